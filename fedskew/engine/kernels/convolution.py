"""Dense convolution of stacked clients, computed as one implicit matrix product per client.

The operations take and return contiguous images [K, B, H, W, C], so that their strides are right under `make_fx` and
`torch.compile`. Block sizes depend on shapes, never on timings, so that results have the same bits each time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fedskew.engine.kernels.availability import tf32_allowed, working_dtype
from fedskew.engine.kernels.channel_sums import channel_sums
from fedskew.engine.kernels.geometry import Geometry, alignment, blocks, channels_first, channels_last, power_of_two
from fedskew.engine.kernels.launches import launch
from fedskew.engine.kernels.operations import operation
from fedskew.engine.kernels.weights import packed_weights, summed_gradient


def stacked_conv2d(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: tuple[int, int], padding: tuple[int, int]
) -> Tensor:
    """Apply `F.conv2d` to each client's images [K, B, C, H, W], with weights [K, O, C, kh, kw] and biases [K, O].

    The result is in channels-last memory, which is also the best layout for the images.
    """
    images = channels_last(x.to(working_dtype(x)))
    if x.shape[2] == 3:  # add a channel of zeros, so that whole pixels can be loaded
        images = F.pad(images, (0, 1))
    return channels_first(_forward(images, weight, bias, stride, padding, tf32_allowed()))


@dataclass(frozen=True)
class Tiling:
    """How a kernel is divided into programs, and how many of the GPU's resources each program takes."""

    pixels: int
    """Pixels per block."""
    channels: int
    """Channels of the result per block."""
    depth: int
    """Products per step of a sum. For the gradient of the weights, rows per block (`weight_gradient_tiling`)."""
    warps: int
    stages: int
    splits: int = 1
    """Number of parts that the pixels are split into, for the gradient of the weights."""

    def constants(self) -> dict[str, int]:
        return {
            "PIXELS": self.pixels,
            "CHANNELS": self.channels,
            "DEPTH": self.depth,
            "num_warps": self.warps,
            "num_stages": self.stages,
        }


def _precision(dtype: torch.dtype, tf32: bool) -> str:
    """Return how float32 blocks are multiplied: in TF32, or by three TF32 products if plain TF32 is not allowed.

    Triton ignores this for 16-bit blocks.
    """
    return "tf32" if tf32 or dtype != torch.float32 else "tf32x3"


def _gradient_precision(dtype: torch.dtype, tf32: bool) -> str:
    """Return how blocks are multiplied for the weights' gradient, where one factor is transposed.

    TF32's tensor cores cannot read a transposed factor. Three products of bfloat16 are faster, and more exact.
    """
    return "bf16x3" if tf32 and dtype == torch.float32 else _precision(dtype, tf32)


# -- block sizes, by shape ---------------------------------------------------------------------------------

_MULTIPROCESSORS = 132
"""Multiprocessors of an H200."""


def product_tiling(columns: int, channels: int, taps: int, dtype: torch.dtype, tf32: bool) -> Tiling:
    """Return the tiling of the forward pass and of the input's gradient.

    The result is a matrix product with one column per channel of the result. Each entry is a sum over the `taps`
    (positions in the window) and over `channels` channels per tap. Blocks are as wide as the result, up to 128 columns,
    so that the images are read as few times as possible. If 16 divides `channels`, one step of the sum stays inside one
    tap. Otherwise, a step takes 32 products, or up to 128 if pixels have four channels of 16 bits, because such pixels
    are loaded whole. Exact float32 needs smaller blocks and steps, because a program holds each block in two parts.
    """
    if _precision(dtype, tf32) == "tf32x3":
        return Tiling(64, power_of_two(16, 64, columns), 32 if channels % 32 == 0 else 16, warps=4, stages=3)
    block_channels = power_of_two(16, 128, columns)
    is_16_bit = dtype != torch.float32
    in_tap = next((d for d in (64 if is_16_bit else 32, 32, 16) if channels % d == 0), None)
    if in_tap is not None:
        warps = 8 if block_channels == 128 or is_16_bit else 4
        return Tiling(128, block_channels, in_tap, warps, stages=2 if is_16_bit and block_channels < 128 else 3)
    depth = power_of_two(32, 128, taps * channels) if channels == 4 and is_16_bit else 32
    return Tiling(128, block_channels, depth, warps=8 if block_channels == 128 else 4, stages=2)


