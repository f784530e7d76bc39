"""The meaning of a sample's labels: one class per sample, or any number of labels per sample.

A `Task` provides everything that depends on this meaning: the loss, the predictions and their counts, the label counts
of clients, and the groups by which samples are split. Metrics are in `metrics.confusion` and `metrics.multi_label`. The
shape of the labels decides the task: class numbers [n], or a matrix of 0 and 1 [n, labels].

The functions at the end help losses to ignore rows of padding and to find the class of each row.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from fedskew.accurate_sums import ACCURATE

IntArray = npt.NDArray[np.int64]

IGNORE = -100
"""The target of a row that pads a short batch, which every loss ignores (PyTorch's convention)."""
NO_LABEL = "none"
"""The name of the group of samples without any label."""


class Task(ABC):
    """The meaning of the labels. Logits are [B, C], with one column per class or label."""

    name: ClassVar[str]

    @abstractmethod
    def loss(self, logits: Tensor, y: Tensor, weights: Tensor | None = None) -> Tensor:
        """Return the plain loss of one client's batch, the mean over the rows that are not padding.

        `weights` [C] are the weights of the classes. With several labels per sample, the weight of a label applies only
        to samples that have the label.
        """

    @abstractmethod
    def probabilities(self, logits: Tensor) -> Tensor:
        """Return the probability of each class or label: [B, C]."""

    @abstractmethod
    def counts_shape(self, classes: int) -> tuple[int, ...]:
        """Return the shape of the counts of correct and wrong predictions."""

    @abstractmethod
    def count(self, counts: Tensor, logits: Tensor, y: Tensor) -> None:
        """Add a batch's predictions to the flattened `counts`. The batch has no padding."""

    @abstractmethod
    def log_loss(self, logits: Tensor, y: Tensor) -> Tensor:
        """Return the sum of −log p, computed in the device's most accurate format.

        p is the probability that the model gives to a sample's class or, with several labels per sample, to the true
        value of each label.
        """

    @abstractmethod
    def label_counts(self, y: IntArray, owners: IntArray, clients: int, classes: int) -> IntArray:
        """Return the number of samples by client and class or label. `owners` has the client of each sample."""

    @abstractmethod
    def groups(self, y: IntArray, names: tuple[str, ...]) -> tuple[IntArray, tuple[str, ...]]:
        """Return one group per sample, and the groups' names, for rules that split samples by class."""

    @abstractmethod
    def renumber(self, y: IntArray, numbers: IntArray, classes: int) -> IntArray:
        """Give class or label c the number `numbers[c]`. `classes` is the number of classes or labels afterwards."""

    @abstractmethod
    def example_labels(self, classes: int) -> IntArray:
        """Return the labels of a placeholder dataset, which has one sample for each class or label."""


class SingleLabel(Task):
    """One class per sample, chosen by a softmax."""

    name = "single-label"

    def loss(self, logits: Tensor, y: Tensor, weights: Tensor | None = None) -> Tensor:
        return negative_log_likelihood(logits.log_softmax(dim=-1), y, weights)

    def probabilities(self, logits: Tensor) -> Tensor:
        return logits.softmax(dim=-1)

    def counts_shape(self, classes: int) -> tuple[int, ...]:
        """The confusion matrix: true class, predicted class."""
        return classes, classes

    def count(self, counts: Tensor, logits: Tensor, y: Tensor) -> None:
        counts.index_add_(0, y * logits.shape[-1] + logits.argmax(dim=-1), torch.ones_like(y))

    def log_loss(self, logits: Tensor, y: Tensor) -> Tensor:
        return -logits.to(ACCURATE[logits.device.type]).log_softmax(dim=-1).gather(1, y.unsqueeze(1)).sum()

    def label_counts(self, y: IntArray, owners: IntArray, clients: int, classes: int) -> IntArray:
        counts = np.bincount(owners * classes + y, minlength=clients * classes)
        return counts.astype(np.int64, copy=False).reshape(clients, classes)

    def groups(self, y: IntArray, names: tuple[str, ...]) -> tuple[IntArray, tuple[str, ...]]:
        """The groups are the classes."""
        return y, names

    def renumber(self, y: IntArray, numbers: IntArray, classes: int) -> IntArray:  # noqa: ARG002
        renumbered: IntArray = numbers[y]
        return renumbered

    def example_labels(self, classes: int) -> IntArray:
        return np.arange(classes)


class MultiLabel(Task):
    """Any number of labels per sample. A label is predicted if its sigmoid is above one half."""

    name = "multi-label"

    def loss(self, logits: Tensor, y: Tensor, weights: Tensor | None = None) -> Tensor:
        """The binary cross entropy, averaged over the labels and the rows. `weights` is torch's `pos_weight`."""
        real, has_label = y != IGNORE, y.clamp(min=0).to(logits.dtype)
        pos_weight = None if weights is None else weights.to(logits.dtype)
        terms = F.binary_cross_entropy_with_logits(logits, has_label, reduction="none", pos_weight=pos_weight)
        return torch.where(real, terms, 0.0).sum() / real.sum().clamp(min=1)

    def probabilities(self, logits: Tensor) -> Tensor:
        return logits.sigmoid()

    def counts_shape(self, classes: int) -> tuple[int, ...]:
        """A 2 × 2 matrix per label: whether the sample has the label, whether the label is predicted."""
        return classes, 2, 2

    def count(self, counts: Tensor, logits: Tensor, y: Tensor) -> None:
        first = 4 * torch.arange(logits.shape[-1], device=y.device)
        cells = (first + 2 * y + (logits > 0)).flatten()
        counts.index_add_(0, cells, torch.ones_like(cells))

    def log_loss(self, logits: Tensor, y: Tensor) -> Tensor:
        accurate = ACCURATE[logits.device.type]
        return F.binary_cross_entropy_with_logits(logits.to(accurate), y.to(accurate), reduction="sum")

    def label_counts(self, y: IntArray, owners: IntArray, clients: int, classes: int) -> IntArray:
        counts = np.zeros((clients, classes), np.int64)
        np.add.at(counts, owners, y)
        return counts

    def groups(self, y: IntArray, names: tuple[str, ...]) -> tuple[IntArray, tuple[str, ...]]:
        """A sample's group is its rarest label, or `NO_LABEL`.

        So a rule splits a rare label as it splits a class, even if most samples with this label also have common ones.
        """
        frequency = np.where(y == 1, y.sum(axis=0), np.iinfo(np.int64).max)
        groups = np.where(y.any(axis=1), frequency.argmin(axis=1), len(names))
        return groups, names if y.any(axis=1).all() else (*names, NO_LABEL)

    def renumber(self, y: IntArray, numbers: IntArray, classes: int) -> IntArray:
        renumbered = np.zeros((len(y), classes), np.int64)
        renumbered[:, numbers] = y
        return renumbered

    def example_labels(self, classes: int) -> IntArray:
        return np.eye(classes, dtype=np.int64)


TASKS: dict[str, Task] = {task.name: task for task in (SingleLabel(), MultiLabel())}


def task_for(y: Tensor | npt.NDArray[np.generic]) -> Task:
    """Return the task of these labels: class numbers [n], or a matrix of 0 and 1 [n, labels]."""
    return TASKS["single-label" if y.ndim == 1 else "multi-label"]


# -- targets of a batch, with rows of padding ---------------------------------------------------------------


def real_rows(targets: Tensor, axes: int = 1) -> Tensor:
    """Mark the rows that are samples, not padding: [B] booleans, for class numbers [B] or several labels [B, L].

    `axes` is the number of axes of the result. For the batches of all clients it is 2, and the result is [K, B].
    """
    real = targets != IGNORE
    return real if real.dim() == axes else real[..., 0]


def class_index(targets: Tensor) -> Tensor:
    """Make targets usable as class indices. Padded rows get class 0, and `batch_mean` ignores them."""
    return targets.clamp(min=0)


def batch_mean(per_sample: Tensor, targets: Tensor | None) -> Tensor:
    """Average over the rows that are not padding. Without `targets`, all rows count."""
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


def negative_log_likelihood(log_probabilities: Tensor, targets: Tensor, weights: Tensor | None = None) -> Tensor:
    """Average −w_y·log p_y over the rows that are not padding. Without `weights`, every w_y is 1."""
    picked = log_probabilities.gather(-1, class_index(targets).unsqueeze(-1)).squeeze(-1)
    return batch_mean(weigh(-picked, targets, weights), targets)


def weigh(per_sample: Tensor, targets: Tensor, weights: Tensor | None) -> Tensor:
    """Multiply each row by the weight of its class. The loss then divides by the number of rows.

    PyTorch divides by the sum of the batch's weights instead. Then the weight of a batch's only class would cancel out,
    and a client that has only rare classes would not count more.
    """
    return per_sample if weights is None else weights.to(per_sample.dtype)[class_index(targets)] * per_sample
