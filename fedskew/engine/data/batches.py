"""The samples of each client at each local step. They are the same for every engine."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedskew.losses import IGNORE
from fedskew.methods.parts import LossPart
from fedskew.randomness import fold, integer_key, permutation


@dataclass(frozen=True)
class RoundKey:
    """The key of the randomness in a round, or in one phase of it."""

    seed: int
    """The run's seed."""
    model: int
    """The number of the model that is trained: 0 for the global model (`experiment.round.sampler.model_number`)."""
    round: int
    """The number of earlier rounds in which this model was trained."""
    phase: int = 0
    """The number of the phase of local training (`methods.personal.Phase`), counted from 0. The training of second
    models and fine-tuning have numbers of their own."""


@dataclass(frozen=True)
class BatchPlan:
    """One client's batches in a round, in order.

    The number and lengths of the batches are known from the start. Their samples are drawn epoch by epoch when they are
    needed. So a device can start with the first batches while the host draws the next.
    """

    samples: npt.NDArray[np.int64]
    """Indices into the training data."""
    client: int
    epochs: int
    width: int
    """Samples in a full batch of the round's largest client. Rows of `indices` have this length."""
    per_epoch: int
    """Batches per epoch."""
    key: RoundKey
    labels: npt.NDArray[np.int64] | None = None
    """The class of each sample, for balanced batches. None for shuffled ones."""

    @property
    def steps(self) -> int:
        return self.epochs * self.per_epoch

    @property
    def full_batch(self) -> int:
        """Samples in a full batch of this client. `width` may be larger, because of other clients of the round."""
        return min(self.width, len(self.samples))

    @property
    def visits(self) -> int:
        """Samples in all batches of the round."""
        return self.epochs * self._kept

    @property
    def _kept(self) -> int:
        """Samples per epoch, without those of a dropped batch."""
        return min(len(self.samples), self.per_epoch * self.width)

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """[steps]: samples in each batch."""
        lengths = np.full(self.per_epoch, self.width, dtype=np.int64)
        lengths[-1:] -= self.per_epoch * self.width - self._kept
        return np.tile(lengths, self.epochs)

    @cached_property
    def client_key(self) -> int:
        """The key of the model's and the method's random numbers, such as dropout masks, in steps and passes."""
        return integer_key(self.key.seed, "dropout", *self._key_parts)

    @cached_property
    def indices(self) -> npt.NDArray[np.int64]:
        """[steps, width]: indices into the training data. −1 pads a short batch."""
        return self.indices_between(0, self.steps)

    @property
    def pass_batches(self) -> npt.NDArray[np.int64]:
        """[batches, width]: the samples for the opening and closing passes, each at most once. −1 is padding.

        As in an epoch, a last batch that is too small is left out. A client with too few samples for a batch has one
        batch of padding.
        """
        order = permutation(len(self.samples), self.key.seed, "pass", *self._key_parts)
        rows = np.full(max(self.per_epoch, 1) * self.width, -1, dtype=np.int64)
        rows[: self._kept] = self.samples[order[: self._kept]]
        return rows.reshape(-1, self.width)

    @cached_property
    def epoch_keys(self) -> npt.NDArray[np.int64]:
        """[steps]: the key of each batch's epoch, for augmentation."""
        return self.epoch_keys_between(0, self.steps)

    def epoch_keys_between(self, first: int, end: int) -> npt.NDArray[np.int64]:
        """Return the epoch keys of the steps from `first` to `end`, without `end`."""
        return np.array([self._epoch_key(step // self.per_epoch) for step in range(first, end)], dtype=np.int64)

    def _epoch_key(self, epoch: int) -> int:
        if epoch not in self._drawn_keys:
            self._drawn_keys[epoch] = integer_key(self.key.seed, "augment", *self._key_parts, epoch)
        return self._drawn_keys[epoch]

    def draw(self, end: int) -> None:
        """Draw the samples and keys of the steps before `end`, and keep them."""
        self.indices_between(0, end)
        self.epoch_keys_between(0, end)

    def indices_between(self, first: int, end: int) -> npt.NDArray[np.int64]:
        """Return the sample indices of the steps from `first` to `end`, without `end`."""
        if end <= first:
            return np.empty((0, self.width), dtype=np.int64)
        epochs = range(first // self.per_epoch, -(-end // self.per_epoch))
        drawn = np.concatenate([self._epoch(epoch) for epoch in epochs])
        begin = epochs.start * self.per_epoch
        return drawn[first - begin : end - begin]

    def _epoch(self, epoch: int) -> npt.NDArray[np.int64]:
        """Shuffle the client's samples, or samples that are drawn class by class, and cut them into batches."""
        if epoch not in self._drawn:
            rows = np.full(self.per_epoch * self.width, -1, dtype=np.int64)
            samples = self.samples if self.labels is None else self.samples[self._balanced(self.labels, epoch)]
            order = permutation(len(samples), self.key.seed, "shuffle", *self._key_parts, epoch)
            rows[: self._kept] = samples[order[: self._kept]]
            self._drawn[epoch] = rows.reshape(self.per_epoch, self.width)
        return self._drawn[epoch]

    def _balanced(self, labels: npt.NDArray[np.int64], epoch: int) -> npt.NDArray[np.int64]:
        """Draw as many positions in `labels` as there are samples, from every present class equally often.

        If the number of samples is not a multiple of the number of classes, random classes get one position more. A
        class that gets more positions than it has samples repeats its samples in turn, in random order.
        """
        seed, key = self.key.seed, (*self._key_parts, epoch)
        classes = np.unique(labels)
        quotas = np.full(len(classes), len(labels) // len(classes))
        quotas[permutation(len(classes), seed, "balanced", *key)[: len(labels) % len(classes)]] += 1
        drawn = []
        for number, quota in zip(classes.tolist(), quotas.tolist(), strict=True):
            members = np.flatnonzero(labels == number)
            mixed = members[permutation(len(members), seed, "balanced", *key, number)]
            drawn.append(np.resize(mixed, quota))  # repeats the members in turn
        return np.concatenate(drawn)

    @cached_property
    def _drawn_keys(self) -> dict[int, int]:
        return {}

    @cached_property
    def _drawn(self) -> dict[int, npt.NDArray[np.int64]]:
        return {}

    @property
    def _key_parts(self) -> tuple[int, ...]:
        parts = self.key.model, self.key.round, self.client
        return (*parts, self.key.phase) if self.key.phase else parts


def plan_batches(
    samples: npt.NDArray[np.int64],
    client: int,
    epochs: int,
    batch_size: int,
    smallest: int,
    key: RoundKey,
    labels: npt.NDArray[np.int64] | None = None,
) -> BatchPlan:
    """Plan a client's batches. In each epoch, its samples are shuffled and cut into batches. The last may be short.

    A last batch of fewer than `smallest` samples is dropped, because BatchNorm cannot train on a single value. With
    the samples' `labels`, epochs are balanced: each of the client's classes occurs about equally often in an epoch. The
    length of an epoch stays the same.

    `RoundWork.batch_plans` limits `batch_size` to the number of samples of the round's largest client.
    """
    per_epoch = -(-len(samples) // batch_size)
    if 0 < len(samples) - (per_epoch - 1) * batch_size < smallest:
        per_epoch -= 1
    return BatchPlan(samples, client, epochs, batch_size, per_epoch, key, labels)


def padded_targets(y: Tensor, valid: Tensor) -> Tensor:
    """Set the labels of padding, where `valid` is False, to `IGNORE`. Labels may have one more axis than `valid`."""
    return torch.where(valid.view(*valid.shape, *(1,) * (y.dim() - valid.dim())), y, IGNORE)


def half_targets(y: Tensor, half: LossPart | None, axis: int = 0) -> Tensor:
    """Keep the labels of one half of the batch, which is every other sample along `axis`. The others become `IGNORE`.

    If a half has no samples, the whole batch replaces it. If `half` is `proximal` or None, all labels are kept.
    """
    if half not in ("first", "second"):
        return y
    in_second = torch.arange(y.shape[axis], device=y.device) % 2 == 1
    inside = padded_targets(y, (in_second if half == "second" else ~in_second).expand(y.shape[: axis + 1]))
    has_samples = (inside != IGNORE).flatten(axis).any(dim=-1)
    return torch.where(has_samples.view(*has_samples.shape, *(1,) * (y.dim() - axis)), inside, y)


def companion_key(key: Tensor) -> Tensor:
    """Return the key of a frozen model's dropout masks, which differ from the trained model's."""
    return fold(key, 0x7EAC)  # any constant that no other key uses


def perturbation_key(key: Tensor) -> Tensor:
    """Return the key with which an objective changes the features. It is independent of all dropout masks."""
    return fold(key, 0xFEA7)  # any constant that no other key uses
