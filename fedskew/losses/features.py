"""Terms on features: contrast, decorrelation, and distances to prototypes and class centres.

In the formulas, f are a sample's features, y is its class, and τ is the temperature. `gravitation` is a term on the
rows of the clients' heads.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fedskew.accurate_sums import ACCURATE
from fedskew.losses.cross_entropies import cross_entropy
from fedskew.task import batch_mean, class_index, class_masks, real_rows


def model_contrast(
    features: Tensor, global_features: Tensor, previous_features: Tensor, targets: Tensor, temperature: float = 0.5
) -> Tensor:
    """−log( e^(s/τ) / (e^(s/τ) + e^(s'/τ)) ) with s, s' the cosines with the global and previous features (MOON).

    A cosine with a zero vector counts as 0. `targets` only marks padded rows.
    """
    current, common, previous = (
        unit_vectors(f) for f in (features, global_features.detach(), previous_features.detach())
    )
    difference = (current * (common - previous)).sum(dim=-1) / temperature  # (s − s')/τ
    return batch_mean(-torch.nn.functional.logsigmoid(difference), targets)


def unit_vectors(features: Tensor) -> Tensor:
    """Scale features to length 1. Zero vectors stay zero."""
    return torch.nn.functional.normalize(features.flatten(1), dim=-1, eps=1e-8)


def decorrelation(features: Tensor, targets: Tensor) -> Tensor:
    """1/N times the mean square of the off-diagonal entries of XᵀX (FedDecorr).

    X has N rows of standardised features. The term is 0 for a batch of one. `targets` only marks padded rows.
    """
    real = real_rows(targets)
    return _off_diagonal(features, real.unsqueeze(-1) & real)


def class_decorrelation(features: Tensor, targets: Tensor) -> Tensor:
    """1/N times the mean square of the off-diagonal entries of XᵀX, summed over classes (FedMR's intra-class term).

    X has the standardised features of one class. Only classes that occur at least twice in the batch count, and N is
    the number of their samples.
    """
    real = real_rows(targets)
    return _off_diagonal(features, (targets.unsqueeze(-1) == targets) & real.unsqueeze(-1) & real)


def _off_diagonal(features: Tensor, alike: Tensor) -> Tensor:
    """Return the mean square of the off-diagonal entries of XᵀX, summed over groups of rows and divided by N.

    `alike[B, B]` marks pairs of rows in the same group. X has the standardised features of one group. N is the number
    of rows in groups of two or more. Since ‖XᵀX‖ = ‖XXᵀ‖, no d×d matrix is needed for d features.
    """
    x, width = features.flatten(1), features[0].numel()
    together = alike.to(x.dtype)
    size = together.sum(dim=-1, keepdim=True)
    used = size > 1
    centred = x - together @ x / size.clamp(min=1)
    variance = together @ centred.square() / (size - 1).clamp(min=1)
    standard = torch.where(used, centred / (variance + 1e-8).sqrt(), 0.0)
    squares = standard.square()
    all_entries = ((standard @ standard.transpose(-1, -2)).square() * together).sum()
    diagonal = (squares * (together @ squares)).sum()
    return (all_entries - diagonal) / max(width * (width - 1), 1) / used.sum().clamp(min=1)


def prototype_contrast(
    features: Tensor, targets: Tensor, prototypes: Tensor, known: Tensor, temperature: float = 0.02
) -> Tensor:
    """−log( Σ e^(cos/τ) over the prototypes of the sample's class / Σ e^(cos/τ) over all prototypes ) (FPL).

    `known[C, P]` marks which of the `prototypes[C, P, d]` exist. A sample whose class has no prototype adds 0.
    """
    cosines = unit_vectors(features) @ unit_vectors(prototypes.detach().flatten(0, 1)).T / temperature
    own = (class_masks(targets, len(known)).unsqueeze(-1) & known).flatten(1)
    contrast = masked_logsumexp(cosines, known.flatten().expand_as(own)) - masked_logsumexp(cosines, own)
    return batch_mean(torch.where(own.any(dim=-1), contrast, 0.0), targets)


def prototype_distance(features: Tensor, targets: Tensor, prototypes: Tensor, known: Tensor) -> Tensor:
    """The mean square of f − m_y, where m_y is the mean of the prototypes of the sample's class (FPL).

    The arguments are those of `prototype_contrast`. A sample whose class has no prototype adds 0.
    """
    present = known.to(prototypes.dtype).unsqueeze(-1)
    means = (prototypes.detach() * present).sum(dim=1) / present.sum(dim=1).clamp(min=1)
    squares = (features.flatten(1) - means[class_index(targets)]).square().mean(dim=-1)
    return batch_mean(torch.where(known.any(dim=-1)[class_index(targets)], squares, 0.0), targets)


def prototype_margin(features: Tensor, targets: Tensor, prototypes: Tensor, known: Tensor) -> Tensor:
    """max(0, ‖g_c − g_c'‖ − ‖f̄_c − g_c'‖), averaged over classes c in the batch and c' ≠ c (FedMR's inter-class term).

    f̄_c is the mean feature of class c in the batch. `prototypes[C, d]` are the g_c, and `known[C]` marks those that
    exist. A pair (c, c') counts only if both prototypes exist.
    """
    x, g = features.flatten(1), prototypes.detach()
    members = class_masks(targets, len(known)).to(x.dtype)
    means = members.T @ x / members.sum(dim=0).clamp(min=1).unsqueeze(-1)
    in_batch = (members.sum(dim=0) > 0) & known
    pairs = in_batch.unsqueeze(-1) & known & ~torch.eye(len(known), dtype=torch.bool, device=known.device)
    shortfall = (_distances(g, g) - _distances(means, g)).clamp(min=0)
    return torch.where(pairs, shortfall, 0.0).sum() / pairs.sum().clamp(min=1)


def centre_cross_entropy(features: Tensor, targets: Tensor, centres: Tensor, max_margin: float = 100.0) -> Tensor:
    """CE(−d_c, y) with d_c = ‖f − μ_c‖ + m·1[c = y] and the class centres μ, `centres[C, d]` (FedLF).

    The margin m is the largest distance between two centres, but at most `max_margin`.
    """
    x, g = features.flatten(1), centres.detach()
    margin = _distances(g, g).amax().clamp(max=max_margin)
    return cross_entropy(-_distances(x, g) - margin * class_masks(targets, len(g)), targets)


def _distances(points: Tensor, others: Tensor) -> Tensor:
    """Return ‖a − b‖ for each a of `points` and b of `others`. Points that coincide have gradient 0."""
    squares = squared_distances(points, others)
    apart = squares > 0
    return torch.where(apart, torch.where(apart, squares, 1.0).sqrt(), 0.0).to(points.dtype)


def squared_distances(points: Tensor, others: Tensor) -> Tensor:
    """Return ‖a − b‖² for each a of `points` and b of `others`, from ‖a‖² + ‖b‖² − 2·a·b.

    This needs no tensor of differences, but it loses digits. It is therefore computed in the device's most accurate
    format, to which TF32 does not apply. The result has this format. Points that coincide up to rounding have distance
    0 and gradient 0. The tolerances are a few times the rounding errors.
    """
    accurate = ACCURATE[points.device.type]
    a, b = points.to(accurate), others.to(accurate)
    squared_lengths = a.square().sum(dim=-1, keepdim=True) + b.square().sum(dim=-1)
    squares = squared_lengths - 2 * a @ b.T
    rounding = max((16 * torch.finfo(points.dtype).eps) ** 2, 64 * torch.finfo(accurate).eps)
    return torch.where(squares > rounding * squared_lengths, squares, 0.0)


def gravitation(classifiers: Tensor, present: Tensor, attraction: bool = True) -> Tensor:
    """FedGR's server regulariser −Σ_k Σ_{i∈Y_k} (log A + log R), without its weight λ (Eq. 9).

    `classifiers[K, C, d]` holds the rows of each participant's head, and `present[K, C]` marks Y_k, the labels that
    participant k has. Let u be row i of participant k, and v the rows of the other participants for their own labels:

        A = Σ_{v of label i} e^(u·v) / Σ_v e^(u·v)
        R = e^(u·u) / (e^(u·u) + Σ_{v of other labels} e^(u·v))

    A attracts the rows of label i to u, and R repels the rows of other labels from u. The row u itself gets no gradient
    from these two factors. If no other participant has label i, A is left out. Without `attraction`, only −Σ log R
    remains, which is FedGC's regulariser.
    """
    clients, classes, _ = classifiers.shape
    present = present.to(torch.bool)
    same_label = torch.eye(classes, dtype=torch.bool, device=classifiers.device).unsqueeze(1)
    total = classifiers.new_zeros(())
    for k in range(clients):
        rows = classifiers[k].detach()
        similarity = torch.einsum("id,zjd->izj", rows, classifiers)
        others_have = present.clone()
        others_have[k] = False
        attracting = others_have & same_label  # [C, K, C]: label i of another client
        repelling = others_have & ~same_label
        attracted = masked_logsumexp(similarity, attracting) - masked_logsumexp(
            similarity, others_have.expand_as(attracting)
        )
        own = (rows * rows).sum(dim=-1)
        repulsion = own - torch.logaddexp(own, masked_logsumexp(similarity, repelling))
        has_attraction = present[k] & attracting.flatten(1).any(dim=1)
        has_repulsion = present[k] & repelling.flatten(1).any(dim=1)
        if attraction:
            total = total - torch.where(has_attraction, attracted, 0.0).sum()
        total = total - torch.where(has_repulsion, repulsion, 0.0).sum()
    return total


def masked_logsumexp(values: Tensor, mask: Tensor) -> Tensor:
    """Return the log-sum-exp of the values that `mask` marks, over all axes but the first.

    For an empty mask, the result is finite but has no meaning.
    """
    mask = mask.flatten(1)
    safe = mask | ~mask.any(dim=1, keepdim=True)
    return values.flatten(1).masked_fill(~safe, -math.inf).logsumexp(dim=1)
