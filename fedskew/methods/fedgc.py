"""FedGC: every client has classification rows of its own labels only, and the server drives the rows apart.

Niu and Deng, "Federated learning for face recognition with gradient correction", AAAI 2022.

    client   L = CE(z, y) over the client's own labels
    server   U^k ← U^k − λ·η·∇_{U^k} Reg,  Reg = −Σ_k Σ_{i∈Y_k} log R;  then the encoder is averaged, and each row over
             the participants who have its label: a row that none of them has stays as it was

with FedGR's R (fedgr.py), which was modelled on it: row i of client k against the rows of other labels elsewhere. In
the paper no two clients share a label, so that a row is one client's own. Where labels overlap, theirs is the mean of
their rows, which is what makes one common model to test. Leaves the client: the model and which labels it has. Extra
compute: one gradient step over the participants' heads on the server.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedskew.losses import own_label_cross_entropy
from fedskew.methods.catalogue import register
from fedskew.methods.fedgr import Gravitation
from fedskew.methods.parts import Client, Objective, Outputs, Tensors, Updates, weighted_mean


@dataclass(frozen=True)
class OwnLabels(Objective):
    """Cross entropy over the client's own labels."""

    def loss(self, out: Outputs, y: Tensor, client: Client) -> Tensor:
        return own_label_cross_entropy(out.logits, y, client.label_counts)


@dataclass(frozen=True)
class GradientCorrection(Gravitation):
    """Rows of different labels repel; each becomes the mean of those who have its label."""

    attracts = False

    def aggregate(self, sent: Tensors, updates: Updates, state: Tensors) -> tuple[Tensors, Tensors]:
        heads = self.corrected(updates)
        others = {name: t for name, t in updates.params.items() if name not in heads}
        owners = updates.weights.unsqueeze(-1) * updates.uplink["label_presence"]
        rows = {name: _mean_of_owners(head, sent[name], owners.to(head.dtype)) for name, head in heads.items()}
        mean = weighted_mean(others, updates.weights)
        return {name: rows[name] if name in rows else mean[name] for name in sent}, state


def _mean_of_owners(stacked: Tensor, sent: Tensor, weights: Tensor) -> Tensor:
    """Row by row; `weights[K, C]`, 0 where a client does not have the label."""
    total = weights.sum(dim=0)
    shape = (*weights.shape, *[1] * (stacked.dim() - 2))
    mean = (weights.view(shape) * stacked).sum(dim=0) / total.clamp(min=1e-12).view(shape[1:])
    return torch.where((total > 0).view(shape[1:]), mean, sent)


register(
    "fedgc",
    parts=(OwnLabels, GradientCorrection),
    paper="Niu and Deng, AAAI 2022",
    summary="Each client's own labels only, and rows of different labels driven apart on the server.",
)
