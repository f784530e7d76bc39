"""What a client's number of training samples per class says of its classes."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

MajorityRule = Literal["code", "paper"]


def class_probabilities(label_counts: Tensor, like: Tensor) -> Tensor:
    """p(c) = n_c / n in the dtype of `like`."""
    counts = label_counts.to(like.dtype)
    return counts / counts.sum()


def majority_classes(label_counts: Tensor, rule: MajorityRule = "code") -> Tensor:
    """Which classes are the client's majority.

    `code`: count > n/C over all C classes, strictly, as FedLMD's program does; `paper`: count ≥ n over the
    number of classes present.
    """
    counts = label_counts.to(torch.float64)
    if rule == "code":
        return counts * counts.shape[-1] > counts.sum()
    present = (counts > 0).sum()
    return counts * present >= counts.sum()
