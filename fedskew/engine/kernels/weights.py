"""Weights of stacked layers in the dtype and order that the kernels read, and sums of a convolution's gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from fedskew.engine.kernels.availability import supported
from fedskew.engine.kernels.geometry import blocks, power_of_two
from fedskew.engine.kernels.launches import launch
from fedskew.engine.kernels.operations import operation

_BLOCK = 32
"""One program sums the gradients of this many positions of the axes [C, taps] for at most this many output channels."""
_RUN = 128
"""The maximum number of input channels of one output channel that one program packs."""
_CONVERTED = 2048
"""The number of weights that one program converts."""


def converted_weights(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return weights [K, …] in this dtype.

    If the clients' weights lie apart in memory, PyTorch converts value by value. The kernel converts runs of
    neighbouring values.
    """
    if weight.dtype == dtype or not (supported(weight, weight) and weight.numel() and weight[0].is_contiguous()):
        return weight.to(dtype)
    return _converted(weight, dtype)


@operation("stacked_converted_weights")
def _converted(weight: Tensor, dtype: torch.dtype) -> Tensor:
    from fedskew.engine.kernels.weights_programs import convert_program

    result, size = weight.new_empty(weight.shape, dtype=dtype), weight[0].numel()
    launch(convert_program, (blocks(size, _CONVERTED), len(weight)))(
        weight, result, weight.stride(0), size, SIZE=_CONVERTED, num_warps=8
    )
    return result


@_converted.register_fake
def _(weight: Tensor, dtype: torch.dtype) -> Tensor:
    return weight.new_empty(weight.shape, dtype=dtype)


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
    tap_slots = 1 << (taps - 1).bit_length()
    block_outs, run = (32, 4) if outputs_last else (1, power_of_two(1, max(4, _RUN * 32 // max(tap_slots, 32)), wide))
    launch(pack_program, (blocks(out, block_outs) * blocks(wide, run), clients))(
        weight, packed, weight.stride(0), *packed.stride()[1:], out, C=channels, WIDE=wide, TAPS=taps, OUTS=block_outs,
        CHANNELS=run, TAP_SLOTS=tap_slots, num_warps=4,
    )  # fmt: skip
    return packed


def summed_gradient(partial: Tensor, like: Tensor) -> Tensor:
    """Sum partial gradients [splits, K, kh·kw·wide, O] to the gradient of weights [K, O, C, kh, kw]."""
    from fedskew.engine.kernels.weights_programs import gradient_program

    clients, out, channels, kh, kw = like.shape
    taps, block_outs = kh * kw, power_of_two(16, _BLOCK, out)
    grad = like.new_empty(like.shape)
    launch(gradient_program, (blocks(channels * taps, _BLOCK) * blocks(out, block_outs), clients))(
        partial, grad, clients, len(partial), out, C=channels, WIDE=partial.shape[2] // taps, TAPS=taps, PLACES=_BLOCK,
        OUTS=block_outs, num_warps=4,
    )  # fmt: skip
    return grad
