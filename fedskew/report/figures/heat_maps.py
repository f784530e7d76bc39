"""Heat maps of label counts and predictions, and charts of the models' features."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from fedskew.errors import UserError
from fedskew.report.charts.chart import Chart, Figure, Heat
from fedskew.report.charts.table import number
from fedskew.report.figures.bars import add_setting, client_label, last_local_row, with_local_models
from fedskew.report.figures.curves import require_single_label
from fedskew.report.model_outputs import ModelOutputs, model_outputs
from fedskew.report.sections.features import cloud_chart, distance_chart, probability_chart
from fedskew.report.sections.federation import partition_map
from fedskew.report.sections.predictions import (
    confusion_chart,
    predicted,
    sampled_labels,
    shown_rounds,
    with_common_scale,
)
from fedskew.results import Comparison, MethodRuns


def maps(comparisons: Sequence[Comparison]) -> Figure:
    """Draw the samples by client and class, a panel per setting."""
    panels = []
    for i, comparison in enumerate(comparisons):
        if any(run.sites for run in comparison.runs):
            raise UserError(f"{comparison.runs[0].folder} is a federation across machines; no map of it is drawn")
        if comparison.label_counts is None:
            raise UserError(f"{comparison.runs[0].folder} has no label counts, and the data were not found")
        panels.append(partition_map(f"map-{i}", comparison.label, comparison.label_counts, comparison.classes,
                                    comparison.client_labels))  # fmt: skip
    return Figure("maps", "Samples by client and class", panels, min(2, len(panels)), wide=True)


def labels_and_predictions(comparisons: Sequence[Comparison]) -> Figure:
    """Draw each method's predictions after the rounds, from its first run, beside the labels of the rounds' clients.

    The labels are those of the first method's first run. If it has none, they are left out.
    """
    panels: list[Heat] = []
    has_labels = False
    for comparison in comparisons:
        runs = [(m, run) for m in comparison.methods if (run := m.first) is not None and shown_rounds(run)]
        labels = sampled_labels(runs[0][1], comparison) if runs else None
        has_labels |= labels is not None
        found = [*([labels] if labels else []), *(predicted(method, run, comparison) for method, run in runs)]
        panels += [replace(panel, title=add_setting(panel.title, comparison, comparisons)) for panel in found]
    if not panels:
        raise UserError("no round has been evaluated yet; expected runs with an evaluated round")
    caption = "Labels of the sampled clients and predictions" if has_labels else "Predictions"
    return Figure("predictions", caption, with_common_scale(panels), 3)


def local_confusion(comparisons: Sequence[Comparison]) -> Figure:
    """Draw the confusion matrix of one local model per method: that of the last round's first client."""
    panels = []
    for comparison in comparisons:
        for method in with_local_models(comparison):
            run, row = last_local_row(method)
            require_single_label(run)
            first_client = (row.local or [])[0]
            if "confusion" not in first_client:
                raise UserError(
                    f"{method.label}: no confusion matrices of local models in {run.name}; expected a run that has "
                    "reached its last round"
                )
            counts = np.array(first_client["confusion"], np.float64)
            shares = 100 * counts / np.maximum(1, counts.sum(axis=1, keepdims=True))
            cells = [[number(v, 1) for v in r] for r in shares]
            client = client_label(comparison, first_client["client"])
            title = add_setting(f"{method.label}, client {client}", comparison, comparisons)
            panels.append(Heat(f"local-confusion-{method.index}", title, "true class", "predicted class", "%",
                               comparison.classes, comparison.classes, cells, "share"))  # fmt: skip
    return Figure("local-confusion", "Confusion of a local model on the test set", panels, min(2, len(panels)))


def embeddings(comparisons: Sequence[Comparison]) -> Figure:
    """Draw a t-SNE of the features of each method's model, from its first run."""
    panels = [
        cloud_chart(
            f"tsne-{method.index}",
            add_setting(method.label, comparison, comparisons),
            outputs.tsne,
            outputs,
            comparison,
        )
        for comparison, method, outputs in _outputs(comparisons)
    ]
    return Figure("tsne", "t-SNE of the features", panels, min(2, len(panels)))


def model_internals(comparisons: Sequence[Comparison]) -> Figure:
    """Draw three panels per method: distances between the classes' mean features, mean probabilities, and confusion.

    The first two need a model, so they show the method's first run. The confusion matrix is the mean over the seeds.
    """
    panels: list[Chart] = []
    for comparison, method, outputs in _outputs(comparisons):
        confusion = replace(confusion_chart(method, comparison), show_numbers=False, value_label="predictions, %")
        for panel in (
            distance_chart(method, outputs, comparison),
            probability_chart(method, outputs, comparison),
            confusion,
        ):
            panels.append(replace(panel, title=add_setting(panel.title, comparison, comparisons)))
    caption = "Feature distances and mean probabilities (first seed), and predictions by class (mean over the seeds)"
    return Figure("model_internals", caption, panels, 3)


def _outputs(comparisons: Sequence[Comparison]) -> Iterator[tuple[Comparison, MethodRuns, ModelOutputs]]:
    """Yield each method with its comparison and the outputs of its first run.

    Raise a UserError if no run of a method was evaluated.
    """
    for comparison in comparisons:
        for method in comparison.methods:
            run = method.first
            if run is None:
                raise UserError(f"{method.label}: no round was evaluated in {method.runs[0].folder}")
            yield comparison, method, model_outputs(run)
