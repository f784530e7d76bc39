"""FedAvg: local SGD on the cross entropy, then the weighted mean of the models.

McMahan et al., "Communication-efficient learning of deep networks from decentralized data", AISTATS 2017.

    client   v ← v − η·∇CE(v), for E epochs over its samples, from v = w
    server   w ← Σ a_k·w_k,  a_k = n_k/Σ n (average=samples) or 1/K (average=uniform)

w is the global model, v is the client's model during training, and w_k is that model at the end. η is the learning
rate, n_k is the client's number of samples, and K is the number of participants.

A method without an objective, solver, weighting or server rule uses FedAvg's, which is in this file.

Sent to the server: the model and the client's number of samples.
Extra compute: none. Other methods' costs are relative to this one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedskew.methods.catalogue import register
from fedskew.methods.parts import Client, Objective, Outputs, ServerRule, Solver, Tensors, Updates, Weighting
from fedskew.task import task_for


@dataclass(frozen=True)
class CrossEntropy(Objective):
    """The cross entropy CE(z, y), or the binary cross entropy of several labels per sample."""

    multi_label = True
    sample_by_sample = True
    takes_class_weights = True

    def loss(self, out: Outputs, y: Tensor, client: Client) -> Tensor:
        return task_for(y).loss(out.logits, y, client.class_weights)


@dataclass(frozen=True)
class SGD(Solver):
    """The plain gradient, which is a solver's default."""


@dataclass(frozen=True)
class Mean(ServerRule):
    """w ← Σ a_k·w_k, which is a server rule's default."""

    uses_only_mean = True


@dataclass(frozen=True)
class SampleWeights(Weighting):
    """a_k = n_k/Σn, which is a weighting's default."""


@dataclass(frozen=True)
class UniformWeights(Weighting):
    """a_k = 1/K."""

    def weigh(self, sent: Tensors, updates: Updates, state: Tensors) -> Tensor:  # noqa: ARG002
        return torch.ones_like(updates.weights)


AVERAGES: dict[str, Weighting] = {"samples": SampleWeights(), "uniform": UniformWeights()}
"""The weightings that the configuration key `average` names, for methods without a weighting."""


register(
    "fedavg",
    parts=(),
    paper="McMahan et al., AISTATS 2017",
    summary="Local SGD, then the weighted mean of the models.",
    document=__doc__,
)
