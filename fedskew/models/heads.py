"""Heads besides the linear one, and the logits z that they compute from the features h.

    cosine     z_c = s·cos(h, w_c), with trained directions w, which start as a simplex (at random if C > d)
    etf        z_c = s·cos(P h, m_c), with a trained projection P and fixed directions m
    prototype  z_c = s·(h·p_c − ‖p_c‖²/2), with trained prototypes p, which start like w
    personal   z = G h + V h, with a generic head G and a personal head V, which starts at zero
    retrained  z = R h, with a head R that the server trains; clients train a generic head G instead

C is the number of classes, d is the number of features, and s is a trained scale. The directions m are a simplex
equiangular tight frame (ETF): the angle between any two of them is the same, and as large as C directions allow. The
largest logit of `prototype` is that of the nearest prototype: its logits are −s·‖h − p_c‖²/2, without the term
−s·‖h‖²/2, which is the same for all classes.
"""

from __future__ import annotations

import math
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedskew.models.base import Classifier

SCALE = 10.0
"""The scale of the heads `cosine` and `etf` before training, as in FedETF's code."""


class CosineHead(nn.Module):
    """Cosine similarities of features and trained directions, times a trained scale."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.directions = nn.Parameter(distant_directions(classes, features))
        self.scale = nn.Parameter(torch.full((1,), SCALE))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * functional.linear(
            functional.normalize(x, dim=-1), functional.normalize(self.directions, dim=-1)
        )


class ETFHead(nn.Module):
    """Cosine similarities of projected features and fixed directions of a simplex, times a trained scale."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        width = max(features, classes)
        self.projection = nn.Linear(features, width)
        self.scale = nn.Parameter(torch.full((1,), SCALE))
        self.frame = nn.Parameter(simplex_frame(classes, width), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * functional.linear(functional.normalize(self.projection(x), dim=-1), self.frame)


class PrototypeHead(nn.Module):
    """The nearer a class's trained prototype is to the features, the larger is the logit."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.prototypes = nn.Parameter(distant_directions(classes, features))
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * functional.linear(x, self.prototypes, -self.prototypes.square().sum(dim=-1) / 2)


class PersonalHead(nn.Module):
    """A generic head and a personal one. The personal logits are the sum of both heads' outputs.

    Training the personal head changes neither the generic head nor the features. In train mode, the output has the
    generic logits and then the personal ones: [B, 2C]. In eval mode, it has only the personal ones, which equal the
    generic ones as long as the personal head is zero.
    """

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.generic = nn.Linear(features, classes)
        self.personal = nn.Linear(features, classes)
        nn.init.zeros_(self.personal.weight)
        nn.init.zeros_(self.personal.bias)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            total: Tensor = self.generic(x) + self.personal(x)
            return total
        return personal_logits(self.generic(x), self.personal(x.detach()))


def personal_logits(generic: Tensor, personal: Tensor) -> Tensor:
    """Return the output of a `PersonalHead` in training, from the logits of its two linear heads."""
    return torch.cat([generic, generic.detach() + personal], dim=-1)


class RetrainedHead(nn.Module):
    """A generic head, which clients train, and a retrained head, which the server trains and predictions use."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.generic = nn.Linear(features, classes)
        self.retrained = nn.Linear(features, classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.generic(x) if self.training else self.retrained(x)
        return logits


def distant_directions(classes: int, width: int) -> Tensor:
    """Return rows of norm 1, [classes, width]: a simplex if width ≥ classes, otherwise random directions."""
    if width >= classes:
        return simplex_frame(classes, width)
    return functional.normalize(torch.randn(classes, width))


def simplex_frame(classes: int, width: int) -> Tensor:
    """Return √(C/(C − 1))·(I − 11ᵀ/C)·Qᵀ for a random Q with orthonormal columns: [classes, width], rows of norm 1.

    Q comes from Gram-Schmidt in float64, because a QR routine may choose other signs on another machine.
    """
    rows = torch.randn(classes, width, dtype=torch.float64)
    for number in range(classes):
        for _ in range(2):  # the second time removes what rounding left
            rows[number] -= rows[:number].T @ (rows[:number] @ rows[number])
            rows[number] /= rows[number].norm()
    frame = math.sqrt(classes / (classes - 1)) * (rows - rows.mean(dim=0))
    return frame.to(torch.get_default_dtype())


HEADS: dict[str, type[CosineHead] | type[ETFHead] | type[PrototypeHead] | type[PersonalHead] | type[RetrainedHead]] = {
    "cosine": CosineHead,
    "etf": ETFHead,
    "prototype": PrototypeHead,
    "personal": PersonalHead,
    "retrained": RetrainedHead,
}

TWO_HEADS = ("personal", "retrained")
"""Heads that consist of two linear heads. Only the methods that choose such a head can train it."""


def replace_head(model: Classifier, kind: str) -> Classifier:
    """Replace the model's linear head by one of another kind, for the same features and classes."""
    linear = cast(nn.Linear, model.head)
    model.head = HEADS[kind](linear.in_features, linear.out_features)
    return model
