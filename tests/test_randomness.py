"""Drawing without replacement, whatever the number to draw from."""

from __future__ import annotations

import numpy as np
import pytest

from fedskew import randomness
from fedskew.randomness import permutation, sample


@pytest.mark.parametrize(("m", "n"), [(1, 1), (3, 100), (100, 100), (5, 4095), (601, 4800)])
def test_a_sample_is_the_beginning_of_the_permutation(m: int, n: int) -> None:
    assert sample(m, n, 7, "clients", 3).tolist() == permutation(n, 7, "clients", 3)[:m].tolist()


@pytest.mark.parametrize("n", [0, 1, 2, 17, 640, 5000])
@pytest.mark.parametrize("values", [3, 1 << 20, 1 << 63])
def test_an_order_is_the_stable_one_even_of_equal_numbers(n: int, values: int) -> None:
    bits = np.random.default_rng(n).integers(0, values, n, dtype=np.uint64)
    assert randomness._order(bits).tolist() == np.argsort(bits, kind="stable").tolist()


@pytest.mark.parametrize(("m", "n"), [(1, 4096), (512, 4096), (10, 10**5), (500, 10**9)])
def test_few_of_many_are_different_and_within(m: int, n: int) -> None:
    for round_ in range(50):
        numbers = sample(m, n, 0, "clients", round_)
        assert len(set(numbers.tolist())) == m
        assert numbers.min() >= 0
        assert numbers.max() < n
        assert numbers.tolist() == sample(m, n, 0, "clients", round_).tolist()
        assert numbers.tolist() != sample(m, n, 1, "clients", round_).tolist()


def test_few_of_many_are_drawn_evenly() -> None:
    n, m, rounds = 4096, 512, 400
    times = np.bincount(np.concatenate([sample(m, n, 0, "clients", r) for r in range(rounds)]), minlength=n)
    expected, variance = rounds * m / n, rounds * m / n * (1 - m / n)
    chi_square = ((times - expected) ** 2 / variance).sum()
    assert abs(chi_square - n) < 5 * np.sqrt(2 * n)


def test_doubles_are_drawn_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(randomness, "_MANY", 8)
    seen = [tuple(sample(1, 8, seed, "clients")) for seed in range(200)]
    assert {number for numbers in seen for number in numbers} == set(range(8))
    assert all(len(set(sample(3, 24, seed, "clients").tolist())) == 3 for seed in range(500))
