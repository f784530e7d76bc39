"""The rows of a batch: their targets, and which of them only pad it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

IGNORE = -100
"""The target of a row that pads a short batch (PyTorch's own convention): it counts for nothing."""


def real_rows(targets: Tensor) -> Tensor:
    return targets != IGNORE


def index(targets: Tensor) -> Tensor:
    """Targets that can index classes: padded rows point at class 0 and are masked out by `batch_mean`."""
    return targets.clamp(min=0)


def batch_mean(per_sample: Tensor, targets: Tensor | None) -> Tensor:
    """The mean over the rows that do not pad the batch."""
    if targets is None:
        return per_sample.mean()
    real = real_rows(targets)
    return torch.where(real, per_sample, 0.0).sum() / real.sum().clamp(min=1)


def class_masks(targets: Tensor, classes: int) -> Tensor:
    """`[B, C]` booleans: which class each row has; none, if it pads."""
    return targets.unsqueeze(-1) == torch.arange(classes, device=targets.device)


def is_target(logits: Tensor, targets: Tensor) -> Tensor:
    classes = torch.arange(logits.shape[-1], device=logits.device)
    return classes == index(targets).unsqueeze(-1)


def members(logits: Tensor, group: Sequence[int]) -> Tensor:
    """[C]: which classes are of the group. A list as an index would be copied from the host at every step, which a
    CUDA graph cannot repeat."""
    classes = torch.arange(logits.shape[-1], device=logits.device)
    return torch.stack([classes == c for c in group]).any(dim=0)
