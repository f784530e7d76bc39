"""What a sample's label costs: the cross entropy, smoothed, focused, calibrated, scaled or over fewer classes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from fedskew.losses.batches import batch_mean, class_masks, index, members
from fedskew.losses.label_counts import class_probabilities
from fedskew.losses.softmaxes import negative_log_likelihood

GammaMode = Literal["paper", "normalised"]
VacantMode = Literal["exclude", "code"]


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """CE(z, y): FedAvg's loss."""
    return negative_log_likelihood(logits.log_softmax(dim=-1), targets)


def smoothed_cross_entropy(logits: Tensor, targets: Tensor, smoothing: float = 0.1) -> Tensor:
    """CE against (1 − μ)·one-hot + μ/C: label smoothing."""
    log_p = logits.log_softmax(dim=-1)
    return (1 - smoothing) * negative_log_likelihood(log_p, targets) - smoothing * batch_mean(log_p.mean(-1), targets)


def focal_cross_entropy(logits: Tensor, targets: Tensor, gamma: float = 2.0) -> Tensor:
    """−(1 − p_y)^γ·log p_y: the focal loss, which turns from samples that are already right."""
    log_p = logits.log_softmax(dim=-1).gather(-1, index(targets).unsqueeze(-1)).squeeze(-1)
    wrong = (-torch.expm1(log_p)).clamp(min=1e-12)  # a power below 1 has no slope at 0
    return batch_mean(-(wrong**gamma) * log_p, targets)


def calibrated_cross_entropy(logits: Tensor, targets: Tensor, label_counts: Tensor) -> Tensor:
    """CE(z + log p, y), vacant classes out of the softmax (FedVLS Eq. 2)."""
    return cross_entropy(logits + class_probabilities(label_counts, logits).log(), targets)


def margin_cross_entropy(logits: Tensor, targets: Tensor, label_counts: Tensor, tau: float) -> Tensor:
    """CE(z_c − τ·n_c^(−1/4), y): FedLC's calibrated margin.

    That of a vacant class is the largest number there is times τ: it drops out, and stays where τ is 0. An infinite
    one would be NaN there, and to ask for τ first would keep runs of other τ from sharing a stack.
    """
    rarity = label_counts.to(logits.dtype).pow(-0.25).clamp(max=torch.finfo(logits.dtype).max)
    return cross_entropy(logits - tau * rarity, targets)


def restricted_softmax_cross_entropy(
    logits: Tensor, targets: Tensor, label_counts: Tensor, alpha: float, soft: bool = False
) -> Tensor:
    """CE(α_c·z_c, y): FedRS scales the logits of vacant classes by α, those present by 1.

    `soft`: α_c = α + (1 − α)·n_c/max n, as in the authors' later program.
    """
    counts = label_counts.to(logits.dtype)
    share = counts / counts.max() if soft else (counts > 0).to(logits.dtype)
    return cross_entropy(logits * (alpha + (1 - alpha) * share), targets)


def unbalanced_cross_entropy(
    logits: Tensor,
    targets: Tensor,
    label_counts: Tensor,
    gamma: GammaMode = "paper",
    vacant: VacantMode = "exclude",
) -> Tensor:
    """CE(γ_c·z_c, y) over the client's own labels (FedGR Eq. 3).

    `gamma="paper"`: γ_c = n/n_c. `"normalised"`: γ_c = n_min/n_c, at most 1, as in the published program.
    `vacant="code"` keeps vacant classes in the softmax with the program's γ (0.25·n_min/n_max, on the
    scale of the chosen γ).
    """
    counts = label_counts.to(logits.dtype)
    present = counts > 0
    smallest = torch.where(present, counts, math.inf).min()
    scale = counts.sum() if gamma == "paper" else smallest
    factor = scale / torch.where(present, counts, 4.0 * counts.max())
    scaled = factor * logits
    if vacant == "exclude":
        scaled = scaled.masked_fill(~present, -math.inf)
    return cross_entropy(scaled, targets)


def batch_class_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """CE with the softmax restricted to the classes that the batch has (BalanceFL); 0 if that is one."""
    present = class_masks(targets, logits.shape[-1]).any(dim=0)
    return cross_entropy(logits.masked_fill(~present, -math.inf), targets)


def own_label_cross_entropy(logits: Tensor, targets: Tensor, label_counts: Tensor) -> Tensor:
    """CE with the softmax restricted to the classes that the client has (FedGC); 0 if that is one."""
    return cross_entropy(logits.masked_fill(label_counts == 0, -math.inf), targets)


def group_cross_entropy(logits: Tensor, targets: Tensor, group: Sequence[int]) -> Tensor:
    """CE with the softmax restricted to the classes of `group`: how a PKD expert learns."""
    return cross_entropy(logits.masked_fill(~members(logits, group), -math.inf), targets)
