"""The models' features: t-SNE, PCA, distances between classes, and mean output probabilities."""

from __future__ import annotations

from fedskew.errors import UserError
from fedskew.report.charts.chart import Chart, Cloud, Figure, Heat, Points
from fedskew.report.charts.table import number
from fedskew.report.model_outputs import DRAWN_SAMPLES, Floats, ModelOutputs, model_outputs
from fedskew.report.sections.section import Section
from fedskew.results import Comparison, MethodRuns

MAX_CLASSES = 20
"""Only this many classes are drawn, because colours for more could not be distinguished."""
MAX_PANELS = 6


def features(comparison: Comparison) -> Section:
    clouds: dict[str, list[Chart]] = {"tsne": [], "pca": []}
    missing = []
    for method in comparison.methods[:MAX_PANELS]:
        run = method.first
        if run is None or not run.finished:
            missing.append(f"{method.label}: no finished run, so there is no model")
            continue
        try:
            outputs = model_outputs(run)
        except UserError as error:
            missing.append(f"{method.label}: {error}")
            continue
        title = f"{method.label}, seed {run.seed}"
        for kind, places in (("tsne", outputs.tsne), ("pca", outputs.pca)):
            clouds[kind].append(cloud_chart(f"{kind}-{method.style}", title, places, outputs, comparison))
    if not clouds["tsne"]:
        return Section("features", "Features", missing=missing)
    left_out = len(comparison.methods) - MAX_PANELS
    if left_out > 0:
        missing.append(f"{left_out} more methods; only the first {MAX_PANELS} are drawn")
    words = [
        f"Inputs of the last layer for {DRAWN_SAMPLES} test samples, which are the same for all methods. t-SNE "
        "preserves neighbourhoods, not distances. PCA shows the two directions of largest variance."
    ]
    figures = [
        Figure("tsne", "t-SNE of the features", clouds["tsne"], 3),
        Figure("pca", "Principal components of the features", clouds["pca"], 3),
    ]
    return Section("features", "Features", words, figures, missing=missing)


def cloud_chart(key: str, title: str, places: Floats, outputs: ModelOutputs, comparison: Comparison) -> Points:
    labels = outputs.labels[: len(places)]
    clouds = []
    for c, name in enumerate(comparison.classes[:MAX_CLASSES]):
        of_class = places[labels == c]
        x, y = ([round(v, 2) for v in column] for column in of_class.T.tolist())
        clouds.append(Cloud(name, x, y, c))
    return Points(key, title, clouds)


def distance_chart(method: MethodRuns, outputs: ModelOutputs, comparison: Comparison) -> Heat:
    cells = [[number(v, 3) for v in row] for row in outputs.class_distances(len(comparison.classes))]
    key = f"distances-{method.style}"
    return Heat(
        key, method.label, "class", "class", "distance of features", comparison.classes, comparison.classes, cells
    )


def probability_chart(method: MethodRuns, outputs: ModelOutputs, comparison: Comparison) -> Heat:
    cells = [[number(100 * v, 1) for v in row] for row in outputs.mean_probabilities(len(comparison.classes))]
    key, label = f"probabilities-{method.style}", method.label
    return Heat(
        key, label, "true class", "class", "mean probability, %", comparison.classes, comparison.classes, cells, "share"
    )
