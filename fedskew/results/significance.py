"""Is a difference between two methods more than chance? Paired over seeds, honest about how few they are.

With one seed both methods meet the same split, clients and batches, so their difference on a second seed is a new
draw: paired differences are what varies. Student's t on them is the test; it assumes that they are roughly normal,
which a few seeds can neither show nor refute. Several comparisons are corrected by Holm's method; whoever asks about
the best of several has to count all pairs, for any of them could have come out best.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

LEVEL = 0.05
NO_SPREAD = 1e-12
"""Differences of shares of the same test set that spread less than this are the same but for rounding."""


@dataclass(frozen=True)
class Difference:
    """First minus second, over the seeds that both have."""

    seeds: int
    mean: float
    low: float | None = None
    """Of the 95 % interval; None with fewer than two seeds, or where they do not differ at all."""
    high: float | None = None
    p: float | None = None
    """Two-sided; after `holm`, corrected."""
    comparisons: int = 1
    """For which p is corrected."""

    @property
    def none(self) -> bool:
        """Whether the means are the same."""
        return abs(self.mean) < NO_SPREAD

    @property
    def sure(self) -> bool:
        return self.p is not None and self.p < LEVEL


def paired(first: Mapping[int, float], second: Mapping[int, float]) -> Difference | None:
    """From the values by seed; None where no seed is common."""
    common = sorted(first.keys() & second.keys())
    if not common:
        return None
    differences = [first[seed] - second[seed] for seed in common]
    n, mean = len(differences), math.fsum(differences) / len(differences)
    if n < 2:
        return Difference(n, mean)
    spread = math.sqrt(math.fsum((d - mean) ** 2 for d in differences) / (n - 1) / n)
    if spread < NO_SPREAD:  # the same to the last sample: no estimate of chance
        return Difference(n, mean, p=1.0 if abs(mean) < NO_SPREAD else None)
    from scipy.stats import t

    half = float(t.ppf(1 - LEVEL / 2, n - 1)) * spread
    return Difference(n, mean, mean - half, mean + half, 2 * float(t.sf(abs(mean) / spread, n - 1)))


def holm(differences: Sequence[Difference]) -> list[Difference]:
    """The same with p corrected for their number."""
    order = sorted((d.p, i) for i, d in enumerate(differences) if d.p is not None)
    corrected: dict[int, float] = {}
    floor = 0.0
    for rank, (p, i) in enumerate(order):
        floor = max(floor, min(1.0, p * (len(order) - rank)))
        corrected[i] = floor
    return [replace(d, p=corrected.get(i), comparisons=len(order)) for i, d in enumerate(differences)]
