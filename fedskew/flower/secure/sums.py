"""Secure sums at the server: send the sites a request, and compute only the sum of their answers."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from fedskew.flower.secure.coordinator import Coordinator, require_enough
from fedskew.flower.secure.fixed_point import Layout, Total, layout_length
from fedskew.flower.secure.identity import verify
from fedskew.flower.secure.masks import Vector
from fedskew.flower.secure.session import FEWEST_SITES, PublicKeys, from_hex, keys_message
from fedskew.flower.secure.shares import SECRET_BYTES
from fedskew.flower.secure.terms import SecureTerms
from fedskew.flower.settings import FederationSettings
from fedskew.flower.site_replies import Failure, Quorum, Reply
from fedskew.flower.sites import Sites
from fedskew.flower.tensors import from_bytes
from fedskew.flower.wire import Facts, Garbled

_STEP_SECONDS = 120.0
"""The time limit of a step in which sites compute only keys, shares and signatures."""


@dataclass(frozen=True)
class SecureSum:
    """The outcome of one session."""

    total: Total | None
    """None if the session failed."""
    contributors: list[int]
    failures: dict[int, str]
    """The reasons why sites did not contribute, by the site's number."""
    reason: str = ""
    """The reason why the session failed."""


class SecureSums:
    """Runs the sessions of one run."""

    def __init__(self, sites: Sites, settings: FederationSettings) -> None:
        self._sites, self._settings = sites, settings
        self._terms = SecureTerms.from_json(sites.terms["secure_aggregation"])

    def request(self, kind: str, facts: Mapping[int, Facts], payload: bytes, group: str = "") -> SecureSum:
        """Send each site its own facts and the same payload. Return the sum of the sites' answers.

        `group` is the number of the round that is trained, as in `Sites.request`. Empty for a test.
        """
        session = _Session(self._sites, self._settings, self._terms, group)
        try:
            total = session.run(kind, facts, payload)
        except Garbled as error:
            reason = f"{error}{session.describe_failures()}"
            return SecureSum(None, [], session.failures | dict.fromkeys(session.contributors, str(error)), reason)
        return SecureSum(total, session.contributors, session.failures)


