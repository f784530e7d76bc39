"""Sections of the report, and the curves of methods that they share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from fedskew.report.charts.chart import Figure, Line
from fedskew.report.charts.table import Table, number
from fedskew.results import MethodRuns, Result

Point = tuple[float, float | None]
"""A round and the value after it. None if the value is unknown."""


@dataclass(frozen=True)
class Section:
    """A part of the report with text, figures and tables."""

    key: str
    title: str
    paragraphs: Sequence[str] = ()
    figures: Sequence[Figure] = ()
    tables: Sequence[Table] = ()

    listing: str = ""
    """Preformatted text to copy."""
    missing: Sequence[str] = ()
    """Lines that name what is missing from the runs, and how to get it."""


def percent(share: float | None) -> float | None:
    return None if share is None else number(100 * share)


def mean_line(method: MethodRuns, curve: Callable[[Result], Iterable[Point]]) -> Line | None:
    """Draw the mean of the runs in `counted_runs` at each round, with a band from the lowest to the highest value.

    Runs without this curve are left out. A round is drawn if all remaining runs have it. None if no run has the curve.
    """
    curves = [c for run in method.counted_runs if (c := dict(curve(run)))]
    if not curves:
        return None
    rounds = sorted(set.intersection(*(set(c) for c in curves)))
    columns = [[c[x] for c in curves] for x in rounds]
    known = [[v for v in column if v is not None] for column in columns]
    mean = [number(sum(v) / len(v), 3) if v else None for v in known]
    if len(curves) == 1:
        return Line(method.label, rounds, mean, style=method.index)
    low = [number(min(v), 3) if v else None for v in known]
    high = [number(max(v), 3) if v else None for v in known]
    return Line(method.label, rounds, mean, low, high, method.index)


def lines(methods: Iterable[MethodRuns], curve: Callable[[Result], Iterable[Point]]) -> list[Line]:
    """Draw one line per method: the mean of the runs in `counted_runs`. Any other run with points has its own line."""
    found: list[Line | None] = []
    for method in methods:
        found.append(mean_line(method, curve))
        for run in method.runs:
            if run not in method.counted_runs and (points := dict(curve(run))):
                name = f"{method.label}, seed {run.seed}, unfinished"
                found.append(Line(name, list(points), list(points.values()), style=method.index))
    return [line for line in found if line is not None and len(line.x)]
