"""A function with a gradient of its own, which tracing does not see."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Reversed(torch.autograd.Function):
    """Reverses the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return -gradient
