"""BatchNorm of stacked clients, with the activation that follows it. Statistics leave out the padding of batches.

Memory bandwidth limits the speed: both the forward and the backward pass read the images twice. The forward pass keeps
only its inputs and the statistics for the backward pass. The operations take and return contiguous images
[K, B, H, W, C]. Sums are computed in two stages, in a fixed order, so that results have the same bits each time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from fedskew.engine.kernels.geometry import alignment, blocks, channels_first, channels_last, is_power_of_two
from fedskew.engine.kernels.launches import launch
from fedskew.engine.kernels.operations import operation

Activation = Literal["none", "relu", "relu6"]
_BOUNDS = {"none": (-math.inf, math.inf), "relu": (0.0, math.inf), "relu6": (0.0, 6.0)}
"""The bounds of each activation's output."""


def stacked_batch_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, valid: Tensor | None, eps: float, activation: Activation
) -> tuple[Tensor, Tensor, Tensor]:
    """Normalise images [K, B, C, H, W] by each client's batch. Then apply weight and bias [K, C], and the activation.

    `valid` [K, B] is False for padding. None means that there is no padding. Padding is normalised, too, but does not
    count in the statistics, nor in the gradient's sums over a batch.

    Also return the mean and biased variance [K, C] in float32, without gradient.
    """
    y, mean, var = _forward(channels_last(x), weight, bias, valid, eps, activation)
    return channels_first(y), mean.detach(), var.detach()


@dataclass(frozen=True)
class Tiling:
    """How a pass over the images is divided into programs, with blocks of `rows` × `channels`.

    A row is a pixel of a sample.
    """

    rows: int
    channels: int
    warps: int
    splits: int
    """Number of parts that a client's rows are split into."""

    def constants(self) -> dict[str, int]:
        return {"ROWS": self.rows, "CHANNELS": self.channels, "num_warps": self.warps}


# -- block sizes, by shape ---------------------------------------------------------------------------------

_MULTIPROCESSORS = 132
"""Multiprocessors of an H200."""


_MAX_SPLITS = 128
"""Splits are limited because each program that reads the images a second time also reads the results of all splits."""


def _channel_block(clients: int, channels: int) -> int:
    """Return the number of channels per block: 128 or 64 if at most a quarter of them is padding, or else 32.

    With few clients, blocks are narrower, so that there are enough programs. There are only three widths, because each
    is compiled separately.
    """
    block_channels = next((c for c in (128, 64) if blocks(channels, c) * c * 3 <= channels * 4), 32)
    while block_channels > 32 and clients * blocks(channels, block_channels) * _MAX_SPLITS < 2 * _MULTIPROCESSORS:
        block_channels //= 2
    return block_channels


