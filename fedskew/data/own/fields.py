"""Data whose samples have several named inputs, such as the token ids and the attention mask of a tokenizer.

The inputs of a sample are stored side by side in one row. `Dataset.fields` has their names and shapes. With these, the
model's adapter (`models/adapter.py`) restores the inputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from fedskew.data.dataset import TEST_FRACTION, Dataset, Samples, stratified_holdout
from fedskew.data.own.arrays import make_label_array, plain_array, refuse_unused_options
from fedskew.data.own.labels import class_list, encode_labels, read_labels
from fedskew.data.spelling import composed
from fedskew.errors import UserError, plural

_LARGEST_EXACT = 1 << 24
"""float32 is exact for whole numbers up to this. All inputs are stored as float32 if one input is floating-point."""

Fields = Mapping[str, npt.NDArray[Any]]


def load_fields(
    name: str,
    pairs: Sequence[tuple[Any, Any]],
    *,
    test_fraction: float | None = None,
    classes: object = None,
    vocabulary: int | None = None,
    sites: Sequence[npt.NDArray[np.int64]] | None = None,
) -> Dataset:
    """Load one pair (inputs by name, labels), or a training pair and a test pair.

    `vocabulary` is the number of tokens, by default the largest id plus 1. `sites` has one array per pair: the index of
    each sample's site.
    """
    prefixes = ("", "test ")
    named = [_arrays(x, prefix) for (x, _), prefix in zip(pairs, prefixes, strict=False)]
    _expect_same_form(named)
    labels = [
        read_labels(make_label_array(y, f"{prefix}y"), f"{prefix}y", "row {}".format)
        for (_, y), prefix in zip(pairs, prefixes, strict=False)
    ]
    names, numbers = encode_labels(labels, class_list(classes))
    all_integers = all(array.dtype.kind in "biu" for array in named[0].values())
    if not all_integers:
        refuse_unused_options("x", "not all whole numbers", {"vocabulary": vocabulary})
    rows = [_rows(arrays, prefix, all_integers) for arrays, prefix in zip(named, prefixes, strict=False)]
    train, test = _train_and_test(rows, numbers, sites, test_fraction)
    return Dataset(
        name,
        "text" if all_integers else "table",
        names,
        train,
        test,
        vocabulary=_vocabulary_size(named, vocabulary) if all_integers else 0,
        fields=tuple((key, array.shape[1:], array.dtype.kind in "biu") for key, array in named[0].items()),
    )


def token_columns(columns: Mapping[str, Any]) -> list[str]:
    """Return the names of all columns of lists if `input_ids` is among them, as in the output of a tokenizer.

    Otherwise, return no names.
    """
    lists = [name for name, column in columns.items() if isinstance(column, np.ndarray) and column.ndim == 2]
    return lists if "input_ids" in lists else []


def _train_and_test(
    rows: Sequence[npt.NDArray[Any]],
    numbers: Sequence[npt.NDArray[np.int64]],
    sites: Sequence[npt.NDArray[np.int64]] | None,
    fraction: float | None,
) -> tuple[Samples, Samples]:
    sites_by_part = [None] * len(rows) if sites is None else sites
    samples = [Samples(x, y, site=s) for x, y, s in zip(rows, numbers, sites_by_part, strict=True)]
    for part, where in zip(samples, ("x", "test x"), strict=False):
        if len(part.x) != len(part.y):
            found = f"{plural(len(part.x), 'input')} but {plural(len(part.y), 'label')}"
            raise UserError(f"{where}: {found}; expected equal lengths")
    if len(samples) == 2:
        if fraction is not None:
            raise UserError("there is a test part; leave out test_fraction")
        return samples[0], samples[1]
    train, test = stratified_holdout(numbers[0], TEST_FRACTION if fraction is None else fraction, "x")
    return samples[0].select(train), samples[0].select(test)


def _arrays(x: Mapping[Any, Any], prefix: str) -> dict[str, npt.NDArray[Any]]:
    """Convert and check the inputs of the training or test data. An input of shape [n] becomes [n, 1]."""
    found: dict[str, npt.NDArray[Any]] = {}
    for key, values in x.items():
        where = f"{prefix}x[{key!r}]"
        array = _as_array(values, where)
        if array.dtype.kind not in "biuf":
            raise UserError(f"{where}: values of type {array.dtype}; expected numbers")
        if not array.ndim:
            raise UserError(f"{where} is a single number; expected one value or row per sample")
        found[composed(str(key))] = array[:, None] if array.ndim == 1 else array
    if not found:
        raise UserError(f"{prefix}x is an empty mapping; expected inputs such as input_ids and attention_mask")
    lengths = {key: len(array) for key, array in found.items()}
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"{key} {length}" for key, length in lengths.items())
        raise UserError(f"{prefix}x: inputs have different numbers of samples ({listed}); expected the same")
    return found


def _as_array(values: Any, where: str) -> npt.NDArray[Any]:
    try:
        array = np.asarray(plain_array(values, where))
    except ValueError as error:
        raise _unequal_rows(where) from error
    lengths = {len(row) for row in array.flat if isinstance(row, list | np.ndarray)} if array.dtype.kind == "O" else ()
    if len(lengths) > 1:
        raise _unequal_rows(where)
    return array


def _unequal_rows(where: str) -> UserError:
    return UserError(
        f"{where}: rows of unequal length; expected equal ones, as a tokenizer gives with padding='max_length'"
    )


def _expect_same_form(named: Sequence[Fields]) -> None:
    train, test = named[0], named[-1]
    forms = [{key: array.shape[1:] for key, array in part.items()} for part in (train, test)]
    if forms[0] != forms[1]:
        raise UserError(f"test x has inputs {forms[1]}, x has {forms[0]}; expected the same names and shapes")
    for key, array in test.items():
        if array.dtype.kind == "f" and train[key].dtype.kind != "f":
            raise UserError(f"test x[{key!r}] has floats, x[{key!r}] whole numbers; expected whole numbers in both")


def _rows(arrays: Fields, prefix: str, all_integers: bool) -> npt.NDArray[Any]:
    """Store the inputs side by side: int64 if all are whole numbers, else float32."""
    for key, array in arrays.items():
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise UserError(f"{prefix}x[{key!r}]: NaN or infinite value; expected finite numbers")
        if array.dtype.kind in "iu" and not all_integers and np.abs(array).max(initial=0) > _LARGEST_EXACT:
            raise UserError(
                f"{prefix}x[{key!r}]: {np.abs(array).max()} is too large to store with floating-point inputs; "
                f"expected whole numbers up to {_LARGEST_EXACT}"
            )
    flat = [array.reshape(len(array), -1) for array in arrays.values()]
    return np.concatenate(flat, axis=1).astype(np.int64 if all_integers else np.float32)


def _vocabulary_size(named: Sequence[Fields], vocabulary: int | None) -> int:
    """Return the number of tokens, which must exceed every token id."""
    if vocabulary is not None and (isinstance(vocabulary, bool) or not isinstance(vocabulary, int | np.integer)):
        raise UserError(f"vocabulary is {vocabulary!r}; expected the number of tokens")
    smallest = min(int(array.min(initial=0)) for part in named for array in part.values())
    if smallest < 0:
        raise UserError(f"x holds the number {smallest}; expected token ids and other whole numbers of at least 0")
    ids = [part["input_ids"] if "input_ids" in part else next(iter(part.values())) for part in named]
    needed = 1 + max(int(array.max(initial=0)) for array in ids)
    if vocabulary is not None and vocabulary < needed:
        raise UserError(f"vocabulary is {vocabulary}, but x has the token id {needed - 1}; expected at least {needed}")
    return vocabulary or max(needed, 2)
