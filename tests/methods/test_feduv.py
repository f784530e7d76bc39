"""FedUV's two terms against the formulas in NumPy and SciPy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.spatial.distance import pdist

from fedskew.losses import IGNORE
from fedskew.methods.feduv import FedUV
from fedskew.methods.parts import Client, Outputs

CLIENT = Client(torch.tensor([3, 0, 4, 1]), {})


def batch(rows: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(rows, 4, dtype=torch.float64, generator=generator)
    features = torch.randn(rows, 6, dtype=torch.float64, generator=generator)
    return logits, features, torch.randint(0, 4, (rows,), generator=generator)


def expected(logits: torch.Tensor, features: torch.Tensor, variance: float, uniformity: float) -> float:
    z = logits.numpy()
    p = np.exp(z) / np.exp(z).sum(axis=1, keepdims=True)
    gamma = np.eye(4).std(axis=0, ddof=1).mean()
    missing = np.maximum(gamma - p.std(axis=0, ddof=1), 0).mean()
    distances = pdist(features.numpy(), "sqeuclidean")
    ordered = np.sort(distances[distances > 0])
    sigma = ordered[(len(ordered) - 1) // 2]  # the lower median, as in PyTorch
    return float(variance * missing + uniformity * np.exp(-distances / sigma).mean())


@pytest.mark.parametrize("rows", [2, 5, 12])
@pytest.mark.parametrize("weights", [(2.5, 0.5), (1.0, 0.0), (0.0, 1.0)])
def test_the_terms_follow_the_formula(rows: int, weights: tuple[float, float]) -> None:
    logits, features, y = batch(rows)
    features[-1] = features[0]  # a pair at distance 0 does not count for the median
    if rows == 2:
        features[-1] += 1
    found = FedUV(*weights).term(Outputs(logits, features), y, CLIENT)
    assert float(found) == pytest.approx(expected(logits, features, *weights), rel=1e-9)


@pytest.mark.parametrize("spread", [1e-2, 1e-3, 1e-4])
def test_features_far_from_the_origin_are_compared_exactly(spread: float) -> None:
    """Features that have nearly collapsed are those that the second term must push apart."""
    logits, features, y = batch(12)
    features = (1 + spread * features).float()
    found = FedUV(0.0, 1.0).term(Outputs(logits.float(), features), y, CLIENT)
    assert float(found) == pytest.approx(expected(logits, features.double(), 0.0, 1.0), rel=1e-5)
    assert found.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_features_that_differ_by_rounding_do_not_count_for_the_median(dtype: torch.dtype) -> None:
    """Otherwise, the median would be a rounding error here, and the gradient would be huge."""
    features = torch.full((5, 6), 3.0, dtype=dtype)
    for row in range(1, 4):
        features[row] = torch.nextafter(features[row - 1], torch.tensor(9.0, dtype=dtype))
    features[4] += 1
    leaf = features.requires_grad_()
    term = FedUV(0.0, 1.0).term(Outputs(torch.zeros(5, 4, dtype=dtype), leaf), torch.zeros(5), CLIENT)
    assert float(term.detach()) == pytest.approx((6 + 4 * np.exp(-1)) / 10, rel=1e-5)
    assert torch.autograd.grad(term, leaf)[0].abs().max() < 1


def test_padding_changes_nothing() -> None:
    logits, features, y = batch(7)
    whole = FedUV().term(Outputs(logits[:5], features[:5]), y[:5], CLIENT)
    padded = FedUV().term(Outputs(logits, features), torch.cat([y[:5], torch.full((2,), IGNORE)]), CLIENT)
    torch.testing.assert_close(padded, whole)


@pytest.mark.parametrize("case", ["one row", "equal rows", "only padding"])
def test_batches_without_spread_have_finite_gradients(case: str) -> None:
    logits, features, y = batch(4)
    if case == "one row":
        logits, features, y = logits[:1], features[:1], y[:1]
    elif case == "equal rows":
        logits, features = logits[:1].repeat(4, 1), features[:1].repeat(4, 1)
    else:
        y = torch.full((4,), IGNORE)
    leaves = [logits.clone().requires_grad_(), features.clone().requires_grad_()]
    term = FedUV().term(Outputs(leaves[0], leaves[1]), y, CLIENT)
    grads = torch.autograd.grad(term, leaves, allow_unused=True, materialize_grads=True)
    assert term.isfinite()
    assert all(grad.isfinite().all() for grad in grads)
    if case != "equal rows":
        assert term.item() == 0
