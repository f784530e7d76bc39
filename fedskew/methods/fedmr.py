"""FedMR: decorrelates features within a class and keeps them at a margin from other classes.

Fan et al., "Federated learning under partially class-disjoint data via manifold reshaping", TMLR 2023.

    L_intra = (1/N)·Σ_c mean_{i≠j} (X_cᵀX_c)_{ij}²
    L_inter = mean over pairs (c, c') of max(0, ‖g_c − g_c'‖ − ‖f̄_c − g_c'‖)
    fedmr        L = base + μ·L_intra
    fedmr-inter  L = base + μ·L_intra + ν·L_inter

L_intra sums over the classes c with two or more samples in the batch. N is the number of these classes' samples. The
matrix X_c has one row per sample of class c and one column per feature, and its columns are standardised. i and j are
features.

L_inter is a mean over pairs of a class c in the batch and another class c', if both have a global prototype. f̄_c is the
mean feature vector of class c in the batch. g_c is the global prototype of class c. Each participant that has the class
sends its mean feature, and g_c is the mean of these. If no participant of the last round has the class, g_c stays.

The base is cross entropy, or the loss of the objective that FedMR is combined with. The authors' code has only L_intra.
L_inter is our reading of the paper's text (docs/fidelity.md).

Sent to the server: the model and the client's number of samples; with L_inter also the mean feature of each of its
classes.
Extra compute: negligible; with L_inter one forward pass of each sample per round.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedskew.errors import expect
from fedskew.losses import class_decorrelation, prototype_margin
from fedskew.methods.catalogue import method
from fedskew.methods.class_means import SendsClassMeans
from fedskew.methods.parts import Client, Outputs, Tensors, Updates
from fedskew.methods.regularisers import Regulariser

_PAPER = "Fan et al., TMLR 2023"


@method("fedmr", paper=_PAPER)
@dataclass(frozen=True)
class FedMR(Regulariser):
    """A penalty on features that are correlated within a class (FedMR's intra-class term)."""

    mu: float = 0.01
    """μ, the weight of L_intra."""

    needs_features = True

    def __post_init__(self) -> None:
        expect(self.mu >= 0, "mu", self.mu, "a number ≥ 0")

    def term(self, out: Outputs, y: Tensor, client: Client) -> Tensor:  # noqa: ARG002
        return self.mu * class_decorrelation(out.required_features, y)


@method("fedmr-inter", paper=_PAPER)
@dataclass(frozen=True)
class FedMRInter(SendsClassMeans):
    """FedMR with both terms: decorrelation within each class, and a margin to the other classes' prototypes."""

    mu: float = 0.01
    """μ, the weight of L_intra."""
    nu: float = 0.1
    """ν, the weight of L_inter."""

    def __post_init__(self) -> None:
        expect(self.mu >= 0, "mu", self.mu, "a number ≥ 0")
        expect(self.nu >= 0, "nu", self.nu, "a number ≥ 0")

    def server_state(self, params: Tensors) -> Tensors:
        head = params["head.weight"].detach()  # [C, d], the shape of the prototypes
        return {"prototypes": torch.zeros_like(head), "prototype_known": torch.zeros_like(head[:, 0]).bool()}

    def downlink(self, server_state: Tensors) -> Tensors:
        return {name: server_state[name] for name in ("prototypes", "prototype_known")}

    def term(self, out: Outputs, y: Tensor, client: Client) -> Tensor:
        features, server = out.required_features, client.downlink
        margin = prototype_margin(features, y, server["prototypes"], server["prototype_known"])
        return self.mu * class_decorrelation(features, y) + self.nu * margin

    def next_server_state(self, updates: Updates, server_state: Tensors) -> Tensors:
        sent, known = updates.uplink["prototypes"], updates.uplink["prototype_known"]
        senders = known.sum(dim=0).unsqueeze(-1)  # clients that have the class
        means = (sent * known.unsqueeze(-1)).sum(dim=0) / senders.clamp(min=1)
        return {
            "prototypes": torch.where(senders > 0, means, server_state["prototypes"]),
            "prototype_known": server_state["prototype_known"] | known.any(dim=0),
        }