def tiling(clients: int, rows: int, channels: int, dtype: torch.dtype, *, backwards: bool) -> Tiling:
    """Return the tiling of the forward pass, or of the backward pass if `backwards`.

    A thread has two 16-byte loads in flight. In the backward pass, one of them is for the result's gradient. Rows are
    split so that about as many programs run as fit into the GPU's registers at once: four per multiprocessor in the
    forward pass and three in the backward pass. There are fewer splits if a program would get fewer than two blocks
    of rows.
    """
    block_channels = _channel_block(clients, channels)
    threads = 8 * 32  # 8 warps of 32 threads
    block_rows = threads * (16 if backwards else 32) // dtype.itemsize // block_channels
    programs = _MULTIPROCESSORS * (3 if backwards else 4)
    splits = min(
        blocks(rows, 2 * block_rows), max(1, programs // (clients * blocks(channels, block_channels))), _MAX_SPLITS
    )
    return Tiling(block_rows, block_channels, 8, splits)


# -- launches ----------------------------------------------------------------------------------------------


def _grid_and_chunk(x: Tensor, tiling: Tiling) -> tuple[tuple[int, int, int], int]:
    """Return the grid of programs, and the number of rows per split."""
    clients, samples, h, w, channels = x.shape
    chunk = blocks(blocks(samples * h * w, tiling.rows), tiling.splits) * tiling.rows
    return (blocks(channels, tiling.channels), clients, tiling.splits), chunk


def _by_client(values: Tensor | None, x: Tensor) -> tuple[Tensor, int]:
    """Return a tensor [K, C] with contiguous rows, and the stride between them.

    If the tensor is missing, return the images in its place, as a pointer that the program does not use.
    """
    if values is None:
        return x, 0
    values = values if values.stride(1) == 1 or values.shape[1] == 1 else values.contiguous()
    return values, values.stride(0)


def _sizes(x: Tensor) -> tuple[int, int, int]:
    """Return the numbers of samples, of pixels per sample, and of channels divided by their `alignment`."""
    _, samples, h, w, channels = x.shape
    return samples, h * w, channels // alignment(channels)


def _as_bytes(valid: Tensor | None, x: Tensor) -> Tensor:
    """Return the mask as bytes. If it is missing, return the images in its place, as in `_by_client`."""
    return x if valid is None else valid.contiguous().view(torch.uint8)


def launch_statistics(x: Tensor, valid: Tensor | None, tiling: Tiling) -> tuple[Tensor, Tensor]:
    """Return means and sums of squared deviations [splits, K, 2, C], and numbers of rows [splits, K].

    Padding does not count.
    """
    from fedskew.engine.kernels.batch_norm_programs import statistics_program

    clients, channels = x.shape[0], x.shape[4]
    grid, chunk = _grid_and_chunk(x, tiling)
    partial = x.new_empty(tiling.splits, clients, 2, channels, dtype=torch.float32)
    counts = x.new_empty(tiling.splits, clients, dtype=torch.float32)
    launch(statistics_program, grid)(
        x,
        _as_bytes(valid, x),
        partial,
        counts,
        *_sizes(x),
        chunk,
        ALIGNED=alignment(channels),
        SHIFTS=is_power_of_two(x.shape[2] * x.shape[3]),
        HAS_VALID=valid is not None,
        maxnreg=64,  # leaves enough registers for four programs per multiprocessor
        **tiling.constants(),
    )
    return partial, counts


def launch_normalisation(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    partial: tuple[Tensor, Tensor],
    eps: float,
    activation: str,
    tiling: Tiling,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return normalised and activated images, mean and variance. `partial` is the result of `launch_statistics`."""
    from fedskew.engine.kernels.batch_norm_programs import normalisation_program

    clients, channels = x.shape[0], x.shape[4]
    grid, chunk = _grid_and_chunk(x, tiling)
    y = torch.empty_like(x)
    mean, var = (x.new_empty(clients, channels, dtype=torch.float32) for _ in range(2))
    scale, scale_stride = _by_client(weight, x)
    shift, shift_stride = _by_client(bias, x)
    launch(normalisation_program, grid)(
        x,
        scale,
        shift,
        *partial,
        y,
        mean,
        var,
        *_sizes(x),
        chunk,
        tiling.splits,
        scale_stride,
        shift_stride,
        eps,
        *_BOUNDS[activation],
        ALIGNED=alignment(channels),
        HAS_WEIGHT=weight is not None,
        HAS_BIAS=bias is not None,
        **tiling.constants(),
    )
    return y, mean, var


@dataclass(frozen=True)
class SavedForBackward:
    """What the backward pass needs from the forward pass."""

    x: Tensor
    weight: Tensor | None
    bias: Tensor | None
    valid: Tensor | None
    mean: Tensor
    var: Tensor
    eps: float
    activation: str

    def pointers(self) -> tuple[Tensor, ...]:
        x = self.x
        scale, shift = _by_client(self.weight, x)[0], _by_client(self.bias, x)[0]
        return x, scale, shift, _as_bytes(self.valid, x), self.mean, self.var

    def numbers(self) -> tuple[int | float, ...]:
        return _by_client(self.weight, self.x)[1], _by_client(self.bias, self.x)[1], self.eps

    def constants(self) -> dict[str, Any]:
        return {
            "ALIGNED": alignment(self.x.shape[4]),
            "SHIFTS": is_power_of_two(self.x.shape[2] * self.x.shape[3]),
            "HAS_WEIGHT": self.weight is not None,
            "HAS_BIAS": self.bias is not None,
            "HAS_VALID": self.valid is not None,
            "ACTIVATION": self.activation,
        }


def launch_gradient_sums(grad: Tensor, saved: SavedForBackward, tiling: Tiling) -> Tensor:
    """Return the sums of the gradient and of its product with the normalised images: [splits, K, 2, C]."""
    from fedskew.engine.kernels.batch_norm_programs import gradient_sums_program

    x = saved.x
    grid, chunk = _grid_and_chunk(x, tiling)
    partial = x.new_empty(tiling.splits, x.shape[0], 2, x.shape[4], dtype=torch.float32)
    launch(gradient_sums_program, grid)(
        grad,
        *saved.pointers(),
        partial,
        *_sizes(x),
        chunk,
        *saved.numbers(),
        **saved.constants(),
        **tiling.constants(),
    )
    return partial


def launch_input_gradient(
    grad: Tensor, saved: SavedForBackward, partial: Tensor, tiling: Tiling
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of images, weight and bias."""
    from fedskew.engine.kernels.batch_norm_programs import input_gradient_program

    x = saved.x
    grid, chunk = _grid_and_chunk(x, tiling)
    grad_x = torch.empty_like(x)
    grad_weight, grad_bias = torch.empty_like(saved.mean), torch.empty_like(saved.mean)
    launch(input_gradient_program, grid)(
        grad,
        *saved.pointers(),
        partial,
        grad_x,
        grad_weight,
        grad_bias,
        *_sizes(x),
        chunk,
        len(partial),
        *saved.numbers(),
        **saved.constants(),
        **tiling.constants(),
    )
    return grad_x, grad_weight, grad_bias


# -- operations --------------------------------------------------------------------------------------------


def _tiling_for(x: Tensor, *, backwards: bool) -> Tiling:
    clients, samples, h, w, channels = x.shape
    return tiling(clients, samples * h * w, channels, x.dtype, backwards=backwards)


@operation("stacked_batch_norm")
def _forward(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, valid: Tensor | None, eps: float, activation: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Return images, mean and variance."""
    x = x.contiguous()
    cut = _tiling_for(x, backwards=False)
    return launch_normalisation(x, weight, bias, launch_statistics(x, valid, cut), eps, activation, cut)


@operation("stacked_batch_norm_gradient")
def _gradient(
    grad: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    valid: Tensor | None,
    mean: Tensor,
    var: Tensor,
    eps: float,
    activation: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of images, weight and bias."""
    grad, x = grad.contiguous(), x.contiguous()
    cut = _tiling_for(x, backwards=True)
    saved = SavedForBackward(x, weight, bias, valid, mean.contiguous(), var.contiguous(), eps, activation)
    return launch_input_gradient(grad, saved, launch_gradient_sums(grad, saved, cut), cut)


@_forward.register_fake
def _(
    x: Tensor,
    weight: Tensor | None,  # noqa: ARG001
    bias: Tensor | None,  # noqa: ARG001
    valid: Tensor | None,  # noqa: ARG001
    eps: float,  # noqa: ARG001
    activation: str,  # noqa: ARG001
) -> tuple[Tensor, Tensor, Tensor]:
    mean, var = (x.new_empty(x.shape[0], x.shape[4], dtype=torch.float32) for _ in range(2))
    return x.new_empty(x.shape), mean, var


@_gradient.register_fake
def _(
    grad: Tensor,  # noqa: ARG001
    x: Tensor,
    weight: Tensor | None,  # noqa: ARG001
    bias: Tensor | None,  # noqa: ARG001
    valid: Tensor | None,  # noqa: ARG001
    mean: Tensor,
    var: Tensor,
    eps: float,  # noqa: ARG001
    activation: str,  # noqa: ARG001
) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), mean.new_empty(mean.shape), var.new_empty(var.shape)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    *tensors, ctx.eps, ctx.activation = inputs
    ctx.save_for_backward(*tensors, *output[1:])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    x, weight, bias, valid, mean, var = ctx.saved_tensors
    found = _gradient(grad.contiguous(), x, weight, bias, valid, mean, var, ctx.eps, ctx.activation)
    gradients = zip(found, (x, weight, bias), ctx.needs_input_grad, strict=False)
    return *(g.to(t.dtype) if needed else None for g, t, needed in gradients), None, None, None


_forward.register_autograd(_backward, setup_context=_save_for_backward)
