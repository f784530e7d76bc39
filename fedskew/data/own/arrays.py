"""Users' arrays, from Python or from `.npz` files. They are tables or images."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from fedskew.data.dataset import Dataset, Kind
from fedskew.data.own.assembly import Array, Part, assemble
from fedskew.data.own.labels import known_classes, read_labels
from fedskew.data.spelling import composed
from fedskew.data.table_encoding import RawTable
from fedskew.errors import UserError, plural, unknown

_CHANNELS = (1, 3, 4)
_LAYOUTS = ("nchw", "nhwc")


def load_npz(
    path: Path, *, test_fraction: float | None = None, layout: str | None = None, classes: object = None
) -> Dataset:
    """Load the arrays `x_train, y_train, x_test, y_test`, or `x, y`. The array `classes` may hold the class names."""
    arrays = _read_npz(path)
    names = [("x_train", "y_train"), ("x_test", "y_test")] if "x_train" in arrays else [("x", "y")]
    missing = [name for pair in names for name in pair if name not in arrays]
    if missing:
        raise UserError(
            f"{path}: no array {missing[0]!r}; expected x_train, y_train, x_test and y_test, or x and y; "
            f"found {', '.join(sorted(arrays)) or 'nothing'}"
        )
    if len(names) == 1 and (unread := [name for name in ("x_test", "y_test") if name in arrays]):
        raise UserError(
            f"{path}: arrays x, y and {unread[0]}; expected x_train, y_train, x_test and y_test, or x and y"
        )
    found = None if "classes" not in arrays else [str(name) for name in np.atleast_1d(arrays["classes"])]
    parts = [ArrayPart(arrays[x], arrays[y], f"{path} {x}", f"{path} {y}") for x, y in names]
    return array_dataset(path.name, parts, known_classes(classes, found), test_fraction, layout)


class ArrayPart(NamedTuple):
    """The arrays of a training or test part, with their names for error messages."""

    x: Array
    y: Array
    x_name: str
    y_name: str


def array_dataset(
    name: str,
    arrays: Sequence[ArrayPart],
    classes: Sequence[str] | None,
    test_fraction: float | None,
    layout: str | None,
    columns: Sequence[str] | None = None,
) -> Dataset:
    """Make a dataset from one part, or from a training and a test part. `columns` names the features of a table.

    Inputs with two dimensions are a table. Inputs with three dimensions are grey images (n, height, width). Inputs with
    four dimensions are images. Their channels are the second or the last axis, whichever has size 1, 3 or 4. If both
    axes or neither axis has such a size, `layout` must be "nchw" or "nhwc".
    """
    labels = [read_labels(part.y, part.y_name, "row {}".format) for part in arrays]
    for part in arrays:
        if part.x.ndim and not len(part.x):
            raise UserError(f"{part.x_name}: no samples")
    where = [part.x_name for part in arrays]
    kind, inputs = convert_inputs([part.x for part in arrays], where, layout)
    if kind == "table":
        refuse_unused_options(where[0], "a table of numbers", {"layout": layout})
        tables = _raw_tables(inputs, where, columns)
        dataset = assemble(name, kind, list(map(Part, tables, labels, where)), classes, test_fraction)
        # Without `columns`, the names x0, x1 … are made up. They are dropped, and so is the encoding, because
        # `Dataset.scaling` has its means and deviations. Both are kept if the encoding also marks gaps.
        is_plain = columns is None and dataset.encoding is not None and dataset.encoding.only_numbers
        return replace(dataset, columns=(), encoding=None) if is_plain else dataset
    if columns is not None:
        raise UserError(f"columns is set, but {where[0]} holds images; leave columns out")
    return assemble(name, kind, list(map(Part, inputs, labels, where)), classes, test_fraction)


def refuse_unused_options(where: str, inputs: str, given: Mapping[str, object]) -> None:
    """Refuse the options in `given` that are set. They have no effect on this kind of inputs."""
    if found := [option for option, value in given.items() if value is not None]:
        raise UserError(f"{where}: option {found[0]!r} has no effect, because the inputs are {inputs}; leave it out")


def make_array(values: Any, where: str) -> npt.NDArray[Any]:
    """Convert tensors and lists to an array."""
    try:
        return np.asarray(plain_array(values, where))
    except ValueError as error:
        raise UserError(f"{where}: rows of unequal length; expected an array of numbers") from error


def plain_array(values: Any, where: str) -> Any:
    """Convert a tensor to an array, and masked values of an array to NaN, or to None among texts.

    Refuse sparse matrices and tensors. Anything else, such as a list, is returned unchanged.
    """
    if isinstance(values, torch.Tensor):
        if values.layout != torch.strided:
            raise UserError(f"{where}: a sparse Tensor; expected a dense one: call to_dense() first")
        is_short = values.is_floating_point() and values.element_size() < 4  # numpy has no bfloat16
        return (values.float() if is_short else values).detach().cpu().numpy()
    if isinstance(values, np.ma.MaskedArray) and np.ma.is_masked(values):
        is_number = values.dtype.kind in "biuf"
        plain: npt.NDArray[Any] = np.array(values.data, dtype=np.float64 if is_number else np.object_)
        plain[np.ma.getmaskarray(values)] = np.nan if is_number else None
        return plain
    if hasattr(values, "toarray"):
        raise UserError(f"{where}: a sparse {type(values).__name__}; expected a dense array: call toarray() first")
    return values


def make_label_array(values: Any, where: str) -> npt.NDArray[Any]:
    """Convert labels to an array. A list becomes an array of objects, because numpy turns [1, "a"] into strings."""
    return np.array(values, dtype=object) if isinstance(values, list | tuple) else make_array(values, where)


def _raw_tables(arrays: Sequence[Array], where: Sequence[str], columns: Sequence[str] | None) -> list[RawTable]:
    """Name the columns, and refuse infinite values. NaN is a gap."""
    width = arrays[0].shape[1]
    if isinstance(columns, str) or not isinstance(columns, Iterable | None):
        raise UserError(f"columns is {columns!r}; expected a list with a name for each feature")
    given = [f"x{index}" for index in range(width)] if columns is None else columns
    names = tuple(composed(str(name)) for name in given)
    if len(names) != width or len(set(names)) < width:
        raise UserError(
            f"columns has {plural(len(names), 'name')} ({len(set(names))} distinct), but {where[0]} has "
            f"{plural(width, 'feature')}; expected a distinct name for each feature"
        )
    tables = []
    for array, source in zip(arrays, where, strict=True):
        if array.shape[1] != width:
            raise UserError(
                f"train inputs have shape {arrays[0].shape[1:]}, but {source} has {array.shape[1:]}; expected the same"
            )
        bad = np.isinf(array).any(axis=1)
        if bad.any():
            raise UserError(
                f"{source}: infinite value in row {int(bad.argmax())}; "
                "expected finite numbers, or NaN for a missing value"
            )
        tables.append(RawTable(names, array.astype(np.float64), {}))
    return tables


def convert_inputs(arrays: Sequence[Array], where: Sequence[str], layout: str | None) -> tuple[Kind, list[Array]]:
    """Convert numbers to a table or to uint8 images (n, channels, height, width). All arrays must be of one kind."""
    for array, name in zip(arrays, where, strict=True):
        if array.dtype.kind not in "biuf":
            raise UserError(f"{name}: values of type {array.dtype}; expected numbers")
        if array.ndim not in (2, 3, 4):
            found = plural(array.ndim, "dimension")
            raise UserError(f"{name}: {found}; expected 2 (a table), 3 (grey images) or 4 (images)")
        if not all(array.shape[1:]):
            raise UserError(f"{name}: shape {array.shape}, so a sample has no values; expected at least one")
        if array.ndim != arrays[0].ndim:
            raise UserError(f"{name}: {array.ndim} dimensions, but {where[0]} has {arrays[0].ndim}; expected the same")
    if arrays[0].ndim == 2:
        return "table", [array.astype(np.float64) for array in arrays]
    order = _channel_order(arrays[0], where[0], layout)
    return "image", [_channels_first(array, order) for array in _as_uint8(arrays, where)]


def _channel_order(images: Array, where: str, layout: str | None) -> str:
    if layout is not None and layout not in _LAYOUTS:
        raise unknown("layout", str(layout), _LAYOUTS)
    if images.ndim == 3 or layout is not None:
        return layout or "nhw"
    first_fits, last_fits = images.shape[1] in _CHANNELS, images.shape[3] in _CHANNELS
    if first_fits == last_fits:
        which = "both axis 1 and axis 3 have" if first_fits else "neither axis 1 nor axis 3 has"
        raise UserError(
            f"{where}: shape {images.shape}; {which} size 1, 3 or 4, so the channels are unknown; "
            "set layout to nchw or nhwc"
        )
    return "nchw" if first_fits else "nhwc"


def _channels_first(images: npt.NDArray[np.uint8], order: str) -> npt.NDArray[np.uint8]:
    if images.ndim == 3:
        return images[:, None]
    return np.ascontiguousarray(images.transpose(0, 3, 1, 2)) if order == "nhwc" else images


def _as_uint8(arrays: Sequence[Array], where: Sequence[str]) -> list[npt.NDArray[np.uint8]]:
    """Convert pixels to uint8.

    Integers are read as 0 to 255. Floats are read as 0 to 1, or as 0 to 255 if any float in any array exceeds 1.
    """
    for array, name in zip(arrays, where, strict=True):
        if array.dtype == np.uint8:
            continue
        flat = array.reshape(len(array), -1).astype(np.float64)
        bad = np.flatnonzero(~((flat >= 0) & (flat <= 255)).all(axis=1))  # NaN fails both comparisons
        if len(bad):
            raise UserError(
                f"{name}: image {bad[0]} (counted from 0) has a pixel that is NaN, negative or above 255; "
                "expected 0 to 1 or 0 to 255 (fedskew normalises images itself)"
            )
    largest_float = max((float(a.max(initial=0)) for a in arrays if a.dtype.kind == "f"), default=0.0)
    scale = 255.0 if largest_float <= 1 else 1.0
    return [
        a.astype(np.uint8, copy=False)
        if a.dtype.kind in "biu"
        else np.rint(a.astype(np.float64) * scale).astype(np.uint8)
        for a in arrays
    ]


def _read_npz(path: Path) -> dict[str, Array]:
    if not zipfile.is_zipfile(path):
        raise UserError(f"{path}: not a .npz file; expected what numpy.savez writes")
    try:
        with np.load(path, allow_pickle=False) as file:
            found = {name: file[name] for name in file.files}
    except (OSError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise UserError(f"{path}: cannot be read ({error}); expected a .npz file") from error
    except ValueError as error:
        if "allow_pickle" not in str(error):
            raise UserError(f"{path}: cannot be read ({error}); expected a .npz file") from error
        raise UserError(f"{path}: holds Python objects, which are never unpickled; expected plain arrays") from error
    if odd := [name for name, array in found.items() if not isinstance(array, np.ndarray)]:
        raise UserError(f"{path}: {odd[0]!r} is not an array; expected what numpy.savez writes")
    return found
