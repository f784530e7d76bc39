"""Linear layers of stacked clients, against PyTorch's own in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from kernel_cases import DEVICE, INTERPRETED, assert_close, made, needs_triton

from fedskew.engine.kernels import stacked_linear


@pytest.mark.parametrize("with_bias", [True, False])
def test_it_is_each_clients_layer_with_gradients_in_the_layout_of_the_weights(with_bias: bool) -> None:
    rows, weight, bias = made(3, 5, 7, seed=1), made(3, 4, 7, seed=2), made(3, 4, seed=3)
    given = [t.requires_grad_() for t in ((rows, weight, bias) if with_bias else (rows, weight))]
    exact = [t.detach().double().requires_grad_() for t in given]
    y = stacked_linear(given[0], given[1], given[2] if with_bias else None)
    each = zip(exact[0], exact[1], exact[2] if with_bias else [None] * 3, strict=True)
    expected = torch.stack([F.linear(*one) for one in each])
    grads, wide = (torch.autograd.grad(out.square().sum(), leaves) for out, leaves in ((y, given), (expected, exact)))
    assert_close([y, *grads], [expected, *wide], 1e-5)
    assert grads[1].is_contiguous()


def test_under_autocast_weights_get_gradients_in_their_own_format() -> None:
    rows, weight, bias = (
        t.requires_grad_() for t in (made(2, 257, 16, seed=1), made(2, 4, 16, seed=2), made(2, 4, seed=3))
    )
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        y = stacked_linear(rows, weight, bias)
    grads = torch.autograd.grad(y.float().sum(), (rows, weight, bias))
    assert y.dtype == torch.bfloat16
    assert all(g.dtype == torch.float32 for g in grads)
    assert torch.equal(grads[2], torch.full_like(bias, 257.0))  # bfloat16 would round it to 256


@needs_triton
def test_weights_that_lie_apart_are_converted_to_pytorchs_bits() -> None:
    from fedskew.engine.kernels.weights import _converted, converted_weights

    dtype = torch.float16 if INTERPRETED else torch.bfloat16  # Triton's interpreter does not round to bfloat16
    arena = made(3, 3000, seed=4)
    weight = arena[:, 5 : 5 + 2211].view(3, 67, 33)
    assert torch.equal(converted_weights(weight, dtype), weight.to(dtype))
    torch.library.opcheck(_converted.overload, (weight, dtype))
