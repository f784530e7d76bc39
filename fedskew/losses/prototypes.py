"""What it costs to be far from the prototypes of one's class, or near those of others."""

from __future__ import annotations

import torch
from torch import Tensor

from fedskew.losses.batches import batch_mean, class_masks, index
from fedskew.losses.cross_entropies import cross_entropy
from fedskew.losses.features import directions
from fedskew.losses.softmaxes import masked_lse


def prototype_contrast(
    features: Tensor, targets: Tensor, prototypes: Tensor, known: Tensor, temperature: float = 0.02
) -> Tensor:
    """−log of Σ e^(cos/τ) over the prototypes of the sample's class over the same of all classes (FPL).

    `prototypes[C, P, d]`, of which `known[C, P]` are; a sample whose class has none counts as 0 in the mean.
    """
    cosines = directions(features) @ directions(prototypes.detach().flatten(0, 1)).T / temperature
    own = (class_masks(targets, len(known)).unsqueeze(-1) & known).flatten(1)
    contrast = masked_lse(cosines, known.flatten().expand_as(own)) - masked_lse(cosines, own)
    return batch_mean(torch.where(own.any(dim=-1), contrast, 0.0), targets)


def prototype_distance(features: Tensor, targets: Tensor, prototypes: Tensor, known: Tensor) -> Tensor:
    """The mean square of f − m_y, m_y the mean of the class's prototypes (FPL); else as in `prototype_contrast`."""
    present = known.to(prototypes.dtype).unsqueeze(-1)
    means = (prototypes.detach() * present).sum(dim=1) / present.sum(dim=1).clamp(min=1)
    squares = (features.flatten(1) - means[index(targets)]).square().mean(dim=-1)
    return batch_mean(torch.where(known.any(dim=-1)[index(targets)], squares, 0.0), targets)


def prototype_margin(features: Tensor, targets: Tensor, prototypes: Tensor, known: Tensor) -> Tensor:
    """max(0, ‖g_c − g_c'‖ − ‖f̄_c − g_c'‖), the mean over the classes c of the batch and all others (FedMR, inter term).

    `prototypes[C, d]` are the g_c, `known[C]` tells which there are; pairs without both cost nothing.
    """
    x, g = features.flatten(1), prototypes.detach()
    members = class_masks(targets, len(known)).to(x.dtype)
    means = members.T @ x / members.sum(dim=0).clamp(min=1).unsqueeze(-1)
    here = (members.sum(dim=0) > 0) & known
    pairs = here.unsqueeze(-1) & known & ~torch.eye(len(known), dtype=torch.bool, device=known.device)
    shortfall = (_distances(g, g) - _distances(means, g)).clamp(min=0)
    return torch.where(pairs, shortfall, 0.0).sum() / pairs.sum().clamp(min=1)


def centre_cross_entropy(features: Tensor, targets: Tensor, centres: Tensor, max_margin: float = 100.0) -> Tensor:
    """CE(−d_c, y), d_c = ‖f − μ_c‖ + m·1[c = y], m the largest distance between two of the `centres[C, d]` (FedLF)."""
    x, g = features.flatten(1), centres.detach()
    margin = _distances(g, g).amax().clamp(max=max_margin)
    return cross_entropy(-_distances(x, g) - margin * class_masks(targets, len(g)), targets)


def _distances(some: Tensor, others: Tensor) -> Tensor:
    """‖a − b‖ of every pair, from their products, so that no [C, C, d] is made.

    In float64, for which there is no TF32: the difference of squares keeps few of their digits. Points that coincide
    but for rounding, theirs or that of the squares, have a distance of 0 with a slope of 0.
    """
    a, b = some.double(), others.double()
    lengths = a.square().sum(dim=-1, keepdim=True) + b.square().sum(dim=-1)
    squares = lengths - 2 * a @ b.T
    rounding = max((16 * torch.finfo(some.dtype).eps) ** 2, 64 * torch.finfo(torch.float64).eps)
    apart = squares > rounding * lengths
    return torch.where(apart, torch.where(apart, squares, 1.0).sqrt(), 0.0).to(some.dtype)
