"""Distillation: divergences from a frozen teacher, or from experts for groups of classes (PKD).

In the formulas, τ is the temperature, by which logits are divided before a softmax, and y is a sample's target.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from fedskew.accurate_sums import ACCURATE
from fedskew.losses.cross_entropies import group_mask
from fedskew.task import IGNORE, batch_mean, class_index, real_rows, target_mask

MajorityRule = Literal["code", "paper"]
"""See `majority_classes`."""


def vacant_distillation(
    logits: Tensor, teacher_logits: Tensor, label_counts: Tensor, targets: Tensor | None = None
) -> Tensor:
    """KL(teacher ‖ student) over the vacant classes (FedVLS Eq. 3, with its sign corrected).

    It is 0, with zero gradient, if fewer than two classes are vacant. `targets` only marks padded rows. Without it, all
    rows count.
    """
    vacant = (label_counts == 0).expand_as(logits)
    return batch_mean(restricted_kl(teacher_logits, logits, vacant, vacant), targets)


def distillation(logits: Tensor, teacher_logits: Tensor, targets: Tensor, temperature: float = 1.0) -> Tensor:
    """τ²·KL(teacher ‖ student) over all classes (FedAvg+KD). `targets` only marks padded rows."""
    all_classes = torch.ones_like(logits, dtype=torch.bool)
    divergence = restricted_kl(teacher_logits / temperature, logits / temperature, all_classes, all_classes)
    return temperature**2 * batch_mean(divergence, targets)


def present_distillation(
    logits: Tensor, teacher_logits: Tensor, targets: Tensor, label_counts: Tensor, temperature: float = 1.0
) -> Tensor:
    """τ²·KL(teacher ‖ student), both over the client's classes (FedEKD). `targets` only marks padded rows."""
    present = (label_counts > 0).expand_as(logits)
    divergence = restricted_kl(teacher_logits / temperature, logits / temperature, present, present)
    return temperature**2 * batch_mean(divergence, targets)


def target_distillation(logits: Tensor, teacher_logits: Tensor, targets: Tensor, temperature: float = 1.0) -> Tensor:
    """τ²·KL(teacher's b ‖ student's b) with b = (p_y, 1 − p_y): the target against all other classes (FedDKD)."""
    teacher, student = (_target_and_rest(z / temperature, targets) for z in (teacher_logits, logits))
    both = torch.ones_like(student, dtype=torch.bool)
    return temperature**2 * batch_mean(restricted_kl(teacher, student, both, both), targets)


def _target_and_rest(logits: Tensor, targets: Tensor) -> Tensor:
    """Return two logits per sample, `[B, 2]`: one for the target and one for all other classes together."""
    target = logits.gather(-1, class_index(targets).unsqueeze(-1)).squeeze(-1)
    rest = logits.masked_fill(target_mask(logits, targets), -math.inf).logsumexp(dim=-1)
    return torch.stack([target, rest], dim=-1)


def not_true_distillation(logits: Tensor, teacher_logits: Tensor, targets: Tensor, temperature: float = 1.0) -> Tensor:
    """τ²·KL(teacher ‖ student), both over the classes other than the target (FedNTD)."""
    others = ~target_mask(logits, targets)
    divergence = restricted_kl(teacher_logits / temperature, logits / temperature, others, others)
    return temperature**2 * batch_mean(divergence, targets)


def teacher_free_not_true(logits: Tensor, targets: Tensor, temperature: float = 1.0) -> Tensor:
    """`not_true_distillation` with a teacher that is uniform over the classes other than the target (FedNTD-Tf)."""
    return not_true_distillation(logits, torch.zeros_like(logits), targets, temperature)


def label_masking_distillation(
    logits: Tensor,
    teacher_logits: Tensor,
    targets: Tensor,
    label_counts: Tensor,
    temperature: float = 1.0,
    majority_rule: MajorityRule = "code",
) -> Tensor:
    """τ²·KL(teacher ‖ student), with the teacher over the minority classes except y and the student over all except y.

    These are FedLMD's Eqs. 3–6. Every class that is not a majority class is a minority class, even a vacant one. The
    term is 0 for a sample if no class besides its target is a minority class.
    """
    others = ~target_mask(logits, targets)
    minority = others & ~majority_classes(label_counts, majority_rule)
    divergence = restricted_kl(teacher_logits / temperature, logits / temperature, minority, others)
    return temperature**2 * batch_mean(divergence, targets)


