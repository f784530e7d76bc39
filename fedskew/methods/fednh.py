"""FedNH: class prototypes as the head, which the server moves slowly towards the clients' class means.

Dai et al., "Tackling data heterogeneity in federated learning with class prototypes", AAAI 2023.

    client   CE(s·cos(h, w_c), y) with fixed w;  then μ_c = normalised mean of the class's normalised features
    server   w_c ← norm(ρ·w_c + (1 − ρ)·norm(Σ_k n_c^k μ_c^k / Σ_k n_c^k))

h are the features, w_c is the prototype of class c, and norm(x) = x/‖x‖. n_c^k is client k's number of samples of class
c, and μ_c^k is its μ_c.

The prototypes w start as far apart as possible, or at random if there are more classes than features. Clients train the
encoder and the scale s, but not w. A class that no participant has keeps its prototype.

The method chooses the model's head (`--head cosine`).

Sent to the server: the model, the mean feature and the number of samples of each class.
Extra compute: one forward pass of each sample per round.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import normalize

from fedskew.errors import expect
from fedskew.losses import class_masks, cross_entropy
from fedskew.methods.catalogue import register
from fedskew.methods.parts import (
    Client,
    Gradient,
    Objective,
    Outputs,
    Reveals,
    Seen,
    ServerRule,
    Solver,
    Tensors,
    Trained,
    Updates,
)


def _prototypes_name(params: Mapping[str, Tensor]) -> str | None:
    """Return the name of the tensor with the prototypes: the head's directions, or the weight of a linear head.

    Return None if the head stays on the clients. Then it is not among these parameters.
    """
    return next((name for name in ("head.directions", "head.weight") if name in params), None)


@dataclass(frozen=True)
class PrototypeCrossEntropy(Objective):
    """FedNH's loss: cross entropy of scaled cosine similarities."""

    head = "cosine"
    needs_features = True
    sample_by_sample = True
    takes_class_weights = True

    def loss(self, out: Outputs, y: Tensor, client: Client) -> Tensor:
        return cross_entropy(out.logits, y, client.class_weights)


@dataclass(frozen=True)
class FixedPrototypes(Solver):
    """FedNH's client: the prototypes are not trained."""

    def direction(self, gradient: Gradient, params: Tensors, client: Client) -> Tensors:  # noqa: ARG002
        found = gradient(params)
        name = _prototypes_name(found)
        return found if name is None else {**found, name: torch.zeros_like(found[name])}


@dataclass(frozen=True)
class SmoothedPrototypes(ServerRule):
    """FedNH's server: the mean of the models, and prototypes that move towards the clients' class means."""

    rho: float = 0.9
    """ρ: how much of the old prototype stays in each round."""

    sends = "normalised mean feature and number of samples per class"
    reveals: ClassVar[Reveals] = "label counts, prototypes"
    extra_compute = "1 forward of each sample per round"
    needs_features = True
    multi_label = False

    def __post_init__(self) -> None:
        expect(0 <= self.rho <= 1, "rho", self.rho, "a number from 0 to 1")

    def closing(self, seen: Seen, client: Client) -> Tensors:
        features = normalize(seen.out.required_features.flatten(1), dim=-1)
        members = class_masks(seen.y, len(client.label_counts)).to(features.dtype)
        return {"direction_sums": members.T @ features}

    def uplink(self, trained: Trained, client: Client) -> Tensors:
        means = normalize(trained.closing["direction_sums"], dim=-1)
        return {"class_directions": means, "class_counts": client.label_counts}

    def aggregate(self, sent: Tensors, updates: Updates, state: Tensors) -> tuple[Tensors, Tensors]:
        name = _prototypes_name(sent)
        if name is None:
            return updates.mean(), state
        counts = updates.uplink["class_counts"].to(sent[name]).unsqueeze(-1)
        present = counts.sum(dim=0) > 0
        mean = normalize((counts * updates.uplink["class_directions"]).sum(dim=0), dim=-1)
        moved = normalize(self.rho * sent[name] + (1 - self.rho) * mean, dim=-1)
        return {**updates.mean(), name: torch.where(present, moved.to(sent[name]), sent[name])}, state


register(
    "fednh",
    parts=(PrototypeCrossEntropy, FixedPrototypes, SmoothedPrototypes),
    paper="Dai et al., AAAI 2023",
    summary="Class prototypes as the head. Only the server moves them, slowly, towards the clients' class means.",
    document=__doc__,
)
