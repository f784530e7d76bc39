"""Folders of `.npy` arrays. The inputs stay on disk, and rows are read when they are needed.

This format is for data that do not fit in memory. The inputs are not converted, so they must already have the types and
shapes that models read.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fedskew.data.dataset import Dataset, Samples
from fedskew.data.images import channel_statistics
from fedskew.data.own.assembly import Array
from fedskew.data.own.label_matrix import IntArray, encode_matrix
from fedskew.data.own.labels import known_classes, read_labels
from fedskew.errors import UserError

INPUTS = ("x_train.npy", "x_test.npy")
LABELS = ("y_train.npy", "y_test.npy")
_FORM = "float32 tables (rows, features) or uint8 images (rows, channels, height, width)"


def is_mapped(folder: Path) -> bool:
    return (folder / INPUTS[0]).is_file()


def load_mapped(folder: Path, *, classes: object = None) -> Dataset:
    """Load the arrays `x_train`, `y_train`, `x_test` and `y_test`.

    Labels are class numbers, which start at 0, or a matrix of 0 and 1 with one column per label.
    """
    train, test = (_samples(folder / x, folder / y) for x, y in zip(INPUTS, LABELS, strict=True))
    names = _class_names(train.y, test.y, str(folder / LABELS[0]), classes)
    name = folder.resolve().name
    if train.x.ndim == 2:
        return Dataset(name, "table", names, train, test)
    return Dataset(name, "image", names, train, test, *channel_statistics(train.x))


def _class_names(train: IntArray, test: IntArray, where: str, classes: object) -> tuple[str, ...]:
    """Return the names that the user lists. Without a list, the classes or the columns of labels are numbered."""
    if train.ndim != test.ndim:
        raise UserError(f"{where}: one class per sample in one part and several labels in the other; expected one kind")
    if train.ndim == 2:
        numbered = tuple(map(str, range(train.shape[1])))
        return encode_matrix([train, test], where, known_classes(classes, numbered))[0]
    largest = max(int(y.max(initial=0)) for y in (train, test))
    return tuple(known_classes(classes, tuple(map(str, range(largest + 1)))) or ())


def _samples(x: Path, y: Path) -> Samples:
    inputs = _map(x)
    if (inputs.ndim, str(inputs.dtype)) not in ((2, "float32"), (4, "uint8")):
        raise UserError(f"{x}: {inputs.dtype} of shape {inputs.shape}; expected {_FORM}")
    labels = read_labels(_map(y), str(y), "row {}".format).values
    if labels.dtype.kind != "i":
        raise UserError(f"{y}: labels are names or booleans; expected the numbers of the classes, from 0")
    return Samples(inputs, labels.astype(np.int64, copy=False))


def _map(path: Path) -> Array:
    """Map a file into memory, read-only."""
    try:
        array: Array = np.load(path, mmap_mode="r", allow_pickle=False)
        if not isinstance(array, np.ndarray):
            raise ValueError("it is an archive of arrays")
    except FileNotFoundError as error:
        expected = ", ".join((*INPUTS, *LABELS))
        raise UserError(f"{path} does not exist; expected {expected} in this folder") from error
    except (OSError, EOFError, ValueError) as error:
        raise UserError(f"{path}: cannot be read ({error}); expected what numpy.save writes") from error
    return array
