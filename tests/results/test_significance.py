"""Paired differences: Student's t by another program, Holm's method by hand, honest where seeds are few."""

from __future__ import annotations

import pytest
from scipy.stats import ttest_rel

from fedskew.results.significance import Difference, holm, paired

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


def test_one_seed_says_nothing_of_chance() -> None:
    found = paired({0: 0.9}, {0: 0.1})
    assert found == Difference(1, pytest.approx(0.8))
    assert found is not None
    assert not found.significant


def test_methods_without_a_common_seed_cannot_be_paired() -> None:
    assert paired({0: 0.9}, {1: 0.1}) is None


def test_the_same_result_twice_is_no_difference() -> None:
    found = paired(ONE, ONE)
    assert found is not None
    assert (found.mean, found.p, found.significant) == (0, 1.0, False)


def test_a_difference_that_varies_by_rounding_only_is_not_significant() -> None:
    one, other = {0: 0.7, 1: 0.4}, {0: 0.6, 1: 0.3}
    assert one[0] - other[0] != one[1] - other[1], "of floating point"
    found = paired(one, other)
    assert found == Difference(2, pytest.approx(0.1))
    assert found is not None
    assert not found.significant


def test_holm_multiplies_the_smallest_most_and_keeps_the_order() -> None:
    ps = [0.01, 0.04, 0.03, 0.005]
    corrected = [d.p for d in holm([Difference(3, 0.1, 0, 1, p) for p in ps])]
    assert corrected == pytest.approx([0.03, 0.06, 0.06, 0.02])


def test_what_has_no_p_is_not_counted() -> None:
    assert [d.p for d in holm([Difference(1, 0.1), Difference(2, 0.1, 0, 1, 0.04)])] == [None, 0.04]
