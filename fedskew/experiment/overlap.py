"""The rounds of a run on CUDA, arranged so that the device rarely waits for the host.

A round's training, aggregation and evaluation are queued on the device at once. Waiting until all updates are known to
be finite would leave the device idle. So the aggregation is computed optimistically, and redone if any update is not
finite. If rounds are short, the host records the previous round and plans the next one while the device trains. Rows
are recorded in order. Their numbers are those of `loop`, to the last bit.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from fedskew.engine import Fetch, RoundResult
from fedskew.experiment.recorder import Recorder
from fedskew.experiment.round.aggregate import Aggregated, PendingReport, server_update
from fedskew.experiment.round.evaluate import RowFields
from fedskew.experiment.round.plan import RoundPlan
from fedskew.experiment.round.record import RoundRow
from fedskew.experiment.round.server import Server
from fedskew.experiment.round.state import RunState, ServerModel
from fedskew.methods import Stage

_SHORT_ROUND_SECONDS = 1.0
"""A round that takes at most this long is short.

If the previous round was short, the host works ahead: while the current round trains, it plans the next one, and while
the next one trains, it records the current one. Otherwise, it records the current round at once, so that the user sees
it.
"""

ReadEvaluation = Callable[[], RowFields]
"""Waits for an evaluation that may still be running on the device, and returns it."""


def run_overlapping_rounds(server: Server, state: RunState, recorder: Recorder) -> RunState:
    """Run rounds until the schedule ends or a callback stops the run."""
    return OverlappingRounds(server, recorder).run(state)


@dataclass(frozen=True)
class OptimisticOutcome:
    """The outcome of a round if all its numbers are finite, as they nearly always are."""

    model: ServerModel
    after: RunState | None
    """The state after the round. None if it is known only after the training.

    This is so if the round changes client states or ends its stage, or if the run evaluates clients' models.
    """


@dataclass(frozen=True)
class LaunchedRound:
    """A round that is queued on the device as a whole."""

    plan: RoundPlan
    result: RoundResult
    report: PendingReport
    optimistic: OptimisticOutcome | None
    """None if the server rule raised an error. `_settle` then calls the rule again."""
    evaluation: ReadEvaluation | None
    """None if no evaluation is due, if it must wait for the training, or if it raised an error."""
    began: float


@dataclass(frozen=True)
class SettledRound:
    """A round with a final outcome. Its evaluation may still be running."""

    after: RunState
    row: RoundRow
    evaluation: ReadEvaluation | None
    snapshot: Fetch | None
    """The state's tensors, on their way to the host for a checkpoint. None if no checkpoint is due."""
    seconds: float

    def complete_row(self, during_next_round: bool) -> tuple[RoundRow, float]:
        """Wait for the evaluation. Return the row and the seconds of the wait.

        The row's `seconds` include the wait, unless the next round trains meanwhile (`during_next_round`).
        """
        began = time.perf_counter()
        evaluation = {} if self.evaluation is None else self.evaluation()
        waited = time.perf_counter() - began
        laps = {**self.row.time, "evaluate": self.row.time["evaluate"] + waited}
        seconds = self.seconds + (0.0 if during_next_round else waited)
        return replace(self.row, **evaluation, time=laps, seconds=seconds), waited


