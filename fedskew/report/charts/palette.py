"""Colours that colour-blind readers can distinguish on white and on black. Series also differ in dash and marker."""

from __future__ import annotations

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#B8558F", "#A6761D", "#6A6FD0", "#7F7F7F", "#C23B4A", "#3B8EA5", "#6B8E23")
DASHES = ("solid", "dash", "dot", "dashdot", "longdash")
MARKERS = ("circle", "square", "diamond", "triangle-up", "x", "cross", "star", "triangle-down", "pentagon", "hexagon")
LIGHT, DARK = "#ffffff", "#14171c"
"""The page's background colours."""
AMOUNT, DIFFERENCE = "viridis", "RdBu"


def colour(style: int) -> str:
    return COLOURS[style % len(COLOURS)]


def dash(style: int) -> str:
    return DASHES[style % len(DASHES)]


def marker(style: int) -> str:
    return MARKERS[style % len(MARKERS)]


def contrast(one: str, other: str) -> float:
    """The contrast ratio of two colours, as defined by WCAG."""
    dark, light = sorted((_luminance(one), _luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def _luminance(colour: str) -> float:
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
