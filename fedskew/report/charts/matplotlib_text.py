"""Legends and axis labels of figures for papers. They are wrapped or thinned out to leave room for the drawing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from textwrap import fill
from typing import Any

from fedskew.report.charts.chart import Chart, Figure, Lines

MAX_LABELS = 30
"""The maximum number of labels on an axis. There is no legend for more names than this."""
MAX_NUMBERS = 10
"""The maximum number of numeric labels, such as rounds, on an x axis. An axis with more than `MAX_LABELS` names shows
at most this many, too."""
MAX_INSIDE = 5
"""With more curves than this, the legend goes below the panel."""
PLOT_SHARE = 0.8
"""Approximate width of the plotting area, as a share of the panel's width."""
LETTERS_PER_INCH = 15
SAMPLE_LETTERS = 8
"""The line sample before a name in a legend is as wide as this many letters."""
LINE_HEIGHT = 0.13
"""Height of a line of text in inches."""
LABEL_SHARE = 0.7
"""Labels of a y axis, and slanted labels, take at most this share of the plotting area's width. Slanted ones also take
at most this share of the panel's height."""


def add_legends(picture: Any, figure: Figure, panels: list[Any]) -> None:
    """Add one legend below all panels if they show the same series. Otherwise, each panel gets its own legend.

    The panel of a single line chart also gets its own legend, because such a legend may lie inside the panel. A panel
    with one series, or with more than `MAX_LABELS`, gets none.
    """
    with_legend = [p for p, chart in zip(panels, figure.charts, strict=True) if not getattr(chart, "thin", False)]
    named = [p for p in with_legend if 1 < len(p.get_legend_handles_labels()[1]) <= MAX_LABELS]
    if not named:
        return
    labels = {tuple(p.get_legend_handles_labels()[1]) for p in named}
    has_one_line_chart = len(panels) == 1 and isinstance(figure.charts[0], Lines)
    if len(labels) > 1 or has_one_line_chart:
        for axes in named:
            handles, names = axes.get_legend_handles_labels()
            shown, columns = _arrange_legend(names, _plot_width(axes))
            below = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.25), "ncols": columns} if columns else {}
            axes.legend(handles, shown, frameon=False, **below)
        return
    handles, names = named[0].get_legend_handles_labels()
    fitting = int(LETTERS_PER_INCH * picture.get_figwidth() / (SAMPLE_LETTERS + max(map(len, names))))
    columns = min(5 if len(panels) > 1 or figure.wide else 3, len(names), max(1, fitting))
    picture.legend(handles, names, loc="outside lower center", ncols=columns, frameon=False)


def _arrange_legend(names: Sequence[str], plot_width: float) -> tuple[list[str], int]:
    """Return the wrapped names and the number of columns of a legend below the panel, or 0 for a legend inside it."""
    room = LETTERS_PER_INCH * plot_width - SAMPLE_LETTERS
    longest = max(map(len, names))
    if len(names) <= MAX_INSIDE and longest <= room / 2:
        return list(names), 0
    return [fill(name, int(room)) for name in names], 2 if longest <= room / 2 else 1


def legend_height(chart: Chart, panel_width: float) -> float:
    """Height in inches of the legend below a panel with curves, or 0 if there is none. `panel_width` is in inches."""
    if not isinstance(chart, Lines) or chart.thin or not 1 < len(chart.lines) <= MAX_LABELS:
        return 0.0
    shown, columns = _arrange_legend([line.name for line in chart.lines], PLOT_SHARE * panel_width)
    return LINE_HEIGHT * sum(name.count("\n") + 1 for name in shown) / columns if columns else 0.0


def label_axis(axes: Any, side: str, names: Sequence[str]) -> None:
    """Label an axis with plain text. If there are many names, show some.

    Names that are too long for an x axis are wrapped or slanted. Long names on a y axis and slanted names are cut.
    """
    limit = MAX_NUMBERS if side == "x" and all(map(str.isdigit, names)) else MAX_LABELS
    kept = _evenly_spaced(names, MAX_NUMBERS) if len(names) > limit else range(len(names))
    shown = [names[i] for i in kept]
    rotation: dict[str, Any] = {}
    if side == "y":
        shown = _cut(shown, LABEL_SHARE * _plot_width(axes))
    if side == "x" and shown:
        inches = max(0.5, _plot_width(axes) - _y_label_inches(axes))
        room = LETTERS_PER_INCH * inches / len(shown)
        if max(map(len, shown)) > room:
            if max((len(word) for name in shown for word in name.split()), default=0) <= room:
                shown = [fill(name, int(room)) for name in shown]
            else:
                slanted = _evenly_spaced(shown, int(inches / LINE_HEIGHT))
                kept, shown = [kept[i] for i in slanted], [shown[i] for i in slanted]
                shown = _cut(shown, LABEL_SHARE * min(_plot_width(axes), _panel_height(axes)) * math.sqrt(2))
                rotation = {"rotation": 45, "ha": "right", "rotation_mode": "anchor"}
    getattr(axes, f"set_{side}ticks")(kept, labels=list(map(escape_math, shown)), **rotation)


def _cut(names: Sequence[str], inches: float) -> list[str]:
    """Cut the middle out of names that are wider than `inches`, so that they leave room for the drawing."""
    letters = max(3, int(LETTERS_PER_INCH * inches))
    end = (letters - 1) // 2
    return [name if len(name) <= letters else f"{name[: letters - 1 - end]}…{name[-end:]}" for name in names]


def _evenly_spaced(names: Sequence[str], limit: int) -> Sequence[int]:
    """Return evenly spaced indices of at most `limit` names."""
    return range(0, len(names), max(1, -(-len(names) // max(1, limit))))


def _y_label_inches(axes: Any) -> float:
    """Width in inches of the labels on the y axis."""
    return max((len(label.get_text()) for label in axes.get_yticklabels()), default=0) / LETTERS_PER_INCH


def _plot_width(axes: Any) -> float:
    """Approximate width in inches of the plotting area."""
    return float(PLOT_SHARE * axes.figure.get_figwidth() / axes.get_subplotspec().get_gridspec().ncols)


def _panel_height(axes: Any) -> float:
    """Approximate height of the panel in inches."""
    return float(axes.figure.get_figheight() / axes.get_subplotspec().get_gridspec().nrows)


def escape_math(text: str) -> str:
    """Escape `$`, which matplotlib reads as the start of a formula."""
    return text.replace("$", r"\$")


def wrap_title(text: str, axes: Any) -> str:
    """Break the title of a panel into lines that are no wider than its plotting area."""
    return fill(escape_math(text), int(LETTERS_PER_INCH * _plot_width(axes)))
