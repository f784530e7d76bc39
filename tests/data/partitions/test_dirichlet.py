"""The Dirichlet split against the papers' statistics and against a slow implementation of one draw."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedskew.data import Dirichlet
from fedskew.data.partitions.dirichlet import divide_class, log_gamma_variates
from fedskew.data.partitions.rule import Labels
from fedskew.randomness import generator

CIFAR10 = Labels(np.repeat(np.arange(10), 5000), tuple("0123456789"))


@pytest.mark.parametrize(("beta", "vacant"), [(0.5, 1.3), (0.1, 4.4), (0.05, 6.0)])
def test_vacant_classes_of_ten_clients(beta: float, vacant: float) -> None:
    rule = Dirichlet(10, beta)
    mean = np.mean([(rule.counts(CIFAR10, seed) == 0).sum(axis=1).mean() for seed in range(60)])
    assert mean == pytest.approx(vacant, abs=0.3)


def test_a_hundred_clients_at_beta_five_hundredths() -> None:
    counts = Dirichlet(100, 0.05).counts(CIFAR10, seed=0)
    assert counts.sum(axis=0).tolist() == [5000] * 10
    assert counts.sum(axis=1).min() >= 10
    assert (counts == 0).sum(axis=1).mean() == pytest.approx(7.2, abs=0.4)
    majority = counts * 10 > counts.sum(axis=1, keepdims=True)
    assert majority.sum(axis=1).mean() == pytest.approx(1.6, abs=0.3)


@pytest.mark.parametrize("shape", [0.05, 0.5, 3.0])
def test_log_gamma_variates_have_the_gamma_mean_and_variance(shape: float) -> None:
    variates = np.exp(log_gamma_variates(shape, (200, 1000), generator(0, "test")))
    assert variates.mean() == pytest.approx(shape, rel=0.03)
    assert variates.var() == pytest.approx(shape, rel=0.08)


def slow_divide(size: int, p: list[float], is_open: list[bool]) -> list[int]:
    """One class of one draw, as the papers' code words it."""
    kept = [share if allowed else 0.0 for share, allowed in zip(p, is_open, strict=True)]
    total = sum(kept)
    cuts, reached = [], 0.0
    for share in kept[:-1]:
        reached += share
        cuts.append(int(reached / total * size))
    return [end - start for start, end in zip([0, *cuts], [*cuts, size], strict=True)]


@given(
    size=st.integers(1, 10_000),
    p=st.lists(st.floats(1e-6, 1), min_size=2, max_size=20),
    closed=st.sets(st.integers(0, 19)),
)
def test_one_class_is_divided_as_by_the_slow_implementation(size: int, p: list[float], closed: set[int]) -> None:
    is_open = [k not in closed for k in range(len(p))]
    is_open[0] = True
    fast = divide_class(size, np.log(np.array([p])), np.array([is_open]))[0]
    slow = slow_divide(size, p, is_open)
    assert fast.sum() == size
    assert (fast >= 0).all()
    # A cut point that falls on a whole number may be rounded either way.
    assert np.abs(np.cumsum(fast) - np.cumsum(slow)).max() <= 1
    assert all(count == 0 for count, allowed in zip(fast[:-1], is_open[:-1], strict=True) if not allowed)


def test_a_client_with_its_even_share_gets_no_more() -> None:
    """The cap is tested before a class is added: what a client holds without its last class is below it."""
    for seed in range(20):
        counts = Dirichlet(10, 0.05).counts(CIFAR10, seed)
        held_before = np.cumsum(counts, axis=1) - counts
        assert (held_before[counts > 0] < 5000).all()


def test_a_tiny_beta_gives_whole_classes_to_single_clients() -> None:
    counts = Dirichlet(10, beta=1e-300).counts(CIFAR10, seed=0)
    assert sorted(counts[counts > 0].tolist()) == [5000] * 10


def test_a_huge_beta_gives_even_shares() -> None:
    counts = Dirichlet(10, beta=1e12).counts(CIFAR10, seed=0)
    assert np.abs(counts[:, 0] - 500).max() <= 1


def test_empty_classes_are_passed_over() -> None:
    labels = Labels(np.repeat([1, 3], 100), tuple("abcde"))
    counts = Dirichlet(4, 0.5).counts(labels, seed=0)
    assert counts.sum(axis=0).tolist() == [0, 100, 0, 100, 0]
