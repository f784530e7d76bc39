"""Fed3R: the head is the ridge regression of one-hot labels on the features of all clients.

Fanì et al., "Accelerating heterogeneous federated learning with closed-form classifiers", ICML 2024.

    client   A_k = Σ_i z_i z_iᵀ,   b_k = Σ_i z_i e_{y_i}ᵀ          z has a last entry 1
    server   W = (Σ_k A_k + λI)⁻¹ Σ_k b_k,   each column divided by the norm of its weights

z_i are the features of sample i under the initial model, so this model should be pretrained (`--init`). e_c is the
one-hot vector of class c. The last row of W is the bias, which is divided by the same norm, as in the published code.
A model whose head has no bias is refused.

Sent to the server: A_k and b_k, once. The last row of b_k is the label counts, and the last entry of A_k is their sum.
The model is also sent, unchanged.
Extra compute: one forward pass of each sample, and no training.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedskew.errors import expect
from fedskew.methods.catalogue import register
from fedskew.methods.feature_sums import ClosedFormHead, OnePass, require_bias
from fedskew.methods.parts import Client, Reveals, Seen, Tensors, Trained


@dataclass(frozen=True)
class RidgeHead(ClosedFormHead):
    """Fed3R's server: ridge regression of the labels on all clients' features."""

    ridge: float = 0.01
    """λ, the weight of the penalty ‖W‖²."""
    normalise: bool = True
    """Whether each class's weights are divided by their norm."""

    sends = "Gram matrix of the features and sum of the features per class, once"
    reveals: ClassVar[Reveals] = "label counts, prototypes, feature covariance"
    with_ones = True

    def __post_init__(self) -> None:
        expect(self.ridge > 0, "ridge", self.ridge, "a number > 0")

    def check(self, params: Mapping[str, Tensor], classes: int) -> None:  # noqa: ARG002
        require_bias(params, "Fed3R", "method afl, which needs none")

    def opening(self, seen: Seen, client: Client) -> Tensors:
        return {"gram": self.gram(seen), "class_sums": self.class_sums(seen, client)}

    def uplink(self, trained: Trained, client: Client) -> Tensors:  # noqa: ARG002
        return {name: client.opening[name] for name in ("gram", "class_sums")}

    def solve(self, uplink: Tensors) -> tuple[Tensor, Tensor]:
        gram, sums = (uplink[name].sum(dim=0) for name in ("gram", "class_sums"))
        identity = torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
        solution = torch.linalg.solve(gram + self.ridge * identity, sums.T).T
        weight, bias = solution[:, :-1], solution[:, -1]
        if not self.normalise:
            return weight, bias
        norm = weight.norm(dim=1).clamp(min=1e-12)
        return weight / norm.unsqueeze(-1), bias / norm


register(
    "fed3r",
    parts=(OnePass, RidgeHead),
    paper="Fanì et al., ICML 2024",
    summary="The head is the ridge regression of labels on all clients' features: one round, no training.",
    document=__doc__,
)
