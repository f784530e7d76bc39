"""Secure aggregation at a site. The site trains and tests as ever, but what leaves is masked.

With secure aggregation, a site answers no request in the plain form, except a greeting without its sample count.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Protocol

import numpy as np
import torch

from fedskew.errors import UserError
from fedskew.experiment.config import Config
from fedskew.flower.approved_apps import read_approvals
from fedskew.flower.credentials import NodeKeys
from fedskew.flower.policy import SECURE_AGGREGATION
from fedskew.flower.secure.fixed_point import Contribution, OutOfRange
from fedskew.flower.secure.identity import NodeIdentity
from fedskew.flower.secure.participant import Participant
from fedskew.flower.secure.released_sums import ReleasedSums
from fedskew.flower.secure.session import PublicKeys, from_hex
from fedskew.flower.secure.terms import SecureTerms
from fedskew.flower.site_config import SiteConfig
from fedskew.flower.tensors import from_bytes, to_bytes
from fedskew.flower.wire import Facts, Garbled, digest
from fedskew.methods import Stage, Tensors
from fedskew.methods.parts import unpack

Answer = tuple[Facts, bytes]

KINDS = ("secure_keys", "secure_shares", "secure_confirm", "secure_unmask")
"""The requests of the steps before and after the masked input."""
_MOST_SESSIONS = 4
"""Sessions of which a site remembers the secrets. A server has one at a time."""
_DIFFERS_BY_SITE = ("client", "kept", "oldest", "secure")
"""Facts of a request that are not the same for all sites, or that do not change what a site computes."""


class RunAtSite(Protocol):
    """What the masked input needs from a site's run."""

    config: Config

    def stage(self, facts: Facts) -> Stage: ...

    def sample_count(self, stage: Stage) -> int: ...


