"""Charts for papers: column width, fonts that stay text, no colour without a second sign."""

from __future__ import annotations

from functools import singledispatch
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

import numpy as np

from fedskew.errors import UserError, unknown
from fedskew.report.charts.chart import Bars, Chart, Figure, Heat, Lines, Points
from fedskew.report.charts.palette import AMOUNT, DIFFERENCE, colour

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLUMN, PAGE = 3.5, 7.2
"""Inches: one column and the full width of a two-column paper."""
FORMATS = ("png", "svg", "pdf")
MOST_LABELS = 30
MOST_NUMBERS = 10
"""Numbers on an axis, such as rounds."""
MOST_INSIDE = 5
"""Curves whose legend leaves room for them."""
LETTERS = 13
"""That find room in an inch."""
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
_DASHES = ("-", "--", ":", "-.", (0, (7, 2)))
_MARKERS = "osD^xP*vph"


def save_figure(figure: Figure, target: Path) -> None:
    """Save as .png, .svg or .pdf."""
    if target.suffix.lower().lstrip(".") not in FORMATS:
        raise UserError(f"cannot save a figure as {str(target)!r}; expected .png, .svg or .pdf")
    try:
        import matplotlib
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure as Picture
    except ImportError as error:
        raise UserError("pictures need matplotlib: install fedskew[report]") from error
    columns = min(figure.columns, len(figure.charts))
    rows = -(-len(figure.charts) // columns)
    with matplotlib.rc_context(STYLE):
        width = PAGE if columns > 1 or figure.wide else COLUMN
        height = rows * max(1.9, max(_height(chart) for chart in figure.charts))
        picture = Picture(figsize=(width, height), layout="constrained")
        FigureCanvasAgg(picture)
        panels = picture.subplots(rows, columns, squeeze=False).ravel()
        for chart, axes in zip(figure.charts, panels, strict=False):
            draw(chart, axes)
            axes.set_title(fill(_plain(chart.title), int(LETTERS * width / columns)))
        for axes in panels[len(figure.charts) :]:
            axes.remove()
        _add_legends(picture, figure, list(panels[: len(figure.charts)]))
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            stamp = {} if target.suffix.lower() == ".png" else _no_date(target.suffix.lower())
            picture.savefig(target, dpi=300, metadata=stamp)
        except OSError as error:
            raise UserError(f"cannot write {target}: {error.strerror or error}") from error


def _add_legends(picture: Any, figure: Figure, panels: list[Any]) -> None:
    """One below all panels that show the same series; curves that stand alone have room for their own."""
    wanted = [p for p, chart in zip(panels, figure.charts, strict=True) if not getattr(chart, "thin", False)]
    named = [p for p in wanted if 1 < len(p.get_legend_handles_labels()[1]) <= MOST_LABELS]
    if not named:
        return
    labels = {tuple(p.get_legend_handles_labels()[1]) for p in named}
    alone = len(panels) == 1 and isinstance(figure.charts[0], Lines)
    if len(labels) > 1 or alone:
        for axes in named:
            below = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.25), "ncols": 2}
            axes.legend(frameon=False, **(below if len(axes.lines) > MOST_INSIDE else {}))
        return
    handles, names = named[0].get_legend_handles_labels()
    columns = 5 if len(panels) > 1 or figure.wide else 3
    picture.legend(handles, names, loc="outside lower center", ncols=min(columns, len(names)), frameon=False)


def checked_formats(text: str) -> list[str]:
    """The kinds of files in `svg,pdf`."""
    kinds = [kind.strip().lower().lstrip(".") for kind in text.split(",") if kind.strip()]
    for kind in kinds:
        if kind not in FORMATS:
            raise unknown("format", kind, FORMATS)
    return kinds


def _no_date(suffix: str) -> dict[str, Any]:
    """The same figure twice is the same file."""
    return {"Date": None} if suffix == ".svg" else {"CreationDate": None}


def _height(chart: Chart) -> float:
    if isinstance(chart, Heat):
        return min(5.0, 1.2 + 0.16 * len(chart.rows))
    longest = max(map(len, chart.categories), default=0) if isinstance(chart, Bars) else 0
    return 2.4 + min(1.5, 0.03 * max(0, longest - 10))


@singledispatch
def draw(chart: Chart, axes: Axes) -> None:  # noqa: ARG001
    """Draw into one panel."""
    raise TypeError(type(chart).__name__)


@draw.register
def _(chart: Lines, axes: Any) -> None:
    for line in chart.lines:
        few = len(line.x) <= 25 and not chart.thin
        axes.plot(
            line.x,
            _numbers(line.y),
            label=_plain(line.name),
            color=colour(line.style),
            linestyle=_DASHES[line.style % len(_DASHES)],
            marker=_MARKERS[line.style % len(_MARKERS)] if few else None,
            markersize=3,
            linewidth=0.6 if chart.thin else None,
        )
        if line.low is not None and line.high is not None:
            axes.fill_between(
                line.x, _numbers(line.low), _numbers(line.high), color=colour(line.style), alpha=0.15, linewidth=0
            )
    _axes(axes, chart.x_label, chart.y_label)
    if all(float(x).is_integer() for line in chart.lines for x in line.x):
        axes.xaxis.get_major_locator().set_params(integer=True)  # half a round means nothing
    axes.grid(alpha=0.3, linewidth=0.5)
    if chart.y_range:
        axes.set_ylim(*chart.y_range)


