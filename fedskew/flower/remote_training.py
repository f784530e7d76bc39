"""Local training at the sites: send them a round's work and collect their updates."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace

from fedskew.engine import RoundResult
from fedskew.experiment.round.plan import RoundPlan
from fedskew.flower.model_message import needed_companions, work_tensors
from fedskew.flower.privacy import private_change
from fedskew.flower.received_replies import ReceivedReplies, request_digest
from fedskew.flower.received_updates import (
    VERSION,
    Update,
    check_sizes,
    check_update,
    combine_updates,
    find_different_extras,
)
from fedskew.flower.settings import FederationSettings
from fedskew.flower.site_replies import Failure, Quorum, Reply, usable_replies
from fedskew.flower.sites import Sites
from fedskew.flower.tensors import to_bytes
from fedskew.flower.wire import Facts, Garbled, digest
from fedskew.methods import Tensors, pack, unpack

Answers = Mapping[int, Reply | Failure]
"""By client, a site's reply, or the reason why there is none."""


@dataclass(frozen=True)
class SiteUpdates:
    """The updates of a round that passed the checks of form and size, and why the others are missing or discarded."""

    updates: dict[int, Update]
    failures: dict[int, str]

    @property
    def finite_count(self) -> int:
        """Number of updates that the next model can be computed from."""
        return sum(bool(update.tensors) for update in self.updates.values())