class SecureSite:
    """The sessions of one site."""

    def __init__(self, config: SiteConfig, log: Callable[[str], object]) -> None:
        self._config, self._log = config, log
        self._sessions: dict[str, Participant] = {}

    @property
    def has_open_session(self) -> bool:
        """Whether the last session waits for its next step."""
        return any(session.is_open for session in list(self._sessions.values())[-1:])

    def answer(
        self, run: RunAtSite, facts: Facts, payload: bytes, answer_plainly: Callable[[Facts, bytes], Answer]
    ) -> Answer:
        """Answer a request of a run with secure aggregation."""
        terms = SecureTerms.from_json(facts["terms"]["secure_aggregation"])
        terms.require_protection(run.config)
        self._require_approved_roster()
        kind, identity = facts["kind"], self.identity(terms)
        if kind == "hello":
            return {"site": answer_plainly(facts, payload)[0]["site"]}, b""
        if kind == "secure_keys":
            return self._open_session(facts, identity, terms).public_keys().to_json(), b""
        if kind in KINDS:
            return self._take_step(facts), b""
        if kind not in ("train", "evaluate") or "secure" not in facts:
            raise UserError(f"the server requests {kind!r} without secure aggregation, which this run must use")
        secure = _mapping(facts["secure"])
        session = self._session(secure)
        session.receive_shares({name: from_hex(sealed) for name, sealed in _mapping(secure.get("shares")).items()})
        plain = {name: value for name, value in facts.items() if name != "secure"}
        contribution = self._contribution(run, plain, payload, answer_plainly, terms.largest_change)
        try:
            vector, layout = terms.encoding.encode(contribution)
        except OutOfRange as error:
            raise UserError(f"its update cannot be masked: {error} (federation.largest_change)") from error
        masked = session.mask(vector, request_digest(facts, payload))
        return {"layout": layout}, to_bytes({"masked": torch.from_numpy(masked.view(np.int64))})

    def _take_step(self, facts: Facts) -> Facts:
        session = self._session(facts)
        if facts["kind"] == "secure_shares":
            keys = {name: PublicKeys.from_json(found) for name, found in _mapping(facts.get("keys")).items()}
            return {"shares": {peer: sealed.hex() for peer, sealed in session.make_shares(keys).items()}}
        if facts["kind"] == "secure_confirm":
            contributors = facts.get("contributors")
            if not isinstance(contributors, list):
                raise Garbled("the server sent no list of contributors")
            return {"signature": session.confirm([str(name) for name in contributors])}
        released = ReleasedSums(self._config.state_folder)
        seeds, keys_ = session.unmask(_mapping(facts.get("signatures")), released.record)
        return {name: {n: share.hex() for n, share in s.items()} for name, s in (("seeds", seeds), ("keys", keys_))}

    def _contribution(
        self,
        run: RunAtSite,
        facts: Facts,
        payload: bytes,
        answer_plainly: Callable[[Facts, bytes], Answer],
        largest_loss: float,
    ) -> Contribution:
        if facts["kind"] == "evaluate":
            return self._tests(facts, payload, answer_plainly)
        reply, tensors = answer_plainly(facts, payload)
        if not reply["finite"]:
            raise UserError("its update is not finite")
        stage = run.stage(facts)
        samples = run.sample_count(stage)
        weight = samples if (stage.average or run.config.average) == "samples" else 1
        counts = {"samples": samples, "visits": int(reply["visits"])}
        loss = min(reply["loss"], largest_loss) if "loss" in reply else None
        return model_contribution(from_bytes(payload), from_bytes(tensors), counts, weight, loss)

    def _tests(self, facts: Facts, payload: bytes, answer_plainly: Callable[[Facts, bytes], Answer]) -> Contribution:
        """Return how many test samples are right. A site that does not report its tests adds zeros."""
        try:
            reply, _ = answer_plainly(facts, payload)
        except UserError as error:
            self._log(f"this site adds nothing to the test results: {error}")
            reply = {"right": 0, "tested": 0}
        return Contribution({"right": int(reply["right"]), "tested": int(reply["tested"])})

    def _open_session(self, facts: Facts, identity: NodeIdentity, terms: SecureTerms) -> Participant:
        name = str(facts.get("session"))
        if name in self._sessions:
            raise UserError("the server opens a session twice")
        for oldest in list(self._sessions)[: 1 - _MOST_SESSIONS]:
            del self._sessions[oldest]
        session = Participant(name, self._config.name, identity, terms.roster, terms.needed)
        self._sessions[name] = session
        return session

    def _session(self, facts: Mapping[str, object]) -> Participant:
        name = str(facts.get("session"))
        if name not in self._sessions:
            raise UserError("this site does not know the session; its worker has been started again, or it came late")
        return self._sessions[name]

    def identity(self, terms: SecureTerms) -> NodeIdentity:
        """Load the site's node key. Refuse terms with another public key of this site."""
        if self._config.keys is None:
            raise UserError("secure aggregation needs this site's node key; expected keys: FOLDER in its site.yaml")
        identity = NodeIdentity(NodeKeys(self._config.folder / self._config.keys).private)
        if terms.roster.get(self._config.name) != identity.public:
            raise UserError(f"the app has another public key for {self._config.name!r} than this site's node key")
        return identity

    def _require_approved_roster(self) -> None:
        if self._config.policy.requires(SECURE_AGGREGATION) and read_approvals(self._config.folder) is None:
            raise UserError(
                "this site requires secure aggregation, but has approved no app, so the server could send any keys as "
                "those of other sites; expected `fedskew federate approve`"
            )


def model_contribution(
    start: Tensors, trained: Tensors, counts: dict[str, int], weight: int, loss: float | None
) -> Contribution:
    """Make the contribution of a trained model: the changes from the model that the server sent."""
    if uplink := [name for name in trained if name.startswith("uplink/")]:
        raise UserError(f"the method sends {uplink[0]!r}, which secure aggregation does not cover")
    values: dict[str, np.ndarray] = {} if loss is None else {"loss": np.array(loss, np.float64)}
    whole: dict[str, np.ndarray] = {}
    for part in ("params", "buffers"):
        for name, sent in unpack(f"sent:{part}", start).items():
            key = f"trained:{part}/{name}"
            after = trained.get(key, sent).cpu()  # a site leaves out the buffers that training did not change
            if sent.is_floating_point():
                values[key] = torch.where(after == sent, 0.0, after.double() - sent.double()).numpy()
            else:
                whole[key] = (after.long() - sent.long()).numpy()
    return Contribution(counts, weight, values, whole)


def request_digest(facts: Facts, payload: bytes) -> str:
    """Hash a request. Sites confirm a sum only if all of them worked on the same request and the same model."""
    common = {name: value for name, value in facts.items() if name not in _DIFFERS_BY_SITE}
    return digest(json.dumps(common, sort_keys=True).encode() + b"\0" + digest(payload).encode())


def _mapping(value: object) -> dict[str, object]:
    if not isinstance(value, dict):
        raise Garbled("a part of the server's request is not readable")
    return {str(name): found for name, found in value.items()}
