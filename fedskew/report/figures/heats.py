"""Heat maps: label counts, predictions, and the insides of models."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from fedskew.errors import UserError
from fedskew.report.charts.chart import Chart, Figure, Heat
from fedskew.report.charts.table import number
from fedskew.report.figures.bars import last_local_row, titled, with_local_models
from fedskew.report.model_outputs import ModelOutputs, model_outputs
from fedskew.report.sections.features import cloud_chart, distance_chart, probability_chart
from fedskew.report.sections.federation import partition_map
from fedskew.report.sections.predictions import confusion_chart, on_one_scale, predicted, sampled_labels
from fedskew.results import Comparison, MethodRuns


def maps(settings: Sequence[Comparison]) -> Figure:
    """Samples by client and class, a panel for each setting."""
    panels = []
    for i, setting in enumerate(settings):
        if setting.label_counts is None:
            raise UserError(f"{setting.runs[0].folder}: its label counts are unknown and the data were not found")
        panels.append(partition_map(f"map-{i}", setting.label, setting.label_counts, setting.classes,
                                    setting.client_labels))  # fmt: skip
    return Figure("maps", "Samples by client and class", panels, min(2, len(panels)), wide=True)


def labels_and_predictions(settings: Sequence[Comparison]) -> Figure:
    """Labels of each round's clients, and what each method predicts after the round."""
    panels: list[Heat] = []
    for setting in settings:
        runs = [(c, run) for c in setting.methods if (run := c.first)]
        held = sampled_labels(runs[0][1], setting) if runs else None
        found = [*([held] if held else []), *(predicted(c, run, setting) for c, run in runs)]
        panels += [replace(panel, title=titled(panel.title, setting, settings)) for panel in found]
    return Figure("predictions", "Labels of the sampled clients and predictions", on_one_scale(panels), 3)


def local_confusion(settings: Sequence[Comparison]) -> Figure:
    """For each method, the confusion matrix of the first client's model in the last round."""
    panels = []
    for setting in settings:
        for c in with_local_models(setting):
            _, row = last_local_row(c)
            one = (row.local or [])[0]
            if "confusion" not in one:
                raise UserError(f"{c.label}: matrices of local models are recorded in the last round of a run only")
            counts = np.array(one["confusion"], np.float64)
            shares = 100 * counts / np.maximum(1, counts.sum(axis=1, keepdims=True))
            cells = [[number(v, 1) for v in r] for r in shares]
            client = (setting.client_labels or tuple(map(str, range(one["client"] + 1))))[one["client"]]
            title = titled(f"{c.label}, client {client}", setting, settings)
            panels.append(Heat(f"local-confusion-{c.style}", title, "true class", "predicted class", "%",
                               setting.classes, setting.classes, cells, "share"))  # fmt: skip
    return Figure("local-confusion", "Confusion of a local model on the test set", panels, min(2, len(panels)))


def embeddings(settings: Sequence[Comparison]) -> Figure:
    """t-SNE of the features of each method's model."""
    panels = [
        cloud_chart(f"tsne-{c.style}", titled(c.label, setting, settings), outputs.tsne, outputs, setting)
        for setting, c, outputs in _outputs(settings)
    ]
    return Figure("tsne", "t-SNE of the features", panels, min(2, len(panels)))


def insides(settings: Sequence[Comparison]) -> Figure:
    """Distances of the classes' features, mean probabilities, and where predictions flow."""
    panels: list[Chart] = []
    for setting, c, outputs in _outputs(settings):
        flow = replace(confusion_chart(c, setting), written=False, value_label="predictions, %")
        for panel in (distance_chart(c, outputs, setting), probability_chart(c, outputs, setting), flow):
            panels.append(replace(panel, title=titled(panel.title, setting, settings)))
    return Figure("insides", "Feature distances, mean probabilities and predictions by class", panels, 3)


def _outputs(settings: Sequence[Comparison]) -> Iterator[tuple[Comparison, MethodRuns, ModelOutputs]]:
    """The outputs of each method's first run; a UserError if it has no model."""
    for setting in settings:
        for contender in setting.methods:
            run = contender.first
            if run is None:
                raise UserError(f"{contender.label}: no finished run, so there is no model")
            yield setting, contender, model_outputs(run)
