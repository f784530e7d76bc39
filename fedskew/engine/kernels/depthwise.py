"""Depthwise convolution of stacked clients. Memory bandwidth limits its speed, so blocks span contiguous channels.

The operations take and return contiguous images [K, B, H, W, C], and take weights [K, kh, kw, C].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedskew.engine.kernels.availability import working_dtype
from fedskew.engine.kernels.channel_sums import channel_sums
from fedskew.engine.kernels.geometry import Geometry, blocks, channels_first, channels_last, power_of_two
from fedskew.engine.kernels.launches import launch
from fedskew.engine.kernels.operations import operation


def stacked_depthwise_conv2d(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: tuple[int, int], padding: tuple[int, int]
) -> Tensor:
    """Apply `F.conv2d` with one group per channel to images [K, B, C, H, W], with weights [K, C, 1, kh, kw].

    The result is in channels-last memory, which is also the best layout for the images.
    """
    dtype = working_dtype(x)
    packed = weight.squeeze(2).permute(0, 2, 3, 1).to(dtype).contiguous()
    flat_bias = None if bias is None else bias.to(dtype)
    return channels_first(_forward(channels_last(x.to(dtype)), packed, flat_bias, stride, padding))


@dataclass(frozen=True)
class Tiling:
    """How a kernel is divided into programs."""

    pixels: int
    """Pixels per block. In `sliding_programs`, these are columns, of one or more samples."""
    channels: int
    warps: int = 4
    splits: int = 1
    """Number of parts that the pixels are split into, for the gradient of the weights."""

    def constants(self) -> dict[str, int]:
        return {"PIXELS": self.pixels, "CHANNELS": self.channels, "num_warps": self.warps, "num_stages": 2}


# -- block sizes, by shape ---------------------------------------------------------------------------------

_PROGRAMS = 1056
"""The number of programs to aim for in the gradient of the weights: eight for each of an H200's 132 multiprocessors."""


def _channel_block(channels: int) -> int:
    """Return the channels per block: the largest of 64, 32 and 16 that needs no padding, or else one that does."""
    return next((c for c in (64, 32, 16) if channels % c == 0), power_of_two(16, 64, channels))


