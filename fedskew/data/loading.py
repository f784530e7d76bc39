"""What the loaders share: their options, and the test set that is held out where the data have none."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from fedskew.data.dataset import Dataset
from fedskew.errors import UserError, unknown
from fedskew.randomness import permutation

Index = npt.NDArray[np.int64]

TEST_FRACTION = 0.2


def option_names(loader: Callable[..., Dataset]) -> tuple[str, ...]:
    """A loader's options are its keyword-only arguments."""
    parameters = inspect.signature(loader).parameters.values()
    return tuple(p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY)


def check_options(
    loader: Callable[..., Dataset], options: dict[str, Any], data: str, also: Sequence[str] = ()
) -> dict[str, Any]:
    """Return `options`, or refuse one that `loader` does not have; `also` are options that others have handled."""
    names = (*option_names(loader), *also)
    for option in options:
        if not names:
            raise UserError(f"unknown option {option!r} of {data}, which has none")
        if option not in names:
            raise unknown(f"option of {data}:", option, names)
    return options


def stratified_holdout(y: Index, fraction: float, where: str) -> tuple[Index, Index]:
    """Indices of the training part and of the test part, each in ascending order.

    The test part has `fraction` of each class, rounded. The choice depends on the labels alone and not on a seed, so
    all seeds of an experiment are tested on the same samples, on every machine.
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
