"""FedDecorr and FedMR: features whose dimensions are not copies of one another.

Shi et al., "Towards understanding and mitigating dimensional collapse in heterogeneous federated learning", ICLR 2023;
Fan et al., "Federated learning under partially class-disjoint data via manifold reshaping", TMLR 2023.

    FedDecorr  L = base + β·(1/N)·mean_{i≠j} (XᵀX)_{ij}²                X: the batch's N features, standardised
    FedMR      L = base + μ·(1/N)·Σ_c mean_{i≠j} (X_cᵀX_c)_{ij}²        X_c: those of class c, if there are two or more

The base is cross entropy, or the loss of the objective that they are combined with. FedMR is here with its intra-class
term only. Leaves the client: the model. Extra compute: none to speak of.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fedskew.errors import expect
from fedskew.losses import class_decorrelation, decorrelation
from fedskew.methods.catalogue import method
from fedskew.methods.parts import Client, Outputs
from fedskew.methods.regularisers import Regulariser


@method("feddecorr", paper="Shi et al., ICLR 2023")
@dataclass(frozen=True)
class FedDecorr(Regulariser):
    """Decorrelated features."""

    beta: float = 0.1

    needs_features = True

    def __post_init__(self) -> None:
        expect(self.beta >= 0, "beta", self.beta, "a number ≥ 0")

    def term(self, out: Outputs, y: Tensor, client: Client) -> Tensor:  # noqa: ARG002
        return self.beta * decorrelation(out.known_features, y)


@method("fedmr", paper="Fan et al., TMLR 2023")
@dataclass(frozen=True)
class FedMR(Regulariser):
    """Features decorrelated within each class (FedMR's intra-class term)."""

    mu: float = 0.01

    needs_features = True

    def __post_init__(self) -> None:
        expect(self.mu >= 0, "mu", self.mu, "a number ≥ 0")

    def term(self, out: Outputs, y: Tensor, client: Client) -> Tensor:  # noqa: ARG002
        return self.mu * class_decorrelation(out.known_features, y)
