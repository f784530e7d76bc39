"""Several labels per sample: a matrix of 0 and 1 with one column per label."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from fedskew.errors import UserError

IntArray = npt.NDArray[np.int64]


def read_matrix(values: npt.NDArray[Any], where: str, row: Callable[[int], str]) -> IntArray:
    """Read a matrix of 0 and 1. Raise `UserError` for other values."""
    if values.ndim != 2:
        raise UserError(f"{where}: labels have shape {values.shape}; expected one label per sample, or a matrix")
    try:
        numbers = values.astype(np.float64)
    except (TypeError, ValueError) as error:
        raise UserError(f"{where}: several columns of labels that are not numbers; expected 0 or 1") from error
    if (gaps := np.flatnonzero(np.isnan(numbers).any(axis=1))).size:
        raise UserError(f"{where}: no label in {row(int(gaps[0]))}; expected 0 or 1 in each column of labels")
    bad = np.flatnonzero(~np.isin(numbers, (0, 1)).all(axis=1))
    if len(bad):
        found = next(value for value in numbers[bad[0]].tolist() if value not in (0, 1))
        raise UserError(
            f"{where}: label {found:g} in {row(int(bad[0]))}; several columns of labels must be 0 or 1, "
            "because fedskew does classification only"
        )
    return numbers.astype(np.int64)


def encode_matrix(
    matrices: Sequence[IntArray], where: str, classes: Sequence[str] | None
) -> tuple[tuple[str, ...], list[IntArray]]:
    """Check the matrices. Return the names of the labels, and the matrices. Without `classes`, labels are numbered."""
    widths = {matrix.shape[1] for matrix in matrices}
    if len(widths) > 1:
        found = " and ".join(map(str, widths))
        raise UserError(f"{where}: {found} columns of labels; expected the same number in training and test data")
    names = tuple(map(str, range(matrices[0].shape[1]))) if classes is None else tuple(classes)
    if len(names) != matrices[0].shape[1] or len(set(names)) < len(names):
        raise UserError(
            f"{where}: {matrices[0].shape[1]} columns of labels, but classes lists {', '.join(names)}; "
            "expected a different name for each column"
        )
    if all((matrix.sum(axis=1) == 1).all() for matrix in matrices):
        raise UserError(
            f"{where}: every row has exactly one 1, so each sample has one class; expected class numbers, "
            "such as y.argmax(axis=1)"
        )
    return names, list(matrices)
