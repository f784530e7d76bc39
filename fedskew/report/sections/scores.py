"""The probabilities of the final models: AUROC, AUPRC, sensitivity, specificity, and the reliability diagram."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from fedskew.metrics.scores import Reliability, Scores
from fedskew.metrics.summary import mean_std
from fedskew.report.charts.chart import Figure, Heat, Line, Lines
from fedskew.report.charts.table import Cell, Table, number
from fedskew.report.sections.section import Section, percent
from fedskew.results import Comparison, MethodRuns

MAX_ROWS = 200
"""With more rows, the table by class is left out. The heat map still shows the AUROC of each class."""
MISSING = (
    "probabilities were not scored: the run is unfinished, was stopped after a round without an evaluation, or is from "
    "an older version; or the method has no global model, a probability is not finite, the sites report totals only, "
    "or memory was too small"
)
COLUMNS = {
    "AUROC": "auroc",
    "AUPRC": "auprc",
    "sensitivity at 0.5": "sensitivity",
    "specificity at 0.5": "specificity",
}
"""The headings of the tables, and the attributes of `Scores` and of `ClassScores` that they show."""


def scores(comparison: Comparison) -> Section:
    """Build the section: scores of the final models' probabilities, and the reliability diagram."""
    methods = [method for method in comparison.methods if _scores(method)]
    title = "Probabilities and calibration"
    if not methods:
        return Section("scores", title, missing=[MISSING])
    figures = [Figure("reliability", "Reliability diagram", [reliability_chart(methods, comparison)])]
    if len(comparison.classes) > 2:
        figures.append(Figure("auroc", "AUROC by class, mean over the seeds", [_by_class_chart(methods, comparison)]))
    tables = [_summary(methods)]
    if len(methods) * len(comparison.classes) <= MAX_ROWS:
        tables.append(_by_class(methods, comparison))
    missing = [f"{method.label}: {MISSING}" for method in comparison.methods if method not in methods]
    return Section("scores", title, _paragraphs(methods, comparison), figures, tables, missing=missing)


def _scores(method: MethodRuns) -> list[Scores]:
    """The scores of the method's runs. Runs of older versions are left out, because they have only AUROC."""
    return [run.scores for run in method.counted_runs if run.scores is not None and run.scores.classes]


def _paragraphs(methods: Sequence[MethodRuns], comparison: Comparison) -> list[str]:
    first = _scores(methods[0])[0]
    if comparison.is_multi_label:
        what = "Each label is scored separately, and the first table has the means over the labels."
        binned = "the probability of each label with how often the sample has it"
    elif first.positive is None:
        what = "Each class is scored against the rest, and the first table has the means over the classes."
        binned = "the probability of the predicted class with how often the prediction is right"
    else:
        what = f"{comparison.classes[first.positive]} is the positive class."
        binned = "the probability of the positive class with how often it is true"
    paragraphs = [
        f"{what} Values are means over the seeds, on the test set after the last round.",
        f"The reliability diagram compares {binned}. The calibration error is the mean distance from the diagonal, "
        "weighted by samples. Lower is better for Brier score, log loss and calibration error.",
    ]
    if errors := [one.auroc_error for method in methods for one in _scores(method) if one.auroc_error]:
        bound = f"The error of AUROC is at most {max(errors):.1g}."
        paragraphs.append(f"AUROC and AUPRC come from the sum of the sites' histograms. {bound}")
    return paragraphs


def reliability_chart(methods: Sequence[MethodRuns], comparison: Comparison) -> Lines:
    """Draw observed frequency over predicted probability, a line per method, over all seeds together."""
    unused_style = 1 + max(method.index for method in comparison.methods)
    lines = [Line("perfect calibration", [0.0, 100.0], [0.0, 100.0], style=unused_style)]
    for method in methods:
        pooled = _pooled([one.reliability for one in _scores(method)])
        points = [
            (100 * p, 100 * f)
            for p, f in zip(pooled.probability, pooled.frequency, strict=True)
            if p is not None and f is not None
        ]
        x, y = [round(p, 2) for p, _ in points], [number(f) for _, f in points]
        lines.append(Line(method.label, x, y, style=method.index))
    return Lines("reliability", "reliability", "predicted probability, %", "observed frequency, %", lines, (0, 100))


def _pooled(diagrams: Sequence[Reliability]) -> Reliability:
    """Combine the diagrams of several seeds into one."""
    sums = np.zeros((3, len(diagrams[0].samples)))
    for one in diagrams:
        samples = np.array(one.samples, np.float64)
        shown = [np.array([v or 0.0 for v in values]) for values in (one.probability, one.frequency)]
        sums += np.stack([samples, samples * shown[0], samples * shown[1]])
    return Reliability.from_sums(sums)


def _by_class_chart(methods: Sequence[MethodRuns], comparison: Comparison) -> Heat:
    rows = [[percent(_class_mean(method, k, "auroc")) for k in range(len(comparison.classes))] for method in methods]
    labels = [method.label for method in methods]
    return Heat("auroc", "AUROC by class", "method", "class", "AUROC, %", labels, comparison.classes, rows, "share")


def _class_mean(method: MethodRuns, label: int, name: str) -> float | None:
    known = [v for one in _scores(method) if (v := getattr(one.classes[label], name)) is not None]
    return math.fsum(known) / len(known) if known else None


def _summary(methods: Sequence[MethodRuns]) -> Table:
    target = _scores(methods[0])[0].target_specificity
    named = {
        **COLUMNS,
        f"sensitivity at specificity {target:g}": "sensitivity_at_specificity",
        "Brier score": "brier",
        "calibration error": "calibration_error",
    }
    rows: list[list[Cell]] = []
    for method in methods:
        found = [[getattr(one, name) for one in _scores(method)] for name in named.values()]
        losses = [run.evaluation.log_loss for run in method.counted_runs]
        rows.append([method.label, len(_scores(method)), *map(_mean, found), _mean(losses)])
    return Table("scores", "Scores after the last round", ["method", "seeds", *named, "log loss"], rows)


def _mean(values: Sequence[float | None]) -> str | None:
    known = [value for value in values if value is not None]
    return mean_std(known).as_numbers(3) if known else None


def _by_class(methods: Sequence[MethodRuns], comparison: Comparison) -> Table:
    target = _scores(methods[0])[0].target_specificity
    named = {
        **COLUMNS,
        f"sensitivity at specificity {target:g}": "sensitivity_at_specificity",
        "its threshold": "threshold",
    }
    rows: list[list[Cell]] = [
        [method.label, name, *(number(_class_mean(method, k, attribute), 3) for attribute in named.values())]
        for method in methods
        for k, name in enumerate(comparison.classes)
    ]
    return Table("scores-by-class", "Each class against the rest", ["method", "class", *named], rows)
