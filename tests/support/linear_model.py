"""Models for digits. The linear one is named `linear_model:make_linear`, so that stored run folders stay small."""

from __future__ import annotations

from torch import Tensor, nn


def make_linear(inputs: object) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))


class WithHead(nn.Module):
    """A linear head, but no features that methods could use: the model is no `Classifier`."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(64, 8), nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.body(x.flatten(1)).relu())
        return logits


def make_with_head(inputs: object) -> nn.Module:
    return WithHead()
