"""Draw charts for papers. They fit a column or a page, text stays text, and series differ in more than colour."""

from __future__ import annotations

from collections.abc import Collection
from functools import singledispatch
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedskew.errors import UserError, unknown
from fedskew.report.charts.chart import Bars, Chart, Figure, Heat, Lines, Points
from fedskew.report.charts.matplotlib_text import add_legends, escape_math, label_axis, legend_height, wrap_title
from fedskew.report.charts.palette import AMOUNT, DASHES, DIFFERENCE, MARKERS, colour, dash, hatch, marker

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLUMN, PAGE = 3.5, 7.2
"""Widths in inches of one column and of the page in a two-column paper."""
FORMATS = ("png", "svg", "pdf")
MAX_MARKERS = 25
"""Curves with more points have no markers."""
MAX_NUMBERED_CELLS = 400
"""In a heat map with more cells, numbers would be too small to read."""
STYLE: Any = {
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.labelsize": 8,
    "legend.fontsize": 7,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "fedskew",
    "pdf.fonttype": 42,
    "lines.linewidth": 1.3,
}
_LINE_STYLES: dict[str, Any] = dict(zip(DASHES, ("-", "--", ":", "-.", (0, (7, 2))), strict=True))
_SYMBOLS = dict(zip(MARKERS, "osD^xP*vph", strict=True))


def line_style(style: int) -> Any:
    """Matplotlib's name of a series' dash."""
    return _LINE_STYLES[dash(style)]


def symbol(style: int) -> str:
    """Matplotlib's name of a series' marker."""
    return _SYMBOLS[marker(style)]


def save_figure(figure: Figure, target: Path) -> None:
    """Save a figure as .png, .svg or .pdf."""
    if target.suffix.lower().lstrip(".") not in FORMATS:
        raise UserError(f"cannot save a figure as {str(target)!r}; expected .png, .svg or .pdf")
    try:
        import matplotlib
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure as Picture
    except ImportError as error:
        raise UserError("pictures need matplotlib: install fedskew[report]") from error
    columns = min(figure.columns, len(figure.charts))
    with matplotlib.rc_context(STYLE):
        width = PAGE if columns > 1 or figure.wide else COLUMN
        panel_heights = [_height(chart) + legend_height(chart, width / columns) for chart in figure.charts]
        heights = [max(panel_heights[first : first + columns]) for first in range(0, len(panel_heights), columns)]
        picture = Picture(figsize=(width, sum(heights)), layout="constrained")
        FigureCanvasAgg(picture)
        ratios = {"height_ratios": heights}
        panels = picture.subplots(len(heights), columns, squeeze=False, gridspec_kw=ratios).ravel()
        for chart, axes in zip(figure.charts, panels, strict=False):
            draw(chart, axes)
            axes.set_title(wrap_title(chart.title, axes))
        for axes in panels[len(figure.charts) :]:
            axes.remove()
        add_legends(picture, figure, list(panels[: len(figure.charts)]))
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            metadata = {} if target.suffix.lower() == ".png" else _no_date(target.suffix.lower())
            picture.savefig(target, dpi=300, metadata=metadata)
        except OSError as error:
            raise UserError(f"cannot write {target}: {error.strerror or error}") from error


def parse_formats(text: str, others: Collection[str] = ()) -> list[str]:
    """Parse a list of file formats such as `svg,pdf`.

    `others` are formats that the caller handles itself if `text` names only one of them. Here, they are an error. The
    message about an unknown format may suggest them.
    """
    kinds = [kind.strip().lower().lstrip(".") for kind in text.split(",") if kind.strip()]
    if not kinds:
        raise UserError(f"format is {text!r}; expected {', '.join(FORMATS)}, or several of them")
    for kind in kinds:
        if kind in others:
            raise UserError(f"format is {text!r}; expected {kind} alone and in lower case, or {', '.join(FORMATS)}")
        if kind not in FORMATS:
            raise unknown("format", kind, [*FORMATS, *others])
    return kinds


def _no_date(suffix: str) -> dict[str, Any]:
    """Metadata without a date, so that files are reproducible."""
    return {"Date": None} if suffix == ".svg" else {"CreationDate": None}


def _height(chart: Chart) -> float:
    """Height of a panel in inches. It grows with a heat map's rows, or with the bars' names, which may be slanted."""
    if isinstance(chart, Heat):
        return max(1.9, min(5.0, 1.2 + 0.16 * len(chart.rows)))
    longest = max(map(len, chart.categories), default=0) if isinstance(chart, Bars) else 0
    return 2.4 + min(1.5, 0.03 * max(0, longest - 10))


@singledispatch
def draw(chart: Chart, axes: Axes) -> None:  # noqa: ARG001
    """Draw a chart into one panel."""
    raise TypeError(type(chart).__name__)


