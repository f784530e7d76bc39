"""Accuracy by class: after the last round, compared with FedAvg, and over the rounds."""

from __future__ import annotations

from fedskew.report.charts.chart import Bars, BarSeries, Chart, Figure, Heat
from fedskew.report.charts.table import number
from fedskew.report.sections.section import Section
from fedskew.results import Comparison, MethodRuns, Result

MAX_BARS = 20
"""With more classes than this, a heat map replaces the bars."""
MAX_PANELS = 12


def classes(setting: Comparison) -> Section:
    methods = [c for c in setting.methods if c.tested]
    if not methods:
        return Section("classes", "Classes", missing=["no run has been evaluated yet"])
    figures = [Figure("by-class", _caption(methods), [_last_round(setting, methods)])]
    if (baseline := setting.baseline) in methods and len(methods) > 1 and baseline is not None:
        gains = _gains(setting, baseline, [c for c in methods if c is not baseline])
        figures.append(Figure("gains", f"Change compared with {baseline.label}, in points", [gains]))
    panels = [p for c in methods[:MAX_PANELS] if (run := c.first) for p in [_over_rounds(c, run, setting)]]
    figures.append(Figure("class-rounds", "Accuracy by class over the rounds, one seed of each method", panels, 3))
    return Section("classes", "Classes", figures=figures)


def _last_round(setting: Comparison, methods: list[MethodRuns]) -> Chart:
    means = [_mean(c) for c in methods]
    if len(setting.classes) <= MAX_BARS:
        series = [BarSeries(c.label, m, _deviation(c), c.style) for c, m in zip(methods, means, strict=True)]
        return Bars("by-class", "accuracy by class", "class", "accuracy %", setting.classes, series, (0, 100))
    labels = [c.label for c in methods]
    return Heat(
        "by-class", "accuracy by class", "method", "class", "accuracy %", labels, setting.classes, means, "share"
    )


def _caption(methods: list[MethodRuns]) -> str:
    caption = "Accuracy by class after the last round, mean over the seeds"
    return f"{caption}, ± sample standard deviation" if any(len(c.tested) > 1 for c in methods) else caption


def _mean(contender: MethodRuns) -> list[float | None]:
    return [number(100 * v) for v in contender.class_accuracy]


def _deviation(contender: MethodRuns) -> list[float | None] | None:
    if len(contender.tested) < 2:
        return None
    return [number(100 * v) for v in contender.class_accuracies().std(axis=0, ddof=1)]


def _gains(setting: Comparison, baseline: MethodRuns, others: list[MethodRuns]) -> Heat:
    base = baseline.class_accuracy
    rows = [[number(100 * v) for v in c.class_accuracy - base] for c in others]
    return Heat(
        "gains",
        f"accuracy minus that of {baseline.label}",
        "method",
        "class",
        "points",
        [c.label for c in others],
        setting.classes,
        rows,
        "difference",
        show_numbers=len(setting.classes) <= MAX_BARS,
    )


def _over_rounds(contender: MethodRuns, run: Result, setting: Comparison) -> Heat:
    rounds = sorted(run.evaluations)
    shares = zip(*(run.evaluations[t].class_accuracy for t in rounds), strict=True)
    cells = [[None if a is None else number(100 * a, 1) for a in row] for row in shares]
    key, title = f"class-rounds-{contender.style}", f"{contender.label}, seed {run.seed}"
    return Heat(key, title, "class", "round", "accuracy %", setting.classes, list(map(str, rounds)), cells, "share")
