"""The rounds of a federation across machines.

Every message to a site takes seconds. Therefore, one message asks for two things: to test the model of round r, and to
train round r + 1, which starts from that model. After the last round of a stage, and always with secure aggregation,
separate messages ask for the test.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from fedskew.engine import RoundResult
from fedskew.errors import UserError, plural
from fedskew.experiment.config import Config
from fedskew.experiment.loop import Stopwatch
from fedskew.experiment.recorder import Recorder
from fedskew.experiment.round.aggregate import Aggregated, read_report
from fedskew.experiment.round.evaluate import RowFields
from fedskew.experiment.round.plan import RoundPlan
from fedskew.experiment.round.record import RoundRow
from fedskew.experiment.round.state import RunState
from fedskew.flower.federation_server import FederationServer
from fedskew.flower.releases import run_epsilon
from fedskew.flower.remote_evaluation import NoTests, Replies, TestedModel, read_local_tests
from fedskew.flower.remote_training import Answers, SiteTraining, SiteUpdates
from fedskew.flower.run_record import RunRecord
from fedskew.flower.settings import FederationSettings
from fedskew.flower.site_replies import Reply
from fedskew.flower.sites import Sites
from fedskew.flower.wire import one_line
from fedskew.methods import Stage


@dataclass(frozen=True)
class RequestedRound:
    """A round that the sites have trained. The replies have not been checked yet."""

    plan: RoundPlan
    answers: Answers
    tests: Replies
    """The sites' reports on the model that the round starts from."""
    absent: list[str]
    """Names of the sites that were not connected."""


@dataclass(frozen=True)
class TrainedRound:
    """A round with enough updates."""

    plan: RoundPlan
    result: RoundResult
    failures: dict[int, str]
    """The reason why a site's update is missing or was discarded, by client."""
    absent: list[str]
    """Names of the sites that were not connected."""
    local_tests: dict[str, list[float | None]] | None
    """The participants' accuracies before and after local training, if they were requested."""


