"""FedGR's server term against its formula, and at its edges."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from fedskew import losses


def expected_gravitation(u: np.ndarray, present: np.ndarray) -> tuple[float, np.ndarray]:
    """The sum to minimise and its gradient, term by term."""
    clients, classes, _ = u.shape
    total, gradient = 0.0, np.zeros_like(u)
    for k in range(clients):
        for i in np.flatnonzero(present[k]):
            v = u[k, i].copy()
            others = [(z, j) for z in range(clients) if z != k for j in range(classes) if present[z, j]]
            strength = {(z, j): math.exp(u[z, j] @ v) for z, j in others}
            same = math.fsum(s for (_, j), s in strength.items() if j == i)
            every = math.fsum(strength.values())
            other = math.fsum(s for (_, j), s in strength.items() if j != i)
            if same:
                total -= math.log(same / every)
                for (z, j), s in strength.items():
                    gradient[z, j] += (s / every - (s / same if j == i else 0)) * v
            denominator = math.exp(v @ v) + other
            total -= math.log(math.exp(v @ v) / denominator)
            for (z, j), s in strength.items():
                if j != i:
                    gradient[z, j] += s / denominator * v
    return total, gradient


@st.composite
def heads(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    k, c, d = draw(st.integers(1, 4)), draw(st.integers(2, 4)), draw(st.integers(1, 3))
    return draw(arrays(np.float64, (k, c, d), elements=st.floats(-2, 2))), draw(arrays(np.bool_, (k, c)))


def gravitation_and_gradient(u: np.ndarray, present: np.ndarray) -> tuple[float, np.ndarray]:
    leaf = torch.from_numpy(u).requires_grad_()
    value = losses.gravitation(leaf, torch.from_numpy(present))
    (gradient,) = torch.autograd.grad(value, leaf)
    return value.item(), gradient.numpy()


@given(heads())
@settings(max_examples=20)
def test_gravitation_and_its_gradient_are_the_formulas(drawn: tuple[np.ndarray, np.ndarray]) -> None:
    value, gradient = gravitation_and_gradient(*drawn)
    expected, expected_gradient = expected_gravitation(*drawn)
    assert value == pytest.approx(expected, rel=1e-11, abs=1e-11)
    np.testing.assert_allclose(gradient, expected_gradient, rtol=1e-9, atol=1e-11)


@given(heads())
@settings(max_examples=12)
def test_rows_of_vacant_labels_get_no_correction(drawn: tuple[np.ndarray, np.ndarray]) -> None:
    _, gradient = gravitation_and_gradient(*drawn)
    assert (gradient[~drawn[1]] == 0).all()


def test_a_single_participant_has_no_gravitation() -> None:
    value, gradient = gravitation_and_gradient(np.ones((1, 3, 2)), np.array([[True, True, False]]))
    assert value == 0
    assert (gradient == 0).all()


def test_a_label_that_nobody_else_owns_is_repelled_but_not_attracted() -> None:
    u = np.array([[[1.0, 0.0], [0.0, 0.0]], [[0.0, 0.0], [0.5, 1.0]]])
    present = np.array([[True, False], [False, True]])
    value, gradient = gravitation_and_gradient(u, present)
    first, second = math.log(1 + math.exp(0.5 - 1.0)), math.log(1 + math.exp(0.5 - 1.25))
    assert value == pytest.approx(first + second, rel=1e-14)
    assert gradient[1, 1] @ u[0, 0] > 0  # minimising moves it against the other label's row


def test_clients_with_only_one_common_label_have_no_gradient() -> None:
    value, gradient = gravitation_and_gradient(np.ones((2, 2, 3)), np.array([[True, False], [True, False]]))
    assert value == 0
    assert (gradient == 0).all()


def test_descending_draws_equal_labels_together_and_drives_different_ones_apart() -> None:
    u = np.random.default_rng(0).normal(size=(3, 2, 4))
    _, gradient = gravitation_and_gradient(u, np.ones((3, 2), dtype=bool))
    moved = u - 0.01 * gradient

    def similarity(rows: np.ndarray, same: bool) -> float:
        pairs = [(k, i, z, j) for k in range(3) for z in range(3) if z != k for i in range(2) for j in range(2)]
        return sum(u[k, i] @ rows[z, j] for k, i, z, j in pairs if (i == j) == same)

    assert similarity(moved, same=True) > similarity(u, same=True)
    assert similarity(moved, same=False) < similarity(u, same=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_long_rows_do_not_overflow(dtype: torch.dtype) -> None:
    u = 1e3 * torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(0)).to(dtype)
    leaf = u.requires_grad_()
    value = losses.gravitation(leaf, torch.ones(3, 4, dtype=torch.bool))
    (gradient,) = torch.autograd.grad(value, leaf)
    assert value.isfinite()
    assert gradient.isfinite().all()


def test_vmap_maps_gravitation_over_rounds() -> None:
    rng = np.random.default_rng(1)
    u, present = torch.from_numpy(rng.normal(size=(3, 2, 4, 2))), torch.from_numpy(rng.random((3, 2, 4)) < 0.6)
    lifted = torch.func.vmap(losses.gravitation)(u, present)
    torch.testing.assert_close(lifted, torch.stack([losses.gravitation(a, b) for a, b in zip(u, present, strict=True)]))
