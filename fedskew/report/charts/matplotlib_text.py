"""Text in the figures of papers: legends and names on axes that leave room for what is drawn."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import fill
from typing import Any

from fedskew.report.charts.chart import Chart, Figure, Lines

MOST_LABELS = 30
MOST_NUMBERS = 10
"""Numbers on an axis, such as rounds."""
MOST_INSIDE = 5
"""Curves whose legend leaves room for them."""
SHARE = 0.8
"""Of a panel's width that its axis has, about; the rest stands beside it."""
LETTERS = 15
"""That find room in an inch."""


def add_legends(picture: Any, figure: Figure, panels: list[Any]) -> None:
    """One below all panels that show the same series; curves that stand alone have room for their own."""
    wanted = [p for p, chart in zip(panels, figure.charts, strict=True) if not getattr(chart, "thin", False)]
    named = [p for p in wanted if 1 < len(p.get_legend_handles_labels()[1]) <= MOST_LABELS]
    if not named:
        return
    labels = {tuple(p.get_legend_handles_labels()[1]) for p in named}
    alone = len(panels) == 1 and isinstance(figure.charts[0], Lines)
    if len(labels) > 1 or alone:
        for axes in named:
            handles, names = axes.get_legend_handles_labels()
            told, columns = _legend(names, _panel_inches(axes))
            below = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.25), "ncols": columns} if columns else {}
            axes.legend(handles, told, frameon=False, **below)
        return
    handles, names = named[0].get_legend_handles_labels()
    columns = 5 if len(panels) > 1 or figure.wide else 3
    picture.legend(handles, names, loc="outside lower center", ncols=min(columns, len(names)), frameon=False)


def _legend(names: Sequence[str], inches: float) -> tuple[list[str], int]:
    """Names as they are written, and in how many columns below the panel; 0: among the curves, which have room."""
    room = LETTERS * inches - 8  # a sample of the line takes the rest
    longest = max(map(len, names))
    if len(names) <= MOST_INSIDE and longest <= room / 2:
        return list(names), 0
    return [fill(name, int(room)) for name in names], 2 if longest <= room / 2 else 1


def legend_height(chart: Chart, inches: float) -> float:
    if not isinstance(chart, Lines) or chart.thin or not 1 < len(chart.lines) <= MOST_LABELS:
        return 0.0
    told, columns = _legend([line.name for line in chart.lines], SHARE * inches)
    return 0.13 * sum(name.count("\n") + 1 for name in told) / columns if columns else 0.0


def put_names(axes: Any, side: str, names: Any) -> None:
    if len(names) > (MOST_NUMBERS if side == "x" and all(map(str.isdigit, names)) else MOST_LABELS):
        every = -(-len(names) // MOST_NUMBERS)
        places = range(0, len(names), every)
        names = [names[i] for i in places]
    else:
        places = range(len(names))
    told = [plain(name) for name in names]
    room = LETTERS * _panel_inches(axes) / max(1, len(told))
    turn: dict[str, Any] = {}
    if side == "x" and max(map(len, told), default=0) > room:
        if max(len(word) for name in told for word in name.split()) <= room:
            told = [fill(name, int(room)) for name in told]
        else:
            turn = {"rotation": 45, "ha": "right", "rotation_mode": "anchor"}
    getattr(axes, f"set_{side}ticks")(places, labels=told, **turn)


def _panel_inches(axes: Any) -> float:
    return float(SHARE * axes.figure.get_figwidth() / axes.get_subplotspec().get_gridspec().ncols)


def plain(text: str) -> str:
    """Text that matplotlib does not take for mathematics."""
    return text.replace("$", r"\$")


def title(text: str, inches: float) -> str:
    return fill(plain(text), int(LETTERS * inches))