class FederatedRounds:
    """Runs the rounds of one run at its sites."""

    def __init__(
        self,
        server: FederationServer,
        training: SiteTraining,
        sites: Sites,
        settings: FederationSettings,
        config: Config,
        record: RunRecord,
    ) -> None:
        self._server, self._training, self._sites = server, training, sites
        self._settings, self._config, self._record = settings, config, record
        self._requested: RequestedRound | None = None
        """The next round, if it was requested with the tests of the round before it."""
        self._declined: set[int] = set()
        """Sites that declined to report their accuracy before and after training."""

    def run(self, state: RunState, recorder: Recorder) -> RunState:
        """Run rounds until the schedule ends or a callback stops the run."""
        while (stage := self._server.next_stage(state)) is not None:
            state, row = self._run_round(stage, state)
            recorder.add(row, state)
            if recorder.stopped:
                break
        return state

    def _run_round(self, stage: Stage, state: RunState) -> tuple[RunState, RoundRow]:
        """Run one round, which may have been requested with the tests of the round before it."""
        clock = Stopwatch()
        trained = self._train(stage, state)
        plan, result = trained.plan, trained.result
        report = read_report(result, plan.start.model)
        clock.lap("train")
        aggregated = self._server.aggregate(plan, result, report)
        clock.lap("server")
        evaluation = self._evaluate_and_train_next(plan, aggregated)
        clock.lap("evaluate")
        row = self._row(trained, aggregated)
        if trained.local_tests is not None and "sites" in evaluation:
            accuracies = [evaluation["sites"].get(name, {}).get("accuracy") for name in self._sites.names]
            own = evaluation.get("client_tests", {})
            evaluation["client_tests"] = {"accuracy": accuracies, **trained.local_tests, **own}
        return aggregated.after, replace(row, **evaluation, time=clock.laps, seconds=clock.total)

    def _train(self, stage: Stage, state: RunState) -> TrainedRound:
        """Train the round, and repeat it if there are too few updates.

        If all `attempts` have too few updates, the run ends, and a person must decide. An automatic restart could
        repeat the round for ever, and every training with noise costs the sites a part of their privacy budget.

        The memory of the replies is freed on return, before the replies of the next round arrive.
        """
        requested, self._requested = self._requested, None
        for attempt in range(1, self._settings.attempts + 1):
            if requested is None:
                self._sites.wait_for(self._settings.sites_to_begin_round)
                requested = self._request(self._server.plan(stage, state))
            plan, found = requested.plan, self._training.check(requested.plan, requested.answers)
            enough = min(self._settings.required_sites, len(plan.clients))
            if found.finite_count >= enough:
                result = self._training.result(plan, found.updates)
                return TrainedRound(plan, result, found.failures, requested.absent, self._local_tests(requested, found))
            number = plan.work.key.round + 1
            usable = f"{found.finite_count} of {enough} required updates can be used"
            self._sites.log(f"warning: round {number}, attempt {attempt}: {usable}")
            requested = None
        raise UserError(
            f"round {number} had too few good updates in {plural(self._settings.attempts, 'attempt')}, so the run does "
            "not restart by itself; the log has each site's reason; remove the cause, then start the run again to "
            "resume it"
        )

    def _evaluate_and_train_next(self, plan: RoundPlan, aggregated: Aggregated) -> RowFields:
        """Test the round's model, if a test is due.

        If possible, the requests to train the next round also ask for the test. After the last round of a stage,
        separate requests do. With secure aggregation, separate requests always do, because updates and test results
        are summed in different sessions.
        """
        site_evaluation, labels = self._server.site_evaluation, plan.stage.labels
        if not self._server.evaluation.is_due(plan):
            return {}
        replies: Replies = {}
        tested = TestedModel(plan.stage.model, aggregated.model.rounds, plan.before.notes)
        test_request = site_evaluation.test_request(tested, labels, plan.stage.concatenates)
        stage_goes_on = aggregated.after.stage_round > 0  # a new stage begins at 0
        if test_request is not None and stage_goes_on:
            self._sites.refresh()  # does not wait for missing sites
            self._requested = self._request(self._server.plan(plan.stage, aggregated.after), test_request)
            replies = self._requested.tests
        model = aggregated.model.model
        try:
            if test_request is not None and not replies:
                frozen = {name: plan.before.models[name].model for name in plan.stage.concatenates}
                exchanged, kept = self._server.exchanged_model(model), self._server.kept_states(aggregated.after)
                replies = site_evaluation.request(exchanged, tested, labels, frozen, kept)
            return site_evaluation.measure(replies, plan.runtime.test_set, model, labels)
        except NoTests as error:  # for example, sites that tested a round's first attempt do not test its second
            self._sites.log(f"round {plan.before.round + 1} has no evaluation: {error}")
            return {}

    def _request(self, plan: RoundPlan, test_request: dict[str, Any] | None = None) -> RequestedRound:
        absent = [name for number, name in enumerate(self._sites.names) if number not in self._sites.online]
        kept = self._server.kept_states(plan.before)
        answers = self._training.request(plan, test_request, self._tests_locally(plan), kept)
        return RequestedRound(plan, *answers, absent)

    def _tests_locally(self, plan: RoundPlan) -> bool:
        """Whether the participants of this round test the global model before and after training."""
        return self._settings.local_tests and plan.stage.model == "global" and self._server.evaluation.is_due(plan)

    def _local_tests(self, requested: RequestedRound, found: SiteUpdates) -> dict[str, list[float | None]] | None:
        """Read the participants' accuracies before and after training. None if they were not requested."""
        if not self._tests_locally(requested.plan):
            return None
        finite = {client for client, update in found.updates.items() if update.tensors}
        replies = {c: a for c, a in requested.answers.items() if isinstance(a, Reply) and c in finite}
        for client, reply in replies.items():
            self._log_refusal(client, reply.facts.get("local_tests"))
        return read_local_tests(replies, len(self._sites.names))

    def _log_refusal(self, client: int, local_tests: object) -> None:
        """Log once that a site does not report its accuracy before and after training."""
        reason = local_tests.get("refused") if isinstance(local_tests, dict) else None
        if reason is not None and client not in self._declined:
            self._declined.add(client)
            self._sites.log(f"{self._sites.names[client]} reports no local tests: {one_line(str(reason))}")

    def _row(self, trained: TrainedRound, aggregated: Aggregated) -> RoundRow:
        """Make the round's row. It says why updates are missing or discarded. It has no loss unless sites share it."""
        row, failures = self._server.record(trained.plan, trained.result, aggregated), trained.failures
        return replace(
            row,
            diverged=[client for client in row.diverged if client not in failures],
            failed={self._sites.names[client]: reason for client, reason in failures.items()},
            absent=trained.absent,
            loss=row.loss if self._settings.share_loss else None,
            privacy=None if self._settings.privacy == "none" else self._privacy_spent(),
        )

    def _privacy_spent(self) -> dict[str, Any]:
        """Compute and log the ε of a site that took part in every round, or of one of its samples.

        Rounds that were repeated, for example after a crash, count again.
        """
        settings = self._settings
        spent = run_epsilon(settings, self._config, self._record.releases)
        whose = "one sample of a site" if settings.privacy == "example" else "a site"
        self._sites.log(f"{settings.privacy} privacy of {whose} so far: ε = {spent:.3g} at δ = {settings.delta:g}")
        return {"kind": settings.privacy, "epsilon": spent, "delta": settings.delta}
