"""Max-pooling with the ReLU before it, against PyTorch's."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from kernel_cases import DEVICE, made, needs_triton
from torch import Tensor, nn

from fedskew.engine.kernels import pools_disjoint_windows, stacked_max_pool

SIDES = {"even": (6, 8, 2), "odd": (7, 5, 2), "windows of three": (9, 10, 3)}


def pooled(x: Tensor, layer: nn.MaxPool2d, relu: bool) -> Tensor:
    clients, samples = x.shape[:2]
    flat = layer((F.relu(x) if relu else x).flatten(0, 1))
    return flat.view(clients, samples, *flat.shape[1:])


@needs_triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("relu", [True, False])
@pytest.mark.parametrize("name", SIDES)
@pytest.mark.parametrize("channels", [5, 32])
def test_values_and_gradients_have_pytorchs_bits(name: str, relu: bool, channels: int, dtype: torch.dtype) -> None:
    h, w, side = SIDES[name]
    x = made(2, 3, channels, h, w, seed=1).to(dtype)
    x[0, 0, 1] = 0.5  # equal values: the first one gets the gradient
    x[0, 1] = -1.0  # nothing passes the ReLU
    layer = nn.MaxPool2d(side)
    ours, theirs = (x.clone().requires_grad_() for _ in range(2))
    y, expected = stacked_max_pool(ours, layer, relu), pooled(theirs, layer, relu)
    factors = made(*y.shape, seed=2).to(dtype)
    (y * factors).sum().backward()
    (expected * factors).sum().backward()
    assert torch.equal(y, expected)
    assert ours.grad is not None
    assert theirs.grad is not None
    assert torch.equal(ours.grad, theirs.grad)


@needs_triton
def test_not_a_number_is_not_hidden() -> None:
    x = torch.zeros(1, 1, 16, 4, 4, device=DEVICE)
    x[0, 0, 3, 1, 1] = torch.nan
    found = stacked_max_pool(x, nn.MaxPool2d(2), relu=True).isnan()
    assert found[0, 0, 3, 0, 0]
    assert found.sum() == 1


@pytest.mark.parametrize(
    ("layer", "disjoint"),
    [
        (nn.MaxPool2d(2), True),
        (nn.MaxPool2d((3, 3), stride=3), True),
        (nn.MaxPool2d(3, stride=2), False),
        (nn.MaxPool2d(2, padding=1), False),
        (nn.MaxPool2d(2, ceil_mode=True), False),
        (nn.MaxPool2d((2, 3)), False),
        (nn.AvgPool2d(2), False),
    ],
)
def test_only_square_windows_that_do_not_overlap_are_pooled_here(layer: nn.Module, disjoint: bool) -> None:
    assert pools_disjoint_windows(layer) == disjoint