class _Session:
    """One session. A site that fails in a step takes no part in the later steps."""

    def __init__(self, sites: Sites, settings: FederationSettings, terms: SecureTerms, group: str) -> None:
        self._sites, self._settings, self._terms, self._group = sites, settings, terms, group
        self._coordinator = Coordinator(terms.needed)
        self.failures: dict[int, str] = {}
        self.contributors: list[int] = []

    def run(self, kind: str, facts: Mapping[int, Facts], payload: bytes) -> Total:
        self._collect_keys(list(facts))
        self._collect_shares()
        layout, masked = self._collect_inputs(kind, facts, payload)
        signatures = self._collect_confirmations(list(masked))
        vector = self._unmask(masked, signatures)
        return self._terms.encoding.decode(vector, layout)

    def _collect_keys(self, clients: list[int]) -> None:
        replies = self._ask("secure_keys", {client: {} for client in clients})
        keys = {}
        for client, reply in replies.items():
            name = self._sites.names[client]
            try:
                found = PublicKeys.from_json(reply.facts)
                message = keys_message(self._coordinator.session, name, found.sealing, found.masking, found.commitment)
                verify(self._terms.roster[name], found.signature, message)
            except Garbled as error:
                self._fail(client, str(error))
                continue
            keys[name] = found
        self._coordinator.receive_keys(keys)
        require_enough("keys", keys, max(FEWEST_SITES, self._terms.needed, self._required(len(clients))))

    def _collect_shares(self) -> None:
        keys = self._coordinator.keys_to_send()
        replies = self._ask("secure_shares", {self._client(name): {"keys": keys} for name in keys})
        sealed: dict[str, dict[str, str]] = {}
        for client, reply in replies.items():
            name, shares = self._sites.names[client], reply.facts.get("shares")
            if isinstance(shares, dict) and shares.keys() == keys.keys() - {name}:
                sealed[name] = {peer: str(content) for peer, content in shares.items()}
            else:
                self._fail(client, "its shares are not for the sites of this session")
        self._coordinator.receive_shares(sealed)
        require_enough("shares", sealed, self._coordinator.needed)

    def _collect_inputs(
        self, kind: str, facts: Mapping[int, Facts], payload: bytes
    ) -> tuple[Layout, dict[str, Vector]]:
        coordinator = self._coordinator
        secure = {
            self._client(name): {"session": coordinator.session, "shares": coordinator.shares_for(name)}
            for name in coordinator.sharing
        }
        requests = {client: facts[client] | {"secure": found} for client, found in secure.items()}
        needed = max(coordinator.needed, self._required(len(facts)))
        answers = self._sites.request(
            kind, requests, payload, self._settings.round_timeout, self._group, Quorum(needed, frozenset(requests))
        )
        found: dict[int, tuple[Layout, Vector]] = {}
        for client, reply in self._usable(answers).items():
            try:
                found[client] = _read_input(reply)
            except Garbled as error:
                self._fail(client, str(error))
        layouts = Counter(json.dumps(layout) for layout, _ in found.values())
        most_common = layouts.most_common(1)[0][0] if layouts else ""
        for client, (layout, _) in list(found.items()):
            if json.dumps(layout) != most_common:
                del found[client]
                self._fail(client, "its masked vector differs in form from those of other sites")
        require_enough("input", found, needed)
        self.contributors = sorted(found)
        return json.loads(most_common), {self._sites.names[client]: found[client][1] for client in self.contributors}

    def _collect_confirmations(self, contributors: list[str]) -> dict[str, str]:
        asked = {client: {"contributors": contributors} for client in self.contributors}
        replies = self._ask("secure_confirm", asked, is_contributor=True)
        require_enough("confirm", replies, self._coordinator.needed)
        return {self._sites.names[client]: str(reply.facts.get("signature")) for client, reply in replies.items()}

    def _unmask(self, masked: Mapping[str, Vector], signatures: Mapping[str, str]) -> Vector:
        asked = {self._client(name): {"signatures": dict(signatures)} for name in signatures}
        replies = self._ask("secure_unmask", asked, is_contributor=True)
        revealed: dict[str, dict[str, dict[str, bytes]]] = {"seeds": {}, "keys": {}}
        for client, reply in replies.items():
            name = self._sites.names[client]
            try:
                for secret, found in revealed.items():
                    found[name] = _read_shares(reply.facts.get(secret))
            except Garbled as error:
                self._log(client, "secure_unmask", str(error))
        require_enough("unmask", revealed["keys"], self._coordinator.needed)
        return self._coordinator.unmask(masked, revealed["seeds"], revealed["keys"])

    def _ask(self, kind: str, facts: Mapping[int, Facts], is_contributor: bool = False) -> dict[int, Reply]:
        """Ask the sites to take one step. Return the replies.

        With `is_contributor`, the sites' masked vectors have already arrived. A site that fails now is still a
        contributor, so its failure is only logged.
        """
        seconds = min(_STEP_SECONDS, self._settings.round_timeout)
        session = {"session": self._coordinator.session}
        requests = {client: {**session, **found} for client, found in facts.items()}
        answers = self._sites.request(kind, requests, b"", seconds, self._group)
        if is_contributor:
            for client, answer in answers.items():
                if isinstance(answer, Failure):
                    self._log(client, kind, answer.reason)
            return {client: answer for client, answer in answers.items() if isinstance(answer, Reply)}
        return self._usable(answers)

    def _usable(self, answers: Mapping[int, Reply | Failure]) -> dict[int, Reply]:
        """Return the replies. Record the failures of the other sites."""
        for client, answer in answers.items():
            if isinstance(answer, Failure):
                self._fail(client, answer.reason)
        return {client: answer for client, answer in answers.items() if isinstance(answer, Reply)}

    def _fail(self, client: int, reason: str) -> None:
        self.failures[client] = reason

    def _log(self, client: int, kind: str, reason: str) -> None:
        self._sites.log(f"warning: {self._sites.names[client]} did not complete {kind}: {reason}")

    def describe_failures(self) -> str:
        if not self.failures:
            return ""
        return "; " + "; ".join(f"{self._sites.names[client]}: {reason}" for client, reason in self.failures.items())

    def _required(self, clients: int) -> int:
        return min(self._settings.required_sites, clients)

    def _client(self, name: str) -> int:
        return self._sites.names.index(name)


def _read_input(reply: Reply) -> tuple[Layout, Vector]:
    """Read a masked vector and its layout."""
    layout = reply.facts.get("layout")
    length, tensors = layout_length(layout), from_bytes(reply.payload)
    masked = tensors.get("masked")
    if len(tensors) != 1 or masked is None or list(masked.shape) != [length] or masked.element_size() != 8:
        raise Garbled("its masked vector does not have the form of its layout")
    vector: Vector = masked.numpy().view(np.uint64)
    assert isinstance(layout, list)
    return layout, vector


def _read_shares(shares: object) -> dict[str, bytes]:
    if not isinstance(shares, dict):
        raise Garbled("its shares are not readable")
    return {str(name): from_hex(share, SECRET_BYTES) for name, share in shares.items()}
