"""What a model is: an encoder that makes features and a head that makes logits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeGuard

from torch import Tensor, nn


class Classifier(nn.Module):
    """Encoder and head, so that methods can reach the features and the classification rows."""

    def __init__(self, encoder: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = head

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.encoder(x))
        return logits


def has_features(model: nn.Module) -> TypeGuard[Classifier]:
    """Whether the model's logits are known to be its head's of its encoder's features."""
    return isinstance(model, Classifier) and type(model).forward is Classifier.forward


@dataclass(frozen=True)
class Inputs:
    """What a model factory must know of the data."""

    shape: tuple[int, ...]
    """Of one sample: (channels, height, width), (features,) or (length,) for text."""
    classes: int
    vocabulary: int = 0


Factory = Callable[[Inputs], nn.Module]
