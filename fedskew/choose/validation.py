"""Validation data for a race, held out of every client's training data. The test set is not used."""

from __future__ import annotations

import math
from dataclasses import replace

from fedskew.data import Federation
from fedskew.errors import UserError

FRACTION = 0.2
"""The largest share of the training data that is held out."""
MAX_SAMPLES = 5000
"""The maximum number of validation samples. It holds on average, because the numbers by client and class are rounded at
random. More samples would cost more time than the reduction in noise is worth."""
_PURPOSE = "validation"
"""Part of the name of the random draw, see `Federation.draw_held_out`."""


def validation_fraction(samples: int) -> float:
    """The share of the training data to hold out."""
    return min(FRACTION, MAX_SAMPLES / samples)


def hold_out(federation: Federation, fraction: float, seed: int) -> Federation:
    """Return the federation with a share of each client's samples of each class as its test set."""
    is_held_out = federation.draw_held_out(fraction, seed, _PURPOSE)
    if not is_held_out.any():
        raise UserError(
            f"{federation.dataset.name}: no sample was held out for validation, because every client has too few of "
            f"each class; expected a client with at least {math.ceil(1 / fraction)} samples of a class"
        )
    indices = tuple(part[~is_held_out[part]] for part in federation.indices)
    dataset = replace(federation.dataset, test=federation.dataset.train.select(is_held_out))
    return replace(federation, dataset=dataset, indices=indices)


_cache: dict[tuple[str, int, float], Federation] = {}
"""The last results of `validation_federation`, by the split's hash, the seed and the fraction."""
_CACHE_SIZE = 12


def validation_federation(federation: Federation, seed: int, fraction: float) -> Federation:
    """Return the result of `hold_out`, from the cache if it is there."""
    key = (federation.hash, seed, fraction)
    if key not in _cache:
        while len(_cache) >= _CACHE_SIZE:
            del _cache[next(iter(_cache))]
        _cache[key] = hold_out(federation, fraction, seed)
    return _cache[key]
