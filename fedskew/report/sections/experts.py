"""PKD: which classes it grouped, how alike they were, how often its experts spoke."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from fedskew.report.charts.chart import Chart, Figure, Heat, Lines
from fedskew.report.charts.table import Cell, Table, number
from fedskew.report.contenders import Contender, Setting
from fedskew.report.recorded import RecordedRun
from fedskew.report.sections.section import Point, Section, first_tested, lines


def experts(setting: Setting) -> Section | None:
    """None where no method has experts."""
    who = [c for c in setting.contenders if any("groups" in _notes(run) or _has_experts(run) for run in c.runs)]
    if not who:
        return None
    rows: list[list[Cell]] = [
        [c.label, run.seed, i, ", ".join(setting.classes[k] for k in group)]
        for c in who for run in c.runs for i, group in enumerate(_groups(run))
    ]  # fmt: skip
    table = Table("groups", "Groups of weak classes", ["method", "seed", "expert", "classes"], rows)
    figures = []
    similar = [p for c in who if (run := first_tested(c)) and (p := _similarity(c, run, setting))]
    if similar:
        caption = "How often classes were taken for one another after the warm-up, on the test set"
        figures.append(Figure("similarity", caption, similar, 2))
    if found := lines(who, activations):
        chart = Lines("activations", "expert activations", "round", "% of sample visits", found)
        figures.append(Figure("activations", "How often a sample was taught by an expert", [chart]))
    words = [
        "After the warm-up PKD groups classes to which the global model gives one another's probability on the "
        "clients' training samples, trains an expert for each group and lets it teach samples whose label and wrong "
        "prediction fall into its group. The map is of predictions on the test set, where others may be confused."
    ]
    return Section("experts", "PKD's experts", words, figures, [table])


def _notes(run: RecordedRun) -> dict[str, list[list[int]]]:
    return dict(run.rows[-1].get("notes") or {}) if run.rows else {}


def _has_experts(run: RecordedRun) -> bool:
    return any(str(row.get("model", "")).startswith("expert") for row in run.rows)


def _groups(run: RecordedRun) -> list[list[int]]:
    return _notes(run).get("groups") or list(run.config.method_params.get("groups") or [])


def _similarity(contender: Contender, run: RecordedRun, setting: Setting) -> Chart | None:
    warm = [row for row in run.evaluated if row.get("stage") == "warm-up"]
    if not warm:
        return None
    counts = np.array(warm[-1]["evaluation"]["confusion"], np.float64)
    shares = counts / np.maximum(1, counts.sum(axis=1, keepdims=True))
    mutual = 50 * (shares + shares.T)
    cells = [[None if i == j else number(mutual[i, j]) for j in range(len(mutual))] for i in range(len(mutual))]
    key, title = f"similarity-{contender.style}", f"{contender.label}, seed {run.seed}"
    return Heat(key, title, "class", "class", "mutual confusion, %", setting.classes, setting.classes, cells)


def activations(run: RecordedRun) -> Iterator[Point]:
    for row in run.rows:
        distilled = (row.get("tally") or {}).get("distilled")
        if distilled is not None and row.get("visits"):
            yield row["model_round"], number(100 * distilled / row["visits"])
