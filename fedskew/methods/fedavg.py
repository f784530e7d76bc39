"""FedAvg: local SGD on the cross entropy, weighted mean of the models.

McMahan et al., "Communication-efficient learning of deep networks from decentralized data", AISTATS 2017.

    client   v ← v − η·∇CE(v), over its own samples, E epochs, from v = w
    server   w ← Σ a_k·w_k,  a_k = n_k/Σ n (average=samples) or 1/K (average=uniform)

Each part here is what a method uses where it does not bring its own. Leaves the client: the model and the number of its
samples. Extra compute: none, for this is what others are measured by.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fedskew.losses import cross_entropy
from fedskew.methods.catalogue import register
from fedskew.methods.parts import Client, Objective, Outputs, ServerRule, Solver, Tensors, Updates


@dataclass(frozen=True)
class CrossEntropy(Objective):
    """CE(z, y)."""

    def loss(self, out: Outputs, y: Tensor, client: Client) -> Tensor:  # noqa: ARG002
        return cross_entropy(out.logits, y)


@dataclass(frozen=True)
class SGD(Solver):
    """The gradient, nothing else."""


@dataclass(frozen=True)
class Mean(ServerRule):
    """w ← Σ a_k·w_k, with a_k = n_k/Σn over the participants (or 1/K: the run's `average`)."""

    def aggregate(self, sent: Tensors, updates: Updates, state: Tensors) -> tuple[Tensors, Tensors]:  # noqa: ARG002
        return updates.mean(), state


register(
    "fedavg",
    parts=(),
    paper="McMahan et al., AISTATS 2017",
    summary="Local SGD, weighted mean of the models.",
    document=__doc__,
)
