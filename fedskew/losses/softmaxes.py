"""Softmaxes over some of the classes, without NaN where none are left."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fedskew.losses.batches import batch_mean, index


def negative_log_likelihood(log_probabilities: Tensor, targets: Tensor) -> Tensor:
    picked = log_probabilities.gather(-1, index(targets).unsqueeze(-1)).squeeze(-1)
    return batch_mean(-picked, targets)


def _log_softmax_over(logits: Tensor, support: Tensor) -> Tensor:
    """Log-softmax restricted to `support`; 0 elsewhere. Rows with an empty support get the full softmax,
    which keeps gradients finite: the caller must give them weight 0."""
    support = support.expand_as(logits)
    safe = support | ~support.any(dim=-1, keepdim=True)
    return logits.masked_fill(~safe, -math.inf).log_softmax(dim=-1).masked_fill(~safe, 0.0)


def restricted_kl(teacher: Tensor, student: Tensor, teacher_support: Tensor, student_support: Tensor) -> Tensor:
    """KL(teacher ‖ student) per sample, each softmax over its own support; 0 where the teacher's is empty."""
    log_p = _log_softmax_over(teacher.detach(), teacher_support)
    log_q = _log_softmax_over(student, student_support)
    divergence = torch.where(teacher_support, log_p.exp() * (log_p - log_q), 0.0).sum(dim=-1)
    return torch.where(teacher_support.any(dim=-1), divergence, 0.0)


def masked_lse(values: Tensor, mask: Tensor) -> Tensor:
    """Log-sum-exp over all but the first axis where `mask`; finite (and to be ignored) where it is empty."""
    mask = mask.flatten(1)
    safe = mask | ~mask.any(dim=1, keepdim=True)
    return values.flatten(1).masked_fill(~safe, -math.inf).logsumexp(dim=1)