@draw.register
def _(chart: Bars, axes: Any) -> None:
    places = np.arange(len(chart.categories))
    wide = 0.8 if chart.stacked else 0.8 / max(1, len(chart.series))
    bottom = np.zeros(len(places))
    for i, one in enumerate(chart.series):
        values = np.nan_to_num(_numbers(one.values))
        shift = 0.0 if chart.stacked else (i - (len(chart.series) - 1) / 2) * wide
        axes.bar(
            places + shift,
            values,
            wide,
            bottom=bottom if chart.stacked else None,
            yerr=None if one.errors is None else np.nan_to_num(_numbers(one.errors)),
            error_kw={"linewidth": 0.6},
            label=_plain(one.name),
            color=colour(one.style),
            hatch=("", "//", "..", "\\\\", "xx")[one.style % 5],
            edgecolor="white",
            linewidth=0.3,
        )
        bottom = bottom + values
    _named(axes, "x", chart.categories)
    _axes(axes, chart.category_label, chart.value_label)
    if chart.value_range:
        axes.set_ylim(*chart.value_range)


@draw.register
def _(chart: Heat, axes: Any) -> None:
    cells = np.ma.masked_invalid([_numbers(row) for row in chart.values])
    if chart.bubbles:
        row, column = np.nonzero(np.ma.filled(cells, 0))
        values = np.asarray(cells[row, column], np.float64)
        across = max(cells.shape)
        area = min(130.0, 40_000 / across**2) * values / values.max(initial=1) + 1
        marks = axes.scatter(column, row, s=area, c=values, cmap=f"{AMOUNT}_r", vmin=0)
        axes.set_xlim(-0.7, cells.shape[1] - 0.3)
        axes.set_ylim(cells.shape[0] - 0.3, -0.7)
    else:
        marks = axes.imshow(cells, aspect="auto", interpolation="none", **_colours(chart, cells))
    axes.figure.colorbar(marks, ax=axes, label=_plain(chart.value_label))
    _named(axes, "x", chart.columns)
    _named(axes, "y", chart.rows)
    _axes(axes, chart.column_label, chart.row_label)
    if chart.written and cells.size <= 400:
        for (r, c), value in np.ndenumerate(np.ma.filled(cells, np.nan)):
            if np.isfinite(value):
                axes.text(c, r, f"{value:.0f}", ha="center", va="center", fontsize=5, color=_ink(marks, value))


def _colours(chart: Heat, cells: Any) -> dict[str, Any]:
    if chart.scale == "difference":
        most = float(np.abs(cells).max()) or 1.0
        return {"cmap": DIFFERENCE, "vmin": -most, "vmax": most}
    if chart.scale == "share":
        return {"cmap": AMOUNT, "vmin": 0, "vmax": 100}
    return {"cmap": f"{AMOUNT}_r", "vmin": 0, "vmax": chart.top}


def _ink(marks: Any, value: float) -> str:
    """Black on light cells, white on dark ones."""
    red, green, blue, _ = marks.cmap(marks.norm(value))
    return "black" if 0.3 * red + 0.6 * green + 0.1 * blue > 0.5 else "white"


@draw.register
def _(chart: Points, axes: Any) -> None:
    for cloud in chart.clouds:
        mark = _MARKERS[cloud.style % len(_MARKERS)]
        axes.scatter(
            cloud.x, cloud.y, s=4, color=colour(cloud.style), marker=mark, linewidths=0.4, label=_plain(cloud.name)
        )
    axes.set_xticks([])
    axes.set_yticks([])


def _named(axes: Any, side: str, names: Any) -> None:
    if len(names) > (MOST_NUMBERS if side == "x" and all(map(str.isdigit, names)) else MOST_LABELS):
        every = -(-len(names) // MOST_NUMBERS)
        places = range(0, len(names), every)
        names = [names[i] for i in places]
    else:
        places = range(len(names))
    told = [_plain(name) for name in names]
    room = LETTERS * _panel_inches(axes) / max(1, len(told))
    turn: dict[str, Any] = {}
    if side == "x" and max(map(len, told), default=0) > room:
        if max(len(word) for name in told for word in name.split()) <= room:
            told = [fill(name, int(room)) for name in told]
        else:
            turn = {"rotation": 45, "ha": "right", "rotation_mode": "anchor"}
    getattr(axes, f"set_{side}ticks")(places, labels=told, **turn)


def _panel_inches(axes: Any) -> float:
    """How wide a panel's axis is, about: what stands beside it takes a fifth."""
    return float(0.8 * axes.figure.get_figwidth() / axes.get_subplotspec().get_gridspec().ncols)


def _axes(axes: Any, x: str, y: str) -> None:
    axes.set_xlabel(_plain(x))
    axes.set_ylabel(_plain(y))


def _numbers(values: Any) -> Any:
    return np.array([np.nan if v is None else v for v in values], np.float64)


def _plain(text: str) -> str:
    """Text that matplotlib does not take for mathematics."""
    return text.replace("$", r"\$")
