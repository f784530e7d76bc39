"""Heads in closed form: the server computes the head from statistics of the features, which every client sends once.

The encoder does not change and nobody trains, so one round with all clients is enough. The statistics are sums over the
client's samples, or determine such sums. The sums over all clients do not depend on the split, so the head does not
either. Sums are computed in float64, if the device has it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedskew.accurate_sums import ACCURATE
from fedskew.errors import UserError
from fedskew.losses import IGNORE, class_masks
from fedskew.methods.parts import Client, Seen, ServerRule, Tensors, Updates
from fedskew.methods.stages import Notes, Schedule, Stage, stage_without_training


@dataclass(frozen=True)
class OnePass(Schedule):
    """One round in which all clients send statistics of their features. Nobody trains."""

    trains_clients = False

    def stages(self, rounds: int, local_epochs: int, notes: Notes) -> Sequence[Stage]:  # noqa: ARG002
        return [stage_without_training("closed form")]


@dataclass(frozen=True)
class ClosedFormHead(ServerRule):
    """A server rule that computes the head from the clients' statistics. Subclasses implement `solve`."""

    needs_features = True
    needs_linear_head = True
    extra_compute = "1 forward of each sample per round"
    multi_label = False
    with_ones: ClassVar[bool] = False
    """Whether features get a last column of ones, whose weight is the bias."""

    def features(self, seen: Seen) -> Tensor:
        """Return the batch's features in float64, if the device has it. Rows of padding are zero."""
        features = seen.out.required_features.flatten(1)
        features = features.to(ACCURATE[features.device.type])
        if self.with_ones:
            features = torch.cat([features, torch.ones_like(features[:, :1])], dim=1)
        return torch.where((seen.y != IGNORE).unsqueeze(-1), features, 0.0)

    def class_sums(self, seen: Seen, client: Client) -> Tensor:
        """Return the sum of the batch's features per class: [C, d]."""
        features = self.features(seen)
        return class_masks(seen.y, len(client.label_counts)).to(features).T @ features

    def gram(self, seen: Seen) -> Tensor:
        """Return the sum of the products z·zᵀ of the batch's features: [d, d]."""
        features = self.features(seen)
        return features.T @ features

    def solve(self, uplink: Tensors) -> tuple[Tensor, Tensor]:
        """Return the head's weight [C, d] and bias [C], from what all clients sent."""
        raise NotImplementedError

    def aggregate(self, sent: Tensors, updates: Updates, state: Tensors) -> tuple[Tensors, Tensors]:
        weight, bias = self.solve(updates.uplink)
        head = {"head.weight": weight, "head.bias": bias}
        return {name: head[name].to(old) if name in head else old for name, old in sent.items()}, state


def require_bias(params: Mapping[str, Tensor], method: str, otherwise: str) -> None:
    """Refuse a model whose head has no bias. Without the computed bias, the predictions would differ."""
    if "head.bias" not in params:
        raise UserError(
            f"{method} computes a bias, but the model's head has none; expected a head with a bias, or {otherwise}"
        )
