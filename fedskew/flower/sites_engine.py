"""An engine whose clients are other machines: it sends a round's work to the sites and gathers what they trained."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from fedskew.engine import Engine, RoundResult, RoundWork
from fedskew.errors import UserError
from fedskew.flower.model_message import needed_companions, work_tensors
from fedskew.flower.privacy import noise_source, private_change
from fedskew.flower.settings import FederationSettings
from fedskew.flower.sites import Failure, Reply, Sites, good
from fedskew.flower.tensors import to_bytes
from fedskew.flower.updates import VERSION, Update, checked, result_of, strangers
from fedskew.flower.wire import Facts, Garbled
from fedskew.methods.parts import Tensors, pack, unpack


@dataclass(frozen=True)
class Situation:
    """Where the run stands, for sites that must find the stage themselves."""

    run: str
    stage: int = 0
    notes: Mapping[str, Any] = field(default_factory=dict)
    frozen: tuple[str, ...] = ()
    """The models whose encoders stand, frozen, in the one that is trained."""
    oldest: int = 0
    """The oldest round that the server may go back to."""


@dataclass(frozen=True)
class _Ahead:
    """Answers to a round that was asked for before its turn."""

    payload: bytes
    answers: Mapping[int, Reply | Failure]


class SitesEngine(Engine):
    """Trains on the sites."""

    name = "flower"

    def __init__(
        self, sites: Sites, settings: FederationSettings, say: Callable[[str], None], release: Callable[[], None]
    ) -> None:
        self._sites, self._settings, self._say, self._release = sites, settings, say, release
        self.notices: list[str] = []
        self.situation = Situation(run="")
        self._ahead: _Ahead | None = None
        self.failures: dict[int, str] = {}
        """Of the last round: which sites gave nothing, and why."""

    def ask_ahead(self, work: RoundWork, tests: Facts) -> dict[int, Reply]:
        """Have a round trained that is next, and, in the same messages, the model that it starts from tested.

        Returns what all sites tell of their tests; their updates wait for `train`.
        """
        payload = to_bytes(work_tensors(work, self.situation.frozen))
        drawn = {a.client: self._facts(work, a.client, a.state) | {"tests": tests} for a in work.assignments}
        others = {client: {"kind": "evaluate", **tests} for client in self._sites.online if client not in drawn}
        answers = self._sites.ask("train", drawn | others, payload, self._settings.round_timeout, _group(work))
        self._ahead = _Ahead(payload, {client: answers[client] for client in drawn})
        told = {c: reply.facts.get("tests") if c in drawn else reply.facts for c, reply in good(answers)}
        return {client: Reply(facts, b"") for client, facts in told.items() if isinstance(facts, dict)}

    def train(self, work: RoundWork) -> RoundResult:
        payload = to_bytes(work_tensors(work, self.situation.frozen))
        enough = min(self._settings.least, len(work.assignments))
        for attempt in range(1, self._settings.attempts + 1):
            self._sites.await_some(self._settings.least)
            updates = self._updates(work, payload)
            if len(updates) >= enough:
                return result_of(work, self._private(work, updates))
            self._say(f"round {work.key.round + 1}: {len(updates)} of {enough} updates needed came; attempt {attempt}")
        raise UserError(
            f"round {work.key.round + 1} failed {self._settings.attempts} times for want of good updates; the run can "
            "be started again and goes on from here"
        )

    def _updates(self, work: RoundWork, payload: bytes) -> dict[int, Update]:
        facts = {a.client: self._facts(work, a.client, a.state) for a in work.assignments}
        ahead, self._ahead, group = self._ahead, None, _group(work)
        if ahead is not None and ahead.payload == payload and ahead.answers.keys() == facts.keys():
            answers = ahead.answers
        else:
            if self._settings.privacy == "local":
                self._release()
            answers = self._sites.ask("train", facts, payload, self._settings.round_timeout, group)
        updates: dict[int, Update] = {}
        self.failures = {}
        for client, answer in answers.items():
            try:
                updates[client] = checked(answer, work)
            except Garbled as problem:
                self._leave_out(client, str(problem), group)
        for client in strangers(updates):
            del updates[client]
            self._leave_out(client, "what it sends beside the model has another form than the others'", group)
        for client, update in updates.items():
            if not update.tensors:
                self._say(f"round {group}: the update of {self._sites.names[client]} is left out: it is not finite")
        return updates

    def _private(self, work: RoundWork, updates: dict[int, Update]) -> dict[int, Update]:
        """With noise on the updates, of which the mean has z·C/K, if the server is to add it."""
        own, finite = self._settings, [client for client, update in updates.items() if update.tensors]
        if own.privacy != "central" or not finite:
            return updates
        self._release()
        deviation, source = own.noise * own.clip / len(finite) ** 0.5, noise_source()
        sent = {name: t.cpu() for name, t in work.sent.params.items()}
        private = dict(updates)
        for client in finite:
            tensors = updates[client].tensors
            changed = private_change(unpack("trained:params", tensors), sent, own.clip, deviation, source)
            private[client] = replace(updates[client], tensors=tensors | pack("trained:params", changed))
        return private

    def _leave_out(self, client: int, reason: str, group: str) -> None:
        self.failures[client] = reason
        self._say(f"round {group}: the update of {self._sites.names[client]} is left out: {reason}")

    def _facts(self, work: RoundWork, client: int, state: Tensors) -> Facts:
        kept, own = state.get(VERSION), self._settings
        return {
            "run": self.situation.run,
            "client": client,
            "stage": self.situation.stage,
            "notes": self.situation.notes,
            "companions": needed_companions(work),
            "local": asdict(work.local),
            "key": asdict(work.key),
            "kept": None if kept is None else int(kept),
            "oldest": self.situation.oldest,
            "share_loss": self._settings.share_loss,
            "noise": [own.clip, own.noise] if own.privacy == "local" else None,
        }


def _group(work: RoundWork) -> str:
    """How Flower's logs name a round."""
    return str(work.key.round + 1)
