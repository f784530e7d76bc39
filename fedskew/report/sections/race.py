"""A race of methods: the final, and the candidates of every rung before it (see `results.race`)."""

from __future__ import annotations

from collections.abc import Sequence

from fedskew.report.charts.chart import Figure, Line, Lines
from fedskew.report.charts.table import Cell, Table, number
from fedskew.report.race import has_intervals
from fedskew.report.sections.section import Section
from fedskew.results.race import Finalist, RaceRecord, Rung, Standing
from fedskew.results.ranking import find_metric
from fedskew.results.significance import INTERVAL_NOTE


def race_section(race: RaceRecord, styles: dict[str, int]) -> Section:
    """Build the section: the final with costs, a curve per method, and all candidates of each rung.

    `styles` has the index of the colour of each method in the report. Methods that only the race has are added to it.
    """
    metric = find_metric(race.rank_by).label
    paragraphs = [
        f"{len(race.methods)} methods were raced on validation data, held out of the training data. The tables show "
        f"{metric} in percent, as a mean over the last rounds and the {race.repeats.many}. The test set was not used.",
    ]
    if not race.finished:
        paragraphs.append("The race is not finished; repeat its command to continue it.")
    if race.final:
        paragraphs.append(f"Only the final used the fresh {race.repeats.many}. Gains are measured there.")
    if has_intervals(race.final):
        paragraphs.append(INTERVAL_NOTE)
    tables = [_final(race.final, race.repeats.many)] if race.final else []
    tables += [_rung(rung, race.repeats.many) for rung in reversed(race.rungs)]
    charts = [_curves(race.rungs, metric, styles)] if race.rungs else []
    figures = [Figure("race", "Best candidate of each method", charts)] if charts else []
    missing = [f"{method} could not run here: {reason}" for method, reason in (race.failures or {}).items()]
    return Section("race", "The race", paragraphs, figures, tables, missing=missing)


def _final(final: Sequence[Finalist], repeats: str) -> Table:
    columns = ["method", "learning rate", f"mean of all {repeats} %", f"number of fresh {repeats}",
               f"mean of fresh {repeats} %", "gain over FedAvg, points", "interval from", "to", "p",
               "compute (FedAvg: 1)", "traffic (FedAvg: 1)", "time per round (FedAvg: 1)",
               "reveals besides updates"]  # fmt: skip
    return Table("race-final", "The final", columns, [_final_row(finalist) for finalist in final])


def _final_row(finalist: Finalist) -> list[Cell]:
    standing, difference = finalist.standing, finalist.difference
    gain: list[float | None] = [None] * 4
    if difference is not None:
        points = (difference.mean, difference.low, difference.high)
        gain = [*map(_points, points), number(difference.p, 4)]
    means = [_points(finalist.overall), len(standing.scores), _points(standing.mean)]
    costs = [finalist.compute, finalist.traffic, finalist.time_ratio]
    return [standing.label, standing.lr, *means, *gain, *costs, finalist.reveals]


def _points(share: float | None) -> float | None:
    return None if share is None else number(100 * share)


def _rung(rung: Rung, repeats: str) -> Table:
    rows: list[list[Cell]] = [
        [s.label, s.lr, len(s.scores), _points(s.mean), "yes" if s.kept else "no"] for s in rung.standings
    ]
    columns = ["method", "learning rate", repeats, "mean %", "continued"]
    return Table(f"race-{rung.rounds}", f"After round {rung.rounds}", columns, rows)


def _curves(rungs: Sequence[Rung], metric: str, styles: dict[str, int]) -> Lines:
    """Draw one line per method, up to the last rung that it reached."""
    points: dict[str, dict[int, float]] = {}
    for rung in rungs:
        for method, best in _best_by_method(rung.standings).items():
            points.setdefault(method, {})[rung.rounds] = best.mean
    # Colours repeat after ten lines, so FedAvg and the methods that went furthest come first.
    ordered = sorted(points, key=lambda method: (method != "fedavg", -len(points[method])))
    lines = [
        Line(method, list(found), list(map(_points, found.values())), style=styles.setdefault(method, len(styles)))
        for method, found in ((method, points[method]) for method in ordered)
    ]
    return Lines("race-curves", "Best candidate of each method", "round", f"validation {metric} %", lines)


def _best_by_method(standings: Sequence[Standing]) -> dict[str, Standing]:
    """The first standing of each method, which is its best, because standings are sorted."""
    best: dict[str, Standing] = {}
    for standing in standings:
        best.setdefault(standing.method, standing)
    return best
