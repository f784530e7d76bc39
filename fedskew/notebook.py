"""HTML for notebooks, made with NumPy alone: an area that is redrawn, curves, and a heat map of classes and clients."""

from __future__ import annotations

import base64
import struct
import sys
import time
import zlib
from collections.abc import Mapping, Sequence
from html import escape
from importlib import import_module
from typing import Any

import numpy as np
import numpy.typing as npt

SECONDS_BETWEEN_UPDATES = 0.3
COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf", "#8c564b", "#e377c2")
MAX_POINTS = 150
"""A curve with more points is thinned, so that a notebook stays small."""
MAX_CLIENTS_WITH_COUNTS = 12
"""Up to this number of clients, the map shows the count in each cell. With more clients, it shows shades only."""
MAX_CLASSES = 30
"""The map shows at most this many classes."""

Points = Sequence[tuple[float, float]]
"""The points (x, y) of a curve."""


def in_notebook() -> bool:
    """Return whether this program runs in a Jupyter kernel, whose front end shows HTML."""
    if "IPython" not in sys.modules:
        return False
    shell = sys.modules["IPython"].get_ipython()
    return shell is not None and hasattr(shell, "kernel")


class OutputArea:
    """A part of a cell's output that is replaced while a program runs."""

    def __init__(self) -> None:
        self._handle: Any = None
        self._shown_at = 0.0

    def is_due(self) -> bool:
        """Return whether enough time has passed since the last update."""
        return time.monotonic() - self._shown_at >= SECONDS_BETWEEN_UPDATES

    def show(self, html: str) -> None:
        """Replace the content."""
        ipython: Any = import_module("IPython.display")  # installed wherever a notebook runs
        self._shown_at = time.monotonic()
        if self._handle is None:
            self._handle = ipython.display(ipython.HTML(html), display_id=True)
        else:
            self._handle.update(ipython.HTML(html))


def bar(done: int, total: int) -> str:
    """Return a progress bar."""
    share = 100 * done / max(1, total)
    return (
        '<div style="width:120px;height:10px;background:#ddd;border-radius:5px;overflow:hidden">'
        f'<div style="width:{share:.0f}%;height:10px;background:{COLOURS[0]}"></div></div>'
    )


def curves(lines: Mapping[str, Sequence[Points]], x_label: str = "round", y_label: str = "accuracy, %") -> str:
    """Return a small chart. All curves under one name have the same colour.

    The result is empty if no curve has two points.
    """
    drawn = {name: [c for c in group if len(c) > 1] for name, group in lines.items()}
    points = [point for group in drawn.values() for curve in group for point in curve]
    if not points:
        return ""
    right = max(x for x, _ in points)
    low, high = min(y for _, y in points), max(y for _, y in points)
    spread = high - low or 1.0
    width, height, left, top = 360, 130, 44, 8

    def to_pixels(x: float, y: float) -> str:
        return f"{left + width * x / (right or 1):.0f},{top + height * (high - y) / spread:.0f}"

    shapes, legend = [], []
    for number, (name, group) in enumerate(drawn.items()):
        colour = COLOURS[number % len(COLOURS)]
        for curve in group:
            line = " ".join(to_pixels(x, y) for x, y in _thin_out(curve))
            shapes.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        if group:
            legend.append(f'<span style="color:{colour}">━ {escape(name)}</span>')
    frame = f'<rect x="{left}" y="{top}" width="{width}" height="{height}" fill="none" stroke="#bbb"/>'
    size = f'width="{left + width + 20}" height="{top + height + 20}"'
    text = 'font-size="11" fill="#777"'
    labels = (
        f'<text x="{left - 4}" y="{top + 9}" {text} text-anchor="end">{high:.1f}</text>'
        f'<text x="{left - 4}" y="{top + height}" {text} text-anchor="end">{low:.1f}</text>'
        f'<text x="{left}" y="{top + height + 14}" {text}>0</text>'
        f'<text x="{left + width}" y="{top + height + 14}" {text} text-anchor="end">{x_label} {right:g}</text>'
        f'<text x="{left + 6}" y="{top + 12}" {text}>{escape(y_label)}</text>'
    )
    return f"<svg {size}>{frame}{''.join(shapes)}{labels}</svg><div>{' '.join(legend)}</div>"


def _thin_out(curve: Points) -> Points:
    step = -(-len(curve) // MAX_POINTS)
    return curve if step == 1 else [*curve[:-1:step], curve[-1]]


def label_map(counts: npt.NDArray[np.int64], clients: Sequence[str], classes: Sequence[str]) -> str:
    """Return a heat map of label counts, a row per class and a column per client. More samples give a darker cell."""
    largest = int(counts.max(initial=0))
    with_counts = len(clients) <= MAX_CLIENTS_WITH_COUNTS
    headings = [f"<th>{escape(name)}</th>" for name in clients] if with_counts else [f"<th>{len(clients)} clients</th>"]
    rows = []
    for name, held in zip(classes[:MAX_CLASSES], counts.T, strict=False):
        cells = _count_cells(held, largest) if with_counts else f"<td>{_strip(held, largest)}</td>"
        rows.append(f"<tr><th>{escape(name)}</th>{cells}<td>{int(held.sum())}</td></tr>")
    more = len(classes) - MAX_CLASSES
    note = f"<div>… and {more} more class{'es' * (more > 1)}</div>" if more > 0 else ""
    return f"<table><tr><th>class \\ client</th>{''.join(headings)}<th>all</th></tr>{''.join(rows)}</table>{note}"


def _count_cells(held: npt.NDArray[np.int64], largest: int) -> str:
    cells = []
    for count in held.tolist():
        shade = 0.75 * count / max(1, largest)
        style = f' style="background:rgba(31,119,180,{shade:.2f})"' if count else ""
        cells.append(f"<td{style}>{count or ''}</td>")
    return "".join(cells)


def _strip(held: npt.NDArray[np.int64], largest: int) -> str:
    """Return an image with one pixel per client, stretched to a readable width.

    A table cell per client would need far more HTML.
    """
    shares = held / max(1, largest)
    shades = np.where(held > 0, 210 - 190 * np.sqrt(shares), 255).astype(np.uint8)
    width = min(600, max(4, 400 // len(held)) * len(held))
    style = f"width:{width}px;height:14px;image-rendering:pixelated;border:1px solid #ddd"
    image = base64.b64encode(_grey_png(shades[None])).decode()
    return f'<img alt="samples by client" style="{style}" src="data:image/png;base64,{image}">'


def _grey_png(pixels: npt.NDArray[np.uint8]) -> bytes:
    """Encode an image of grey levels."""
    height, width = pixels.shape
    lines = b"".join(b"\0" + row.tobytes() for row in pixels)
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(lines, 9)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )
