"""Accuracy by class: after the last round, compared with FedAvg, and over the rounds."""

from __future__ import annotations

from fedskew.report.charts.chart import Bars, BarSeries, Chart, Figure, Heat
from fedskew.report.charts.table import number
from fedskew.report.sections.section import Section
from fedskew.results import Comparison, MethodRuns, Result

MAX_BARS = 20
"""With more classes than this, a heat map replaces the bars."""
MAX_PANELS = 12
"""The maximum number of methods with a panel of accuracies over the rounds."""


def classes(comparison: Comparison) -> Section:
    """Build the section: accuracy by class after the last round, compared with FedAvg, and over the rounds."""
    methods = [method for method in comparison.methods if method.counted_runs]
    if not methods:
        return Section("classes", "Classes", missing=["no run has been evaluated yet"])
    figures = [Figure("by-class", _caption(comparison, methods), [_last_round(comparison, methods)])]
    baseline = comparison.baseline
    if baseline is not None and baseline in methods and len(methods) > 1:
        gains = _gains(comparison, baseline, [method for method in methods if method is not baseline])
        seeds = {frozenset(run.seed for run in method.counted_runs) for method in methods}
        where = ", on the seeds that both methods have" if len(seeds) > 1 else ""
        figures.append(Figure("gains", f"Change compared with {baseline.label}, in points{where}", [gains]))
    panels = [_over_rounds(method, run, comparison) for method in methods[:MAX_PANELS] if (run := method.first)]
    which = "each method" if len(methods) <= MAX_PANELS else f"each of the first {MAX_PANELS} methods"
    figures.append(Figure("class-rounds", f"Accuracy by class over the rounds, one seed of {which}", panels, 3))
    return Section("classes", "Classes", figures=figures)


def _last_round(comparison: Comparison, methods: list[MethodRuns]) -> Chart:
    means = [_mean(method) for method in methods]
    if len(comparison.classes) <= MAX_BARS:
        series = [
            BarSeries(method.label, m, _deviation(method), method.index)
            for method, m in zip(methods, means, strict=True)
        ]
        return Bars("by-class", "accuracy by class", "class", "accuracy %", comparison.classes, series, (0, 100))
    labels = [method.label for method in methods]
    return Heat(
        "by-class", "accuracy by class", "method", "class", "accuracy %", labels, comparison.classes, means, "share"
    )


def _caption(comparison: Comparison, methods: list[MethodRuns]) -> str:
    caption = "Accuracy by class after the last round, mean over the seeds"
    shows_deviation = len(comparison.classes) <= MAX_BARS and any(len(method.counted_runs) > 1 for method in methods)
    return f"{caption}, ± sample standard deviation" if shows_deviation else caption


def _mean(method: MethodRuns) -> list[float | None]:
    return [number(100 * v) for v in method.class_accuracy]


def _deviation(method: MethodRuns) -> list[float | None] | None:
    if len(method.counted_runs) < 2:
        return None
    return [number(100 * v) for v in method.class_accuracies().std(axis=0, ddof=1)]


def _gains(comparison: Comparison, baseline: MethodRuns, others: list[MethodRuns]) -> Heat:
    rows = [_mean_changes(method, baseline, len(comparison.classes)) for method in others]
    return Heat(
        "gains",
        f"accuracy minus that of {baseline.label}",
        "method",
        "class",
        "points",
        [method.label for method in others],
        comparison.classes,
        rows,
        "difference",
        show_numbers=len(comparison.classes) <= MAX_BARS,
    )


def _mean_changes(method: MethodRuns, baseline: MethodRuns, classes: int) -> list[float | None]:
    """The mean change of each class in points, over the seeds that both methods have. None if they share no seed."""
    changes = method.class_changes(baseline)
    return [number(100 * v) for v in changes.mean(axis=0)] if len(changes) else [None] * classes


def _over_rounds(method: MethodRuns, run: Result, comparison: Comparison) -> Heat:
    rounds = sorted(run.evaluations)
    shares = zip(*(run.evaluations[round_].class_accuracy for round_ in rounds), strict=True)
    cells = [[None if a is None else number(100 * a, 1) for a in row] for row in shares]
    key, title = f"class-rounds-{method.index}", f"{method.label}, seed {run.seed}"
    return Heat(key, title, "class", "round", "accuracy %", comparison.classes, list(map(str, rounds)), cells, "share")