def pass_tiling(shape: Geometry) -> Tiling:
    """Return the tiling of the forward pass and of the input's gradient, with 16 values per thread."""
    block_channels = _channel_block(shape.c)
    return Tiling(2048 // block_channels, block_channels)


def _can_slide(shape: Geometry) -> bool:
    """Return whether `sliding_programs` can process these images, row by row.

    These programs need stride 1 and a window of at least two rows. If the window were not larger than the padding, the
    padding of `Geometry.reversed` would be negative.
    """
    return shape.sh == shape.sw == 1 and 2 <= shape.kh > shape.ph and shape.kw > shape.pw


def weight_gradient_tiling(clients: int, samples: int, shape: Geometry) -> Tiling:
    """Return a tiling with 8 values per thread. A thread needs registers for a sum per value and tap."""
    block_channels = _channel_block(shape.c)
    pixels = 1024 // block_channels
    column_blocks = blocks(samples * shape.wo, pixels)
    max_splits = column_blocks if _can_slide(shape) else max(1, column_blocks * shape.ho // 8)
    splits = min(max_splits, blocks(_PROGRAMS, clients * blocks(shape.c, block_channels)))
    return Tiling(pixels, block_channels, splits=splits)


# -- launches ----------------------------------------------------------------------------------------------


def _sliding_constants(shape: Geometry) -> dict[str, int]:
    return {name: size for name, size in shape.constants().items() if name not in ("SH", "SW")}


def _launch_sliding(
    x: Tensor, weight: Tensor, bias: Tensor | None, shape: Geometry, tiling: Tiling, *, flipped: bool
) -> Tensor:
    from fedskew.engine.kernels.sliding_programs import convolution_program

    clients, samples = x.shape[:2]
    y = x.new_empty(clients, samples, shape.ho, shape.wo, shape.c)
    grid = (blocks(samples * shape.wo, tiling.pixels) * blocks(shape.c, tiling.channels), clients)
    launch(convolution_program, grid)(
        x.contiguous(),
        weight.contiguous(),
        None if bias is None else bias.contiguous(),
        y,
        samples,
        *shape.sizes(),
        int(flipped),
        **_sliding_constants(shape),
        HAS_BIAS=bias is not None,
        **tiling.constants(),
    )
    return y


def launch_forward(x: Tensor, weight: Tensor, bias: Tensor | None, shape: Geometry, tiling: Tiling) -> Tensor:
    from fedskew.engine.kernels.depthwise_programs import forward_program

    if _can_slide(shape):
        return _launch_sliding(x, weight, bias, shape, tiling, flipped=False)
    clients, samples = x.shape[:2]
    y = x.new_empty(clients, samples, shape.ho, shape.wo, shape.c)
    grid = (blocks(samples * shape.ho * shape.wo, tiling.pixels) * blocks(shape.c, tiling.channels), clients)
    launch(forward_program, grid)(
        x.contiguous(),
        weight.contiguous(),
        None if bias is None else bias.contiguous(),
        y,
        samples,
        *shape.sizes(),
        SHIFTS=shape.shifts,
        **shape.constants(),
        HAS_BIAS=bias is not None,
        **tiling.constants(),
    )
    return y


def launch_input_gradient(grad: Tensor, weight: Tensor, shape: Geometry, tiling: Tiling) -> Tensor:
    from fedskew.engine.kernels.depthwise_programs import input_gradient_program

    if _can_slide(shape):
        return _launch_sliding(grad, weight, None, shape.reversed(), tiling, flipped=True)
    clients, samples = grad.shape[:2]
    grad_x = grad.new_empty(clients, samples, shape.h, shape.w, shape.c)
    grid = (blocks(samples * shape.h * shape.w, tiling.pixels) * blocks(shape.c, tiling.channels), clients)
    launch(input_gradient_program, grid)(
        grad.contiguous(),
        weight.contiguous(),
        grad_x,
        samples,
        *shape.sizes(),
        SHIFTS=shape.shifts,
        **shape.constants(),
        **tiling.constants(),
    )
    return grad_x


def launch_weight_gradient(x: Tensor, grad: Tensor, shape: Geometry, tiling: Tiling) -> Tensor:
    """Return partial gradients [splits, K, taps, C]. The gradient is their sum."""
    from fedskew.engine.kernels.depthwise_programs import weight_gradient_program
    from fedskew.engine.kernels.sliding_programs import weight_gradient_program as sliding_program

    clients, samples = x.shape[:2]
    slides = _can_slide(shape)
    partial = x.new_empty(tiling.splits, clients, shape.taps, shape.c, dtype=torch.float32)
    length = samples * shape.wo * (1 if slides else shape.ho)
    chunk = blocks(blocks(length, tiling.pixels), tiling.splits) * tiling.pixels
    grid = (blocks(shape.c, tiling.channels), clients, tiling.splits)
    arguments = (x.contiguous(), grad.contiguous(), partial, samples, chunk, *shape.sizes())
    if slides:
        launch(sliding_program, grid)(*arguments, **_sliding_constants(shape), **tiling.constants())
    else:
        launch(weight_gradient_program, grid)(
            *arguments, SHIFTS=shape.shifts, **shape.constants(), **tiling.constants()
        )
    return partial


# -- operations --------------------------------------------------------------------------------------------


def _geometry(image: Sequence[int], window: Sequence[int], stride: Sequence[int], padding: Sequence[int]) -> Geometry:
    return Geometry.from_shapes(image, image[-1], window, stride, padding)


@operation("stacked_depthwise_conv2d")
def _forward(x: Tensor, weight: Tensor, bias: Tensor | None, stride: Sequence[int], padding: Sequence[int]) -> Tensor:
    shape = _geometry(x.shape, weight.shape[1:3], stride, padding)
    return launch_forward(x, weight, bias, shape, pass_tiling(shape))


@operation("stacked_depthwise_conv2d_input_gradient")
def _input_gradient(
    grad: Tensor, weight: Tensor, image: Sequence[int], stride: Sequence[int], padding: Sequence[int]
) -> Tensor:
    """Return the gradient of images of the given shape."""
    shape = _geometry(image, weight.shape[1:3], stride, padding)
    return launch_input_gradient(grad, weight, shape, pass_tiling(shape))


@operation("stacked_depthwise_conv2d_weight_gradient")
def _weight_gradient(
    x: Tensor, grad: Tensor, window: Sequence[int], stride: Sequence[int], padding: Sequence[int]
) -> Tensor:
    """Return partial sums [splits, K, kh·kw, C] of the gradient, in float32."""
    shape = _geometry(x.shape, window, stride, padding)
    return launch_weight_gradient(x, grad, shape, weight_gradient_tiling(x.shape[0], x.shape[1], shape))


@_forward.register_fake
def _(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,  # noqa: ARG001
    stride: Sequence[int],
    padding: Sequence[int],
) -> Tensor:
    shape = _geometry(x.shape, weight.shape[1:3], stride, padding)
    return x.new_empty(*x.shape[:2], shape.ho, shape.wo, shape.c)


@_input_gradient.register_fake
def _(
    grad: Tensor,
    weight: Tensor,  # noqa: ARG001
    image: Sequence[int],
    stride: Sequence[int],  # noqa: ARG001
    padding: Sequence[int],  # noqa: ARG001
) -> Tensor:
    return grad.new_empty(*image)


@_weight_gradient.register_fake
def _(
    x: Tensor,
    grad: Tensor,  # noqa: ARG001
    window: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
) -> Tensor:
    shape = _geometry(x.shape, window, stride, padding)
    splits = weight_gradient_tiling(x.shape[0], x.shape[1], shape).splits
    return x.new_empty(splits, x.shape[0], shape.taps, shape.c, dtype=torch.float32)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001
    x, weight, bias, ctx.stride, ctx.padding = inputs
    ctx.save_for_backward(x, weight)
    ctx.image = x.shape
    ctx.bias_dtype = None if bias is None else bias.dtype


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, weight = ctx.saved_tensors
    grad = grad.contiguous()
    grad_x = grad_weight = grad_bias = None
    if ctx.needs_input_grad[0]:
        grad_x = _input_gradient(grad, weight, ctx.image, ctx.stride, ctx.padding)
    if ctx.needs_input_grad[1]:
        partial = _weight_gradient(x, grad, weight.shape[1:3], ctx.stride, ctx.padding)
        grad_weight = partial.sum(0).view_as(weight).to(weight.dtype)
    if ctx.needs_input_grad[2]:
        grad_bias = channel_sums(grad).to(ctx.bias_dtype)
    return grad_x, grad_weight, grad_bias, None, None


_forward.register_autograd(_backward, setup_context=_save_for_backward)
