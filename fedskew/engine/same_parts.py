"""Compare parts of methods by their attributes, because their `repr` may hide differences. In doubt they differ."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fedskew.methods.parts import Part


def same_parts(some: Sequence[Part], others: Sequence[Part]) -> bool:
    """Whether the parts are pairwise the same."""
    return len(some) == len(others) and all(map(_same_part, some, others))


def _same_part(one: Part, other: Part) -> bool:
    if one is other:
        return True
    if type(one) is not type(other) or not hasattr(one, "__dict__"):
        return False
    held, also = vars(one), vars(other)
    return held.keys() == also.keys() and all(_same_value(held[name], also[name]) for name in held)


def _same_value(one: object, other: object) -> bool:
    if one is other:
        return True
    if isinstance(one, Part) and isinstance(other, Part):
        return _same_part(one, other)
    try:
        if isinstance(one, Tensor) and isinstance(other, Tensor):
            return one.dtype == other.dtype and one.device == other.device and torch.equal(one, other)
        return type(one) is type(other) and bool(one == other)
    except (TypeError, RuntimeError, ValueError):
        return False
