"""The global model's predictions: confusion matrices, and predictions per round next to the clients' labels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from fedskew.report.charts.chart import Figure, Heat
from fedskew.report.charts.table import number
from fedskew.report.sections.section import Section
from fedskew.results import Comparison, MethodRuns, Result

Counts = npt.NDArray[np.int64]
MAX_ROUNDS = 100
"""The maximum number of rounds in a panel. Later rounds are not drawn."""
MAX_PANELS = 12
"""The maximum number of methods that are drawn."""
MAX_NUMBERED_CLASSES = 10
"""With more classes, the cells of a confusion matrix show no numbers."""


def confusion(comparison: Comparison) -> Section:
    """Build the section with one confusion matrix per method."""
    if comparison.is_multi_label:
        return Section(
            "confusion", "Confusion", missing=["samples have several labels, so there is no confusion matrix"]
        )
    panels = [confusion_chart(method, comparison) for method in comparison.methods[:MAX_PANELS] if method.counted_runs]
    if not panels:
        return Section("confusion", "Confusion", missing=["no run has been evaluated yet"])
    paragraphs = ["Rows are true classes and columns are predictions, in percent of the row, as means over the seeds."]
    return Section("confusion", "Confusion", paragraphs, [Figure("confusion", "Confusion matrices", panels, 3)])


def confusion_chart(method: MethodRuns, comparison: Comparison) -> Heat:
    matrices = [_shares(run.last.confusion) for run in method.counted_runs if run.last is not None]
    cells = [[number(v, 1) for v in row] for row in np.mean(matrices, axis=0)]
    return Heat(
        f"confusion-{method.index}",
        method.label,
        "true class",
        "predicted class",
        "%",
        comparison.classes,
        comparison.classes,
        cells,
        "share",
        show_numbers=len(comparison.classes) <= MAX_NUMBERED_CLASSES,
    )


def _shares(counts: Counts) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    """Divide each row by its sum, in percent. A row without samples becomes NaN."""
    totals = counts.sum(axis=1, keepdims=True).astype(np.float64)
    shares: np.ndarray[tuple[int, ...], np.dtype[np.float64]] = np.divide(
        100.0 * counts, totals, out=np.full(counts.shape, np.nan), where=totals > 0
    )
    return shares


def predictions(comparison: Comparison) -> Section:
    """Build the section: the labels of each round's clients, and the model's predictions after the round."""
    title = "Predictions over the rounds"
    methods = comparison.methods[:MAX_PANELS]
    runs = [(method, run) for method in methods if (run := method.first) is not None and shown_rounds(run)]
    if not runs:
        return Section("predictions", title, missing=["no round has been evaluated yet"])
    labels = next((found for _, run in runs if (found := sampled_labels(run, comparison))), None)
    panels = [*([labels] if labels else []), *(predicted(method, run, comparison) for method, run in runs)]
    figure = Figure("predictions", _caption(labels), with_common_scale(panels), 3)
    unknown_labels = (
        "labels of the sampled clients: no run has both label counts and a round in which clients trained the global "
        "model"
    )
    missing = [] if labels else [unknown_labels]
    paragraphs = [_explanation(labels, [run for _, run in runs])]
    if any(len(panel.columns) >= MAX_ROUNDS for panel in panels):
        paragraphs.append(f"A panel shows at most {MAX_ROUNDS} rounds, the first ones.")
    return Section("predictions", title, paragraphs, [figure], missing=missing)


def _caption(labels: Heat | None) -> str:
    return "Labels of the sampled clients and predictions, round by round" if labels else "Predictions, round by round"


def _explanation(labels: Heat | None, runs: Sequence[Result]) -> str:
    seeds = {run.seed for run in runs}
    which = f"seed {runs[0].seed}" if len(seeds) == 1 else "one seed of each method"
    if labels is None:
        return f"The panels show what the global model predicts after the evaluated rounds ({which})."
    return (
        "The first panel shows the labels of each round's clients, the others what the global model predicts after "
        f"the round ({which}). If the predictions follow the labels of the round, the model forgets the other "
        "classes."
    )


def with_common_scale(panels: Sequence[Heat]) -> list[Heat]:
    """Give all panels the same colour scale."""
    top = max((v for panel in panels for row in panel.values for v in row if v is not None), default=1.0)
    return [replace(panel, top=top) for panel in panels]


def sampled_labels(run: Result, comparison: Comparison) -> Heat | None:
    counts = run.label_counts
    rows = [row for row in run.history if row.clients and row.is_global][:MAX_ROUNDS]
    if counts is None or not rows:
        return None
    labels = np.array([counts[row.clients].sum(axis=0) for row in rows])
    names = [str(row.model_round) for row in rows]
    return _by_round("sampled-labels", "labels of the sampled clients", comparison, names, labels)


def predicted(method: MethodRuns, run: Result, comparison: Comparison) -> Heat:
    rounds = shown_rounds(run)
    counts = np.array([run.evaluations[round_].predictions for round_ in rounds])
    key = f"predictions-{method.index}"
    return _by_round(key, f"predictions of {method.label}", comparison, list(map(str, rounds)), counts)


def shown_rounds(run: Result) -> list[int]:
    """The evaluated rounds to draw, without the initial model."""
    return [round_ for round_ in sorted(run.evaluations) if round_ > 0][:MAX_ROUNDS]


def _by_round(key: str, title: str, comparison: Comparison, rounds: list[str], counts: Counts) -> Heat:
    shares = [[number(v, 1) for v in row] for row in _shares(counts).T]
    return Heat(key, title, "class", "round", "% of the round", comparison.classes, rounds, shares)
