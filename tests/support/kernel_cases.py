"""What the tests of the Triton kernels share: where they can run, and tensors to run on."""

from __future__ import annotations

import os
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"

needs_triton = pytest.mark.skipif(
    find_spec("triton") is None or (DEVICE == "cpu" and not INTERPRETED),
    reason="needs Triton, and a GPU or TRITON_INTERPRET=1",
)


def made(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    drawn = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return drawn.to(dtype).to(DEVICE)


def assert_close(found: list[Tensor], exact: list[Tensor], tolerance: float) -> None:
    for one, other in zip(found, exact, strict=True):
        assert one.shape == other.shape
        difference = (one.double() - other).norm() / other.norm()
        assert difference < tolerance
