"""The metrics that can decide which method is best: `--rank-by` on the command line, `rank_by=` in Python."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from fedskew.errors import UserError, unknown
from fedskew.experiment.result import Result
from fedskew.methods import is_reference_bound
from fedskew.metrics.summary import MeanStd

DEFAULT_METRIC = "accuracy"


@dataclass(frozen=True)
class RankingMetric:
    """A metric of a run. Methods are ranked by its mean over the seeds."""

    name: str
    """The name that users write."""
    label: str
    measure: str | None = None
    """The attribute of `Evaluation` with the value. Every evaluated round has an `Evaluation`."""
    score: str | None = None
    """The attribute of `Scores` with the value. Only the final model has `Scores`."""
    lower_is_better: bool = False
    percent: bool = True
    """Whether values are shown in percent."""
    limit: float = 1.0
    """The largest possible difference of two values."""

    def value(self, run: Result) -> float:
        """The run's value at its last evaluation. NaN if it was not recorded."""
        if self.measure is None:
            return _number(getattr(run.scores, self.score or "", None))
        return _number(getattr(run.evaluation, self.measure))

    def merit(self, run: Result) -> float:
        """The value with the sign that makes the highest the best."""
        return self.sign * self.value(run)

    def curve(self, run: Result) -> list[tuple[int, float]]:
        """The evaluated rounds of the global model, with the value after each. `Scores` exist only for the last one."""
        if self.measure is None:
            return [(run.last_round, self.value(run))]
        return [(round_, _number(getattr(found, self.measure))) for round_, found in run.evaluations.items()]

    @property
    def sign(self) -> int:
        return -1 if self.lower_is_better else 1

    @property
    def best_word(self) -> str:
        """The word for the best value: highest or lowest."""
        return "lowest" if self.lower_is_better else "highest"

    @property
    def heading(self) -> str:
        """The label with its unit, for a column."""
        return f"{self.label} %" if self.percent else self.label

    @property
    def scale(self) -> int:
        """The factor by which shown values are multiplied."""
        return 100 if self.percent else 1

    def text(self, value: float) -> str:
        """Format a value with its unit."""
        if math.isnan(value):
            return "–"
        return f"{100 * value:.1f} %" if self.percent else f"{value:.3f}"

    def cell(self, values: MeanStd, digits: int) -> str:
        """Format mean and deviation without a unit. Values that are not in percent get two more digits."""
        return values.in_percent(digits) if self.percent else values.as_numbers(digits + 2)

    def amount(self, difference: float) -> str:
        """Format a difference with its unit."""
        return f"{100 * difference:.1f} points" if self.percent else f"{difference:.3f}"


def _number(value: float | None) -> float:
    """Return the value, or NaN if it is unknown or infinite. Run folders cannot store infinite values."""
    return math.nan if value is None or math.isinf(value) else float(value)


METRICS = {
    metric.name: metric
    for metric in (
        RankingMetric("accuracy", "accuracy", "accuracy"),
        RankingMetric("macro-f1", "macro F1", "macro_f1"),
        RankingMetric("worst-class", "worst class", "worst_class"),
        RankingMetric("balanced-accuracy", "balanced accuracy", "mean_class"),
        RankingMetric("auroc", "AUROC", score="auroc"),
        RankingMetric("auprc", "AUPRC", score="auprc"),
        RankingMetric("sensitivity", "sensitivity", score="sensitivity"),
        RankingMetric("specificity", "specificity", score="specificity"),
        RankingMetric("sensitivity-at-specificity", "sensitivity at specificity", score="sensitivity_at_specificity"),
        RankingMetric("kappa", "Cohen's κ", "kappa", percent=False, limit=2.0),
        RankingMetric("log-loss", "log loss", "log_loss", lower_is_better=True, percent=False, limit=math.inf),
        RankingMetric("brier", "Brier score", score="brier", lower_is_better=True, percent=False, limit=2.0),
        RankingMetric("ece", "calibration error", score="calibration_error", lower_is_better=True),
    )
}


def find_metric(name: str, choices: Iterable[str] = METRICS) -> RankingMetric:
    """Find the metric with this name. Python's spelling, such as macro_f1, is also accepted.

    For an unknown name, the error lists the `choices`.
    """
    spelled = str(name).replace("_", "-").lower()
    if spelled not in METRICS:
        raise unknown("ranking metric", str(name), choices)
    return METRICS[spelled]


def require_metric(runs: Iterable[Result], name: str) -> RankingMetric:
    """Find the metric with this name. Refuse evaluated runs without a value, except reference bounds."""
    metric = find_metric(name)
    for run in runs:
        if run.last is not None and not is_reference_bound(run.method) and math.isnan(metric.value(run)):
            raise UserError(f"{run.folder or run.name} cannot be ranked by {metric.name}: {_reason(run, metric)}")
    return metric


def _reason(run: Result, metric: RankingMetric) -> str:
    """Say why the run has no value of the metric, and what to do."""
    if run.evaluation.totals is not None:
        return "its sites reported total accuracy only; expected --rank-by accuracy"
    if metric.score is not None and not run.finished:
        return f"{metric.label} is computed when a run is finished; finish it, or rank by accuracy or macro-f1"
    if run.sites:
        return "its federation did not record it; rank by accuracy or macro-f1 instead"
    if metric.score is not None and run.stopped_early and not run.history[-1].is_evaluated:
        return (
            f"it was stopped after a round without an evaluation, and {metric.label} is computed after an evaluated "
            "last round; rank by accuracy or macro-f1, or repeat it with eval_every 1"
        )
    if metric.score is not None and run.evaluated[-1].client_accuracy is not None:
        return f"its method has no global model, and {metric.label} is computed for one; rank by accuracy or macro-f1"
    if run.diverged:
        return f"its training diverged, so it has no {metric.label}; lower the learning rate, or rank by macro-f1"
    return (
        f"it has no {metric.label}: the model's outputs are not finite, the test samples do not define this metric, or "
        "an older version ran it; rank by macro-f1, or run it again in another folder, perhaps with a lower --lr"
    )
