"""Secure aggregation at a site. The site trains and tests as usual, but its results are masked before they leave.

Besides the steps of the protocol, a site answers only greetings. Its reply to a greeting leaves out the number of
samples.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from fedskew.errors import UserError
from fedskew.experiment.config import Config
from fedskew.flower.approved_apps import read_approvals
from fedskew.flower.credentials import NodeKeys, require_private
from fedskew.flower.policy import SECURE_AGGREGATION
from fedskew.flower.secure.fixed_point import Contribution, OutOfRange
from fedskew.flower.secure.identity import NodeIdentity
from fedskew.flower.secure.participant import Participant
from fedskew.flower.secure.released_sums import ReleasedSums
from fedskew.flower.secure.session import PublicKeys, from_hex
from fedskew.flower.secure.terms import SecureTerms
from fedskew.flower.site_config import SiteConfig
from fedskew.flower.site_state import StateUnusable
from fedskew.flower.tensors import from_bytes, to_bytes
from fedskew.flower.wire import Facts, Garbled, digest, one_line
from fedskew.methods import Stage, Tensors
from fedskew.methods.parts import unpack

Answer = tuple[Facts, bytes]

KINDS = ("secure_keys", "secure_shares", "secure_confirm", "secure_unmask")
"""The kinds of requests for all steps but the masked input, which is the reply to `train` or `evaluate`."""
_MOST_SESSIONS = 4
"""The largest number of sessions that a site remembers. A server uses only one at a time."""
_NOT_IN_DIGEST = ("client", "kept", "oldest", "secure")
"""Facts that are not part of a request's digest: they differ between sites, or do not change the result."""


class RunAtSite(Protocol):
    """The part of a site's run that this module uses."""

    name: str
    config: Config

    def stage(self, facts: Facts) -> Stage: ...

    def sample_count(self, stage: Stage) -> int: ...


@dataclass
class _Session:
    """A session and its purpose."""

    participant: Participant
    terms: SecureTerms
    purpose: str = ""
    """Names the round or the test whose sum the session computes. Empty until the server requests it."""
    contribution: str = ""
    """The digest of this site's contribution. Empty if the site adds noise, because the contribution is then new each
    time."""


class SecureSite:
    """The sessions of one site."""

    def __init__(self, config: SiteConfig, log: Callable[[str], object]) -> None:
        self._config, self._log = config, log
        self._sessions: dict[str, _Session] = {}

    @property
    def has_open_session(self) -> bool:
        """Whether the last session waits for its next step."""
        return any(session.participant.is_open for session in list(self._sessions.values())[-1:])

    def end_session(self, facts: Facts) -> None:
        """End the session of a request that was refused or failed. The site takes no further step of this session."""
        secure = facts.get("secure")
        name = str((secure if isinstance(secure, dict) else facts).get("session"))
        if name in self._sessions:
            self._sessions[name].participant.end()

    def answer(
        self, run: RunAtSite, facts: Facts, payload: bytes, answer_plainly: Callable[[Facts, bytes], Answer]
    ) -> Answer:
        """Answer a request of a run with secure aggregation. `answer_plainly` answers it without masks."""
        terms = SecureTerms.from_json(facts["terms"]["secure_aggregation"])
        terms.require_protection(run.config)
        self._require_approved_roster()
        kind, identity = facts["kind"], self.identity(terms)
        if kind == "hello":
            return {name: value for name, value in answer_plainly(facts, payload)[0].items() if name != "samples"}, b""
        if kind == "secure_keys":
            return self._open_session(facts, identity, terms).public_keys().to_json(), b""
        if kind in KINDS:
            return self._take_step(facts, terms), b""
        if kind not in ("train", "evaluate") or "secure" not in facts:
            raise UserError(f"the server requests {kind!r} without secure aggregation, which this run must use")
        secure = _mapping(facts["secure"])
        session = self._session(secure, terms)
        participant, session.purpose = session.participant, _purpose(run, facts)
        participant.receive_shares({name: from_hex(sealed) for name, sealed in _mapping(secure.get("shares")).items()})
        plain = {name: value for name, value in facts.items() if name != "secure"}
        try:
            contribution = _contribution(run, plain, payload, answer_plainly, terms.largest_change)
            vector, layout = terms.encoding.encode(contribution)
        except OutOfRange as error:
            self._log(f"this site's update cannot be masked: {error}")
            raise UserError(
                "its update cannot be masked: it is not finite, or has a number that is too large "
                "(federation.largest_change, federation.most_samples)"
            ) from error
        has_noise = facts.get("noise") is not None or run.config.example_noise is not None
        session.contribution = "" if has_noise else digest(vector.tobytes())
        masked = participant.mask(vector, request_digest(facts, payload))
        return {"layout": layout}, to_bytes({"masked": torch.from_numpy(masked.view(np.int64))})

    def _take_step(self, facts: Facts, terms: SecureTerms) -> Facts:
        session = self._session(facts, terms)
        participant = session.participant
        if facts["kind"] == "secure_shares":
            keys = {name: PublicKeys.from_json(found) for name, found in _mapping(facts.get("keys")).items()}
            return {"shares": _to_hex(participant.make_shares(keys))}
        if facts["kind"] == "secure_confirm":
            contributors = facts.get("contributors")
            if not isinstance(contributors, list):
                raise Garbled("the server sent no list of contributors")
            return {"signature": participant.confirm([str(name) for name in contributors])}
        released = ReleasedSums(self._config.state_folder)
        record = functools.partial(released.record, session.purpose, contribution=session.contribution)
        seeds, masking_keys = participant.unmask(_mapping(facts.get("signatures")), record)
        return {"seeds": _to_hex(seeds), "keys": _to_hex(masking_keys)}

    def _open_session(self, facts: Facts, identity: NodeIdentity, terms: SecureTerms) -> Participant:
        name = str(facts.get("session"))
        if name in self._sessions:
            raise UserError("the server opens a session twice")
        for oldest in list(self._sessions)[: 1 - _MOST_SESSIONS]:
            del self._sessions[oldest]
        participant = Participant(name, self._config.name, identity, terms.roster, terms.needed)
        self._sessions[name] = _Session(participant, terms)
        return participant

    def _session(self, facts: Mapping[str, object], terms: SecureTerms) -> _Session:
        """Return a known session. Refuse other terms than those with which the session was opened."""
        name = str(facts.get("session"))
        if name not in self._sessions:
            raise UserError(
                "this site does not know the session: its worker has been started again, its data or its site.yaml "
                "have changed, or the request came late"
            )
        if self._sessions[name].terms != terms:
            raise UserError("the server continues a session with other terms of secure aggregation")
        return self._sessions[name]

    def identity(self, terms: SecureTerms) -> NodeIdentity:
        """Load the site's node key. Refuse terms whose roster does not have its public key for this site."""
        if self._config.keys is None:
            raise UserError("secure aggregation needs this site's node key; expected keys: FOLDER in its site.yaml")
        key = NodeKeys(self._config.folder / self._config.keys).private
        try:
            identity = NodeIdentity(key)
            require_private(key)
        except UserError as error:  # the text names the site's file
            raise StateUnusable(str(error)) from error
        if terms.roster.get(self._config.name) != identity.public:
            raise UserError(f"the app does not have the public key of this site's node key for {self._config.name!r}")
        return identity

    def _require_approved_roster(self) -> None:
        if self._config.policy.requires(SECURE_AGGREGATION) and read_approvals(self._config.folder) is None:
            raise UserError(
                "this site requires secure aggregation, but has approved no app, so the server could send any keys as "
                "those of other sites; expected `fedskew federate approve`"
            )


