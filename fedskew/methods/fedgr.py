"""FedGR: an unbalanced softmax on the client and a gravitation regulariser on the server.

Guo et al., "FedGR: federated learning with gravitation regulation for double imbalance distribution", DASFAA 2023.

    client   L = CE(γ_c·z_c, y) over the client's labels, γ_c ∝ 1/n_c                                  Eq. 3
    server   U^k ← U^k − λ·η·∇_{U^k} Reg,  Reg = −Σ_k Σ_{i∈Y_k} (log A + log R),  then the mean        Eq. 9

U^k are the rows of client k's head, Y_k are its labels, and η is the learning rate. A attracts rows of the same label,
and R repels rows of different labels (see `gravitation`). The head's bias, if any, counts as one more column.

Sent to the server: the model and the client's number of samples. With the server rule, also which labels the client
has.
Extra compute: none on the client; on the server, one gradient step on the participants' heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedskew.errors import expect
from fedskew.losses import GammaMode, VacantMode, gravitation, unbalanced_cross_entropy
from fedskew.methods.catalogue import method, register
from fedskew.methods.parts import (
    Client,
    Objective,
    Outputs,
    Reveals,
    ServerRule,
    Tensors,
    Trained,
    Updates,
    weighted_mean,
)

_PAPER = "Guo et al., DASFAA 2023"


@method("fedgr-client", paper=_PAPER)
@dataclass(frozen=True)
class UnbalancedSoftmax(Objective):
    """FedGR's client only: cross entropy over the client's labels, with larger factors for the logits of rarer ones."""

    gamma: GammaMode = "normalised"
    """`normalised`: γ_c = n_min/n_c, at most 1, as in the published code. `paper`: n/n_c, which makes
    training diverge (docs/fidelity.md)."""
    vacant: VacantMode = "exclude"
    """Whether vacant classes are excluded from the softmax, or kept with a small γ as in the published code."""

    takes_class_weights = True

    def loss(self, out: Outputs, y: Tensor, client: Client) -> Tensor:
        counts, weights = client.label_counts, client.class_weights
        return unbalanced_cross_entropy(out.logits, y, counts, self.gamma, self.vacant, weights)


@method("fedgr-server", paper=_PAPER)
@dataclass(frozen=True)
class Gravitation(ServerRule):
    """FedGR's server only: the heads' rows of one label attract each other, and rows of different labels repel."""

    gravity: float = 0.5
    """λ, the weight of the regulariser."""
    reduction: Literal["sum", "mean"] = "sum"
    """Sum or mean of the regulariser's terms, one per participant and label. The paper uses the sum."""

    sends = "label presence"
    reveals: ClassVar[Reveals] = "label presence"

    attracts: ClassVar[bool] = True
    """Whether rows of the same label attract. FedGC has only repulsion."""
    needs_linear_head = True
    multi_label = False  # two labels that occur together must not repel each other

    def __post_init__(self) -> None:
        expect(self.gravity >= 0, "gravity", self.gravity, "a number ≥ 0")

    def uplink(self, trained: Trained, client: Client) -> Tensors:  # noqa: ARG002
        return {"label_presence": client.label_counts > 0}

    def aggregate(self, sent: Tensors, updates: Updates, state: Tensors) -> tuple[Tensors, Tensors]:  # noqa: ARG002
        return weighted_mean({**updates.params, **self.correct_heads(updates)}, updates.weights), state

    def correct_heads(self, updates: Updates) -> Tensors:
        """Return the participants' heads after one gradient step on the regulariser."""
        head = [name for name in ("head.weight", "head.bias") if name in updates.params]
        present = updates.uplink["label_presence"]
        with torch.enable_grad():
            leaves = {name: updates.params[name].detach().requires_grad_() for name in head}
            rows = torch.cat([leaf if leaf.dim() == 3 else leaf.unsqueeze(-1) for leaf in leaves.values()], dim=-1)
            regulariser = gravitation(rows, present, self.attracts)
            if self.reduction == "mean":
                regulariser = regulariser / present.sum()
            grads = torch.autograd.grad(regulariser, list(leaves.values()), allow_unused=True, materialize_grads=True)
        step = self.gravity * updates.lr
        return {name: updates.params[name] - step * grad for name, grad in zip(leaves, grads, strict=True)}


register(
    "fedgr",
    parts=(UnbalancedSoftmax, Gravitation),
    paper=_PAPER,
    summary="Unbalanced softmax on the client, gravitation between the heads' rows on the server.",
)