def teacher_free_label_masking(
    logits: Tensor,
    targets: Tensor,
    label_counts: Tensor,
    temperature: float = 1.0,
    majority_rule: MajorityRule = "code",
) -> Tensor:
    """`label_masking_distillation` with a teacher that is uniform over the minority classes except y (FedLMD-Tf)."""
    return label_masking_distillation(
        logits, torch.zeros_like(logits), targets, label_counts, temperature, majority_rule
    )


MeanOver = Literal["batch", "active"]
"""Whether to average over the whole batch, or over the samples that an expert teaches."""
TaughtSamples = Literal["confused", "all"]
"""Which samples of a group its expert teaches: samples mistaken for another class of the group, or all."""


def partial_distillation(
    logits: Tensor,
    targets: Tensor,
    expert_logits: Tensor,
    groups: Sequence[Sequence[int]],
    temperature: float = 3.0,
    reverse: bool = False,
    mean_over: MeanOver = "batch",
    taught: TaughtSamples = "confused",
) -> Tensor:
    """KL(expert ‖ student) over the classes of a group, for samples confused within the group (PKD).

    Expert g has the logits `expert_logits[g]`. It teaches a wrongly predicted sample if the sample's target and its
    prediction both lie in group g. If several groups qualify, the expert of the first one teaches. With `taught="all"`,
    an expert teaches every sample whose target lies in its group. `reverse` gives KL(student ‖ expert), as printed in
    PKD's Eq. 1.
    """
    active = active_experts(logits, targets, groups, taught)
    total = torch.zeros_like(logits[..., 0])
    for expert, group in enumerate(groups):
        expert_within, within = (
            torch.stack([z[..., c] for c in group], dim=-1) for z in (expert_logits[expert], logits)
        )
        log_p = (expert_within.detach() / temperature).log_softmax(dim=-1)
        log_q = (within / temperature).log_softmax(dim=-1)
        first, second = (log_q, log_p) if reverse else (log_p, log_q)
        total = total + active[expert] * (first.exp() * (first - second)).sum(dim=-1)
    counted = targets if mean_over == "batch" else torch.where(active.any(dim=0), targets, IGNORE)
    return batch_mean(total, counted)


def active_experts(
    logits: Tensor, targets: Tensor, groups: Sequence[Sequence[int]], taught: TaughtSamples = "confused"
) -> Tensor:
    """Mark which expert teaches which sample: `[G, B]` booleans. Only the first qualifying expert teaches a sample."""
    membership = torch.stack([group_mask(logits, group) for group in groups])
    qualifies = membership[:, class_index(targets)] & real_rows(targets)
    if taught == "confused":
        predicted = logits.argmax(dim=-1)
        qualifies = qualifies & membership[:, predicted] & (predicted != targets)
    return qualifies & (qualifies.cumsum(dim=0) == 1)


def majority_classes(label_counts: Tensor, rule: MajorityRule = "code") -> Tensor:
    """Mark the client's majority classes: `[C]` booleans.

    With the rule `code`, as in FedLMD's code, a majority class has n_c > n/C, where C is the number of all classes.
    With the rule `paper`, it has n_c ≥ n/C', where C' is the number of classes that the client has.
    """
    counts = label_counts.to(ACCURATE[label_counts.device.type])
    if rule == "code":
        return counts * counts.shape[-1] > counts.sum()
    present = (counts > 0).sum()
    return counts * present >= counts.sum()


def _log_softmax_over(logits: Tensor, support: Tensor) -> Tensor:
    """Return the log-softmax restricted to the classes that `support` marks, and 0 for other classes.

    Rows with an empty support get the full softmax, which keeps gradients finite. The caller must give them weight 0.
    """
    support = support.expand_as(logits)
    safe = support | ~support.any(dim=-1, keepdim=True)
    return logits.masked_fill(~safe, -math.inf).log_softmax(dim=-1).masked_fill(~safe, 0.0)


def restricted_kl(teacher: Tensor, student: Tensor, teacher_support: Tensor, student_support: Tensor) -> Tensor:
    """Return KL(teacher ‖ student) per sample. Each softmax is over the classes that its support marks.

    The result is 0 for a sample with an empty `teacher_support`.
    """
    log_p = _log_softmax_over(teacher.detach(), teacher_support)
    log_q = _log_softmax_over(student, student_support)
    divergence = torch.where(teacher_support, log_p.exp() * (log_p - log_q), 0.0).sum(dim=-1)
    return torch.where(teacher_support.any(dim=-1), divergence, 0.0)
