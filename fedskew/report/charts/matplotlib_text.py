"""Legends and axis labels of figures for papers. They are wrapped or thinned out to leave room for the drawing."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import fill
from typing import Any

from fedskew.report.charts.chart import Chart, Figure, Lines

MAX_LABELS = 30
MAX_NUMBERS = 10
"""At most this many numeric labels on an axis, such as rounds."""
MAX_INSIDE = 5
"""With more curves than this, the legend goes below the panel."""
SHARE = 0.8
"""Approximate width of the plotting area, as a share of the panel's width."""
LETTERS = 15
"""Letters per inch."""
LINE = 0.13
"""Height of a line of text in inches."""


def add_legends(picture: Any, figure: Figure, panels: list[Any]) -> None:
    """Add one legend below all panels if they show the same series, otherwise one per panel."""
    with_legend = [p for p, chart in zip(panels, figure.charts, strict=True) if not getattr(chart, "thin", False)]
    named = [p for p in with_legend if 1 < len(p.get_legend_handles_labels()[1]) <= MAX_LABELS]
    if not named:
        return
    labels = {tuple(p.get_legend_handles_labels()[1]) for p in named}
    alone = len(panels) == 1 and isinstance(figure.charts[0], Lines)
    if len(labels) > 1 or alone:
        for axes in named:
            handles, names = axes.get_legend_handles_labels()
            shown, columns = _legend(names, _plot_width(axes))
            below = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.25), "ncols": columns} if columns else {}
            axes.legend(handles, shown, frameon=False, **below)
        return
    handles, names = named[0].get_legend_handles_labels()
    # The line sample of each name takes the width of 8 letters.
    fitting = int(LETTERS * picture.get_figwidth() / (8 + max(map(len, names))))
    columns = min(5 if len(panels) > 1 or figure.wide else 3, len(names), max(1, fitting))
    picture.legend(handles, names, loc="outside lower center", ncols=columns, frameon=False)


def _legend(names: Sequence[str], plot_width: float) -> tuple[list[str], int]:
    """Return the wrapped names and the number of columns of a legend below the panel, or 0 for a legend inside it."""
    room = LETTERS * plot_width - 8  # the line sample takes the width of 8 letters
    longest = max(map(len, names))
    if len(names) <= MAX_INSIDE and longest <= room / 2:
        return list(names), 0
    return [fill(name, int(room)) for name in names], 2 if longest <= room / 2 else 1


def legend_height(chart: Chart, panel_width: float) -> float:
    """Height in inches of the legend below a panel, or 0 if there is none. `panel_width` is in inches."""
    if not isinstance(chart, Lines) or chart.thin or not 1 < len(chart.lines) <= MAX_LABELS:
        return 0.0
    shown, columns = _legend([line.name for line in chart.lines], SHARE * panel_width)
    return LINE * sum(name.count("\n") + 1 for name in shown) / columns if columns else 0.0


def label_axis(axes: Any, side: str, names: Sequence[str]) -> None:
    """Label an axis with plain, wrapped or slanted text, the first that fits. If there are many names, show some."""
    numbers = side == "x" and all(map(str.isdigit, names))
    kept = _some(names, MAX_NUMBERS) if len(names) > (MAX_NUMBERS if numbers else MAX_LABELS) else range(len(names))
    shown = [escape_math(names[i]) for i in kept]
    turn: dict[str, Any] = {}
    if side == "x" and shown:
        inches = max(0.5, _plot_width(axes) - _y_label_inches(axes))
        room = LETTERS * inches / len(shown)
        if max(map(len, shown)) > room:
            if max((len(word) for name in shown for word in name.split()), default=0) <= room:
                shown = [fill(name, int(room)) for name in shown]
            else:
                slanted = _some(shown, int(inches / LINE))
                kept, shown = [kept[i] for i in slanted], [shown[i] for i in slanted]
                turn = {"rotation": 45, "ha": "right", "rotation_mode": "anchor"}
    getattr(axes, f"set_{side}ticks")(kept, labels=shown, **turn)


def _some(names: Sequence[str], most: int) -> Sequence[int]:
    """Evenly spaced indices of at most `most` names."""
    return range(0, len(names), max(1, -(-len(names) // max(1, most))))


def _y_label_inches(axes: Any) -> float:
    """Width in inches of the labels on the y axis."""
    return max((len(label.get_text()) for label in axes.get_yticklabels()), default=0) / LETTERS


def _plot_width(axes: Any) -> float:
    """Approximate width in inches of the plotting area."""
    return float(SHARE * axes.figure.get_figwidth() / axes.get_subplotspec().get_gridspec().ncols)


def escape_math(text: str) -> str:
    """Escape `$`, which matplotlib reads as the start of a formula."""
    return text.replace("$", r"\$")


def wrap_title(text: str, inches: float) -> str:
    return fill(escape_math(text), int(LETTERS * inches))
