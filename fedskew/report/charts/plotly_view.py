"""Convert charts to JSON for Plotly in the browser."""

from __future__ import annotations

from functools import singledispatch
from typing import Any

from fedskew.report.charts.chart import Bars, Chart, Heat, Line, Lines, Points
from fedskew.report.charts.palette import colour, dash, hatch, marker

Json = dict[str, Any]
MAX_MARKERS = 40
"""Curves with more points have no markers."""
FEW_ROUNDS = 10
"""Up to this many rounds get one tick each, to avoid ticks between rounds."""


@singledispatch
def plotly(chart: Chart) -> Json:
    """Return Plotly's `data` and `layout`. The page's theme sets the colours of text and background."""
    raise TypeError(type(chart).__name__)


@plotly.register
def _(chart: Lines) -> Json:
    traces: list[Json] = []
    for line in chart.lines:
        if line.low is not None and line.high is not None:
            traces.append(_band(line))
        traces.append(_curve(line, chart.thin))
    layout = _layout(chart.x_label, chart.y_label) | {"hovermode": "closest" if chart.thin else "x unified"}
    if chart.y_range:
        layout["yaxis"]["range"] = list(chart.y_range)
    if chart.x_label == "round" and max((x for line in chart.lines for x in line.x), default=0) <= FEW_ROUNDS:
        layout["xaxis"]["dtick"] = 1
    layout["showlegend"] = not chart.thin and len(chart.lines) > 1
    return {"data": traces, "layout": layout}


def _curve(line: Line, thin: bool) -> Json:
    has_markers = len(line.x) <= MAX_MARKERS and not thin
    return {
        "type": "scatter",
        "mode": "lines+markers" if has_markers else "lines",
        "name": _escape_html(line.name),
        "meta": line.name,
        "legendgroup": line.name,
        "x": list(line.x),
        "y": list(line.y),
        "line": {"color": colour(line.style), "dash": dash(line.style), "width": 1 if thin else 2},
        "marker": {"symbol": marker(line.style), "size": 6, "color": colour(line.style)},
        "hovertemplate": "%{y:.2f}" if not thin else f"{_escape_html(line.name)}: %{{y:.2f}}<extra></extra>",
    }


def _band(line: Line) -> Json:
    """Draw the band from the lowest to the highest run as one closed outline."""
    known = [i for i, (a, b) in enumerate(zip(line.low or (), line.high or (), strict=True)) if None not in (a, b)]
    low, high = line.low or (), line.high or ()
    return {
        "type": "scatter",
        "mode": "lines",
        "x": [line.x[i] for i in known] + [line.x[i] for i in reversed(known)],
        "y": [high[i] for i in known] + [low[i] for i in reversed(known)],
        "fill": "toself",
        "fillcolor": colour(line.style) + "22",
        "line": {"width": 0},
        "hoverinfo": "skip",
        "showlegend": False,
        "legendgroup": line.name,
        "meta": line.name,
        "name": _escape_html(line.name),
    }


@plotly.register
def _(chart: Bars) -> Json:
    traces = []
    for one in chart.series:
        filled = colour(one.style)
        bar: Json = {
            "type": "bar",
            "name": _escape_html(one.name),
            "meta": one.name,
            "x": [_escape_html(c) for c in chart.categories],
            "y": list(one.values),
            "marker": {
                "color": filled,
                # without a background of its own, a bar with a pattern is transparent
                "pattern": {"shape": hatch(one.style), "bgcolor": filled, "fgcolor": "#ffffff", "solidity": 0.2},
            },
            "hovertemplate": f"%{{x}}<br>{_escape_html(one.name)}: %{{y:.2f}}<extra></extra>",
        }
        if one.errors is not None:
            bar["error_y"] = {
                "type": "data",
                "array": [e or 0 for e in one.errors],
                "thickness": 1,
                "width": 2,
                "color": "#808080",
            }
        traces.append(bar)
    layout = _layout(chart.category_label, chart.value_label)
    layout["barmode"] = "stack" if chart.stacked else "group"
    layout["xaxis"]["type"] = "category"
    layout["showlegend"] = len(chart.series) > 1
    if chart.value_range:
        layout["yaxis"]["range"] = list(chart.value_range)
    return {"data": traces, "layout": layout}


