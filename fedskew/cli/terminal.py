"""Print results to stdout and notices to stderr, in any encoding."""

from __future__ import annotations

import codecs
import io
import json
import sys
from typing import Any

from rich.console import Console

_SIMILAR = str.maketrans(
    "±×–−…·█━─│→←≤≥≠‖∇✓" + "αβγδεηκλμρστφΔΣ" + "²₁₂ᵀ",
    "~x--..#--|><<>!|d+" + "abgdenklmrstfDS" + "212T",
) | {ord("∞"): "inf"}
"""ASCII replacements of the non-ASCII characters that the program prints most. All others become `?`."""


def allow_any_encoding() -> None:
    """Make stdout and stderr print similar ASCII characters, or `?`, for each character that their encoding lacks."""
    codecs.register_error("fedskew", _replace_by_similar)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="fedskew")


def _replace_by_similar(error: UnicodeError) -> tuple[str | bytes, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    text = error.object[error.start : error.end].translate(_SIMILAR)
    return "".join(c if c.isascii() else "?" for c in text), error.end


def stdout() -> Console:
    return Console(highlight=False)


def stderr() -> Console:
    return Console(stderr=True, highlight=False)


def notice(line: str) -> None:
    """Print one line that is not a result."""
    stderr().print(line, style="dim", markup=False, soft_wrap=True)


def print_json(value: Any) -> None:
    """Print a value as JSON on stdout."""
    sys.stdout.write(json.dumps(value, indent=2, allow_nan=False, ensure_ascii=True) + "\n")
