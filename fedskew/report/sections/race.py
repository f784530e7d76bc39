"""A race of methods: the final, and how the candidates did on the way."""

from __future__ import annotations

from collections.abc import Sequence

from fedskew.report.charts.chart import Figure, Line, Lines
from fedskew.report.charts.table import Cell, Table, number
from fedskew.report.race import has_intervals
from fedskew.report.sections.section import Section
from fedskew.results.race import Finalist, RaceRecord, Rung, Standing
from fedskew.results.ranking import find_metric
from fedskew.results.significance import INTERVAL_NOTE


def race_section(race: RaceRecord) -> Section:
    """The final with costs, a curve per method over the rungs, and every candidate of every rung."""
    metric = find_metric(race.rank_by).label
    words = [
        f"{len(race.methods)} methods were raced on validation data, held out of the training data. Means are of "
        f"{metric} in percent, over the last rounds and the splits. The test set was not used.",
    ]
    if not race.finished:
        words.append("The race is not finished; repeat its command to continue it.")
    if has_intervals(race.final):
        words.append(INTERVAL_NOTE)
    tables = [_final(race.final)] if race.final else []
    tables += [_rung(rung) for rung in reversed(race.rungs)]
    figures = [Figure("race", "Best candidate of each method", [_curves(race.rungs, metric)])] if race.rungs else []
    missing = [f"{method} could not run here: {reason}" for method, reason in (race.failures or {}).items()]
    return Section("race", "The race", words, figures, tables, missing=missing)


def _final(final: Sequence[Finalist]) -> Table:
    columns = ["method", "learning rate", "all splits %", "fresh splits", "mean of fresh splits %",
               "gain over FedAvg, points", "interval from", "to", "p", "compute (FedAvg: 1)", "traffic (FedAvg: 1)",
               "time per round (FedAvg: 1)", "reveals"]  # fmt: skip
    return Table("race-final", "The final", columns, [_final_row(one) for one in final])


def _final_row(one: Finalist) -> list[Cell]:
    standing, d = one.standing, one.difference
    tested = [None] * 4 if d is None else [_points(d.mean), _points(d.low), _points(d.high), number(d.p, 4)]
    mean = [_points(one.overall), len(standing.scores), _points(standing.mean)]
    return [standing.label, standing.lr, *mean, *tested, one.compute, one.traffic, one.time_ratio, one.reveals]


def _points(share: float | None) -> float | None:
    return None if share is None else number(100 * share)


def _rung(rung: Rung) -> Table:
    rows: list[list[Cell]] = [
        [s.label, s.lr, len(s.scores), _points(s.mean), "yes" if s.kept else "no"] for s in rung.standings
    ]
    columns = ["method", "learning rate", "splits", "mean %", "went on"]
    return Table(f"race-{rung.rounds}", f"After round {rung.rounds}", columns, rows)


def _curves(rungs: Sequence[Rung], metric: str) -> Lines:
    """One line per method, as far as the method went."""
    points: dict[str, dict[int, float]] = {}
    for rung in rungs:
        for method, best in _best(rung.standings).items():
            points.setdefault(method, {})[rung.rounds] = best.mean
    # Colours repeat after a few lines, so FedAvg and the methods that went furthest come first.
    ordered = sorted(points, key=lambda method: (method != "fedavg", -len(points[method])))
    lines = [
        Line(method, list(found), [_points(mean) for mean in found.values()], style=style)
        for style, (method, found) in enumerate((method, points[method]) for method in ordered)
    ]
    return Lines("race-curves", "Best candidate of each method", "round", f"validation {metric} %", lines)


def _best(standings: Sequence[Standing]) -> dict[str, Standing]:
    best: dict[str, Standing] = {}
    for standing in standings:
        best.setdefault(standing.method, standing)
    return best