@draw.register
def _(chart: Lines, axes: Any) -> None:
    for line in chart.lines:
        has_markers = len(line.x) <= MAX_MARKERS and not chart.thin
        axes.plot(
            line.x,
            _numbers(line.y),
            label=escape_math(line.name),
            color=colour(line.style),
            linestyle=line_style(line.style),
            marker=symbol(line.style) if has_markers else None,
            markersize=3,
            linewidth=0.6 if chart.thin else None,
        )
        if line.low is not None and line.high is not None:
            axes.fill_between(
                line.x, _numbers(line.low), _numbers(line.high), color=colour(line.style), alpha=0.15, linewidth=0
            )
    _label_axes(axes, chart.x_label, chart.y_label)
    if all(float(x).is_integer() for line in chart.lines for x in line.x):
        axes.xaxis.get_major_locator().set_params(integer=True)  # no half rounds
    axes.grid(alpha=0.3, linewidth=0.5)
    if chart.y_range:
        axes.set_ylim(*chart.y_range)


@draw.register
def _(chart: Bars, axes: Any) -> None:
    positions = np.arange(len(chart.categories))
    bar_width = 0.8 if chart.stacked else 0.8 / max(1, len(chart.series))  # a fifth is left between categories
    bottom = np.zeros(len(positions))
    for i, one in enumerate(chart.series):
        values = np.nan_to_num(_numbers(one.values))
        shift = 0.0 if chart.stacked else (i - (len(chart.series) - 1) / 2) * bar_width
        axes.bar(
            positions + shift,
            values,
            bar_width,
            bottom=bottom if chart.stacked else None,
            yerr=None if one.errors is None else np.nan_to_num(_numbers(one.errors)),
            error_kw={"linewidth": 0.6},
            label=escape_math(one.name),
            color=colour(one.style),
            hatch=2 * hatch(one.style),  # a repeated symbol makes the pattern denser
            edgecolor="white",
            linewidth=0.3,
        )
        bottom = bottom + values
    label_axis(axes, "x", chart.categories)
    _label_axes(axes, chart.category_label, chart.value_label)
    if chart.value_range:
        axes.set_ylim(*chart.value_range)


@draw.register
def _(chart: Heat, axes: Any) -> None:
    cells = np.ma.masked_invalid([_numbers(row) for row in chart.values])
    if chart.bubbles:
        row, column = np.nonzero(np.ma.filled(cells, 0))
        values = np.asarray(cells[row, column], np.float64)
        # In square points. The largest bubble must not cover its neighbours.
        area = min(130.0, 40_000 / max(cells.shape) ** 2) * values / values.max(initial=1) + 1
        marks = axes.scatter(column, row, s=area, c=values, cmap=f"{AMOUNT}_r", vmin=0)
        axes.set_xlim(-0.7, cells.shape[1] - 0.3)
        axes.set_ylim(cells.shape[0] - 0.3, -0.7)
    else:
        marks = axes.imshow(cells, aspect="auto", interpolation="none", **_colours(chart, cells))
    axes.figure.colorbar(marks, ax=axes, label=escape_math(chart.value_label))
    label_axis(axes, "y", chart.rows)
    label_axis(axes, "x", chart.columns)
    _label_axes(axes, chart.column_label, chart.row_label)
    if chart.show_numbers and cells.size <= MAX_NUMBERED_CELLS:
        for (r, c), value in np.ndenumerate(np.ma.filled(cells, np.nan)):
            if np.isfinite(value):
                axes.text(c, r, f"{value:.0f}", ha="center", va="center", fontsize=5, color=text_colour(marks, value))


def _colours(chart: Heat, cells: Any) -> dict[str, Any]:
    if chart.scale == "difference":
        largest = float(np.abs(cells).max()) or 1.0
        return {"cmap": DIFFERENCE, "vmin": -largest, "vmax": largest}
    if chart.scale == "share":
        return {"cmap": AMOUNT, "vmin": 0, "vmax": 100}
    return {"cmap": f"{AMOUNT}_r", "vmin": 0, "vmax": chart.top}


def text_colour(marks: Any, value: float) -> str:
    """Black on light cells, white on dark ones."""
    red, green, blue, _ = marks.cmap(marks.norm(value))
    return "black" if 0.3 * red + 0.6 * green + 0.1 * blue > 0.5 else "white"


@draw.register
def _(chart: Points, axes: Any) -> None:
    for cloud in chart.clouds:
        mark = symbol(cloud.style)
        axes.scatter(
            cloud.x, cloud.y, s=4, color=colour(cloud.style), marker=mark, linewidths=0.4, label=escape_math(cloud.name)
        )
    axes.set_xticks([])
    axes.set_yticks([])


def _label_axes(axes: Any, x: str, y: str) -> None:
    axes.set_xlabel(escape_math(x))
    axes.set_ylabel(escape_math(y))


def _numbers(values: Any) -> Any:
    return np.array([np.nan if v is None else v for v in values], np.float64)
