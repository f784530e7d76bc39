"""Helpers of the losses: masks of padded rows and of classes, and softmaxes over some of the classes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from fedskew.task import IGNORE


def real_rows(targets: Tensor, axes: int = 1) -> Tensor:
    """Mark the rows that are samples, not padding: `[B]` booleans, for class numbers [B] or several labels [B, L].

    `axes` is the number of axes of the result. It is 2 for the batches of all clients, [K, B].
    """
    real = targets != IGNORE
    return real if real.dim() == axes else real[..., 0]


def class_index(targets: Tensor) -> Tensor:
    """Make targets usable as class indices. Padded rows get class 0, and `batch_mean` ignores them."""
    return targets.clamp(min=0)


def batch_mean(per_sample: Tensor, targets: Tensor | None) -> Tensor:
    """Average over the rows that are not padding."""
    if targets is None:
        return per_sample.mean()
    real = real_rows(targets)
    return torch.where(real, per_sample, 0.0).sum() / real.sum().clamp(min=1)


def class_masks(targets: Tensor, classes: int) -> Tensor:
    """Mark the class of each row: `[B, C]` booleans, all False for padding."""
    return targets.unsqueeze(-1) == torch.arange(classes, device=targets.device)


def target_mask(logits: Tensor, targets: Tensor) -> Tensor:
    """Mark the target of each row: `[B, C]` booleans, with class 0 for padding."""
    classes = torch.arange(logits.shape[-1], device=logits.device)
    return classes == class_index(targets).unsqueeze(-1)


def group_mask(logits: Tensor, group: Sequence[int]) -> Tensor:
    """Mark the classes of the group: `[C]` booleans.

    Indexing with a list would copy it from the host at every step, which a CUDA graph cannot replay.
    """
    classes = torch.arange(logits.shape[-1], device=logits.device)
    return torch.stack([classes == c for c in group]).any(dim=0)


MajorityRule = Literal["code", "paper"]
"""When a class is a majority class: see `majority_classes`."""


def class_probabilities(label_counts: Tensor, like: Tensor) -> Tensor:
    """Return p(c) = n_c/n, in the dtype of `like`."""
    counts = label_counts.to(like.dtype)
    return counts / counts.sum()


def majority_classes(label_counts: Tensor, rule: MajorityRule = "code") -> Tensor:
    """Mark the client's majority classes: `[C]` booleans.

    `code`: n_c > n/C, as in FedLMD's code; C is the number of all classes. `paper`: n_c ≥ n/C'; C' is the number of
    classes that the client has.
    """
    counts = label_counts.to(torch.float64)
    if rule == "code":
        return counts * counts.shape[-1] > counts.sum()
    present = (counts > 0).sum()
    return counts * present >= counts.sum()


def negative_log_likelihood(log_probabilities: Tensor, targets: Tensor) -> Tensor:
    """Average −log p_y over the batch."""
    picked = log_probabilities.gather(-1, class_index(targets).unsqueeze(-1)).squeeze(-1)
    return batch_mean(-picked, targets)


def _log_softmax_over(logits: Tensor, support: Tensor) -> Tensor:
    """Compute the log-softmax restricted to `support`, and 0 elsewhere.

    Rows with an empty support get the full softmax, which keeps gradients finite. The caller must give them weight 0.
    """
    support = support.expand_as(logits)
    safe = support | ~support.any(dim=-1, keepdim=True)
    return logits.masked_fill(~safe, -math.inf).log_softmax(dim=-1).masked_fill(~safe, 0.0)


def restricted_kl(teacher: Tensor, student: Tensor, teacher_support: Tensor, student_support: Tensor) -> Tensor:
    """Return KL(teacher ‖ student) per sample, each softmax over its support. It is 0 if the teacher's is empty."""
    log_p = _log_softmax_over(teacher.detach(), teacher_support)
    log_q = _log_softmax_over(student, student_support)
    divergence = torch.where(teacher_support, log_p.exp() * (log_p - log_q), 0.0).sum(dim=-1)
    return torch.where(teacher_support.any(dim=-1), divergence, 0.0)


def masked_logsumexp(values: Tensor, mask: Tensor) -> Tensor:
    """Log-sum-exp of the masked values over all axes but the first. It is finite but meaningless for an empty mask."""
    mask = mask.flatten(1)
    safe = mask | ~mask.any(dim=1, keepdim=True)
    return values.flatten(1).masked_fill(~safe, -math.inf).logsumexp(dim=1)
