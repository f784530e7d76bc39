"""Colours that colour-blind readers can distinguish, on white and on black. Series also differ in dash and marker.

The first four are Okabe and Ito's. A search found the others. Any two of the ten differ by at least 16 in CIELAB. That
also holds for protanopia, deuteranopia and tritanopia (simulated as in Machado et al., 2009). Each colour has a
contrast of at least 3 to both backgrounds.
"""

from __future__ import annotations

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#546C3C", "#9078FC", "#E40048", "#9024FC", "#9C4878", "#E400C0")
DASHES = ("solid", "dash", "dot", "dashdot", "longdash")
MARKERS = ("circle", "square", "diamond", "triangle-up", "x", "cross", "star", "triangle-down", "pentagon", "hexagon")
HATCHES = ("", "/", ".", "\\", "x")
LIGHT, DARK = "#ffffff", "#14171c"
"""The page's backgrounds."""
AMOUNT, DIFFERENCE = "viridis", "RdBu"
"""The colour maps of matplotlib for amounts and for differences around zero."""


def colour(style: int) -> str:
    """The colour of a series. `style` is the number of the series, from 0."""
    return COLOURS[style % len(COLOURS)]


def dash(style: int) -> str:
    """The dash of a line. When the colours repeat, each is combined with another dash."""
    return DASHES[(style + style // len(COLOURS)) % len(DASHES)]


def marker(style: int) -> str:
    """The marker of a point. When the colours repeat, each is combined with another marker."""
    return MARKERS[(style + 3 * (style // len(COLOURS))) % len(MARKERS)]


def hatch(style: int) -> str:
    """The pattern of a bar."""
    return HATCHES[(style + style // len(COLOURS)) % len(HATCHES)]


def contrast(one: str, other: str) -> float:
    """The contrast ratio of two colours, as defined by WCAG."""
    dark, light = sorted((_luminance(one), _luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def _luminance(colour: str) -> float:
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
