"""The overview of several settings: all of them in one table, and accuracy over each key that varies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fedskew.report.charts.chart import Figure, Heat
from fedskew.report.charts.table import Cell, Table, number
from fedskew.report.figures.sweeps import curves_over
from fedskew.report.sections.section import Section
from fedskew.results import Comparison, MethodRuns
from fedskew.results.naming import flat, varied_keys
from fedskew.results.ranking import METRICS, RankingMetric


def overview(found: Sequence[Comparison]) -> Section:
    """Build a table with a row per method and setting, and charts over the numbers that vary."""
    keys = varied_keys([run.config for comparison in found for run in comparison.runs])
    pairs = [(comparison, method) for comparison in found for method in comparison.methods]
    shown = [METRICS[name] for name in dict.fromkeys((found[0].rank_by, "accuracy", "macro-f1", "worst-class"))]
    rows = [_row(method, keys, shown) for _, method in pairs]
    runs = [run for _, method in pairs for run in method.runs]
    done = sum(run.finished for run in runs)
    words = [
        f"{len(runs)} runs, {done} finished, in {len(found)} settings that differ in {', '.join(keys) or 'nothing'}.",
        *_winners(found),
        "± is the sample standard deviation over the seeds.",
    ]
    numbers = [heading for metric in shown for heading in (metric.heading, f"± {metric.label}")]
    columns = [*keys, "method", "finished", "runs", *numbers, "training time, s"]
    charts = curves_over(found)
    figures = [Figure("over-keys", "Accuracy over the varied keys", charts, 2)] if charts else []
    if len(found) > 1 and all(len(s.methods) > 1 for s in found):
        figures.append(Figure("winners", "Accuracy by setting and method", [_grid(found)], wide=True))
    table = Table("overview", "All settings and methods", columns, rows)
    return Section("overview", "Overview", words, figures, [table])


def _winners(found: Sequence[Comparison]) -> list[str]:
    wins: dict[str, int] = {}
    for comparison in found:
        if len(methods := comparison.competing) > 1:
            wins[methods[0].label] = wins.get(methods[0].label, 0) + 1
    if not wins:
        return []
    wins_by_method = ", ".join(f"{label} in {n}" for label, n in sorted(wins.items(), key=lambda item: -item[1]))
    return [f"{found[0].metric.best_word.capitalize()} mean {found[0].metric.label} by setting: {wins_by_method}."]


def _row(method: MethodRuns, keys: Sequence[str], shown: Sequence[RankingMetric]) -> list[Cell]:
    values = flat(method.runs[0].config)
    measured = [(method.over_seeds(metric.value), metric) for metric in shown]
    return [
        *(_cell(values.get(key)) for key in keys),
        method.label,
        len(method.finished),
        len(method.runs),
        *(number(m.scale * value, 2 if m.percent else 4) for found, m in measured for value in found),
        number(sum(run.seconds for run in method.runs), 1),
    ]


def _cell(value: Any) -> Cell:
    return value if isinstance(value, str | int | float) or value is None else str(value)


def _grid(found: Sequence[Comparison]) -> Heat:
    labels = list(dict.fromkeys(method.label for comparison in found for method in comparison.methods))
    cells = []
    for label in labels:
        shown = [
            next((method for method in comparison.methods if method.label == label and method.counted), None)
            for comparison in found
        ]
        cells.append([None if c is None else number(100 * c.accuracy.mean) for c in shown])
    names = [comparison.label for comparison in found]
    return Heat("winners", "accuracy", "method", "setting", "accuracy %", labels, names, cells, "share",
                show_numbers=len(names) <= 20)  # fmt: skip
