"""A test set cut from data that comes without one: stratified, and the same on every machine."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fedskew.errors import UserError
from fedskew.randomness import permutation

Index = npt.NDArray[np.int64]

TEST_FRACTION = 0.2


def stratified_holdout(y: Index, fraction: float, where: str) -> tuple[Index, Index]:
    """Indices of the training and of the test part, each in the data's own order.

    Of each class, the nearest whole number to `fraction` of its samples is tested on; the choice depends on
    the labels alone, not on an experiment's seed, so that all seeds are measured on the same test set.
    """
    check_fraction(fraction)
    tested = np.zeros(len(y), dtype=bool)
    for label in np.unique(y):
        members = np.flatnonzero(y == label)
        count = round(len(members) * fraction)
        tested[members[permutation(len(members), 0, "holdout", int(label))[:count]]] = True
    if tested.all() or not tested.any():
        raise UserError(f"{where}: {len(y)} samples are too few to hold out {fraction:g} of each class for testing")
    return np.flatnonzero(~tested), np.flatnonzero(tested)


def check_fraction(fraction: object) -> None:
    if isinstance(fraction, bool) or not isinstance(fraction, int | float) or not 0 < fraction < 1:
        raise UserError(f"test_fraction is {fraction!r}; expected a number between 0 and 1, such as 0.2")