def weight_gradient_tiling(clients: int, samples: int, shape: Geometry, dtype: torch.dtype) -> Tiling:
    """Return the tiling of the weights' gradient, a matrix with a row per tap and input channel.

    Its columns are the output channels. A block has many rows, so that the output's gradient is read few times. If the
    number of input channels is not a multiple of 8 (16 in float32), a block has fewer pixels, because more would spill
    registers. Float32 blocks have fewer output channels, because they are multiplied in parts.
    """
    is_float32 = dtype == torch.float32
    depth = power_of_two(16, 64 if is_float32 and shape.c % 16 == 0 else 128, shape.depth)
    block_channels = power_of_two(16, 64 if is_float32 else 128, shape.o)
    pixels = 64 if shape.c % (16 if is_float32 else 8) == 0 else 32
    programs = clients * blocks(shape.depth, depth) * blocks(shape.o, block_channels)
    max_splits = max(1, samples * shape.ho * shape.wo // (8 * pixels))
    splits = min(max_splits, _even_splits(programs))
    warps = 8 if depth * block_channels == 128 * 128 else 4
    return Tiling(pixels, block_channels, depth, warps, stages=2 if is_float32 and pixels == 64 else 3, splits=splits)


def _even_splits(programs: int) -> int:
    """Return the number of splits that keeps the multiprocessors busy. Each should get two, three or four programs."""
    choices = [max(1, each * _MULTIPROCESSORS // programs) for each in (2, 3, 4)]

    def busy_share(splits: int) -> float:
        total = programs * splits
        return total / (blocks(total, _MULTIPROCESSORS) * _MULTIPROCESSORS)

    return next((splits for splits in choices if busy_share(splits) >= 0.9), max(choices, key=busy_share))


# -- launches ----------------------------------------------------------------------------------------------


def _has_fixed_sizes(shape: Geometry) -> bool:
    """Return whether to compile the sizes in. This makes narrow layers faster, and networks have few such shapes."""
    return min(shape.c, shape.o) < 128


def _shifts(shape: Geometry) -> bool:
    return shape.shifts and not _has_fixed_sizes(shape)


def _sizes(shape: Geometry) -> dict[str, int]:
    names = ("h", "w", "groups", "ho", "wo")
    return {**dict(zip(names, shape.sizes(), strict=True)), "out_groups": shape.o // alignment(shape.o)}


def _constants(shape: Geometry) -> dict[str, int]:
    return {**shape.constants(), "OUT_ALIGNED": alignment(shape.o)}


def launch_forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, shape: Geometry, tf32: bool, tiling: Tiling
) -> Tensor:
    """Convolve with weights [K, O, kh·kw, C]."""
    from fedskew.engine.kernels.convolution_programs import fixed_forward_program, forward_program

    clients, samples = x.shape[:2]
    y = x.new_empty(clients, samples, shape.ho, shape.wo, shape.o)
    grid = (blocks(samples * shape.ho * shape.wo, tiling.pixels) * blocks(shape.o, tiling.channels), clients)
    program = fixed_forward_program if _has_fixed_sizes(shape) else forward_program
    launch(program, grid)(
        x.contiguous(),
        weight.contiguous(),
        None if bias is None else bias.contiguous(),
        y,
        samples,
        **_sizes(shape),
        **_constants(shape),
        SHIFTS=_shifts(shape),
        HAS_BIAS=bias is not None,
        FEW=shape.c if shape.c % tiling.depth else 0,
        PRECISION=_precision(x.dtype, tf32),
        **tiling.constants(),
    )
    return y


def launch_input_gradient(
    grad: Tensor, weight: Tensor, samples: int, shape: Geometry, tf32: bool, tiling: Tiling
) -> Tensor:
    """Return the gradient of the images. Each client's weights in [K, O, kh·kw, C] may have any memory order."""
    from fedskew.engine.kernels.convolution_programs import fixed_input_gradient_program, input_gradient_program

    clients = len(grad)
    grad_x = grad.new_empty(clients, samples, shape.h, shape.w, shape.c)
    # Each program processes pixels of one phase (`input_gradient_program`).
    phase_pixels = blocks(shape.h, shape.sh) * blocks(shape.w, shape.sw)
    phases = shape.sh * shape.sw
    grid = (blocks(samples * phase_pixels, tiling.pixels) * blocks(shape.c, tiling.channels), clients, phases)
    program = fixed_input_gradient_program if _has_fixed_sizes(shape) else input_gradient_program
    launch(program, grid)(
        grad.contiguous(),
        weight,
        grad_x,
        samples,
        *weight.stride()[1:],
        **_sizes(shape),
        **_constants(shape),
        WHOLE=shape.o % tiling.depth == 0,
        # With 128 registers per thread, two programs fit on a multiprocessor.
        maxnreg=None if _has_fixed_sizes(shape) or tiling.warps < 8 else 128,
        PRECISION=_precision(grad.dtype, tf32),
        **tiling.constants(),
    )
    return grad_x


def launch_weight_gradient(x: Tensor, grad: Tensor, shape: Geometry, tf32: bool, tiling: Tiling) -> Tensor:
    """Return partial gradients [splits, K, taps·C, O]. The gradient is their sum."""
    from fedskew.engine.kernels.convolution_programs import fixed_weight_gradient_program, weight_gradient_program

    clients, samples = x.shape[:2]
    partial = x.new_empty(tiling.splits, clients, shape.depth, shape.o, dtype=torch.float32)
    chunk = blocks(blocks(samples * shape.ho * shape.wo, tiling.pixels), tiling.splits) * tiling.pixels
    grid = (blocks(shape.depth, tiling.depth) * blocks(shape.o, tiling.channels), clients, tiling.splits)
    program = fixed_weight_gradient_program if _has_fixed_sizes(shape) else weight_gradient_program
    launch(program, grid)(
        x.contiguous(),
        grad.contiguous(),
        partial,
        samples,
        chunk,
        **_sizes(shape),
        **_constants(shape),
        SHIFTS=_shifts(shape),
        PRECISION=_gradient_precision(x.dtype, tf32),
        **tiling.constants(),
    )
    return partial


# -- operations --------------------------------------------------------------------------------------------


@operation("stacked_conv2d")
def _forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: Sequence[int], padding: Sequence[int], tf32: bool
) -> Tensor:
    """Convolve images [K, B, H, W, C] with weights [K, O, C, kh, kw]. The images may have added channels of zeros."""
    shape = Geometry.from_shapes(x.shape, weight.shape[1], weight.shape[3:], stride, padding)
    tiling = product_tiling(shape.o, shape.c, shape.taps, x.dtype, tf32)
    return launch_forward(x, packed_weights(weight, shape.c, x.dtype), bias, shape, tf32, tiling)


@operation("stacked_conv2d_input_gradient")
def _input_gradient(
    grad: Tensor, weight: Tensor, image: Sequence[int], stride: Sequence[int], padding: Sequence[int], tf32: bool
) -> Tensor:
    """Return the gradient of images of the given shape."""
    shape = Geometry.from_shapes(image, weight.shape[1], weight.shape[3:], stride, padding)
    tiling = product_tiling(shape.c, shape.o, shape.taps, grad.dtype, tf32)
    # Tensor cores need a contiguous reduction axis for TF32.
    packed = packed_weights(weight, shape.c, grad.dtype, outputs_last=grad.dtype == torch.float32)
    return launch_input_gradient(grad, packed, image[1], shape, tf32, tiling)


@operation("stacked_conv2d_weight_gradient")
def _weight_gradient(
    x: Tensor, grad: Tensor, weight: Tensor, stride: Sequence[int], padding: Sequence[int], tf32: bool
) -> Tensor:
    """Return the gradient of these weights."""
    shape = Geometry.from_shapes(x.shape, grad.shape[-1], weight.shape[3:], stride, padding)
    tiling = weight_gradient_tiling(x.shape[0], x.shape[1], shape, x.dtype)
    return summed_gradient(launch_weight_gradient(x, grad, shape, tf32, tiling), weight)


@_forward.register_fake
def _(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,  # noqa: ARG001
    stride: Sequence[int],
    padding: Sequence[int],
    tf32: bool,  # noqa: ARG001
) -> Tensor:
    shape = Geometry.from_shapes(x.shape, weight.shape[1], weight.shape[3:], stride, padding)
    return x.new_empty(*x.shape[:2], shape.ho, shape.wo, shape.o)


@_input_gradient.register_fake
def _(
    grad: Tensor,
    weight: Tensor,  # noqa: ARG001
    image: Sequence[int],
    stride: Sequence[int],  # noqa: ARG001
    padding: Sequence[int],  # noqa: ARG001
    tf32: bool,  # noqa: ARG001
) -> Tensor:
    return grad.new_empty(*image)


@_weight_gradient.register_fake
def _(
    x: Tensor,  # noqa: ARG001
    grad: Tensor,  # noqa: ARG001
    weight: Tensor,
    stride: Sequence[int],  # noqa: ARG001
    padding: Sequence[int],  # noqa: ARG001
    tf32: bool,  # noqa: ARG001
) -> Tensor:
    return weight.new_empty(weight.shape)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001
    x, weight, bias, ctx.stride, ctx.padding, ctx.tf32 = inputs
    ctx.save_for_backward(x, weight)
    ctx.image = x.shape
    ctx.bias_dtype = None if bias is None else bias.dtype


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, weight = ctx.saved_tensors
    grad = grad.contiguous()
    grad_x = grad_weight = grad_bias = None
    if ctx.needs_input_grad[0]:
        grad_x = _input_gradient(grad, weight, ctx.image, ctx.stride, ctx.padding, ctx.tf32)
    if ctx.needs_input_grad[1]:
        grad_weight = _weight_gradient(x, grad, weight, ctx.stride, ctx.padding, ctx.tf32)
    if ctx.needs_input_grad[2]:
        grad_bias = channel_sums(grad).to(ctx.bias_dtype)
    return grad_x, grad_weight, grad_bias, None, None, None


_forward.register_autograd(_backward, setup_context=_save_for_backward)