class OverlappingRounds:
    """Runs the rounds of one run. If rounds are short, each begins before its predecessor is recorded."""

    def __init__(self, server: Server, recorder: Recorder) -> None:
        self._server, self._recorder = server, recorder
        self._planned: RoundPlan | None = None
        """The next round, planned from the optimistic outcome of this one."""
        self._unrecorded: SettledRound | None = None
        """The last settled round, until it is recorded."""
        self._last_seconds = math.inf

    def run(self, state: RunState) -> RunState:
        """Run the rounds. If one fails, the round before it is still recorded."""
        try:
            while (stage := self._server.next_stage(state)) is not None and not self._recorder.stopped:
                state = self.run_round(stage, state)
        except BaseException:
            with contextlib.suppress(Exception):  # the user must see the first error
                self._record_settled()
            raise
        self._record_settled()
        return state

    def run_round(self, stage: Stage, state: RunState) -> RunState:
        """Run a round until its outcome is known. Its row is recorded at once, or during the next round."""
        began = time.perf_counter()
        launched = self._launch(self._take_plan(stage, state), began)
        waited = self._record_settled(during_next_round=True)
        if self._recorder.stopped:  # a callback stopped the run after the previous round, so this one is dropped
            return state
        is_short = self._last_seconds <= _SHORT_ROUND_SECONDS
        if is_short:
            self._plan_next(launched)
        settled = self._settle(launched, waited)
        self._last_seconds = settled.seconds
        self._unrecorded = settled
        if not is_short:
            self._record_settled()
        return settled.after

    def _take_plan(self, stage: Stage, state: RunState) -> RoundPlan:
        """Return the plan that was made ahead, if it starts from this state. Otherwise plan now."""
        planned, self._planned = self._planned, None
        return planned if planned is not None and planned.before is state else self._server.plan(stage, state)

    def _launch(self, plan: RoundPlan, began: float) -> LaunchedRound:
        """Queue the whole round on the device, without waiting for any of it."""
        result = self._server.train(plan)
        optimistic = self._aggregate_optimistically(plan, result)
        update = server_update(optimistic.model) if optimistic else ()
        report = PendingReport(result, plan.start.model, update)
        evaluation = None
        if optimistic is not None and optimistic.after is not None:
            with contextlib.suppress(Exception):  # it may fail on non-finite numbers; `_settle` repeats it
                evaluation = self._begin_evaluation(plan, optimistic.model)
        return LaunchedRound(plan, result, report, optimistic, evaluation, began)

    def _aggregate_optimistically(self, plan: RoundPlan, result: RoundResult) -> OptimisticOutcome | None:
        """Aggregate as if all updates were finite. Return None if the server rule raises an error."""
        try:
            model = self._server.aggregator.combine(plan, result, np.ones(len(plan.clients), dtype=bool))
        except Exception:  # a server rule may refuse non-finite numbers; `_settle` calls it again
            return None
        state, stage = plan.before, plan.stage
        changes_states = bool(result.states) or stage.cohort == "alone"
        if changes_states or plan.ends_stage or not self._server.evaluation.covers_one_model(plan):
            return OptimisticOutcome(model, None)
        return OptimisticOutcome(model, self._server.state_after(plan, state.clients, model))

    def _plan_next(self, launched: LaunchedRound) -> None:
        """Plan the next round while the device is busy, if the state after this one is known.

        The plan is used only if the optimistic outcome proves right.
        """
        after = launched.optimistic.after if launched.optimistic else None
        stage = None if after is None else self._server.next_stage(after)
        if after is None or stage is None:
            return
        with contextlib.suppress(Exception):  # it may fail on non-finite numbers; `_take_plan` repeats it
            planned = self._server.plan(stage, after)
            planned.runtime.engine.prefetch(planned.work)
            self._planned = planned

    def _settle(self, launched: LaunchedRound, waited: float) -> SettledRound:
        """Wait until the clients are trained. If the optimistic outcome was wrong, compute the right one.

        `waited` are the seconds since the launch that the host waited for the evaluation of the previous round. They
        are in that round's `time` already.
        """
        server, plan, result = self._server, launched.plan, launched.result
        report, optimistic, evaluation = launched.report.read(), launched.optimistic, launched.evaluation
        trained_at = time.perf_counter()
        if optimistic is None or not report.finite.all() or not launched.report.server_update_is_finite():
            aggregated, evaluation = server.aggregate(plan, result, report), None
        elif optimistic.after is None:
            aggregated = server.conclude(plan, result, report, optimistic.model)
        else:
            aggregated = Aggregated(optimistic.model, optimistic.after, report)
        row = server.record(plan, result, aggregated)
        aggregated_at = time.perf_counter()
        if evaluation is None:
            evaluation = self._evaluate(plan, result, aggregated)
        now = time.perf_counter()
        laps = {
            "train": trained_at - launched.began - waited,
            "server": aggregated_at - trained_at,
            "evaluate": now - aggregated_at,
        }
        snapshot = self._recorder.snapshot(aggregated.after)
        seconds = time.perf_counter() - launched.began
        return SettledRound(aggregated.after, replace(row, time=laps), evaluation, snapshot, seconds)

    def _begin_evaluation(self, plan: RoundPlan, model: ServerModel) -> ReadEvaluation | None:
        """Start to evaluate the round's model on the device, if an evaluation is due."""
        if not self._server.evaluation.is_due(plan):
            return None
        return plan.runtime.test_set.begin_to_measure(model.model, plan.stage.labels)

    def _evaluate(self, plan: RoundPlan, result: RoundResult, aggregated: Aggregated) -> ReadEvaluation | None:
        """Evaluate a settled round. Only the evaluation of a single model runs in the background."""
        if self._server.evaluation.covers_one_model(plan):
            return self._begin_evaluation(plan, aggregated.model)
        fields = self._server.evaluate(plan, result, aggregated)
        return lambda: fields

    def _record_settled(self, during_next_round: bool = False) -> float:
        """Record the last settled round, unless it is recorded. Return the seconds of the wait for its evaluation."""
        if self._unrecorded is None:
            return 0.0
        settled = self._unrecorded
        row, waited = settled.complete_row(during_next_round)
        self._unrecorded = None  # not earlier: if the wait was interrupted, the round can still be recorded
        self._recorder.add(row, settled.after, settled.snapshot)
        return waited
