"""How long a run may take on a CPU, from its size alone: roughly, and the same on every machine."""

from __future__ import annotations

import copy
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

_PER_STEP = 1e-3
"""Seconds of a step that do not depend on the model's size."""
_PER_SECOND = 1e10
"""Multiplications of a forward and a backward pass; large layers reach five times as many, small convolutions these."""


def estimated_seconds(model: nn.Module, sample: Tensor, steps: float, visits: float) -> float:
    """For so many local steps over so many samples in all; `sample` is one input of the model."""
    return steps * _PER_STEP + 3 * multiplications(model, sample) * visits / _PER_SECOND


@torch.no_grad()
def multiplications(model: nn.Module, sample: Tensor) -> float:
    """Of the linear and convolutional layers in the forward pass of one sample."""
    total = 0.0

    def count(layer: nn.Module, _: Any, out: Tensor) -> None:
        nonlocal total
        weight = layer.weight
        assert isinstance(weight, Tensor)
        total += out.numel() * prod(weight.shape[1:])

    whole = copy.deepcopy(model).to(sample.device).eval()
    for layer in whole.modules():
        if isinstance(layer, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d):
            layer.register_forward_hook(count)
    whole(sample)
    return total
