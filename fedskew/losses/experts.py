"""What it costs to differ from experts for groups of classes that are confused with each other (PKD)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from fedskew.losses.batches import IGNORE, batch_mean, index, members, real_rows

MeanOver = Literal["batch", "active"]
Taught = Literal["confused", "all"]
"""Of a group's samples, which its expert teaches: those mistaken for another class of the group, or all."""


def partial_distillation(
    logits: Tensor,
    targets: Tensor,
    expert_logits: Tensor,
    groups: Sequence[Sequence[int]],
    temperature: float = 3.0,
    reverse: bool = False,
    mean_over: MeanOver = "batch",
    taught: Taught = "confused",
) -> Tensor:
    """KL(expert ‖ student) within the group, for samples confused inside a weak-class group (PKD Eq. 1).

    Expert g (`expert_logits[g]`) is active for a sample whose target and wrong prediction both lie in group
    g; where two groups qualify, the first. `reverse`: KL(student ‖ expert). `mean_over`: the whole batch, or the
    samples that are taught. `taught`: every sample of a group's classes, rather than those confused.
    """
    active = active_experts(logits, targets, groups, taught)
    total = torch.zeros_like(logits[..., 0])
    for expert, group in enumerate(groups):
        expert_own, own = (torch.stack([z[..., c] for c in group], dim=-1) for z in (expert_logits[expert], logits))
        log_p = (expert_own.detach() / temperature).log_softmax(dim=-1)
        log_q = (own / temperature).log_softmax(dim=-1)
        first, second = (log_q, log_p) if reverse else (log_p, log_q)
        total = total + active[expert] * (first.exp() * (first - second)).sum(dim=-1)
    counted = targets if mean_over == "batch" else torch.where(active.any(dim=0), targets, IGNORE)
    return batch_mean(total, counted)


def active_experts(
    logits: Tensor, targets: Tensor, groups: Sequence[Sequence[int]], taught: Taught = "confused"
) -> Tensor:
    """`[G, B]` booleans: which expert teaches which sample; at most one each, the first that qualifies."""
    membership = torch.stack([members(logits, group) for group in groups])
    qualifies = membership[:, index(targets)] & real_rows(targets)
    if taught == "confused":
        predicted = logits.argmax(dim=-1)
        qualifies = qualifies & membership[:, predicted] & (predicted != targets)
    return qualifies & (qualifies.cumsum(dim=0) == 1)
