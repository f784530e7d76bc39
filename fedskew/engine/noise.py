"""Sources of noise for example-level privacy."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from fedskew.randomness import raw_normals


class Noise(Protocol):
    """Draws standard normal numbers."""

    def __call__(self, shape: torch.Size, key: int, /) -> Tensor:
        """Return numbers of this shape in host memory. A source of secret noise ignores the key."""
        ...


def keyed_noise(shape: torch.Size, key: int) -> Tensor:
    """Return noise that follows from the key, for simulations. Whoever knows the run's seed can compute it."""
    return torch.from_numpy(raw_normals(shape.numel(), key, "example noise")).view(shape)