_SCALES: dict[str, Json] = {
    "amount": {"colorscale": "Viridis", "reversescale": True, "zmin": 0},
    "share": {"colorscale": "Viridis", "zmin": 0, "zmax": 100},
    "difference": {"colorscale": [[0, "#B2182B"], [0.5, "#F7F7F7"], [1, "#2166AC"]], "zmid": 0},
}


@plotly.register
def _(chart: Heat) -> Json:
    layout = _layout(chart.column_label, chart.row_label)
    rows, columns = [_escape_html(r) for r in chart.rows], [_escape_html(c) for c in chart.columns]
    for axis, names in (("xaxis", columns), ("yaxis", rows)):
        layout[axis] |= {"type": "category", "categoryorder": "array", "categoryarray": names, "showgrid": False}
        if len(names) <= 20:
            layout[axis]["dtick"] = 1
    layout["yaxis"]["autorange"] = "reversed"
    if chart.bubbles:
        return {"data": [_bubbles(chart, rows, columns)], "layout": layout}
    heat: Json = {
        "type": "heatmap",
        "x": columns,
        "y": rows,
        "z": [list(row) for row in chart.values],
        "hoverongaps": False,
        "colorbar": {"thickness": 10, "title": {"text": chart.value_label, "side": "right"}},
        "hovertemplate": f"{_escape_html(chart.row_label)} %{{y}}<br>{_escape_html(chart.column_label)} %{{x}}"
        f"<br>{_escape_html(chart.value_label)}: %{{z:.4~g}}<extra></extra>",
        **_SCALES[chart.scale],
    }
    if chart.scale == "amount":  # Plotly takes zmin only with zmax
        largest = max((v for row in chart.values for v in row if v is not None), default=0.0)
        heat["zmax"] = chart.top if chart.top is not None else largest or 1.0
    if chart.show_numbers:
        heat["texttemplate"] = "%{z:.0f}"
    return {"data": [heat], "layout": layout}


def _bubbles(chart: Heat, rows: list[str], columns: list[str]) -> Json:
    cells = [(r, c, v) for r, row in enumerate(chart.values) for c, v in enumerate(row) if v]
    largest = max((v for *_, v in cells), default=1.0)
    widest = min(24.0, 520 / max(len(rows), len(columns)))  # in pixels, so that bubbles do not overlap
    return {
        "type": "scatter",
        "mode": "markers",
        "x": [columns[c] for _, c, _ in cells],
        "y": [rows[r] for r, *_ in cells],
        "marker": {
            "size": [max(3.0, widest * (v / largest) ** 0.5) for *_, v in cells],
            "color": [v for *_, v in cells],
            "colorscale": "Viridis",
            "reversescale": True,
            "cmin": 0,
            "showscale": True,
            "colorbar": {"thickness": 10, "title": {"text": chart.value_label, "side": "right"}},
        },
        "customdata": [v for *_, v in cells],
        "hovertemplate": f"{_escape_html(chart.row_label)} %{{y}}<br>{_escape_html(chart.column_label)} %{{x}}"
        f"<br>{_escape_html(chart.value_label)}: %{{customdata}}<extra></extra>",
    }


@plotly.register
def _(chart: Points) -> Json:
    traces = [
        {
            "type": "scatter",
            "mode": "markers",
            "name": _escape_html(cloud.name),
            "x": list(cloud.x),
            "y": list(cloud.y),
            "marker": {"color": colour(cloud.style), "symbol": marker(cloud.style), "size": 5, "opacity": 0.75},
            "hovertemplate": f"{_escape_html(cloud.name)}<extra></extra>",
        }
        for cloud in chart.clouds
    ]
    layout = _layout("", "")
    for axis in ("xaxis", "yaxis"):
        layout[axis] |= {"showticklabels": False, "zeroline": False, "showgrid": False}
    return {"data": traces, "layout": layout}


def _layout(x: str, y: str) -> Json:
    def axis(label: str) -> Json:
        return {"title": {"text": _escape_html(label), "standoff": 8}, "automargin": True}

    return {"xaxis": axis(x), "yaxis": axis(y)}


def _escape_html(text: str) -> str:
    """Escape HTML, which Plotly interprets in texts."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
