"""Which samples each client sees at each local step: drawn once a round, the same for every engine."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from fedskew.randomness import integer_key, permutation


@dataclass(frozen=True)
class RoundKey:
    """What all randomness of a round is keyed by: the run's seed, which model is trained, and its round."""

    seed: int
    model: int
    round: int


@dataclass(frozen=True)
class BatchPlan:
    """One client's batches of a round, in order.

    How many there are and how long is known at once; which samples they hold is drawn epoch by epoch when asked for,
    so that a device can begin with the first while the next are drawn.
    """

    samples: npt.NDArray[np.int64]
    client: int
    epochs: int
    width: int
    """Samples in a full batch."""
    per_epoch: int
    """Batches."""
    key: RoundKey

    @property
    def steps(self) -> int:
        return self.epochs * self.per_epoch

    @property
    def visits(self) -> int:
        return self.epochs * self._kept

    @property
    def _kept(self) -> int:
        """Samples that an epoch sees."""
        return min(len(self.samples), self.per_epoch * self.width)

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """[steps]: samples in each batch."""
        of_epoch = np.full(self.per_epoch, self.width, dtype=np.int64)
        of_epoch[-1:] -= self.per_epoch * self.width - self._kept
        return np.tile(of_epoch, self.epochs)

    @cached_property
    def client_key(self) -> int:
        """For dropout."""
        return integer_key(self.key.seed, "dropout", *self._where)

    @cached_property
    def indices(self) -> npt.NDArray[np.int64]:
        """[steps, width] rows of the training data; −1 pads a short batch."""
        return self.rows(0, self.steps)

    @property
    def whole(self) -> npt.NDArray[np.int64]:
        """[batches, width]: every sample once, in an order of its own, for passes beside the training; of a client
        whose samples are too few for a batch, one that only pads."""
        order = permutation(len(self.samples), self.key.seed, "pass", *self._where)
        rows = np.full(max(self.per_epoch, 1) * self.width, -1, dtype=np.int64)
        rows[: self._kept] = self.samples[order[: self._kept]]
        return rows.reshape(-1, self.width)

    @cached_property
    def epoch_keys(self) -> npt.NDArray[np.int64]:
        """[steps]: the key of the epoch that a batch belongs to, for augmentation."""
        return self.keys(0, self.steps)

    def keys(self, first: int, end: int) -> npt.NDArray[np.int64]:
        """The epoch keys of some steps."""
        return np.array([self._epoch_key(step // self.per_epoch) for step in range(first, end)], dtype=np.int64)

    def _epoch_key(self, epoch: int) -> int:
        if epoch not in self._epoch_keys:
            self._epoch_keys[epoch] = integer_key(self.key.seed, "augment", *self._where, epoch)
        return self._epoch_keys[epoch]

    def draw(self, end: int) -> None:
        """What the steps before `end` are made from, to be kept until it is asked for."""
        self.rows(0, end)
        self.keys(0, end)

    def rows(self, first: int, end: int) -> npt.NDArray[np.int64]:
        """The indices of some steps."""
        if end <= first:
            return np.empty((0, self.width), dtype=np.int64)
        epochs = range(first // self.per_epoch, -(-end // self.per_epoch))
        drawn = np.concatenate([self._epoch(epoch) for epoch in epochs])
        begin = epochs.start * self.per_epoch
        return drawn[first - begin : end - begin]

    def _epoch(self, epoch: int) -> npt.NDArray[np.int64]:
        """The client's samples in a new order, cut into batches."""
        if epoch not in self._drawn:
            rows = np.full(self.per_epoch * self.width, -1, dtype=np.int64)
            order = permutation(len(self.samples), self.key.seed, "shuffle", *self._where, epoch)
            rows[: self._kept] = self.samples[order[: self._kept]]
            self._drawn[epoch] = rows.reshape(self.per_epoch, self.width)
        return self._drawn[epoch]

    @cached_property
    def _epoch_keys(self) -> dict[int, int]:
        return {}

    @cached_property
    def _drawn(self) -> dict[int, npt.NDArray[np.int64]]:
        return {}

    @property
    def _where(self) -> tuple[int, int, int]:
        return self.key.model, self.key.round, self.client


def plan_batches(
    samples: npt.NDArray[np.int64], client: int, epochs: int, batch_size: int, smallest: int, key: RoundKey
) -> BatchPlan:
    """Shuffle the client's samples anew each epoch and cut them into batches; the last may be short.

    Batches below `smallest` are left out: BatchNorm cannot train on a single value.
    """
    per_epoch = -(-len(samples) // batch_size)
    if 0 < len(samples) - (per_epoch - 1) * batch_size < smallest:
        per_epoch -= 1
    return BatchPlan(samples, client, epochs, batch_size, per_epoch, key)
