"""Draw a comparison of methods: accuracy over the rounds, and accuracy by class."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from fedskew.errors import UserError
from fedskew.report.charts.matplotlib_text import escape_math
from fedskew.report.charts.matplotlib_view import line_style, symbol, text_colour
from fedskew.report.charts.palette import AMOUNT, colour
from fedskew.results import Comparison, MethodRuns

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FORMATS = (".png", ".svg", ".pdf")
MAX_NUMBERS = 20
"""With more classes than this, the heat map shows neither numbers nor class names."""


def save_comparison(comparison: Comparison, path: str | os.PathLike[str]) -> None:
    """Save the curves and the heat map as .png, .svg or .pdf."""
    target = Path(path)
    if target.suffix.lower() not in FORMATS:
        raise UserError(f"cannot save a figure as {str(path)!r}; expected {', '.join(FORMATS)}")
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UserError("figures need matplotlib: install fedskew[report]") from error
    figure = Figure(figsize=(13, max(4.2, 1.6 + 0.45 * len(comparison.methods))), layout="constrained")
    FigureCanvasAgg(figure)
    curves, heat = figure.subplots(1, 2, width_ratios=(1, 1.15))
    draw_curves(comparison, curves)
    draw_class_accuracy(comparison, heat)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(target, dpi=150)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}") from error


def draw_curves(comparison: Comparison, axes: Axes) -> None:
    """Draw the mean accuracy over the rounds, with a band from the lowest to the highest accuracy of the seeds."""
    for method in comparison.methods:
        rounds, accuracies = _curves(method)
        shade = colour(method.index)
        axes.plot(
            rounds,
            100 * accuracies.mean(axis=0),
            label=escape_math(method.label),
            linewidth=1.6,
            color=shade,
            linestyle=line_style(method.index),
            marker=symbol(method.index),
            markersize=4,
            markevery=max(1, len(rounds) // 10),
        )
        if len(accuracies) > 1:
            low, high = 100 * accuracies.min(axis=0), 100 * accuracies.max(axis=0)
            axes.fill_between(rounds, low, high, color=shade, alpha=0.12, linewidth=0)
    axes.set_xlabel("round")
    axes.set_ylabel("test accuracy, %")
    axes.set_ylim(0, 100)
    axes.grid(alpha=0.3)
    axes.set_title(_curves_title(comparison))
    axes.legend(loc="lower right", fontsize="small")


def _curves_title(comparison: Comparison) -> str:
    """State the number of seeds, if a method has several. The number may differ between methods."""
    numbers = [len(method.counted_runs) for method in comparison.methods]
    fewest, most = min(numbers), max(numbers)
    if most == 1:
        return "accuracy over the rounds"
    return f"mean of {most if fewest == most else f'{fewest} to {most}'} seeds, band from lowest to highest"


def draw_class_accuracy(comparison: Comparison, axes: Axes) -> None:
    """Draw a heat map of accuracy by method and class after the last round, as means over the seeds."""
    methods, classes = comparison.methods, comparison.classes
    cells = 100 * np.array([method.class_accuracy for method in methods], np.float64)
    image = axes.imshow(cells, aspect="auto", cmap=AMOUNT, vmin=0, vmax=100, interpolation="none")
    axes.figure.colorbar(image, ax=axes, label="test accuracy, %")
    axes.set_yticks(range(len(methods)), labels=[escape_math(method.label) for method in methods])
    axes.set_title("accuracy by class after the last round")
    axes.set_xlabel("class")
    if len(classes) > MAX_NUMBERS:
        return
    rotation = 45 if max(map(len, classes)) > 3 else 0  # longer names would overlap
    axes.set_xticks(range(len(classes)), labels=[escape_math(name) for name in classes], rotation=rotation)
    for (row, column), value in np.ndenumerate(cells):
        if np.isfinite(value):
            shade = text_colour(image, value)
            axes.text(column, row, f"{value:.0f}", ha="center", va="center", fontsize="small", color=shade)


def _curves(method: MethodRuns) -> tuple[list[int], npt.NDArray[np.float64]]:
    """The rounds that were evaluated with all seeds, and the accuracies as [seeds, rounds]."""
    curves = [dict(run.accuracy_curve) for run in method.counted_runs]
    rounds = sorted(set.intersection(*(set(curve) for curve in curves)))
    return rounds, np.array([[curve[round_] for round_ in rounds] for curve in curves], np.float64)
