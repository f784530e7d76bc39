"""FedGC: a client's softmax has only its own labels, and the server pushes the heads' rows of different labels apart.

Niu and Deng, "Federated learning for face recognition with gradient correction", AAAI 2022.

    client   L = CE(z, y) over the client's labels
    server   U^k ← U^k − λ·η·∇_{U^k} Reg,  Reg = −Σ_k Σ_{i∈Y_k} log R
             then the encoder is averaged over all participants, and each row of the head over the participants that
             have its label. A row stays unchanged if no participant has its label

U^k are the rows of client k's head, Y_k are its labels, and η is the learning rate. R falls as row i of client k
becomes more similar to the other clients' rows of other labels. FedGR uses the same R (`losses.gravitation`). In the
paper no two clients share a label, so every row has one owner. If clients share labels, the mean over a row's owners
gives one common model.

Sent to the server: the model, the client's number of samples, and which labels the client has.
Extra compute: none on the client; on the server, one gradient step on the participants' heads.
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
    """Cross entropy over the labels that the client has."""

    takes_class_weights = True

    def loss(self, out: Outputs, y: Tensor, client: Client) -> Tensor:
        return own_label_cross_entropy(out.logits, y, client.label_counts, client.class_weights)


@dataclass(frozen=True)
class GradientCorrection(Gravitation):
    """Repels rows of different labels, then averages each row over the participants that have its label."""

    attracts = False

    def aggregate(self, sent: Tensors, updates: Updates, state: Tensors) -> tuple[Tensors, Tensors]:
        heads = self.correct_heads(updates)
        others = {name: t for name, t in updates.params.items() if name not in heads}
        owners = updates.weights.unsqueeze(-1) * updates.uplink["label_presence"]
        rows = {name: _mean_over_owners(head, sent[name], owners.to(head.dtype)) for name, head in heads.items()}
        mean = weighted_mean(others, updates.weights)
        return {name: rows[name] if name in rows else mean[name] for name in sent}, state


def _mean_over_owners(stacked: Tensor, sent: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted mean of each row. `weights[K, C]` is 0 if client k does not have label c.

    A row without an owner stays as it was sent.
    """
    total = weights.sum(dim=0)
    shape = (*weights.shape, *[1] * (stacked.dim() - 2))
    mean = (weights.view(shape) * stacked).sum(dim=0) / total.clamp(min=1e-12).view(shape[1:])
    return torch.where((total > 0).view(shape[1:]), mean, sent)


register(
    "fedgc",
    parts=(OwnLabels, GradientCorrection),
    paper="Niu and Deng, AAAI 2022",
    summary="Cross entropy over the client's labels, and rows of different labels pushed apart on the server.",
)
