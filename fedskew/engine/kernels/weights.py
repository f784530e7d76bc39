"""Weights of stacked convolutions, rearranged for the kernels in one pass, and their gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from fedskew.engine.kernels.geometry import blocks

_SIZE = 256
"""The number of weights that one program rearranges."""


def packed_weights(weight: Tensor, wide: int, dtype: torch.dtype, outputs_last: bool = False) -> Tensor:
    """Return weights [K, O, C, kh, kw] as [K, O, kh·kw, wide] in this dtype, with zeros for channels beyond C.

    With `outputs_last`, the output channels O are contiguous in memory. Otherwise, the input channels are.
    """
    from fedskew.engine.kernels.weights_programs import pack_program

    clients, out, channels, kh, kw = weight.shape
    taps, shape = kh * kw, (clients, out, kh * kw, wide)
    if outputs_last:
        packed = weight.new_empty(clients, wide, taps, out, dtype=dtype).permute(0, 3, 2, 1)
    else:
        packed = weight.new_empty(shape, dtype=dtype)
    weight = weight if weight[0].is_contiguous() else weight.contiguous()
    pack_program[(blocks(out * taps * wide, _SIZE), clients)](
        weight, packed, weight.stride(0), *packed.stride()[1:], out, C=channels, WIDE=wide, TAPS=taps, SIZE=_SIZE,
        num_warps=4,
    )  # fmt: skip
    return packed


def summed_gradient(partial: Tensor, like: Tensor) -> Tensor:
    """Sum partial gradients [splits, K, kh·kw·wide, O] to the gradient of weights [K, O, C, kh, kw]."""
    from fedskew.engine.kernels.weights_programs import gradient_program

    clients, out, channels, kh, kw = like.shape
    splits, size = len(partial), partial.shape[2] * out
    grad = like.new_empty(like.shape)
    gradient_program[(blocks(size, _SIZE), clients)](
        partial, grad, clients, splits, out, C=channels, WIDE=partial.shape[2] // (kh * kw), TAPS=kh * kw, SIZE=_SIZE,
        num_warps=4,
    )  # fmt: skip
    return grad
