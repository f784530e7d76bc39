"""Where the time went."""

from __future__ import annotations

from fedskew.experiment.round.row import RoundRow
from fedskew.report.charts.chart import Bars, BarSeries, Figure
from fedskew.report.charts.table import Table, number
from fedskew.report.contenders import Setting
from fedskew.report.sections.section import Section

PARTS = {"train": "clients' training", "server": "aggregation", "evaluate": "tests", "rest": "checkpoints and the rest"}


def timing(setting: Setting) -> Section:
    runs = setting.runs
    missing = []
    figures = []
    if all(row.time for run in runs for row in run.rows if row.round) and any(len(r.rows) > 1 for r in runs):
        figures.append(Figure("time", "Seconds by part, mean over the seeds", [_parts(setting)]))
    else:
        missing.append("time by part: these runs are from a version that did not record it")
    columns = ["method", "seed", "rounds", "seconds", "seconds a round", "engine", "device", "folder"]
    rows = [
        [c.label, run.seed, len(run.rows) - 1, number(run.total("seconds"), 1),
         number(run.total("seconds") / max(1, len(run.rows) - 1), 3),
         str(run.summary.get("engine") or run.config.engine), run.config.device, str(run.folder)]
        for c in setting.contenders for run in c.runs
    ]  # fmt: skip
    table = Table("runs", "The runs", columns, rows)
    return Section("timing", "Where the time went", figures=figures, tables=[table], missing=missing)


def _parts(setting: Setting) -> Bars:
    labels = [c.label for c in setting.contenders]
    series = []
    for i, (part, name) in enumerate(PARTS.items()):
        values = []
        for c in setting.contenders:
            spent = [_seconds(row, part) for run in c.runs for row in run.rows]
            values.append(number(sum(spent) / len(c.runs), 3))
        series.append(BarSeries(name, values, style=i))
    return Bars("time", "time by part", "method", "seconds", labels, series, stacked=True)


def _seconds(row: RoundRow, part: str) -> float:
    if part == "rest":
        return max(0.0, row.seconds - sum(row.time.values())) if row.time else 0.0
    return row.time.get(part, 0.0)
