"""CReFF: the server makes features whose gradients match those of real features, and trains a second head on them.

Shang et al., "Federated learning on heterogeneous and long-tailed data via classifier re-training with federated
features", IJCAI 2022.

    client   g_c^k = the mean of ∇_R CE(R h, c) over its samples of class c, for each of its classes
             then it trains as in FedAvg
    server   G and encoder: the weighted mean;  g_c = the mean of g_c^k over the participants that have class c
             F ← F − η_F·∇_F Σ_c D(∇_R CE(R F_c, c), g_c), for some steps;  D = Σ_rows (1 − cos)
             R ← SGD on CE(R F_c, c) over the features of all classes, from random values

h are the features of a sample under the received model. Clients train the encoder and the head G. The server trains R,
on M federated features F_c per class, which start at random and stay on the server. D compares the rows of two
gradients, and the gradient of the bias is one more row. The model predicts with R, so R is tested and exported. A class
that no participant of a round has keeps its features.

The method chooses the model's head (`--head retrained`).

Sent to the server: the model, the client's number of samples, and for each of its classes the gradient of R, which has
the size of a head.
Extra compute: one forward pass of each sample per round.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedskew.accurate_sums import ACCURATE
from fedskew.errors import UserError, expect
from fedskew.losses import class_masks
from fedskew.methods.catalogue import register
from fedskew.methods.fedavg import CrossEntropy
from fedskew.methods.head_training import HeadTraining
from fedskew.methods.parts import Client, Reveals, Seen, ServerRule, Tensors, Trained, Updates
from fedskew.randomness import fold, normal, uniform

_WEIGHT, _BIAS = "head.retrained.weight", "head.retrained.bias"
"""The names of R's parameters in the model."""


@dataclass(frozen=True)
class TwoHeads(CrossEntropy):
    """The cross entropy of the head that clients train."""

    head = "retrained"
    needs_features = True
    multi_label = False


