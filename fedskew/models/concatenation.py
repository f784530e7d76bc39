"""FedConcat's final model: one head on the concatenated features of several frozen encoders."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TypeGuard

import torch
from torch import Tensor, nn

from fedskew.models.base import Classifier, has_features
from fedskew.randomness import integer_key


class ConcatenatedEncoders(nn.Module):
    """Concatenates the features of several encoders, which are frozen and always in eval mode."""

    def __init__(self, encoders: Sequence[nn.Module]) -> None:
        super().__init__()
        self.encoders = nn.ModuleList(encoders)
        self.requires_grad_(False)
        self.eval()

    def train(self, mode: bool = True) -> ConcatenatedEncoders:  # noqa: ARG002
        super().train(False)
        return self

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([encoder(x) for encoder in self.encoders], dim=-1)


def concatenate(models: Sequence[nn.Module], head_seed: int | None = None) -> Classifier:
    """Make one classifier on the concatenated encoders of all models.

    Without a seed, its head is the concatenation of the models' heads, so its logits are the sum of the models' logits.
    With a seed, its head starts with random weights.
    """
    heads = [_linear_head(model) for model in models]
    weight, bias = heads[0].weight, heads[0].bias
    width = sum(head.in_features for head in heads)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(integer_key(head_seed or 0, "concatenated head"))
        head = nn.Linear(width, len(weight), bias is not None).to(weight)
    if head_seed is None:
        with torch.no_grad():
            head.weight.copy_(torch.cat([h.weight for h in heads], dim=1))
            if bias is not None:
                head.bias.copy_(torch.stack([h.bias for h in heads]).sum(dim=0))
    return Classifier(ConcatenatedEncoders([copy.deepcopy(model.get_submodule("encoder")) for model in models]), head)


def count_encoders(model: nn.Module) -> int:
    """Return the number of concatenated encoders, or 0 for any other model."""
    return len(model.encoder.encoders) if has_features(model) and _is_concatenation(model.encoder) else 0


def with_encoders(model: nn.Module, encoders: int) -> nn.Module:
    """Return a model that can load a saved concatenation of `encoders` models, or `model` itself if `encoders` is 0."""
    return concatenate([model] * encoders) if encoders else model


def _is_concatenation(encoder: nn.Module) -> TypeGuard[ConcatenatedEncoders]:
    return isinstance(encoder, ConcatenatedEncoders)


def _linear_head(model: nn.Module) -> nn.Linear:
    if not has_features(model) or not isinstance(model.head, nn.Linear):
        raise TypeError(f"cannot concatenate a {type(model).__name__}; expected a Classifier with a linear head")
    return model.head
