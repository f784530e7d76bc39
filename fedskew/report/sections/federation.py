"""How many samples of each class each client has."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fedskew.errors import plural
from fedskew.report.charts.chart import Bars, BarSeries, Figure, Heat
from fedskew.report.charts.table import Table, number
from fedskew.report.sections.section import Section
from fedskew.results import Comparison

Counts = npt.NDArray[np.int64]
BUBBLES_UP_TO = 30
"""The map shows bubbles up to this number of clients and of classes, otherwise a heat map."""
MAX_CLIENTS = 1000
"""The maximum number of clients that are drawn and listed. A browser cannot show a million."""


def federation(comparison: Comparison) -> Section:
    """Build the section: the map of samples, and the vacant, minority and majority classes of each client."""
    counts = comparison.label_counts
    sites = next((run.sites for run in comparison.runs if run.sites), ())
    if counts is None and sites:
        listed = f"{plural(len(sites), 'site')}: {', '.join(sites)}."
        note = f"{listed} For a federation across machines, no map of the samples by client and class is shown."
        return Section("federation", "The federation", [note])
    if counts is None:
        return Section("federation", "The federation", missing=[
            "the clients' label counts: about.json is missing or damaged, and the data were not found; "
            "set FEDSKEW_DATA, or repeat the runs"])  # fmt: skip
    run = next(run for run in comparison.runs if run.label_counts is not None)
    groups = class_groups(counts)
    unit = "label" if comparison.is_multi_label else "sample"
    paragraphs = [
        f"{plural(len(counts), 'client')}, {counts.shape[1]} classes, {plural(int(counts.sum()), unit)}; split of "
        f"seed {run.config.partition_seed}. A class is vacant on a client that has no samples of it. Otherwise it is a "
        f"majority class if it has more than an even share of the client's {unit}s, and a minority class if not.",
        f"On average a client lacks {groups['vacant'].mean():.1f} of {counts.shape[1]} classes and has "
        f"{groups['minority'].mean():.1f} minority and {groups['majority'].mean():.1f} majority classes.",
    ]
    if comparison.is_multi_label:
        paragraphs.append("A sample may have several labels, or none.")
    if len(counts) > MAX_CLIENTS:
        paragraphs.append(f"The figures and the table show the first {MAX_CLIENTS} clients.")
    clients = comparison.client_labels[:MAX_CLIENTS]
    series = [
        BarSeries(name, [int(v) for v in groups[name][:MAX_CLIENTS]], style=i)
        for i, name in enumerate(("majority", "minority", "vacant"))
    ]
    kinds = Bars("class-kinds", "classes by kind", "client", "classes", clients, series, stacked=True)
    figures = [
        Figure(
            "map",
            "Samples by client and class",
            [partition_map("map", "samples", counts, comparison.classes, clients)],
            wide=True,
        ),
        Figure("class-kinds", "Majority, minority and vacant classes per client", [kinds]),
    ]
    table = Table(
        "clients",
        "The clients",
        ["client", f"{unit}s", "vacant", "minority", "majority", "largest class %"],
        [
            [clients[k], int(row.sum()), *(int(groups[g][k]) for g in ("vacant", "minority", "majority")),
             number(100 * row.max() / max(1, row.sum()), 1)]
            for k, row in enumerate(counts[:MAX_CLIENTS])
        ],
    )  # fmt: skip
    return Section("federation", "The federation", paragraphs, figures, [table])


def class_groups(counts: Counts) -> dict[str, Counts]:
    """The number of vacant, minority and majority classes per client."""
    totals = counts.sum(axis=1, keepdims=True)
    vacant, majority = counts == 0, counts * counts.shape[1] > totals
    kinds = {"vacant": vacant, "minority": ~vacant & ~majority, "majority": majority}
    return {name: np.asarray(mask.sum(axis=1), np.int64) for name, mask in kinds.items()}


def partition_map(
    key: str, title: str, counts: Counts, classes: tuple[str, ...], clients: tuple[str, ...] = ()
) -> Heat:
    """Draw classes down and clients across, as in the papers. The cell of a vacant class is empty."""
    counts = counts[:MAX_CLIENTS]
    cells = [[int(v) or None for v in row] for row in counts.T]
    names = list(clients[:MAX_CLIENTS]) or [str(k) for k in range(len(counts))]
    bubbles = max(counts.shape) <= BUBBLES_UP_TO
    return Heat(key, title, "class", "client", "samples", list(classes), names, cells, bubbles=bubbles)
