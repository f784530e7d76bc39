"""What decides which method is best: `--rank-by` on the command line, `rank_by=` in Python."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from fedskew.errors import UserError, unknown
from fedskew.experiment.result import Result
from fedskew.methods import is_reference_bound

DEFAULT_METRIC = "accuracy"


@dataclass(frozen=True)
class RankingMetric:
    """A metric of a run, from 0 to 1. The method with the highest mean over the seeds is best."""

    name: str
    """As users write it."""
    label: str
    measure: str | None
    """The property of an `Evaluation` that has the value; None for AUROC, which is known only after the last round."""

    def value(self, run: Result) -> float:
        """The run's value after its last round; NaN if it has none."""
        if self.measure is None:
            return math.nan if run.auroc is None else run.auroc
        return float(getattr(run.evaluation, self.measure))

    def curve(self, run: Result) -> list[tuple[int, float]]:
        """The evaluated rounds of the global model and the value after each; only the last one for AUROC."""
        if self.measure is None:
            return [(run.last_round, self.value(run))]
        return [(round_, float(getattr(found, self.measure))) for round_, found in run.evaluations.items()]


METRICS = {
    metric.name: metric
    for metric in (
        RankingMetric("accuracy", "accuracy", "accuracy"),
        RankingMetric("macro-f1", "macro F1", "macro_f1"),
        RankingMetric("worst-class", "worst class", "worst_class"),
        RankingMetric("balanced-accuracy", "balanced accuracy", "mean_class"),
        RankingMetric("auroc", "AUROC", None),
    )
}


def find_metric(name: str) -> RankingMetric:
    """The metric of this name, also in Python's spelling, such as macro_f1."""
    spelled = str(name).replace("_", "-").lower()
    if spelled not in METRICS:
        raise unknown("ranking metric", str(name), METRICS)
    return METRICS[spelled]


def require_metric(runs: Iterable[Result], name: str) -> RankingMetric:
    """The metric of this name. Refuse runs that lack it, except reference bounds, which do not compete."""
    metric = find_metric(name)
    for run in runs:
        if run.last is not None and not is_reference_bound(run.method) and math.isnan(metric.value(run)):
            raise UserError(f"{run.folder or run.name} cannot be ranked by {metric.name}: {_reason(run, metric)}")
    return metric


def _reason(run: Result, metric: RankingMetric) -> str:
    if metric.name != "auroc":
        return "its sites reported total accuracy only; expected --rank-by accuracy"
    if run.sites:
        return "the probabilities of its samples stay at the sites; rank by accuracy or macro-f1 instead"
    if not run.finished:
        return "AUROC is computed when a run is finished"
    return "it has no AUROC, like all runs of older versions; run it again in another folder, or rank by macro-f1"
