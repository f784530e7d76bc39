"""Drawing without replacement, whatever the number to draw from; keyed random bits."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fedskew import randomness
from fedskew.randomness import fold, permutation, sample, uniform


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
    monkeypatch.setattr(randomness, "_SMALL", 8)
    seen = [tuple(sample(1, 8, seed, "clients")) for seed in range(200)]
    assert {number for numbers in seen for number in numbers} == set(range(8))
    assert all(len(set(sample(3, 24, seed, "clients").tolist())) == 3 for seed in range(500))


def _mixed(x: int) -> int:
    """Wellons' lowbias32 in Python's integers."""
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B), (16, 1)):
        x = ((x ^ (x >> shift)) * factor) % 2**32
    return x


_NUMBERS = st.integers(0, 2**32 - 1) | st.sampled_from([0, 0x61C88646, 0x61C88647, 2**31, 2**32 - 1])


@given(_NUMBERS, _NUMBERS)
def test_a_key_and_a_value_give_the_same_bits_whether_the_value_is_a_tensor(key: int, value: int) -> None:
    wanted = _mixed(_mixed(key) ^ _mixed((value + 0x9E3779B9) % 2**32))
    keys = torch.tensor([key])
    assert fold(keys, value).item() == wanted
    assert fold(keys, torch.tensor(value)).item() == wanted


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_compiled_for_a_gpu_random_bits_are_the_same() -> None:
    def draws(keys: Tensor) -> tuple[Tensor, Tensor]:
        places = torch.arange(50, device=keys.device)
        return fold(keys[:, None], places), uniform(fold(keys[:, None], 3), places + 2**31)

    keys = torch.randint(0, 2**32, (100,))
    compiled = torch.compile(draws, dynamic=False)(keys.cuda())
    assert all(torch.equal(here.cpu(), there) for here, there in zip(compiled, draws(keys), strict=True))
