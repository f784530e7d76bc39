"""Linear layers of stacked clients. The parameters' gradients have the parameters' layout and number format.

PyTorch's gradient of a product with transposed weights is itself transposed, and under autocast it has 16 bits.
Correcting the layout or the format would take a pass over memory. The largest layers of small networks are linear, so
these passes would be long.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fedskew.engine.kernels.availability import working_dtype
from fedskew.engine.kernels.weights import converted_weights


def stacked_linear(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply rows [K, n, in] by weights [K, out, in] and add biases [K, out]."""
    dtype = working_dtype(rows)
    # The weights in the working format are an argument, so that the backward pass need not convert them again.
    arguments = rows.to(dtype), weight, bias, converted_weights(weight.detach(), dtype)
    out: Tensor = _StackedLinear.apply(*arguments)  # type: ignore[no-untyped-call]
    return out


class _StackedLinear(torch.autograd.Function):
    @staticmethod
    def forward(rows: Tensor, weight: Tensor, bias: Tensor | None, converted: Tensor) -> Tensor:  # noqa: ARG004
        matrices = converted.transpose(1, 2)
        with torch.autocast(rows.device.type, enabled=False):
            if bias is None:
                return torch.bmm(rows, matrices)
            return torch.baddbmm(bias.to(rows.dtype).unsqueeze(1), rows, matrices)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG004
        rows, weight, bias, converted = inputs
        ctx.save_for_backward(rows, converted)
        ctx.weight_dtype, ctx.bias_dtype = weight.dtype, None if bias is None else bias.dtype

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rows, converted = ctx.saved_tensors
        (grad,) = grads
        grad_rows = grad_weight = grad_bias = None
        with torch.autocast(grad.device.type, enabled=False):
            if ctx.needs_input_grad[0]:
                grad_rows = torch.bmm(grad, converted)
            if ctx.needs_input_grad[1]:
                grad_weight = _product_in(ctx.weight_dtype, grad.transpose(1, 2), rows)
            if ctx.needs_input_grad[2]:
                grad_bias = grad.sum(1, dtype=ctx.bias_dtype)
        return grad_rows, grad_weight, grad_bias, None


def _product_in(dtype: torch.dtype, a: Tensor, b: Tensor) -> Tensor:
    """Return the matrix products in this dtype. A CPU or an old PyTorch first rounds them to the dtype of `a`."""
    if a.dtype != dtype and a.device.type == "cuda" and hasattr(torch.ops.aten.bmm, "dtype"):
        return torch.bmm(a, b, out_dtype=dtype)
    return torch.bmm(a, b).to(dtype)
