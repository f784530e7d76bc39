"""What the commands print: results on stdout, everything else on stderr, in any encoding."""

from __future__ import annotations

import codecs
import io
import json
import sys
from typing import Any

from rich.console import Console

_PLAIN = str.maketrans("±×–…·█━─│→≤≥‖τλβγη∇", "~x-..#--|><>|tlbgnd")


def allow_any_encoding() -> None:
    """Characters that a stream cannot encode become similar ones, as wide as they were, instead of an error."""
    codecs.register_error("fedskew", _similar)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="fedskew")


def _similar(error: UnicodeError) -> tuple[str | bytes, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    text = error.object[error.start : error.end].translate(_PLAIN)
    return "".join(c if c.isascii() else "?" for c in text), error.end


def stdout() -> Console:
    return Console(highlight=False)


def stderr() -> Console:
    return Console(stderr=True, highlight=False)


def notice(line: str) -> None:
    """One line that is not the result."""
    stderr().print(line, style="dim", markup=False, soft_wrap=True)


def print_json(value: Any) -> None:
    """One JSON object on stdout."""
    sys.stdout.write(json.dumps(value, indent=2, allow_nan=False, ensure_ascii=True) + "\n")
