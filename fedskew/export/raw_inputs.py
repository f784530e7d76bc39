"""A classifier for unscaled samples. This module's source is exported with the model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn


class RawInputs(nn.Module):
    """Scales and normalises images and rows of a table, then applies the model. Word indices need neither.

    It takes images as bytes (uint8, n × channels × height × width), unscaled rows of a table (float64, n × inputs),
    or word indices (int64, n × length). If `inputs` has no scaling, it leaves rows as they are. It returns logits
    (n × classes).
    """

    mean: Tensor
    std: Tensor

    def __init__(self, model: nn.Module, inputs: Mapping[str, Any]) -> None:
        super().__init__()
        self.model = model
        self.kind = inputs["kind"]
        mean, std = _statistics(inputs)
        self.register_buffer("mean", mean, persistent=False)
        self.register_buffer("std", std, persistent=False)

    def forward(self, samples: Tensor) -> Tensor:
        if self.kind == "image":
            samples = (samples.float() / 255 - self.mean) / self.std
        elif self.kind == "table":
            samples = ((samples.double() - self.mean) / self.std).float()
        logits: Tensor = self.model(samples)
        return logits


def _statistics(inputs: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation per channel of images in [0, 1], or per input of a table. Texts do not use them."""
    if inputs["kind"] == "image":
        return torch.tensor(inputs["mean"]).view(-1, 1, 1), torch.tensor(inputs["std"]).view(-1, 1, 1)
    columns = torch.tensor(inputs.get("scaling") or [[0.0, 1.0]], dtype=torch.float64)
    return columns[:, 0], columns[:, 1]
