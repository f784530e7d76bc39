"""The section with t-SNE and PCA of the models' features.

The module also makes charts of class distances and of mean probabilities, for `report.figures.heat_maps`.
"""

from __future__ import annotations

from fedskew.errors import UserError
from fedskew.report.charts.chart import Chart, Cloud, Figure, Heat, Points
from fedskew.report.charts.table import number
from fedskew.report.model_outputs import PLOTTED_SAMPLES, Floats, ModelOutputs, model_outputs
from fedskew.report.sections.section import Section
from fedskew.results import Comparison, MethodRuns

MAX_CLASSES = 20
"""The maximum number of classes that are drawn. More colours would be hard to distinguish."""
MAX_PANELS = 6
"""The maximum number of methods that are drawn."""


def features(comparison: Comparison) -> Section:
    """Build the section: t-SNE and PCA of each method's features. It needs the models and the data."""
    clouds: dict[str, list[Chart]] = {"tsne": [], "pca": []}
    missing = []
    for method in comparison.methods[:MAX_PANELS]:
        run = method.first
        if run is None or not run.finished:
            missing.append(f"{method.label}: no finished run, so there is no model")
            continue
        try:
            outputs = model_outputs(run)
            drawn = {"tsne": outputs.tsne, "pca": outputs.pca}
        except UserError as error:
            missing.append(f"{method.label}: {error}")
            continue
        title = f"{method.label}, seed {run.seed}"
        for kind, points in drawn.items():
            clouds[kind].append(cloud_chart(f"{kind}-{method.index}", title, points, outputs, comparison))
    if not clouds["tsne"]:
        return Section("features", "Features", missing=missing)
    missing += [
        f"only the first {most} of {len(items)} {kind} are drawn"
        for kind, items, most in (
            ("methods", comparison.methods, MAX_PANELS),
            ("classes", comparison.classes, MAX_CLASSES),
        )
        if len(items) > most
    ]
    paragraphs = [
        "The features are the inputs of the model's head, or the model's outputs if it has no separate head. The "
        f"charts show up to {PLOTTED_SAMPLES} test samples, the same for all methods. t-SNE preserves neighbourhoods, "
        "not distances. PCA shows the two directions of largest variance."
    ]
    figures = [
        Figure("tsne", "t-SNE of the features", clouds["tsne"], 3),
        Figure("pca", "Principal components of the features", clouds["pca"], 3),
    ]
    return Section("features", "Features", paragraphs, figures, missing=missing)


def cloud_chart(key: str, title: str, points: Floats, outputs: ModelOutputs, comparison: Comparison) -> Points:
    """Chart `points`, the positions of the first samples in `outputs`, with one colour per class."""
    labels = outputs.labels[: len(points)]
    clouds = []
    for c, name in enumerate(comparison.classes[:MAX_CLASSES]):
        class_points = points[labels == c]
        x, y = ([round(v, 2) for v in column] for column in class_points.T.tolist())
        clouds.append(Cloud(name, x, y, c))
    return Points(key, title, clouds)


def distance_chart(method: MethodRuns, outputs: ModelOutputs, comparison: Comparison) -> Heat:
    """Chart the distance between the mean features of each pair of classes."""
    classes = comparison.classes
    cells = [[number(v, 3) for v in row] for row in outputs.class_distances(len(classes))]
    key, value = f"distances-{method.index}", "distance between mean features"
    return Heat(key, method.label, "class", "class", value, classes, classes, cells)


def probability_chart(method: MethodRuns, outputs: ModelOutputs, comparison: Comparison) -> Heat:
    """Chart the mean predicted probability of every class, by true class."""
    cells = [[number(100 * v, 1) for v in row] for row in outputs.mean_probabilities(len(comparison.classes))]
    key, label = f"probabilities-{method.index}", method.label
    return Heat(
        key, label, "true class", "class", "mean probability, %", comparison.classes, comparison.classes, cells, "share"
    )
