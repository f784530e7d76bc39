"""Accuracy over the configuration keys that vary between runs: curves over one key, grids over two."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fedskew.errors import UserError
from fedskew.metrics.summary import mean_std
from fedskew.report.charts.chart import Figure, Heat, Line, Lines
from fedskew.report.charts.table import number
from fedskew.results import Comparison, MethodRuns
from fedskew.results.naming import flat_config, with_whole_numbers

MAX_LINES = 12
"""The maximum number of curves in a panel."""


def over_keys(comparisons: Sequence[Comparison]) -> Figure:
    """Draw a panel for each numeric key that was varied."""
    panels = curves_over(comparisons)
    if not panels:
        raise UserError(
            "no two evaluated runs of a method differ only in one key whose values are all numbers; "
            "expected runs of a sweep"
        )
    return Figure("over-keys", "Accuracy over the varied keys", panels, min(2, len(panels)))


def curves_over(comparisons: Sequence[Comparison]) -> list[Lines]:
    """Draw accuracy over each numeric key that varies.

    Each method has a curve for each combination of the other varied keys' values. A panel in which every curve would be
    a single point is left out.
    """
    points = _points(comparisons)
    names = _short_names(_varied(points))
    panels = [_panel(key, points, names) for key in _numeric(points)]
    return [panel for panel in panels if any(len(line.x) > 1 for line in panel.lines)]


def grid(comparisons: Sequence[Comparison]) -> Figure:
    """Draw a heat map over the first two numeric keys that vary, a panel per method that has both.

    A cell is the mean over all runs with its two values, whatever their other keys.
    """
    points = _points(comparisons)
    keys, names = _numeric(points), _short_names(_varied(points))
    if len(keys) < 2:
        raise UserError(f"varying numeric keys: {', '.join(keys) or 'none'}; expected at least two")
    down, across = keys[:2]
    panels = []
    with_both = [(values, method) for values, method in points if down in values and across in values]
    if not with_both:
        raise UserError(f"no method has both {down} and {across}; expected runs of one method that vary two keys")
    for i, name in enumerate(dict.fromkeys(values["method.name"] for values, _ in with_both)):
        found = [(values, method) for values, method in with_both if values["method.name"] == name]
        rows, columns = (sorted({values[key] for values, _ in found}) for key in (down, across))
        cells = [
            [_mean([method for v, method in found if (v[down], v[across]) == (r, k)]) for k in columns] for r in rows
        ]
        rows_named, columns_named = ([f"{value:g}" for value in axis] for axis in (rows, columns))
        panels.append(
            Heat(f"grid-{i}", str(name), names[down], names[across], "accuracy %", rows_named, columns_named, cells,
                 "share", show_numbers=True)
        )  # fmt: skip
    return Figure("grid", "Accuracy over two parameters", panels, min(2, len(panels)))


Point = tuple[dict[str, Any], MethodRuns]
"""A configuration as a flat mapping (`method.name`, `local_epochs` …), and the runs that used it."""


def _points(comparisons: Sequence[Comparison]) -> list[Point]:
    return [
        (with_whole_numbers(flat_config(method.runs[0].config)), method)
        for comparison in comparisons
        for method in comparison.methods
        if method.counted_runs
    ]


def _varied(points: Sequence[Point]) -> list[str]:
    """The keys whose values differ between points. Values of a method's parameters are compared among its own runs."""
    keys = dict.fromkeys(key for values, _ in points for key in values)
    found = []
    for key in keys:
        by_method: dict[str, set[str]] = {}
        for values, _ in points:
            if key in values:
                name = values["method.name"] if key.startswith("method.") else ""
                by_method.setdefault(name, set()).add(str(values[key]))
        if key != "method.name" and any(len(different) > 1 for different in by_method.values()):
            found.append(key)
    return found


def _numeric(points: Sequence[Point]) -> list[str]:
    """The varied keys whose values are numbers in all points that have them."""

    def is_number(value: Any) -> bool:
        return isinstance(value, int | float) and not isinstance(value, bool)

    return [key for key in _varied(points) if all(is_number(values[key]) for values, _ in points if key in values)]


def _panel(key: str, points: Sequence[Point], names: Mapping[str, str]) -> Lines:
    """Draw a panel: a curve for each method and each combination of the other varied keys' values.

    `names` maps all varied keys to the names that are shown. If every method has only one curve, the curves have the
    methods' colours.
    """
    curves: dict[str, dict[float, list[float]]] = {}
    method_of_curve: dict[str, int] = {}
    for values, method in points:
        if key not in values:
            continue
        rest = ", ".join(f"{shown}={values[k]}" for k, shown in names.items() if k != key and k in values)
        name = f"{values['method.name']}{', ' + rest if rest else ''}"
        method_of_curve.setdefault(name, method.index)
        found = curves.setdefault(name, {}).setdefault(float(values[key]), [])
        found += [100 * a for a in method.by_seed(lambda run: run.accuracy).values()]
    drawn = []
    methods = list(method_of_curve.values())
    styles = methods if len(set(methods)) == len(methods) else range(len(methods))
    for style, (name, accuracies) in list(zip(styles, curves.items(), strict=True))[:MAX_LINES]:
        x = sorted(accuracies)
        by_x = [accuracies[value] for value in x]
        means = [number(mean_std(found).mean) for found in by_x]
        lows, highs = [number(min(found)) for found in by_x], [number(max(found)) for found in by_x]
        drawn.append(Line(name, x, means, lows, highs, style))
    shown = names[key]
    title = f"over {shown}" + (f", {len(drawn)} of {len(curves)} curves" if len(curves) > len(drawn) else "")
    return Lines(f"over-{shown}", title, shown, "accuracy %", drawn)


def _mean(found: Sequence[MethodRuns]) -> float | None:
    values = [a for method in found for a in method.by_seed(lambda run: run.accuracy).values()]
    return number(100 * sum(values) / len(values)) if values else None


def _short_names(keys: Sequence[str]) -> dict[str, str]:
    """The last part of each key, such as `beta`. If two keys end in it, the whole keys, such as `partition.beta`."""
    short = {key: key.rpartition(".")[2] for key in keys}
    ends = list(short.values())
    return {key: end if ends.count(end) == 1 else key for key, end in short.items()}
