"""A loader's options are its keyword arguments: unknown ones are refused with the nearest name."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from fedskew.data.dataset import Dataset
from fedskew.errors import UserError, unknown


def option_names(loader: Callable[..., Dataset]) -> tuple[str, ...]:
    parameters = inspect.signature(loader).parameters.values()
    return tuple(p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY)


def checked(loader: Callable[..., Dataset], options: dict[str, Any], data: str) -> dict[str, Any]:
    """`options`, if `loader` has them all."""
    names = option_names(loader)
    for option in options:
        if not names:
            raise UserError(f"unknown option {option!r} of {data}, which has none")
        if option not in names:
            raise unknown(f"option of {data}:", option, names)
    return options