def _contribution(
    run: RunAtSite,
    facts: Facts,
    payload: bytes,
    answer_plainly: Callable[[Facts, bytes], Answer],
    largest_loss: float,
) -> Contribution:
    """Train or test as without secure aggregation. Return the site's contribution to the sum.

    A loss beyond ±`largest_loss` counts as the nearer of these two numbers, because the encoding of the sum has no
    larger ones.
    """
    if facts["kind"] == "evaluate":
        return _test_contribution(facts, payload, answer_plainly)
    reply, tensors = answer_plainly(facts, payload)
    if not reply["finite"]:
        raise OutOfRange("the loss is not finite")
    stage = run.stage(facts)
    samples = run.sample_count(stage)
    weight = samples if (stage.average or run.config.average) == "samples" else 1
    counts = {"samples": samples, "visits": int(reply["visits"])}
    loss = max(-largest_loss, min(reply["loss"], largest_loss)) if "loss" in reply else None
    return model_contribution(from_bytes(payload), from_bytes(tensors), counts, weight, loss)


def _test_contribution(facts: Facts, payload: bytes, answer_plainly: Callable[[Facts, bytes], Answer]) -> Contribution:
    """Test the model. Contribute the number of predictions, and the number of correct ones.

    A site without test samples does not contribute. If such sites contributed zeros, the sum could be the result of a
    single site.
    """
    if facts.get("scores") or facts["detail"] != "total":
        raise UserError("the server requests more test results than totals, which secure aggregation does not cover")
    reply, _ = answer_plainly(facts, payload)
    if not reply["tested"]:
        raise UserError("it has no test samples")
    return Contribution({"right": int(reply["right"]), "tested": int(reply["tested"])})


def model_contribution(
    start: Tensors, trained: Tensors, counts: dict[str, int], weight: int, loss: float | None
) -> Contribution:
    """Make the contribution of a trained model: its differences from the model that the server sent."""
    if uplink := [name for name in trained if name.startswith("uplink/")]:
        raise UserError(f"the method sends {uplink[0]!r}, which secure aggregation does not cover")
    values: dict[str, np.ndarray] = {} if loss is None else {"loss": np.array(loss, np.float64)}
    whole: dict[str, np.ndarray] = {}
    for part in ("params", "buffers"):
        for name, sent in unpack(f"sent:{part}", start).items():
            key = f"trained:{part}/{name}"
            after = trained.get(key, sent).cpu()  # a site leaves out the buffers that training did not change
            if sent.is_floating_point():  # equal infinities differ by 0, but their subtraction gives NaN
                values[key] = torch.where(after == sent, 0.0, after.double() - sent.double()).numpy()
            else:
                whole[key] = (after.long() - sent.long()).numpy()
    return Contribution(counts, weight, values, whole)


def request_digest(facts: Facts, payload: bytes) -> str:
    """Hash a request and its model. In step 4, sites sign this hash, so it must be the same for all sites."""
    common = {name: value for name, value in facts.items() if name not in _NOT_IN_DIGEST}
    return digest(json.dumps(common, sort_keys=True).encode() + b"\0" + digest(payload).encode())


def _purpose(run: RunAtSite, facts: Facts) -> str:
    """Name the round or the test of a request, for the record of unmasked sums."""
    if facts["kind"] == "evaluate":
        return f"the test of model {one_line(str(facts['model']))!r} after round {facts['round']} in run {run.name}"
    return f"round {facts['key']['round'] + 1} of stage {run.stage(facts).name!r} in run {run.name}"


def _to_hex(shares: Mapping[str, bytes]) -> dict[str, str]:
    return {name: share.hex() for name, share in shares.items()}


def _mapping(value: object) -> dict[str, object]:
    if not isinstance(value, dict):
        raise Garbled("a part of the server's request is not readable")
    return {str(name): found for name, found in value.items()}
