"""Terms on the classifier: FedVLS's suppression of logits, FedGR's gravitation between rows of the heads."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from fedskew.losses.masks import class_probabilities, masked_logsumexp, real_rows, target_mask

SuppressVariant = Literal["lade", "paper"]


def logit_suppression(
    logits: Tensor, targets: Tensor, label_counts: Tensor, variant: SuppressVariant = "lade"
) -> Tensor:
    """Σ_c p(c)·ℓ_c, which lowers the logits of present classes on samples of other classes (FedVLS Eqs. 4–5).

    `paper`: ℓ_c is the log of the batch mean of 1[y ≠ c]·e^z_c, which has no lower bound. `lade`, as in the published
    program: the logits are shifted by −log p(c) + log 1/C, and a sample of class c adds e⁰ instead of nothing, which
    bounds the term from below. A class without negatives in the batch is skipped (`paper`) or gives 0 (`lade`).
    """
    p = class_probabilities(label_counts, logits)
    real = real_rows(targets).unsqueeze(-1)
    negatives = ~target_mask(logits, targets) & real
    if variant == "lade":
        shifted = logits - (p + 1e-9).log() + math.log(1 / logits.shape[-1] + 1e-9)
        terms = torch.where(negatives, shifted, 0.0).masked_fill(~real, -math.inf)
        counted = (p > 0) & real.any()
    else:
        counted = (p > 0) & negatives.any(dim=0)
        terms = logits.masked_fill(~negatives, -math.inf)
    terms = torch.where(counted, terms, 0.0)
    per_class = terms.logsumexp(dim=0) - real.sum().clamp(min=1).to(logits.dtype).log()
    return torch.where(counted, p * per_class, 0.0).sum()


def gravitation(classifiers: Tensor, present: Tensor, attraction: bool = True) -> Tensor:
    """FedGR's server regulariser −Σ_k Σ_{i∈Y_k} (log A + log R), without its weight λ (Eq. 9).

    `classifiers[K, C, d]` holds the rows of each participant's head, and `present[K, C]` says which labels it has. A
    attracts row i of client k to the other participants' rows of label i, and R repels it from their rows of other
    labels. In its own terms, a row is a constant. A label that no other participant has is not attracted. Without
    `attraction`, only −Σ log R remains, which is FedGC's regulariser.
    """
    clients, classes, _ = classifiers.shape
    present = present.to(torch.bool)
    same_label = torch.eye(classes, dtype=torch.bool, device=classifiers.device).unsqueeze(1)
    total = classifiers.new_zeros(())
    for k in range(clients):
        row = classifiers[k].detach()
        similarity = torch.einsum("id,zjd->izj", row, classifiers)
        elsewhere = present.clone()
        elsewhere[k] = False
        attracting = elsewhere & same_label  # [C, K, C]: label i of another client
        repelling = elsewhere & ~same_label
        attracted = masked_logsumexp(similarity, attracting) - masked_logsumexp(
            similarity, elsewhere.expand_as(attracting)
        )
        own = (row * row).sum(dim=-1)
        repulsion = own - torch.logaddexp(own, masked_logsumexp(similarity, repelling))
        has_attraction = present[k] & attracting.flatten(1).any(dim=1)
        has_repulsion = present[k] & repelling.flatten(1).any(dim=1)
        if attraction:
            total = total - torch.where(has_attraction, attracted, 0.0).sum()
        total = total - torch.where(has_repulsion, repulsion, 0.0).sum()
    return total
