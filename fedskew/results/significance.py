"""Significance of the differences between methods, paired over seeds.

With the same seed, all methods get the same split and, with few exceptions, the same clients and batches. So their
results can be subtracted seed by seed, and different seeds give independent differences. The differences are tested
with Student's t test. It assumes that they are roughly normal, which cannot be checked with a few seeds. With fewer
than three seeds, nothing is tested.

Comparisons with a method that was chosen beforehand, such as FedAvg in `fedskew choose`, are corrected together by
Holm's method. The best method of a comparison is chosen on the same seeds on which it is tested, and chance alone makes
one method the best. So `leads` corrects for all pairs of methods: whichever method is the best, its pairs are among
these. If all methods are equally good, the best one then has a significant lead in at most 5 % of cases. With a
correction for the 13 pairs of the best of 14 methods alone, it had one in 13 % of cases (five seeds).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

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
    found = _subtract(first, second, limit)
    return None if found is None else _with_intervals([replace(found, p=_p_values([found])[0])])[0]


def leads(values: Sequence[Mapping[int, float]], limit: float = 1.0) -> list[Difference | None]:
    """Compare the first method with each other one, by seed. p is corrected for all pairs of methods.

    `values` has each method's values by seed. The first method may thus be chosen by these values. A lead is None for a
    method that shares no seed with the first.
    """
    pairs = [_subtract(first, second, limit) for first, second in combinations(values, 2)]
    ps = iter(_p_values([pair for pair in pairs if pair is not None]))
    steps = _holm_steps([None if pair is None else next(ps) for pair in pairs])
    with_first = list(zip(pairs, steps, strict=True))[: max(0, len(values) - 1)]
    corrected = iter(_with_intervals([replace(pair, **vars(step)) for pair, step in with_first if pair is not None]))
    return [None if pair is None else next(corrected) for pair, _ in with_first]


def holm(differences: Sequence[Difference]) -> list[Difference]:
    """Correct p-values and intervals for the number of comparisons.

    The comparisons are sorted by p. With m comparisons, the first is tested at the level 5 % / m, the second at
    5 % / (m − 1), and so on. The comparisons after the first that is not significant are not significant either, and
    have the same level.
    """
    steps = _holm_steps([d.p for d in differences])
    return _with_intervals([replace(d, **vars(step)) for d, step in zip(differences, steps, strict=True)])


@dataclass
class _Correction:
    """The fields of a `Difference` that Holm's method sets."""

    p: float | None
    comparisons: int
    divisor: int = 1


def _holm_steps(ps: Sequence[float | None]) -> list[_Correction]:
    """Correct p-values. None, for what was not tested, stays None and does not count."""
    order = sorted((p, i) for i, p in enumerate(ps) if p is not None)
    found = [_Correction(None, len(order)) for _ in ps]
    p, divisor = 0.0, len(order)
    for rank, (raw, i) in enumerate(order):
        divisor = len(order) - rank if p < LEVEL else divisor
        p = max(p, min(1.0, raw * (len(order) - rank)))
        found[i] = _Correction(p, len(order), divisor)
    return found


def _subtract(first: Mapping[int, float], second: Mapping[int, float], limit: float) -> Difference | None:
    """Return the difference without p. None if the two share no seed."""
    differences = [value - second[seed] for seed, value in sorted(first.items()) if seed in second]
    if not differences:
        return None
    n, mean = len(differences), math.fsum(differences) / len(differences)
    spread = None
    if n >= MIN_SEEDS:
        found = math.sqrt(math.fsum((d - mean) ** 2 for d in differences) / (n - 1))
        spread = 0.0 if found < NO_SPREAD else found
    return Difference(n, mean, sum(d > NO_SPREAD for d in differences), spread, limit=limit)


def _p_values(differences: Sequence[Difference]) -> list[float | None]:
    """Return the p-values. There is one call of scipy for all, because each takes long."""
    varying = [d for d in differences if d.spread]
    ps: list[float] = []
    if varying:
        from scipy.stats import t

        statistics = [abs(d.mean) / (d.spread or math.nan) * math.sqrt(d.seeds) for d in varying]
        ps = (2 * t.sf(statistics, [d.seeds - 1 for d in varying])).tolist()
    found = iter(ps)
    return [next(found) if d.spread else _p_without_spread(d) for d in differences]


def _p_without_spread(difference: Difference) -> float | None:
    """Return 1 if all differences are 0. If all are equal, but not 0, chance cannot be estimated."""
    return 1.0 if difference.spread == 0 and difference.is_zero else None


def _with_intervals(differences: Sequence[Difference]) -> list[Difference]:
    """Add the interval of each comparison at its level, limited to the possible differences."""
    varying = [d for d in differences if d.spread]
    if not varying:
        return list(differences)
    from scipy.stats import t

    critical = iter(t.ppf([1 - LEVEL / d.divisor / 2 for d in varying], [d.seeds - 1 for d in varying]).tolist())
    return [_with_interval(d, next(critical) * d.spread / math.sqrt(d.seeds)) if d.spread else d for d in differences]


def _with_interval(difference: Difference, half: float) -> Difference:
    low, high = difference.mean - half, difference.mean + half
    return replace(difference, low=max(-difference.limit, low), high=min(difference.limit, high))


def _power(effect: float, seeds: int, level: float) -> float:
    """Return the probability that a paired t test finds a mean difference of `effect` standard deviations."""
    from scipy.stats import nct, t

    critical, centre = float(t.ppf(1 - level / 2, seeds - 1)), effect * math.sqrt(seeds)
    return float(nct.sf(critical, seeds - 1, centre) + nct.cdf(-critical, seeds - 1, centre))
