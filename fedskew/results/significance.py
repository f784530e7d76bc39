"""Significance of a difference between two methods, paired over seeds.

With one seed both methods get the same split, clients and batches, so their differences on several seeds are
independent draws. They are tested with Student's t, which assumes that they are roughly normal; a few seeds can neither
show nor refute that. Several comparisons are corrected by Holm's method. A claim about the best of several methods
has to count all pairs, because any method could have come out best.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

LEVEL = 0.05
NO_SPREAD = 1e-12
"""Differences in accuracy on one test set that vary less than this are equal up to rounding."""


@dataclass(frozen=True)
class Difference:
    """First minus second, over the seeds that both have."""

    seeds: int
    mean: float
    low: float | None = None
    """Lower end of the 95 % interval; None with fewer than two seeds, or if all differences are equal."""
    high: float | None = None
    p: float | None = None
    """Two-sided; after `holm`, corrected."""
    comparisons: int = 1
    """The number of comparisons that p is corrected for."""

    @property
    def is_zero(self) -> bool:
        """Whether the means are the same."""
        return abs(self.mean) < NO_SPREAD

    @property
    def significant(self) -> bool:
        return self.p is not None and self.p < LEVEL


def paired(first: Mapping[int, float], second: Mapping[int, float]) -> Difference | None:
    """Compare values by seed; None if the two have no seed in common."""
    common = sorted(first.keys() & second.keys())
    if not common:
        return None
    differences = [first[seed] - second[seed] for seed in common]
    n, mean = len(differences), math.fsum(differences) / len(differences)
    if n < 2:
        return Difference(n, mean)
    spread = math.sqrt(math.fsum((d - mean) ** 2 for d in differences) / (n - 1) / n)
    if spread < NO_SPREAD:  # equal up to rounding: chance cannot be estimated
        return Difference(n, mean, p=1.0 if abs(mean) < NO_SPREAD else None)
    from scipy.stats import t

    half = float(t.ppf(1 - LEVEL / 2, n - 1)) * spread
    return Difference(n, mean, mean - half, mean + half, 2 * float(t.sf(abs(mean) / spread, n - 1)))


def holm(differences: Sequence[Difference]) -> list[Difference]:
    """Correct the p-values for the number of comparisons."""
    order = sorted((d.p, i) for i, d in enumerate(differences) if d.p is not None)
    corrected: dict[int, float] = {}
    floor = 0.0
    for rank, (p, i) in enumerate(order):
        floor = max(floor, min(1.0, p * (len(order) - rank)))
        corrected[i] = floor
    return [replace(d, p=corrected.get(i), comparisons=len(order)) for i, d in enumerate(differences)]
