"""Which samples each client sees at each local step: drawn once a round, the same for every engine."""

from __future__ import annotations

from dataclasses import dataclass

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
    """One client's batches of a round, in order."""

    indices: npt.NDArray[np.int64]
    """[steps, batch size] rows of the training data; −1 pads a short batch."""
    epoch_keys: npt.NDArray[np.int64]
    """[steps]: the key of the epoch that a batch belongs to, for augmentation."""
    client_key: int
    """For dropout."""

    @property
    def steps(self) -> int:
        return len(self.indices)

    @property
    def visits(self) -> int:
        return int((self.indices >= 0).sum())


def plan_batches(
    samples: npt.NDArray[np.int64], client: int, epochs: int, batch_size: int, smallest: int, key: RoundKey
) -> BatchPlan:
    """Shuffle the client's samples anew each epoch and cut them into batches; the last may be short.

    Batches below `smallest` are left out: BatchNorm cannot train on a single value.
    """
    per_epoch = -(-len(samples) // batch_size)
    if 0 < len(samples) - (per_epoch - 1) * batch_size < smallest:
        per_epoch -= 1
    rows = np.full((epochs, per_epoch * batch_size), -1, dtype=np.int64)
    kept = min(len(samples), per_epoch * batch_size)
    where = (key.model, key.round, client)
    for epoch in range(epochs):
        order = permutation(len(samples), key.seed, "shuffle", *where, epoch)
        rows[epoch, :kept] = samples[order[:kept]]
    epoch_keys = [integer_key(key.seed, "augment", *where, epoch) for epoch in range(epochs)]
    return BatchPlan(
        indices=rows.reshape(epochs * per_epoch, batch_size),
        epoch_keys=np.repeat(np.array(epoch_keys, dtype=np.int64), per_epoch),
        client_key=integer_key(key.seed, "dropout", *where),
    )
