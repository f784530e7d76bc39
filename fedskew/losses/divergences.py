"""What it costs to differ from a teacher, the model that the client received: distillation over all or some classes."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fedskew.losses.batches import batch_mean, index, is_target
from fedskew.losses.label_counts import MajorityRule, majority_classes
from fedskew.losses.softmaxes import restricted_kl


def vacant_distillation(
    logits: Tensor, teacher_logits: Tensor, label_counts: Tensor, targets: Tensor | None = None
) -> Tensor:
    """KL(teacher ‖ student) over the vacant classes (FedVLS Eq. 3, with the sign that makes it a divergence).

    Zero, with zero gradient, when no or one class is vacant. `targets` only tells which rows pad the batch.
    """
    vacant = (label_counts == 0).expand_as(logits)
    return batch_mean(restricted_kl(teacher_logits, logits, vacant, vacant), targets)


def distillation(logits: Tensor, teacher_logits: Tensor, targets: Tensor, temperature: float = 1.0) -> Tensor:
    """τ²·KL(teacher ‖ student) over all classes (FedAvg+KD). `targets` only tells which rows pad the batch."""
    everything = torch.ones_like(logits, dtype=torch.bool)
    divergence = restricted_kl(teacher_logits / temperature, logits / temperature, everything, everything)
    return temperature**2 * batch_mean(divergence, targets)


def present_distillation(
    logits: Tensor, teacher_logits: Tensor, targets: Tensor, label_counts: Tensor, temperature: float = 1.0
) -> Tensor:
    """τ²·KL(teacher ‖ student), both over the client's own classes (FedEKD). `targets`: as in `distillation`."""
    present = (label_counts > 0).expand_as(logits)
    divergence = restricted_kl(teacher_logits / temperature, logits / temperature, present, present)
    return temperature**2 * batch_mean(divergence, targets)


def target_distillation(logits: Tensor, teacher_logits: Tensor, targets: Tensor, temperature: float = 1.0) -> Tensor:
    """τ²·KL(b^g ‖ b), b = (p_y, 1 − p_y): what the models say of the target against all else (DKD's TCKD)."""
    teacher, student = (_target_and_rest(z / temperature, targets) for z in (teacher_logits, logits))
    both = torch.ones_like(student, dtype=torch.bool)
    return temperature**2 * batch_mean(restricted_kl(teacher, student, both, both), targets)


def _target_and_rest(logits: Tensor, targets: Tensor) -> Tensor:
    """`[B, 2]`: logits of the same probability for the target and for all other classes together."""
    target = logits.gather(-1, index(targets).unsqueeze(-1)).squeeze(-1)
    rest = logits.masked_fill(is_target(logits, targets), -math.inf).logsumexp(dim=-1)
    return torch.stack([target, rest], dim=-1)


def not_true_distillation(logits: Tensor, teacher_logits: Tensor, targets: Tensor, temperature: float = 1.0) -> Tensor:
    """τ²·KL(teacher ‖ student), both over the classes other than the target (FedNTD)."""
    others = ~is_target(logits, targets)
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
    """τ²·KL(teacher ‖ student), the teacher without majority classes and target, the student without the target.

    FedLMD Eqs. 3–6. A sample whose target is the only minority class has no teacher left and costs nothing.
    """
    others = ~is_target(logits, targets)
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
    """`label_masking_distillation` with a teacher that is uniform over the minority classes (FedLMD-Tf)."""
    return label_masking_distillation(
        logits, torch.zeros_like(logits), targets, label_counts, temperature, majority_rule
    )
