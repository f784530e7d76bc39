"""Cross entropies: plain, smoothed, focal, calibrated by label counts, or over some of the classes.

In the formulas, z are the logits of a sample and y is its class. C is the number of classes, n_c is the client's number
of samples of class c, and n is their sum. A class with n_c = 0 is vacant.

FedVLS's logit suppression is here as well, because it is added to the calibrated cross entropy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from fedskew.task import (
    TASKS,
    batch_mean,
    class_index,
    class_masks,
    negative_log_likelihood,
    real_rows,
    target_mask,
    weigh,
)

SuppressVariant = Literal["lade", "paper"]
"""See `logit_suppression`."""
GammaMode = Literal["paper", "normalised"]
"""See `unbalanced_cross_entropy`."""
VacantMode = Literal["exclude", "code"]
"""See `unbalanced_cross_entropy`."""


def cross_entropy(logits: Tensor, targets: Tensor, weights: Tensor | None = None) -> Tensor:
    """w_y·CE(z, y): FedAvg's loss for one class per sample. w are the `weights` of the classes, 1 by default.

    The other cross entropies of this file use `weights` in the same way, unless they say otherwise.
    """
    return TASKS["single-label"].loss(logits, targets, weights)


def binary_cross_entropy(logits: Tensor, targets: Tensor, weights: Tensor | None = None) -> Tensor:
    """The mean of −w·y·log σ(z) − (1 − y)·log σ(−z) over the labels: FedAvg's loss for several labels per sample.

    y is 1 for a label that the sample has, and 0 for another. w are the `weights` of the labels, 1 by default.
    """
    return TASKS["multi-label"].loss(logits, targets, weights)


def smoothed_cross_entropy(
    logits: Tensor, targets: Tensor, smoothing: float = 0.1, weights: Tensor | None = None
) -> Tensor:
    """CE against (1 − μ)·one-hot + μ/C: label smoothing with μ = `smoothing`.

    As in PyTorch, the weight of a class also multiplies its term of the uniform part.
    """
    log_p = logits.log_softmax(dim=-1)
    hard = negative_log_likelihood(log_p, targets, weights)
    every_class = log_p if weights is None else weights.to(log_p.dtype) * log_p
    return (1 - smoothing) * hard - smoothing * batch_mean(every_class.mean(-1), targets)


def focal_cross_entropy(logits: Tensor, targets: Tensor, gamma: float = 2.0, weights: Tensor | None = None) -> Tensor:
    """−(1 − p_y)^γ·log p_y: the focal loss. A sample counts less if the probability p_y of its class is high."""
    log_p = logits.log_softmax(dim=-1).gather(-1, class_index(targets).unsqueeze(-1)).squeeze(-1)
    one_minus_p = (-torch.expm1(log_p)).clamp(min=1e-12)  # at 0, the gradient would be infinite for γ < 1
    return batch_mean(weigh(-(one_minus_p**gamma) * log_p, targets, weights), targets)


def balanced_weights(label_counts: Tensor, like: Tensor) -> Tensor:
    """Return n/(C'·n_c) for the C' classes with samples, and 0 for the others, in the dtype of `like`.

    With these weights, every class with samples has the same total weight.
    """
    counts = label_counts.to(like.dtype)
    present = counts > 0
    return torch.where(present, counts.sum() / (present.sum() * counts.clamp(min=1)), 0.0)


def balanced_label_weights(label_counts: Tensor, samples: Tensor, like: Tensor) -> Tensor:
    """Return negatives/positives for each label of samples with several labels, in the dtype of `like`.

    With this weight, a label's positives have the same total weight as its negatives. A label that no sample has, or
    that all have, gets the weight 1.
    """
    positives = label_counts.to(like.dtype)
    negatives = samples.to(like.dtype) - positives
    return torch.where((positives > 0) & (negatives > 0), negatives / positives.clamp(min=1), 1.0)


def calibrated_cross_entropy(
    logits: Tensor, targets: Tensor, label_counts: Tensor, weights: Tensor | None = None
) -> Tensor:
    """CE(z + log p, y) with the client's class shares p. It excludes vacant classes from the softmax (FedVLS Eq. 2)."""
    return cross_entropy(logits + class_probabilities(label_counts, logits).log(), targets, weights)


def margin_cross_entropy(
    logits: Tensor, targets: Tensor, label_counts: Tensor, tau: float, weights: Tensor | None = None
) -> Tensor:
    """CE(z_c − τ·n_c^(−1/4), y): FedLC's calibrated margin.

    For a vacant class, n_c^(−1/4) is infinite. The largest float replaces it, because 0·∞ is NaN. With τ > 0, vacant
    classes drop out of the softmax.
    """
    rarity = label_counts.to(logits.dtype).pow(-0.25).clamp(max=torch.finfo(logits.dtype).max)
    return cross_entropy(logits - tau * rarity, targets, weights)


def restricted_softmax_cross_entropy(
    logits: Tensor,
    targets: Tensor,
    label_counts: Tensor,
    alpha: float,
    soft: bool = False,
    weights: Tensor | None = None,
) -> Tensor:
    """CE(α_c·z_c, y) with α_c = α for vacant classes and 1 for present ones (FedRS).

    With `soft`, α_c = α + (1 − α)·n_c/max n, as in the authors' later code.
    """
    counts = label_counts.to(logits.dtype)
    share = counts / counts.max() if soft else (counts > 0).to(logits.dtype)
    return cross_entropy(logits * (alpha + (1 - alpha) * share), targets, weights)


def unbalanced_cross_entropy(
    logits: Tensor,
    targets: Tensor,
    label_counts: Tensor,
    gamma: GammaMode = "paper",
    vacant: VacantMode = "exclude",
    weights: Tensor | None = None,
) -> Tensor:
    """CE(γ_c·z_c, y) over the client's classes (FedGR Eq. 3).

    With `gamma="paper"`, γ_c = n/n_c. With `gamma="normalised"`, as in the published code, γ_c = n_min/n_c, where n_min
    is the smallest count above 0.

    By default, vacant classes are excluded from the softmax. With `vacant="code"`, as in the published code, they are
    included, as if they had 4·n_max samples. n_max is the largest count.
    """
    counts = label_counts.to(logits.dtype)
    present = counts > 0
    smallest = torch.where(present, counts, math.inf).min()
    scale = counts.sum() if gamma == "paper" else smallest
    factor = scale / torch.where(present, counts, 4.0 * counts.max())
    scaled = factor * logits
    if vacant == "exclude":
        scaled = scaled.masked_fill(~present, -math.inf)
    return cross_entropy(scaled, targets, weights)


def batch_class_cross_entropy(logits: Tensor, targets: Tensor, weights: Tensor | None = None) -> Tensor:
    """CE with the softmax restricted to the batch's classes (BalanceFL). It is 0 if the batch has only one class."""
    present = class_masks(targets, logits.shape[-1]).any(dim=0)
    return cross_entropy(logits.masked_fill(~present, -math.inf), targets, weights)


def own_label_cross_entropy(
    logits: Tensor, targets: Tensor, label_counts: Tensor, weights: Tensor | None = None
) -> Tensor:
    """CE with the softmax restricted to the client's classes (FedGC). It is 0 if the client has only one class."""
    return cross_entropy(logits.masked_fill(label_counts == 0, -math.inf), targets, weights)


def group_cross_entropy(logits: Tensor, targets: Tensor, group: Sequence[int], weights: Tensor | None = None) -> Tensor:
    """CE with the softmax restricted to the classes of `group`: the loss of an expert in PKD."""
    return cross_entropy(logits.masked_fill(~group_mask(logits, group), -math.inf), targets, weights)


def logit_suppression(
    logits: Tensor, targets: Tensor, label_counts: Tensor, variant: SuppressVariant = "lade"
) -> Tensor:
    """Σ_c p(c)·ℓ_c, which lowers the logits of present classes on samples of other classes (FedVLS Eqs. 4–5).

    In the variant `paper`, ℓ_c is the log of the batch mean of 1[y ≠ c]·e^z_c, which has no lower bound. A class
    without negatives (samples of other classes) in the batch is skipped.

    The variant `lade` is that of the published code, which took it from the LADE regulariser. It shifts the logits by
    −log p(c) + log 1/C. A sample of class c adds e⁰ to the mean instead of nothing, so ℓ_c has a lower bound if the
    batch has such a sample. A class without negatives gives 0.
    """
    p = class_probabilities(label_counts, logits)
    real = real_rows(targets).unsqueeze(-1)  # False for padding
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


def class_probabilities(label_counts: Tensor, like: Tensor) -> Tensor:
    """Return p(c) = n_c/n, in the dtype of `like`."""
    counts = label_counts.to(like.dtype)
    return counts / counts.sum()


def group_mask(logits: Tensor, group: Sequence[int]) -> Tensor:
    """Mark the classes of the group: `[C]` booleans.

    Indexing with a Python list would copy the list to the GPU at every step, which a CUDA graph cannot replay.
    """
    classes = torch.arange(logits.shape[-1], device=logits.device)
    return torch.stack([classes == c for c in group]).any(dim=0)
