"""Callbacks, which watch a run and may stop it early."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from fedskew.errors import UserError, unknown
from fedskew.experiment.preparation import Prepared
from fedskew.experiment.result import Result
from fedskew.experiment.round.record import RoundRow
from fedskew.experiment.round.state import RunState
from fedskew.metrics.confusion import Evaluation


class Callback:
    """Watches a run. Each hook does nothing unless it is overridden.

    `rounds_ahead` is the number of remaining rounds in the stages known so far.
    """

    def on_start(self, prepared: Prepared, state: RunState, rounds_ahead: int) -> None:
        """Called before the first round of a run, and before the first round after a resume."""

    def on_resume(self, rows: Sequence[RoundRow]) -> bool | None:
        """Called after `on_start` when a run is resumed, with the rows recorded so far. Return True to stop at once."""

    def on_round(self, row: RoundRow, rounds_ahead: int) -> bool | None:
        """Called after each round. Return True to stop the run after this round."""

    def on_notice(self, line: str) -> None:
        """Called with a line that the user should see."""

    def on_end(self, result: Result) -> None:
        """Called after the last round. It is called at once if the run was already finished."""


def check_callbacks(callbacks: object) -> None:
    """Raise `UserError` unless this is a list of callbacks."""
    if not isinstance(callbacks, list | tuple) or not all(isinstance(callback, Callback) for callback in callbacks):
        raise UserError(
            f"callbacks is {callbacks!r}; expected a list of fedskew.Callback objects, such as "
            "[fedskew.EarlyStopping(patience=10)]"
        )


class EarlyStopping(Callback):
    """Stops a run when its test metric no longer improves.

    Evaluations of models that a method trains besides the global one, such as PKD's experts, do not count. The test set
    decides when the run stops, so the final accuracy of a stopped run is slightly optimistic, like the best accuracy of
    any run.
    """

    METRICS = (
        "accuracy", "macro_f1", "micro_f1", "worst_class", "balanced_accuracy", "mean_class", "best_class", "kappa",
        "log_loss",
    )  # fmt: skip
    """The metrics of every evaluation. `mean_class` is another name of `balanced_accuracy`. Only `log_loss` improves if
    it falls."""

    def __init__(self, patience: int = 10, metric: str = "accuracy", min_delta: float = 0.0) -> None:
        """Stop after `patience` evaluations in a row without a gain of more than `min_delta` over the best one.

        An evaluation with a smaller gain does not become the best one. If the metric is unknown, the evaluation has no
        gain. `metric` may also be spelled as in `rank_by`: `macro-f1`.
        """
        if isinstance(patience, bool) or not isinstance(patience, int | np.integer) or patience < 1:
            raise UserError(f"patience is {patience!r}; expected a number of evaluations, at least 1")
        is_number = isinstance(min_delta, int | float | np.number) and not isinstance(min_delta, bool)
        if not is_number or not 0 <= min_delta < math.inf:
            raise UserError(f"min_delta is {min_delta!r}; expected a finite number of at least 0")
        spelled = str(metric).replace("-", "_").lower()
        if spelled not in self.METRICS:
            raise unknown("metric", str(metric), self.METRICS)
        self.patience, self.metric, self.min_delta = patience, spelled, min_delta
        self._reset()

    def on_start(self, prepared: Prepared, state: RunState, rounds_ahead: int) -> None:  # noqa: ARG002
        self._reset()

    def on_resume(self, rows: Sequence[RoundRow]) -> bool:
        for row in rows:
            self._observe(row)
        return self._is_out_of_patience

    def on_round(self, row: RoundRow, rounds_ahead: int) -> bool:  # noqa: ARG002
        self._observe(row)
        return self._is_out_of_patience

    @property
    def _is_out_of_patience(self) -> bool:
        return self._evaluations_without_gain >= self.patience

    def _reset(self) -> None:
        self._best = -math.inf
        self._evaluations_without_gain = 0

    def _observe(self, row: RoundRow) -> None:
        if not row.is_evaluated or row.round == 0:  # row 0 is the initial model
            return
        value = self._merit(row.required_evaluation)
        if value > self._best + self.min_delta:
            self._best, self._evaluations_without_gain = value, 0
        else:
            self._evaluations_without_gain += 1

    def _merit(self, evaluation: Evaluation) -> float:
        """Return the metric with the sign that makes the highest value the best. NaN if it is unknown."""
        value = getattr(evaluation, "mean_class" if self.metric == "balanced_accuracy" else self.metric)
        if value is None:
            return math.nan
        return -float(value) if self.metric == "log_loss" else float(value)
