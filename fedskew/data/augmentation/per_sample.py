"""Helpers of the augmentations: draw random numbers from each sample's key, and move the pixels of each sample."""

from __future__ import annotations

import torch
from torch import Tensor

from fedskew.randomness import uniform


def draw_uniforms(keys: Tensor, first: int, count: int) -> Tensor:
    """Return draws `first` to `first + count - 1` of each key, [N, count]. They are uniform in [0, 1)."""
    numbers = torch.arange(first, first + count, device=keys.device)
    return uniform(keys.unsqueeze(1), numbers)


def integers_below(limit: int, uniforms: Tensor) -> Tensor:
    """Turn draws in [0, 1) into integers from 0 to `limit - 1`."""
    return (uniforms * limit).to(torch.int64)


def pick(images: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Return images whose pixel (y, x) comes from row `rows[n, y, x]` and column `columns[n, y, x]` of image n.

    The pixel is 0 if that position is outside the image. `rows` and `columns` are broadcast to [N, H, W].
    """
    height, width = images.shape[-2:]
    inside = (rows >= 0) & (rows < height) & (columns >= 0) & (columns < width)
    index = rows.clamp(0, height - 1) * width + columns.clamp(0, width - 1)
    flat = images.flatten(2)
    picked = flat.gather(2, index.flatten(1).unsqueeze(1).expand_as(flat)).view_as(images)
    return picked * inside.unsqueeze(1)
