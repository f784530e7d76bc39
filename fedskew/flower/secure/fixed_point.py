"""Fixed-point numbers modulo 2⁶⁴, so that masked updates add up exactly.

A site with weight w encodes every number x of its update as round(w·x·2^f). The server computes the sum of these
numbers over the sites, and divides it by Σw·2^f. Every weight is a whole number of at least 1. So the result differs
from the exact weighted mean by at most 2^-(f+1), plus the rounding of float64. f is the largest whole number for which
Σ|w·x|·2^f is at most 2⁶², if every w and every x has its largest allowed value. Arrays of whole numbers are encoded
with f = 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from fedskew.flower.secure.masks import Vector
from fedskew.flower.wire import MAX_SAMPLES, Garbled, is_count

_BITS = 62
"""Bits of the largest possible sum. One more is for the sign, and one is spare."""
FEWEST_BITS = 16
"""Fewer fractional bits than this are refused."""

Layout = list[Any]
"""Names and shapes of a contribution, in three lists: the names of the counts, [name, shape] of each array of values,
and [name, shape] of each array of whole numbers."""


class OutOfRange(Exception):
    """A contribution cannot be encoded, because a number in it is not finite or out of range. The text says where."""


@dataclass(frozen=True)
class Contribution:
    """What a site adds to a sum. The server learns the sums of the counts and weights, and the means of the arrays."""

    counts: dict[str, int]
    weight: int = 1
    """The site's weight in the means."""
    values: Mapping[str, npt.NDArray[np.float64]] = field(default_factory=dict)
    """Arrays of real numbers."""
    whole: Mapping[str, npt.NDArray[np.int64]] = field(default_factory=dict)
    """Arrays of whole numbers."""


@dataclass(frozen=True)
class Total:
    """The sum of several sites' contributions."""

    counts: dict[str, int]
    weight: int
    means: dict[str, npt.NDArray[np.float64]]
    """The weighted means of the values and of the whole numbers."""


@dataclass(frozen=True)
class FixedPoint:
    """The encoding of one federation's sums."""

    sites: int
    """The largest number of sites in a sum."""
    largest_weight: int
    """The largest weight of a site."""
    largest_value: float
    """The largest absolute value of a number in `Contribution.values`."""

    @property
    def fraction_bits(self) -> int:
        """The number of bits after the binary point. This is f in the module's docstring."""
        return math.floor(_BITS - math.log2(self.sites * self.largest_weight) - math.log2(self.largest_value))

    @property
    def error_bound(self) -> float:
        """The largest difference between a decoded mean and the exact one, apart from the rounding of float64."""
        return 2.0 ** -(self.fraction_bits + 1)

    @property
    def _largest_whole(self) -> int:
        return int(2**_BITS // (self.sites * self.largest_weight))

    def encode(self, contribution: Contribution) -> tuple[Vector, Layout]:
        """Return the contribution as numbers modulo 2⁶⁴, and their layout."""
        weight = contribution.weight
        if not 1 <= weight <= self.largest_weight:
            raise OutOfRange(f"the weight is {weight}; expected 1 to {self.largest_weight}")
        if not all(is_count(count) for count in contribution.counts.values()):
            raise OutOfRange(f"a count is beyond {MAX_SAMPLES}")
        parts = [np.array([*contribution.counts.values(), weight], np.int64)]
        for name, values in contribution.values.items():
            if not np.isfinite(values).all() or np.abs(values).max(initial=0.0) > self.largest_value:
                raise OutOfRange(f"{name} has a number beyond ±{self.largest_value:g}, or one that is not finite")
            parts.append(np.rint(np.ldexp(weight * values.astype(np.float64).ravel(), self.fraction_bits)))
        for name, numbers in contribution.whole.items():
            if max(numbers.max(initial=0), -int(numbers.min(initial=0))) > self._largest_whole:
                raise OutOfRange(f"{name} has a number beyond ±{self._largest_whole}")
            parts.append(weight * numbers.ravel())
        layout: Layout = [
            list(contribution.counts),
            [[name, list(values.shape)] for name, values in contribution.values.items()],
            [[name, list(numbers.shape)] for name, numbers in contribution.whole.items()],
        ]
        return np.concatenate([part.astype(np.int64) for part in parts]).view(np.uint64), layout

    def decode(self, total: Vector, layout: Layout) -> Total:
        """Decode the sum of several encoded contributions. Raise `Garbled` if its counts are impossible."""
        numbers, (counts, values, whole) = total.view(np.int64), layout
        weight = int(numbers[len(counts)])
        found = {name: int(number) for name, number in zip(counts, numbers, strict=False)}
        if not 1 <= weight <= self.sites * self.largest_weight or not all(map(is_count, found.values())):
            raise Garbled("the sum has impossible counts; a site has sent a wrong vector")
        means: dict[str, npt.NDArray[np.float64]] = {}
        start = len(counts) + 1
        for bits, tensors in ((self.fraction_bits, values), (0, whole)):
            for name, shape in tensors:
                end = start + math.prod(shape)
                means[name] = (np.ldexp(numbers[start:end].astype(np.float64), -bits) / weight).reshape(shape)
                start = end
        return Total(found, weight, means)


def layout_length(layout: Any) -> int:
    """Return the length of a vector with the layout that a site sent. Raise `Garbled` if this is not a layout."""
    try:
        counts, values, whole = layout
        tensors = [(name, list(shape)) for name, shape in (*values, *whole)]
        names = [*counts, *(name for name, _ in tensors)]
        sizes = [size for _, shape in tensors for size in shape]
    except (TypeError, ValueError) as error:
        raise Garbled("the layout of its vector is not readable") from error
    if not all(isinstance(name, str) for name in names) or not all(map(is_count, sizes)):
        raise Garbled("the layout of its vector is not readable")
    return int(len(counts) + 1 + sum(math.prod(shape) for _, shape in tensors))
