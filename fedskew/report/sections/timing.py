"""How long the parts of a round take, summed over a run."""

from __future__ import annotations

from fedskew.experiment.round.record import RoundRow
from fedskew.report.charts.chart import Bars, BarSeries, Figure
from fedskew.report.charts.table import Table, number
from fedskew.report.sections.section import Section
from fedskew.results import Comparison

PARTS = {
    "train": "clients' training",
    "server": "aggregation",
    "evaluate": "evaluation",
    "rest": "checkpoints and the rest",
}


def timing(comparison: Comparison) -> Section:
    """Build the section: seconds of a run by part of a round, and a table of all runs."""
    runs = comparison.runs
    missing = []
    figures = []
    if not any(run.rounds for run in runs):
        missing.append("time by part: no round is finished yet")
    elif all(row.time for run in runs for row in run.history if row.round):
        figures.append(Figure("time", "Seconds by part, mean over the seeds", [_parts(comparison)]))
    else:
        missing.append("time by part: an earlier version of fedskew made some of these runs and did not record it")
    columns = ["method", "seed", "rounds", "seconds", "seconds per round", "engine", "device", "folder"]
    rows = [
        [method.label, run.seed, run.rounds, number(run.seconds, 1), number(run.seconds / max(1, run.rounds), 3),
         run.engine, run.config.device, str(run.folder)]
        for method in comparison.methods for run in method.runs
    ]  # fmt: skip
    table = Table("runs", "The runs", columns, rows)
    return Section("timing", "Where the time went", figures=figures, tables=[table], missing=missing)


def _parts(comparison: Comparison) -> Bars:
    labels = [method.label for method in comparison.methods]
    series = []
    for i, (part, name) in enumerate(PARTS.items()):
        values = []
        for method in comparison.methods:
            spent = [_seconds(row, part) for run in method.runs for row in run.history]
            values.append(number(sum(spent) / len(method.runs), 3))
        series.append(BarSeries(name, values, style=i))
    return Bars("time", "time by part", "method", "seconds", labels, series, stacked=True)


def _seconds(row: RoundRow, part: str) -> float:
    if part == "rest":
        return max(0.0, row.seconds - sum(row.time.values())) if row.time else 0.0
    return row.time.get(part, 0.0)
