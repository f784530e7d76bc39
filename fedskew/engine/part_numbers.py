"""The numbers in which the parts of several runs differ: in the place of each, a tensor that goes with each client.

A program has the numbers of a method in it. For clients of runs with other numbers in one stack, it takes those that
differ from the clients' memory instead.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from typing import TypeVar

from torch import Tensor

from fedskew.engine.same_parts import same_value
from fedskew.methods.parts import Part

P = TypeVar("P", bound=Part)

Numbers = Mapping[str, float] | Mapping[str, Tensor]
"""By where they are, as in `0.regulariser.mu`."""


def differing_numbers(some: Sequence[Part], others: Sequence[Part]) -> list[str] | None:
    """Where these parts differ from those; None if in more than numbers, or in doubt."""
    found: list[str] = []
    for place, (one, other) in enumerate(zip(some, others, strict=True)):
        of_part = _differing(one, other)
        if of_part is None:
            return None
        found += [f"{place}.{where}" for where in of_part]
    return found


def _differing(one: Part, other: Part) -> list[str] | None:
    if one is other:
        return []
    if type(one) is not type(other) or not hasattr(one, "__dict__") or vars(one).keys() != vars(other).keys():
        return None
    found: list[str] = []
    for name, value in vars(one).items():
        also = vars(other)[name]
        if isinstance(value, Part) and isinstance(also, Part):
            inside = _differing(value, also)
            if inside is None:
                return None
            found += [f"{name}.{where}" for where in inside]
        elif type(value) is float and type(also) is float:
            found += [name] if value != also else []
        elif not same_value(value, also):
            return None
    return found


def numbers_of(parts: Sequence[Part], where: Sequence[str]) -> dict[str, float]:
    """What these parts have there."""
    return {path: _value(parts, path) for path in where}


def _value(parts: Sequence[Part], path: str) -> float:
    place, *names = path.split(".")
    value: object = parts[int(place)]
    for name in names:
        value = getattr(value, name)
    assert isinstance(value, float)
    return value


def without_numbers(parts: Sequence[Part], where: Sequence[str]) -> tuple[Part, ...]:
    """The parts with no number there: whatever came to be computed with one would show."""
    return with_numbers(parts, dict.fromkeys(where, math.nan))


def with_numbers(parts: Sequence[Part], numbers: Numbers) -> tuple[Part, ...]:
    """The parts with these numbers instead of their own."""
    changed = list(parts)
    for path, number in numbers.items():
        place, *names = path.split(".")
        changed[int(place)] = _with_number(changed[int(place)], names, number)
    return tuple(changed)


def _with_number(part: P, names: Sequence[str], number: float | Tensor) -> P:
    """A copy that is not checked as a new one would be: a tensor is no number to compare with others."""
    first, *rest = names
    other = copy.copy(part)
    value = _with_number(getattr(part, first), rest, number) if rest else number
    object.__setattr__(other, first, value)
    return other
