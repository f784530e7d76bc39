"""Write parts of Markdown pages."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from typing import Any

_SPECIAL = re.compile(r"[\\`*<|\[\]]|(?<![^\W_])_|_(?![^\W_])")
"""The characters that Markdown may read as markup. An underscore between letters or digits is not one of them."""


def percent(value: float | None) -> str:
    """Write a share as a percentage, or a dash if it is unknown."""
    return "–" if value is None or math.isnan(value) else f"{100 * value:.1f} %"


def table(headings: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Write a table."""
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def escape(text: str) -> str:
    """Escape a name for Markdown: one line without markup. Unescaped, `<unknown>` would be an HTML tag."""
    return _SPECIAL.sub(r"\\\g<0>", " ".join(text.split()))
