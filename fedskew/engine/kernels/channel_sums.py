"""Sums of images over samples and pixels, for the gradient of a convolution's bias."""

from __future__ import annotations

import torch
from torch import Tensor

from fedskew.engine.kernels.geometry import blocks, power_of_two
from fedskew.engine.kernels.launches import launch
from fedskew.engine.kernels.operations import operation

_PROGRAMS = 1056
"""The number of programs to aim for: eight per multiprocessor of an H200, which has 132."""


def channel_sums(images: Tensor) -> Tensor:
    """Sum images [K, B, H, W, C] to [K, C] in float32, in two stages with a fixed order."""
    partial: Tensor = _partial_sums(images)
    return partial.sum(0)


def _cut(images: Tensor) -> tuple[int, int, int]:
    """Return the rows (pixels of samples) and channels of a block, and into how many splits the rows are cut.

    A thread has two 16-byte loads in flight.
    """
    clients, samples, h, w, channels = images.shape
    block_channels = power_of_two(16, 64, channels)
    block_rows = 4 * 32 * 32 // images.dtype.itemsize // block_channels  # 4 warps of 32 threads, 32 bytes each
    splits = min(
        blocks(samples * h * w, 4 * block_rows), max(1, _PROGRAMS // (clients * blocks(channels, block_channels)))
    )
    return block_rows, block_channels, splits


@operation("stacked_channel_sums")
def _partial_sums(images: Tensor) -> Tensor:
    """Return partial sums: [splits, K, C]."""
    from fedskew.engine.kernels.channel_sums_programs import sums_program

    clients, samples, h, w, channels = images.shape
    block_rows, block_channels, splits = _cut(images)
    rows = samples * h * w
    partial = images.new_empty(splits, clients, channels, dtype=torch.float32)
    launch(sums_program, (blocks(channels, block_channels), clients, splits))(
        images.contiguous(),
        partial,
        rows,
        blocks(blocks(rows, block_rows), splits) * block_rows,
        C=channels,
        ROWS=block_rows,
        CHANNELS=block_channels,
        num_warps=4,
    )
    return partial


@_partial_sums.register_fake
def _(images: Tensor) -> Tensor:
    return images.new_empty(_cut(images)[2], images.shape[0], images.shape[4], dtype=torch.float32)
