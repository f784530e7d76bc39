"""What large logits of the client's own classes cost on samples of other classes (FedVLS)."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from fedskew.losses.batches import is_target, real_rows
from fedskew.losses.label_counts import class_probabilities

SuppressVariant = Literal["lade", "paper"]


def logit_suppression(
    logits: Tensor, targets: Tensor, label_counts: Tensor, variant: SuppressVariant = "lade"
) -> Tensor:
    """Σ_c p(c)·ℓ_c, which pushes down the logits of present classes on samples of other classes (FedVLS Eq. 4–5).

    `paper`: ℓ_c = log of the mean over the batch of 1[y≠c]·e^z_c; it has no lower bound. `lade`, the published
    program: logits shifted by −log p(c) + log 1/C, and a sample of class c adds e^0 instead of nothing, which
    gives the term a floor. A class without negatives in the batch is skipped (`paper`) or gives 0 (`lade`).
    """
    p = class_probabilities(label_counts, logits)
    real = real_rows(targets).unsqueeze(-1)
    negatives = ~is_target(logits, targets) & real
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
