"""The structure of a model: an encoder computes features, and a head computes logits from them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, TypeGuard

from torch import Tensor, nn


class Classifier(nn.Module):
    """An encoder and a head. Methods can use the encoder's features and the head's rows, one per class."""

    def __init__(self, encoder: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = head

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.encoder(x))
        return logits


def has_features(model: nn.Module) -> TypeGuard[Classifier]:
    """Return whether the logits are `head(encoder(x))`. A subclass of `Classifier` may compute them differently."""
    return isinstance(model, Classifier) and type(model).forward is Classifier.forward


class Field(NamedTuple):
    """One of several inputs of a model, such as token ids or an attention mask."""

    name: str
    shape: tuple[int, ...]
    is_integer: bool

    @property
    def size(self) -> int:
        """The number of values per sample."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class DataShape:
    """The shape of a sample and the number of classes: what a model factory needs to know about the data."""

    shape: tuple[int, ...]
    """The shape of one sample: (channels, height, width), (features,), or (length,) for text."""
    classes: int
    vocabulary: int = 0
    """The number of distinct tokens, for text. 0 for other data."""
    fields: tuple[Field, ...] = ()
    """The inputs of a model that takes several. A sample is then one row with the values of all inputs, in this order.
    Empty if there is only one."""


Factory = Callable[[DataShape], nn.Module]
