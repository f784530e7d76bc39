"""Validation data for a race: held out of every client's training data. The test set plays no part."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from fedskew.data import Federation
from fedskew.errors import UserError
from fedskew.randomness import generator

FRACTION = 0.2
"""The largest share of the training data that is held out."""
MAX_SAMPLES = 5000
"""More validation samples would cost more time than the reduction in noise is worth."""
_PURPOSE = "validation"


def validation_fraction(samples: int) -> float:
    """The share of the training data to hold out."""
    return min(FRACTION, MAX_SAMPLES / samples)


def hold_out(federation: Federation, fraction: float, seed: int) -> Federation:
    """The federation with a share of each client's samples of each class as its test set.

    A client keeps at least one sample of every class that it has, so the skew stays what it is. The share is exact on
    average: each number is rounded up or down at random, drawn from the seed, the client and the class.
    """
    labels = federation.dataset.train.y
    held = np.zeros(len(labels), dtype=bool)
    for client, part in enumerate(federation.indices):
        for label in np.unique(labels[part]).tolist():
            members = part[labels[part] == label]
            draw = generator(seed, _PURPOSE, client, label)
            count = min(len(members) - 1, int(len(members) * fraction + draw.random()))
            held[draw.permutation(members)[:count]] = True
    if not held.any():
        raise UserError(
            f"{federation.dataset.name}: no client has enough samples of a class to hold one out for validation; "
            "expected at least two samples per client and class"
        )
    kept = tuple(part[~held[part]] for part in federation.indices)
    dataset = replace(federation.dataset, test=federation.dataset.train.select(held))
    return replace(federation, dataset=dataset, indices=kept)


_recent: dict[tuple[str, int, float], Federation] = {}
_RECENT = 12


def validation_federation(whole: Federation, seed: int, fraction: float) -> Federation:
    """Like `hold_out`; each process computes a split once."""
    key = (whole.hash, seed, fraction)
    if key not in _recent:
        while len(_recent) >= _RECENT:
            del _recent[next(iter(_recent))]
        _recent[key] = hold_out(whole, fraction, seed)
    return _recent[key]
