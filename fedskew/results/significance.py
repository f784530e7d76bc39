"""Significance of the differences between methods, paired over seeds.

With the same seed, all methods get the same split and, with few exceptions, the same clients and batches. So their
results can be subtracted seed by seed, and different seeds give independent differences. The differences are tested
with Student's t test. It assumes that they are roughly normal, which cannot be checked with a few seeds. With fewer
than three seeds, nothing is tested. The comparisons with one method, such as the best one or FedAvg, are corrected
together by Holm's method.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

LEVEL = 0.05
"""A difference is significant if its p-value is below this."""
POWER = 0.8
"""The probability with which a recommended number of seeds makes a difference significant."""
MIN_SEEDS = 3
"""With fewer seeds nothing is tested. An interval from two differences would be mean ± 9 standard deviations."""
MAX_SEEDS = 30
"""The maximum number of seeds that is recommended."""
INTERVAL_NOTE = (
    "A difference is significant at 5 %, corrected by Holm's method, if and only if its interval excludes 0."
)
"""A note for tables of intervals. It is needed because the correction widens some 95 % intervals."""
NO_SPREAD = 1e-12
"""Differences in accuracy on one test set that vary less than this are equal up to rounding."""


@dataclass(frozen=True)
class Difference:
    """The first method minus the second, over the seeds that both have. Values are fractions, not percent."""

    seeds: int
    mean: float
    wins: int = 0
    """The number of seeds with which the first method is better."""
    spread: float | None = None
    """Sample standard deviation of the differences. None with fewer than three seeds."""
    low: float | None = None
    """Lower end of the interval at the level of this comparison (see `divisor`). The interval excludes 0 if and only if
    the difference is significant. None if nothing was tested, or if all differences are equal."""
    high: float | None = None
    p: float | None = None
    """Two-sided p-value. `holm` corrects it. None if nothing was tested, or if all differences are equal but not 0."""
    comparisons: int = 1
    """The number of comparisons that p is corrected for."""
    divisor: int = 1
    """Holm's method divides the level of 5 % by this number for this comparison."""
    limit: float = 1.0
    """The largest possible difference, which bounds the interval."""

    @property
    def is_zero(self) -> bool:
        """Whether the means are the same."""
        return abs(self.mean) < NO_SPREAD

    @property
    def is_tested(self) -> bool:
        return self.p is not None

    @property
    def significant(self) -> bool:
        return self.p is not None and self.p < LEVEL

    @property
    def seeds_to_settle(self) -> int | None:
        """The number of seeds that would make the difference significant with a probability of 80 %.

        The estimate assumes that the mean and the spread stay as they are. None if the difference is significant or was
        not tested, or if more than 30 seeds would be needed.
        """
        if self.p is None or self.significant or not self.spread or self.is_zero:
            return None
        effect, level = abs(self.mean) / self.spread, LEVEL / self.divisor
        numbers = range(self.seeds + 1, MAX_SEEDS + 1)
        return next((n for n in numbers if _power(effect, n, level) >= POWER), None)


def paired(first: Mapping[int, float], second: Mapping[int, float], limit: float = 1.0) -> Difference | None:
    """Compare values by seed. `limit` is the largest possible difference. None if the two share no seed."""
    common = sorted(first.keys() & second.keys())
    if not common:
        return None
    differences = [first[seed] - second[seed] for seed in common]
    n, mean = len(differences), math.fsum(differences) / len(differences)
    found = Difference(n, mean, sum(d > NO_SPREAD for d in differences), limit=limit)
    if n < MIN_SEEDS:
        return found
    spread = math.sqrt(math.fsum((d - mean) ** 2 for d in differences) / (n - 1))
    if spread < NO_SPREAD:  # the differences are equal, so chance cannot be estimated
        return replace(found, spread=0.0, p=1.0 if found.is_zero else None)
    from scipy.stats import t

    p = 2 * float(t.sf(abs(mean) / (spread / math.sqrt(n)), n - 1))
    return _with_interval(replace(found, spread=spread, p=p))


def holm(differences: Sequence[Difference]) -> list[Difference]:
    """Correct p-values and intervals for the number of comparisons.

    The comparisons are sorted by p. With m comparisons, the first is tested at the level 5 % / m, the second at
    5 % / (m − 1), and so on. The comparisons after the first that is not significant are not significant either, and
    have the same level.
    """
    order = sorted((d.p, i) for i, d in enumerate(differences) if d.p is not None)
    corrected: dict[int, tuple[float, int]] = {}
    p, divisor = 0.0, len(order)
    for rank, (raw, i) in enumerate(order):
        divisor = len(order) - rank if p < LEVEL else divisor
        p = max(p, min(1.0, raw * (len(order) - rank)))
        corrected[i] = p, divisor
    return [
        _with_interval(replace(d, p=corrected[i][0], comparisons=len(order), divisor=corrected[i][1]))
        if i in corrected
        else replace(d, comparisons=len(order))
        for i, d in enumerate(differences)
    ]


def _with_interval(difference: Difference) -> Difference:
    """Add the interval at this comparison's level, limited to the possible differences."""
    if not difference.spread:
        return difference
    from scipy.stats import t

    n, level = difference.seeds, LEVEL / difference.divisor
    half = float(t.ppf(1 - level / 2, n - 1)) * difference.spread / math.sqrt(n)
    return replace(
        difference,
        low=max(-difference.limit, difference.mean - half),
        high=min(difference.limit, difference.mean + half),
    )


def _power(effect: float, seeds: int, level: float) -> float:
    """Return the probability that a paired t test finds a mean difference of `effect` standard deviations."""
    from scipy.stats import nct, t

    critical, centre = float(t.ppf(1 - level / 2, seeds - 1)), effect * math.sqrt(seeds)
    return float(nct.sf(critical, seeds - 1, centre) + nct.cdf(-critical, seeds - 1, centre))
