"""What a round's classifiers cost that disagree on a label or confuse labels (FedGR's and FedGC's server)."""

from __future__ import annotations

import torch
from torch import Tensor

from fedskew.losses.softmaxes import masked_lse


def gravitation(classifiers: Tensor, present: Tensor, attraction: bool = True) -> Tensor:
    """FedGR's server regulariser −Σ_k Σ_{i∈Y_k} (log A + log R), before its weight λ (Eq. 9); without attraction only
    −Σ log R, FedGC's.

    `classifiers[K, C, d]` holds each participant's classification rows, `present[K, C]` whose labels they are.
    A draws row i of client k to the same label's rows elsewhere, R drives it from the other labels' rows; the
    row itself is a constant in its own terms. A label that no other participant owns has no attraction.
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
        attracted = masked_lse(similarity, attracting) - masked_lse(similarity, elsewhere.expand_as(attracting))
        own = (row * row).sum(dim=-1)
        repulsion = own - torch.logaddexp(own, masked_lse(similarity, repelling))
        has_attraction = present[k] & attracting.flatten(1).any(dim=1)
        has_repulsion = present[k] & repelling.flatten(1).any(dim=1)
        if attraction:
            total = total - torch.where(has_attraction, attracted, 0.0).sum()
        total = total - torch.where(has_repulsion, repulsion, 0.0).sum()
    return total