class SiteTraining:
    """Trains rounds at the sites."""

    def __init__(
        self,
        sites: Sites,
        settings: FederationSettings,
        run: str,
        kept_rounds: int,
        count_release: Callable[[], None],
        received: ReceivedReplies,
    ) -> None:
        """`run` is the run's name at the sites. Sites keep their states of the last `kept_rounds` rounds, because a
        restart may go back that far. `count_release` is called before each release of private updates. `received` has
        the updates that have already arrived."""
        self._sites, self._settings, self._received = sites, settings, received
        self._run, self._kept_rounds, self._count_release = run, kept_rounds, count_release
        self._usual_norms: dict[str, float] = {}
        self._origins: dict[tuple[int, str], str] = {}
        """The digest of the model that an update was trained from, by client and digest of the update."""

    def request(
        self,
        plan: RoundPlan,
        test_request: Facts | None = None,
        local_tests: bool = False,
        kept: Mapping[int, Facts] | None = None,
    ) -> tuple[Answers, dict[int, Reply]]:
        """Ask the sites to train a round.

        With `test_request`, all connected sites also test the model at the start of the round. With `local_tests`, the
        participants test the model before and after their training. `kept` names the saved states of sites that test
        their own models. Return the participants' replies, and the test reports of all sites.
        """
        if self._settings.sites_add_noise:
            self._count_release()
        tests: Facts = {} if test_request is None else {"tests": test_request}
        tests |= {"local_tests": True} if local_tests else {}
        participants = {a.client: self._facts(plan, a.client, a.state) | tests for a in plan.work.assignments}
        others: dict[int, Facts] = {}
        if test_request is not None:
            idle = [client for client in self._sites.online if client not in participants]
            # The entry `kind` makes each of these requests a test. Requests to the participants have the kind `train`.
            others = {c: {"kind": "evaluate", **test_request, **(kept or {}).get(c, {})} for c in idle}
        payload = to_bytes(work_tensors(plan.work, plan.stage.concatenates))
        answers = self._request_updates(plan.before.round, round_name(plan), participants, others, payload)
        reports = {
            client: reply.facts.get("tests") if client in participants else reply.facts
            for client, reply in usable_replies(answers)
        }
        replies = {client: Reply(facts, b"") for client, facts in reports.items() if isinstance(facts, dict)}
        start = digest(payload)
        return {client: self._check_origin(client, answers[client], start) for client in participants}, replies

    def _request_updates(
        self, round: int, name: str, participants: Mapping[int, Facts], others: Mapping[int, Facts], payload: bytes
    ) -> Answers:
        """Send the requests of a round. If the round is repeated, updates that have arrived are not requested again."""
        requests = {client: request_digest(facts, payload) for client, facts in participants.items()}
        self._received.forget_before(round - 1)
        known: dict[int, Reply | Failure] = {}
        for client, request in requests.items():
            tests = participants[client].get("tests")
            if (reply := self._received.find(round, self._sites.names[client], request, tests)) is not None:
                known[client] = reply
        if known:
            names = [self._sites.names[client] for client in known]
            self._sites.log(f"round {name}: the updates of {', '.join(names)} have already arrived")
        asked = {client: facts for client, facts in {**participants, **others}.items() if client not in known}

        def keep(client: int, reply: Reply) -> None:
            if client in requests and reply.payload:
                samples, tests = self._sites.samples[client], participants[client].get("tests")
                self._received.keep(round, self._sites.names[client], requests[client], samples, reply, tests)

        quorum = Quorum(self._settings.required_sites - len(known), frozenset(participants.keys() - known.keys()))
        timeout = self._settings.round_timeout
        repeats = not self._settings.sites_add_noise  # if sites add noise, training again would cost more privacy
        answers = self._sites.request("train", asked, payload, timeout, name, quorum, keep=keep, repeats=repeats)
        return dict(sorted({**answers, **known}.items()))

    def _check_origin(self, client: int, answer: Reply | Failure, start: str) -> Reply | Failure:
        """Return the reply, or a failure if its update was trained from another model or repeats an earlier one."""
        if isinstance(answer, Failure) or not answer.payload:
            return answer
        if answer.facts.get("start") != start:
            return Failure("it was trained from another model than the server sent")
        if self._origins.setdefault((client, digest(answer.payload)), start) != start:
            return Failure("it repeats the update of an earlier round")
        return answer

    def check(self, plan: RoundPlan, answers: Answers) -> SiteUpdates:
        """Check the updates. If no update of a site is used, the log says why."""
        updates: dict[int, Update] = {}
        failures: dict[int, str] = {}
        for client, answer in answers.items():
            try:
                updates[client] = check_update(answer, plan.work)
            except Garbled as problem:
                failures[client] = str(problem)
        for client in find_different_extras(updates):
            del updates[client]
            failures[client] = "its tensors besides the model differ in form from those of other updates"
        found = check_sizes(updates, plan.work, self._settings.largest_update, self._usual_norms)
        for client, reason in found.discarded.items():
            del updates[client]
            failures[client] = reason
        self._usual_norms = found.medians
        # The round's row lists updates that are not finite as diverged, not as failures.
        not_finite = {client: "it is not finite" for client, update in updates.items() if not update.tensors}
        for client, reason in {**failures, **not_finite}.items():
            name = self._sites.names[client]
            self._sites.log(f"warning: round {round_name(plan)}: no update of {name} is used: {reason}")
            self._received.forget(plan.before.round, name)
            if isinstance(answers[client], Reply):
                entry = {"event": "discarded", "site": name, "kind": "train", "round": plan.work.key.round + 1}
                self._sites.audit(entry | {"reason": reason})
        return SiteUpdates(updates, failures)

    def result(self, plan: RoundPlan, updates: Mapping[int, Update]) -> RoundResult:
        """Return the updates as an engine would, with the server's noise if privacy is central."""
        return combine_updates(plan.work, self._with_noise(plan, updates))

    def _with_noise(self, plan: RoundPlan, updates: Mapping[int, Update]) -> Mapping[int, Update]:
        """With central privacy, clip the K finite updates and add noise to each.

        The noise on the mean of the updates then has deviation z·C/K, with the settings `noise` (z) and `clip` (C).
        """
        settings, finite = self._settings, [client for client, update in updates.items() if update.tensors]
        if settings.privacy != "central" or not finite:
            return updates
        self._count_release()
        deviation = settings.noise * settings.clip / len(finite) ** 0.5
        start = {name: t.cpu() for name, t in plan.work.exchanged.params.items()}
        private = dict(updates)
        for client in finite:
            tensors = updates[client].tensors
            changed = private_change(unpack("trained:params", tensors), start, settings.clip, deviation)
            private[client] = replace(updates[client], tensors=tensors | pack("trained:params", changed))
        return private

    def _facts(self, plan: RoundPlan, client: int, state: Tensors) -> Facts:
        kept, settings, work, before = state.get(VERSION), self._settings, plan.work, plan.before
        noise = [settings.clip, settings.noise]
        return {
            "run": self._run,
            "client": client,
            "stage": before.stage,
            "notes": before.notes,
            "companions": needed_companions(work),
            "local": asdict(work.local),
            "key": asdict(work.key),
            "kept": None if kept is None else int(kept),
            "oldest": max(0, work.key.round - self._kept_rounds),
            "share_loss": settings.share_loss,
            "noise": noise if settings.privacy == "local" else None,
            **({"central_noise": noise} if settings.privacy == "central" else {}),
        }


def round_name(plan: RoundPlan) -> str:
    """Return the round's number among the rounds that train the same model, counted from 1. Flower's logs show it."""
    return str(plan.work.key.round + 1)
