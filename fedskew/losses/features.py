"""What features cost that leave the global model's, or whose dimensions say the same."""

from __future__ import annotations

import torch
from torch import Tensor

from fedskew.losses.batches import batch_mean, real_rows


def model_contrast(
    features: Tensor, global_features: Tensor, previous_features: Tensor, targets: Tensor, temperature: float = 0.5
) -> Tensor:
    """−log of e^(s/τ) over e^(s/τ) + e^(s'/τ), s and s' the cosines with the global and the previous model (MOON).

    Features of zero length have a cosine of 0 with everything. `targets` only tells which rows pad the batch.
    """
    own, common, previous = (directions(f) for f in (features, global_features.detach(), previous_features.detach()))
    closer = (own * (common - previous)).sum(dim=-1) / temperature
    return batch_mean(-torch.nn.functional.logsigmoid(closer), targets)


def directions(features: Tensor) -> Tensor:
    return torch.nn.functional.normalize(features.flatten(1), dim=-1, eps=1e-8)


def decorrelation(features: Tensor, targets: Tensor) -> Tensor:
    """The mean square of the off-diagonal of XᵀX, over N; X the N standardised features (FedDecorr).

    0 for a batch of one. `targets` only tells which rows pad the batch.
    """
    real = real_rows(targets)
    return _off_diagonal(features, real.unsqueeze(-1) & real)


def class_decorrelation(features: Tensor, targets: Tensor) -> Tensor:
    """The same class by class, summed, over the samples of classes that are in the batch twice (FedMR's intra term)."""
    real = real_rows(targets)
    return _off_diagonal(features, (targets.unsqueeze(-1) == targets) & real.unsqueeze(-1) & real)


def _off_diagonal(features: Tensor, alike: Tensor) -> Tensor:
    """Σ over groups of rows of the mean square off the diagonal of XᵀX, over the rows used; `alike[B, B]`: one group.

    ‖XᵀX‖ = ‖XXᵀ‖, so no d×d matrix is made.
    """
    x, width = features.flatten(1), features[0].numel()
    together = alike.to(x.dtype)
    size = together.sum(dim=-1, keepdim=True)
    used = size > 1
    centred = x - together @ x / size.clamp(min=1)
    variance = together @ centred.square() / (size - 1).clamp(min=1)
    standard = torch.where(used, centred / (variance + 1e-8).sqrt(), 0.0)
    squares = standard.square()
    whole = ((standard @ standard.transpose(-1, -2)).square() * together).sum()
    diagonal = (squares * (together @ squares)).sum()
    return (whole - diagonal) / max(width * (width - 1), 1) / used.sum().clamp(min=1)