@dataclass(frozen=True)
class FederatedFeatures(ServerRule):
    """The weighted mean of the models, with a second head that the server trains on federated features."""

    features_per_class: int = 100
    """M, the number of federated features per class."""
    match_steps: int = 100
    """The number of steps on the federated features in each round."""
    match_lr: float = 0.1
    """η_F, the learning rate of the steps on the federated features."""
    head_lr: float = 0.01
    """The learning rate with which the server trains R."""
    head_epochs: int = 300
    """The epochs for which the server trains R in each round."""
    head_batch: int = 32
    """The batch size with which the server trains R."""

    sends = "gradient of the second head for each class of the client"
    reveals: ClassVar[Reveals] = "label presence, prototypes"
    extra_compute = "1 forward of each sample per round"
    needs_features = True
    multi_label = False

    def __post_init__(self) -> None:
        for name in ("features_per_class", "match_lr", "head_lr", "head_batch"):
            expect(getattr(self, name) > 0, name, getattr(self, name), "a number > 0")
        for name in ("match_steps", "head_epochs"):
            expect(getattr(self, name) >= 0, name, getattr(self, name), "a whole number ≥ 0")

    def check(self, params: Mapping[str, Tensor], classes: int) -> None:  # noqa: ARG002
        if _WEIGHT not in params:
            raise UserError("CReFF needs a model with a second head that clients share; expected the head 'retrained'")

    def server_state(self, params: Tensors) -> Tensors:
        classes, width = params[_WEIGHT].shape
        features = params[_WEIGHT].new_zeros(classes, self.features_per_class, width)
        return {"federated_features": features, "has_features": features.new_zeros(())}

    def opening(self, seen: Seen, client: Client) -> Tensors:
        z = seen.out.required_features.flatten(1)
        z, logits = (t.to(ACCURATE[t.device.type]) for t in (z, seen.out.logits))
        members = class_masks(seen.y, len(client.label_counts)).to(z)  # rows of padding are in no class
        is_sample = members.any(dim=1, keepdim=True)
        error = torch.where(is_sample, logits.softmax(dim=-1) - members, 0.0)
        gradients = torch.einsum("bc,bj,bi->cji", members, error, torch.where(is_sample, z, 0.0))
        return {"gradients": gradients, "bias_gradients": members.T @ error, "counts": members.sum(dim=0)}

    def uplink(self, trained: Trained, client: Client) -> Tensors:
        # `opening` may have left out a last batch, so `counts` may differ from the label counts.
        seen, dtype = client.opening["counts"], trained.params[_WEIGHT].dtype
        counts = seen.clamp(min=1).unsqueeze(-1)
        return {
            "class_gradients": (client.opening["gradients"] / counts.unsqueeze(-1)).to(dtype),
            "class_bias_gradients": (client.opening["bias_gradients"] / counts).to(dtype),
            "class_known": seen > 0,
        }

    def aggregate(self, sent: Tensors, updates: Updates, state: Tensors) -> tuple[Tensors, Tensors]:
        known = updates.uplink["class_known"]
        gradients, bias_gradients = (
            _mean_over_known(updates.uplink[name], known) for name in ("class_gradients", "class_bias_gradients")
        )
        head = sent[_WEIGHT].to(gradients), sent[_BIAS].to(gradients)
        features = state["federated_features"].to(gradients)
        fresh = normal(_keys(updates.key, features)).to(gradients)
        features = torch.where(state["has_features"] > 0, features, fresh)
        features = self.match(features, head, gradients, bias_gradients, known.any(dim=0))
        weight, bias = self.retrain(features, updates.key)
        retrained = {_WEIGHT: weight.to(sent[_WEIGHT]), _BIAS: bias.to(sent[_BIAS])}
        kept = {"federated_features": features.to(state["federated_features"]), "has_features": torch.ones(())}
        return updates.mean() | retrained, {**state, **{name: t.to(state[name]) for name, t in kept.items()}}

    def match(
        self, features: Tensor, head: tuple[Tensor, Tensor], gradients: Tensor, bias_gradients: Tensor, present: Tensor
    ) -> Tensor:
        """Move the features [C, M, d] so that their gradients get the directions of the real ones."""
        (weight, bias), targets = head, torch.eye(len(features)).to(features).unsqueeze(1)
        for _ in range(self.match_steps):
            with torch.enable_grad():
                x = features.detach().requires_grad_()
                error = ((x @ weight.T + bias).softmax(dim=-1) - targets) / self.features_per_class
                distances = _distance(error.mT @ x, gradients).sum(dim=-1) + _distance(error.sum(dim=1), bias_gradients)
                (slope,) = torch.autograd.grad(torch.where(present, distances, 0.0).sum(), x)
            features = features - self.match_lr * slope
        return features

    def retrain(self, features: Tensor, key: int) -> tuple[Tensor, Tensor]:
        """Train a head on the features, from random values. Return its weight and bias."""
        classes, count, width = features.shape
        # Index 2, because `normal` used the indices 0 and 1 of the same keys for the features.
        start = (2 * uniform(_keys(key, features.new_empty(classes, width + 1)), 2) - 1).to(features) / width**0.5
        labels = torch.arange(classes, device=features.device).repeat_interleave(count)
        training = HeadTraining(self.head_lr, self.head_epochs, self.head_batch)
        weight, bias = training.train(start[:, :-1], start[:, -1], features.flatten(0, 1), labels, key)
        assert bias is not None
        return weight, bias


def _mean_over_known(stacked: Tensor, known: Tensor) -> Tensor:
    """Return the mean over the participants that have the class, in float64 if the device has it: [C, …]."""
    accurate = stacked.to(ACCURATE[stacked.device.type])
    shape = (-1, *(1,) * (stacked.dim() - 2))
    return torch.einsum("kc,kc...->c...", known.to(accurate), accurate) / known.sum(dim=0).clamp(min=1).view(shape)


def _distance(one: Tensor, other: Tensor) -> Tensor:
    """Return 1 − cos for the rows of two tensors. The authors' constant avoids a division by zero."""
    cosines: Tensor = (one * other).sum(dim=-1) / (one.norm(dim=-1) * other.norm(dim=-1) + 1e-6)
    return 1 - cosines


def _keys(key: int, like: Tensor) -> Tensor:
    """Return a random key for each entry of a tensor of this shape."""
    numbers = torch.arange(like.numel(), device=like.device).view(like.shape)
    return fold(torch.tensor(key, device=like.device), numbers)


register(
    "creff",
    parts=(TwoHeads, FederatedFeatures),
    paper="Shang et al., IJCAI 2022",
    summary="The server trains a second head on features whose gradients match those of the clients' features.",
)
