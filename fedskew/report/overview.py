"""The overview of several comparisons, each with its own configuration.

It has one table of all comparisons, a chart of the accuracy over each numeric configuration key that varies, and a heat
map of the accuracy by method and setting.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fedskew.report.charts.chart import Figure, Heat
from fedskew.report.charts.table import Cell, Table, number
from fedskew.report.figures.sweeps import curves_over
from fedskew.report.sections.section import Section
from fedskew.results import Comparison, MethodRuns
from fedskew.results.early_stops import early_stops
from fedskew.results.naming import shown_config, varied_keys
from fedskew.results.ranking import METRICS, RankingMetric
from fedskew.results.significance import NO_SPREAD


def overview(comparisons: Sequence[Comparison]) -> Section:
    """Build the section: a table with a row per method and setting, charts over the numeric keys, and a heat map."""
    keys = varied_keys([run.config for comparison in comparisons for run in comparison.runs])
    methods = [method for comparison in comparisons for method in comparison.methods]
    names = dict.fromkeys((comparisons[0].rank_by, "accuracy", "macro-f1", "worst-class"))
    shown = [METRICS[name] for name in names]
    rows = [_row(method, keys, shown) for method in methods]
    runs = [run for method in methods for run in method.runs]
    finished = sum(run.finished for run in runs)
    differing = ", ".join(keys) or "nothing"
    paragraphs = [
        f"{len(runs)} runs, {finished} finished, in {len(comparisons)} settings that differ in {differing}.",
        *_winners(comparisons),
        *(f"{comparison.label}: {line}." for comparison in comparisons for line in early_stops(comparison)),
        "± is the sample standard deviation over the seeds.",
    ]
    numbers = [heading for metric in shown for heading in (metric.heading, f"± {metric.label}")]
    columns = [*keys, "method", "finished", "runs", *numbers, "training time, s"]
    charts = curves_over(comparisons)
    figures = [Figure("over-keys", "Accuracy over the varied keys", charts, 2)] if charts else []
    if len(comparisons) > 1 and all(len(comparison.methods) > 1 for comparison in comparisons):
        figures.append(Figure("winners", "Accuracy by setting and method", [_grid(comparisons)], wide=True))
    table = Table("overview", "All settings and methods", columns, rows)
    return Section("overview", "Overview", paragraphs, figures, [table])


def _winners(comparisons: Sequence[Comparison]) -> list[str]:
    """Say in how many settings each method is the best. Equal methods all count.

    Settings with fewer than two competing methods do not count.
    """
    wins: dict[str, int] = {}
    for comparison in comparisons:
        if len(methods := comparison.competing) > 1:
            merits = [comparison.ranked_mean(method, comparison.metric.merit) for method in methods]
            for method, merit in zip(methods, merits, strict=True):
                if merits[0] - merit < NO_SPREAD:
                    wins[method.label] = wins.get(method.label, 0) + 1
    if not wins:
        return []
    wins_by_method = ", ".join(f"{label} in {n}" for label, n in sorted(wins.items(), key=lambda item: -item[1]))
    metric = comparisons[0].metric
    return [f"{metric.best_word.capitalize()} mean {metric.label} by setting: {wins_by_method}."]


def _row(method: MethodRuns, keys: Sequence[str], shown: Sequence[RankingMetric]) -> list[Cell]:
    values = shown_config(method.runs[0].config)
    measured = [(method.over_seeds(metric.value), metric) for metric in shown]
    return [
        *(_cell(values.get(key)) for key in keys),
        method.label,
        len(method.finished_runs),
        len(method.runs),
        *(number(m.scale * value, 2 if m.percent else 4) for found, m in measured for value in found),
        number(sum(run.seconds for run in method.runs), 1),
    ]


def _cell(value: Any) -> Cell:
    return value if isinstance(value, str | int | float) or value is None else str(value)


def _grid(comparisons: Sequence[Comparison]) -> Heat:
    labels = list(dict.fromkeys(method.label for comparison in comparisons for method in comparison.methods))
    cells = []
    for label in labels:
        shown = [
            next((method for method in comparison.methods if method.label == label and method.counted_runs), None)
            for comparison in comparisons
        ]
        cells.append([None if method is None else number(100 * method.accuracy.mean) for method in shown])
    names = [comparison.label for comparison in comparisons]
    return Heat("winners", "accuracy", "method", "setting", "accuracy %", labels, names, cells, "share",
                show_numbers=len(names) <= 20)  # fmt: skip
