"""Paired differences: Student's t by another program, Holm's method by hand, honest where seeds are few."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import ttest_rel

from fedskew.results.ranking import find_metric
from fedskew.results.significance import Difference, holm, leads, paired

ONE = {0: 0.71, 1: 0.69, 2: 0.74, 3: 0.70}
OTHER = {0: 0.66, 1: 0.68, 2: 0.70, 3: 0.64, 9: 0.10}


def test_p_and_interval_are_those_of_the_paired_t_test() -> None:
    found = paired(ONE, OTHER)
    reference = ttest_rel([ONE[s] for s in range(4)], [OTHER[s] for s in range(4)])
    interval = reference.confidence_interval(0.95)
    assert found is not None
    assert found.seeds == 4, "seed 9 has no partner"
    assert found.p == pytest.approx(reference.pvalue)
    assert (found.low, found.high) == pytest.approx((interval.low, interval.high))


@pytest.mark.parametrize("seeds", [1, 2])
def test_fewer_than_three_seeds_are_not_tested(seeds: int) -> None:
    """Two seeds once gave an interval from -255.9 to +257.3 points."""
    found = paired({s: 0.9 + s / 50 for s in range(seeds)}, {s: 0.1 + s / 20 for s in range(seeds)})
    assert found is not None
    assert (found.seeds, found.wins, found.mean) == (seeds, seeds, pytest.approx(0.8 if seeds == 1 else 0.785))
    assert (found.p, found.low, found.high, found.significant, found.seeds_to_settle) == (None, None, None, False, None)


def test_methods_without_a_common_seed_cannot_be_paired() -> None:
    assert paired({0: 0.9}, {1: 0.1}) is None


def test_the_same_result_twice_is_no_difference() -> None:
    found = paired(ONE, ONE)
    assert found is not None
    assert (found.mean, found.p, found.significant) == (0, 1.0, False)


def test_a_difference_that_varies_by_rounding_only_is_not_tested() -> None:
    one, other = {0: 0.7, 1: 0.4, 2: 0.2}, {0: 0.6, 1: 0.3, 2: 0.1}
    assert one[0] - other[0] != one[1] - other[1], "of floating point"
    found = paired(one, other)
    assert found is not None
    assert (found.mean, found.wins, found.p) == (pytest.approx(0.1), 3, None)
    assert not found.significant


def with_p(p: float | None) -> Difference:
    return Difference(3, 0.1, p=p)


def test_holm_multiplies_the_smallest_most_and_keeps_the_order() -> None:
    corrected = [d.p for d in holm([with_p(p) for p in (0.01, 0.04, 0.03, 0.005)])]
    assert corrected == pytest.approx([0.03, 0.06, 0.06, 0.02])


def test_what_has_no_p_is_not_counted() -> None:
    found = holm([with_p(None), with_p(0.04)])
    assert [(d.p, d.comparisons) for d in found] == [(None, 1), (0.04, 1)]


shares = st.floats(0, 1).map(lambda share: round(share, 3))


@given(st.integers(3, 6).flatmap(lambda n: st.lists(st.lists(shares, min_size=n, max_size=n), min_size=2, max_size=5)))
def test_an_interval_excludes_zero_exactly_if_the_difference_is_significant(values: list[list[float]]) -> None:
    best, *others = [dict(enumerate(row)) for row in values]
    for found in holm([d for other in others if (d := paired(best, other)) is not None]):
        if found.low is None or found.high is None:
            assert not found.significant
            continue
        assert -1 <= found.low <= found.mean <= found.high <= 1
        assert (found.low > 0 or found.high < 0) == found.significant


def test_a_method_chosen_beforehand_needs_fewer_comparisons_than_the_best_one() -> None:
    """71 % against 31 % with three seeds. If the first method is the best of four, all six pairs count."""
    best = {0: 0.70, 1: 0.73, 2: 0.70}
    others = [{0: 0.25, 1: 0.30, 2: 0.38}, {0: 0.30, 1: 0.33, 2: 0.31}, {0: 0.28, 1: 0.34, 2: 0.31}]
    chosen_beforehand = holm([d for other in others if (d := paired(best, other)) is not None])
    assert all(d.significant and d.wins == 3 for d in chosen_beforehand)
    for lead, difference in zip(leads([best, *others]), chosen_beforehand, strict=True):
        assert lead is not None
        assert (lead.comparisons, difference.comparisons) == (6, 3)
        assert lead.p > difference.p


@pytest.mark.parametrize(("effect", "seeds"), [(1.5, 6), (1.0, 10), (0.8, 15), (0.65, 21), (0.5, None)])
def test_the_seeds_that_would_settle_it_are_those_of_power_tables(effect: float, seeds: int | None) -> None:
    """A two-sided paired t test at 5 % with a power of 80 %; for an effect of 0.5 it takes 34."""
    assert Difference(3, effect / 100, spread=0.01, p=0.2).seeds_to_settle == seeds


def test_more_comparisons_need_more_seeds_and_what_is_settled_needs_none() -> None:
    alone = Difference(3, 0.02, spread=0.02, p=0.2)
    assert replace(alone, divisor=4).seeds_to_settle > alone.seeds_to_settle
    assert replace(alone, p=0.01).seeds_to_settle is None
    assert replace(alone, mean=0.0).seeds_to_settle is None
    assert replace(alone, mean=0.2).seeds_to_settle == 4, "one more than there are"


def test_after_the_first_insignificant_comparison_no_interval_excludes_0() -> None:
    """Alone, each of the two is significant at 5 %. Together, the smaller p is not, so neither is."""
    found = [paired({0: 0.5 + a, 1: 0.5 + b, 2: 0.5 + c}, dict.fromkeys(range(3), 0.5))
             for a, b, c in ((0.1, 0.12, 0.19), (0.1, 0.12, 0.18))]  # fmt: skip
    alone = [d for d in found if d is not None]
    assert all(d.significant and d.low is not None and d.low > 0 for d in alone)
    for corrected in holm(alone):
        assert not corrected.significant
        assert corrected.divisor == 2
        assert corrected.low is not None
        assert corrected.low < 0


def test_a_difference_of_kappa_may_exceed_1() -> None:
    """κ is from −1 to 1."""
    found = paired({0: 0.9, 1: 0.8, 2: 1.0}, {0: -0.6, 1: -0.5, 2: -0.9}, find_metric("kappa").limit)
    assert found is not None
    assert found.high is not None
    assert found.mean < found.high <= 2


def equal_methods(methods: int, seeds: int, comparisons: int) -> list[list[dict[int, float]]]:
    """Accuracies of equally good methods on splits that are not equally difficult, the best method first."""
    draws = np.random.default_rng(0).normal(0.7, 0.02, (comparisons, methods, seeds))
    draws += np.random.default_rng(1).normal(0, 0.05, (comparisons, 1, seeds))
    ranked = np.take_along_axis(draws, np.argsort(-draws.mean(axis=2), axis=1)[:, :, None], axis=1)
    return [[dict(enumerate(values)) for values in one] for one in ranked.tolist()]


def share_with_a_lead(many: list[list[dict[int, float]]], find: Callable[..., Sequence[Difference | None]]) -> float:
    found = [any(lead is not None and lead.significant for lead in find(values)) for values in many]
    return sum(found) / len(found)


@pytest.mark.parametrize("methods", [2, 5, 14])
def test_equal_methods_rarely_have_a_significant_lead(methods: int) -> None:
    """At most 5 % of comparisons, plus three standard errors of the simulation."""
    found = share_with_a_lead(equal_methods(methods, 5, 400), leads)
    assert found <= 0.05 + 3 * np.sqrt(0.05 * 0.95 / 400)


def test_a_correction_for_the_comparisons_with_the_best_method_only_is_not_enough() -> None:
    def only_with_the_best(values: list[dict[int, float]]) -> list[Difference]:
        return holm([d for other in values[1:] if (d := paired(values[0], other)) is not None])

    assert share_with_a_lead(equal_methods(14, 5, 200), only_with_the_best) > 0.1


def test_leads_are_corrected_for_all_pairs() -> None:
    values = [{s: a + b * s * s for s in range(4)} for a, b in ((0.8, 0.0), (0.6, 0.002), (0.5, 0.003), (0.3, 0.001))]
    found = leads(values)
    assert [lead.comparisons for lead in found if lead is not None] == [6, 6, 6]
    alone = [paired(values[0], other) for other in values[1:]]
    assert all(lead.p > one.p for lead, one in zip(found, alone, strict=True))
    (only,) = leads(values[:2])
    assert only == paired(values[0], values[1]), "two methods are one pair"


def test_pairs_without_a_common_seed_or_a_test_do_not_count() -> None:
    one = {0: 0.5, 1: 0.7, 2: 0.8}
    found = leads([one, {9: 0.1}, {s: a - 0.1 for s, a in one.items()}, {0: 0.3, 1: 0.2, 2: 0.5}])
    assert found[0] is None
    assert [lead is not None and (lead.p is None, lead.comparisons) for lead in found[1:]] == [(True, 2), (False, 2)]
    assert leads([]) == leads([one]) == []
