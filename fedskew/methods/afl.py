"""AFL: clients fit a least-squares head to their features, and the server joins the heads exactly.

He et al., "AFL: a single-round analytic approach for federated learning with pre-trained models", CVPR 2025.

    client   C_k = Σ_i z_i z_iᵀ + γI,   W_k = C_k⁻¹ Σ_i z_i e_{y_i}ᵀ
    server   C = Σ_k C_k,  W = C⁻¹ Σ_k C_k W_k               the absolute aggregation law
             W ← (C − KγI)⁻¹ C W                              removes the K clients' γ

z_i are the features of sample i under the initial model, so this model should be pretrained (`--init`). e_c is the
one-hot vector of class c. The result is the least-squares head on the data of all clients, the same for every split and
every γ. The published code joins two clients at a time, which gives the same matrix. The head has no bias: a bias of
the model becomes 0. If the features are linearly dependent, for example because one is always zero, C − KγI has no
inverse. The pseudo-inverse then gives the head of least norm.

Sent to the server: W_k and C_k, once. The model is also sent, unchanged. The columns of C_k W_k are the sums s_c of the
features per class. From them, the server can compute the client's label counts, n_c = s_cᵀ(C_k − γI)⁺ Σ_c' s_c', where
⁺ is the pseudo-inverse. They are exact if the features of the client's samples are linearly independent, which is
likely with few samples. Otherwise, they are estimates.
Extra compute: one forward pass of each sample, one linear system per client, and no training.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedskew.errors import expect
from fedskew.methods.catalogue import register
from fedskew.methods.feature_sums import ClosedFormHead, OnePass
from fedskew.methods.parts import Client, Reveals, Seen, Tensors, Trained


@dataclass(frozen=True)
class AnalyticHead(ClosedFormHead):
    """AFL's server: the least-squares head on all clients' features, from the clients' heads."""

    gamma: float = 1.0
    """γ, which makes each client's linear system solvable. The result does not depend on it."""

    sends = "least-squares head and Gram matrix of the features, once"
    reveals: ClassVar[Reveals] = "label counts, prototypes, feature covariance"

    def __post_init__(self) -> None:
        expect(self.gamma > 0, "gamma", self.gamma, "a number > 0")

    def opening(self, seen: Seen, client: Client) -> Tensors:
        return {"gram": self.gram(seen), "class_sums": self.class_sums(seen, client)}

    def uplink(self, trained: Trained, client: Client) -> Tensors:  # noqa: ARG002
        gram, sums = client.opening["gram"], client.opening["class_sums"]
        regularised = gram + self.gamma * torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
        return {"own_head": torch.linalg.solve(regularised, sums.T), "regularised_gram": regularised}

    def solve(self, uplink: Tensors) -> tuple[Tensor, Tensor]:
        heads, grams = uplink["own_head"], uplink["regularised_gram"]
        sums = (grams @ heads).sum(dim=0)
        identity = torch.eye(grams.shape[-1], dtype=grams.dtype, device=grams.device)
        gram = grams.sum(dim=0) - len(grams) * self.gamma * identity
        weight = (torch.linalg.pinv(gram, hermitian=True) @ sums).T
        return weight, torch.zeros_like(weight[:, 0])


register(
    "afl",
    parts=(OnePass, AnalyticHead),
    paper="He et al., CVPR 2025",
    summary="Clients' least-squares heads, joined exactly: one round, no training, the same head for every split.",
    document=__doc__,
)
