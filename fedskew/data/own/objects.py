"""Load a user's data from Python objects: arrays, a pandas DataFrame, a torch Dataset or a Hugging Face Dataset.

pandas and Hugging Face's datasets are recognised by their attributes, so they do not have to be installed.
"""

from __future__ import annotations

import datetime
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fedskew.data.dataset import Dataset, check_options
from fedskew.data.images import Size, image_pixels, is_image, parse_size
from fedskew.data.own.arrays import array_dataset
from fedskew.data.own.assembly import Array, Part, assemble
from fedskew.data.own.columns import Column, make_strings, number_text
from fedskew.data.own.fields import load_fields
from fedskew.data.own.labels import class_list, known_classes, read_labels
from fedskew.data.own.table_files import TEST_SPLITS, arrow_table, unusable
from fedskew.data.own.tables import Table, load_tables
from fedskew.data.published.text import LENGTH, VOCABULARY
from fedskew.errors import UserError

FORMS = (
    "a dataset's name, a path, a pair of arrays (x, y), a pandas DataFrame, a torch Dataset or a Hugging Face Dataset"
)
_COMMON_OPTIONS = ("name", "test")


def load_object(data: object, options: dict[str, Any]) -> Dataset:
    """Load `data`. `options` are `name`, `test` (a test set of the same form) and those of the data's form."""
    train, test = _parts(data, options.get("test"))
    parts = [train] if test is None else [train, test]
    pairs = _is_pair(train)
    kind = type(train[0]).__name__ if pairs else type(train).__name__
    name = options.get("name", "arrays" if pairs else kind.lower())
    if not isinstance(name, str) or not name.strip():
        raise UserError(f"name is {name!r}; expected text")
    rest = {key: value for key, value in options.items() if key not in _COMMON_OPTIONS}
    where = (kind, f"test {kind}")
    loader: Callable[..., Dataset]
    content: list[Any]
    if pairs and _is_frame(train[0]):
        if "label" in rest:
            raise UserError(f"label is {rest['label']!r}, but the labels are y of the pair (x, y); leave out label")
        loader, content = load_tables, [_frame_table(x, y, at) for (x, y), at in zip(parts, where, strict=False)]
        rest["label"] = next(reversed(content[0].columns))
    elif _is_frame(train) or _is_hugging_face(train):
        loader, content = load_tables, [_table(part, at) for part, at in zip(parts, where, strict=False)]
    elif pairs and isinstance(train[0], Mapping):
        loader, content = load_fields, parts
    elif pairs:
        loader, content = load_arrays, parts
    else:
        loader, content = load_samples, list(zip(parts, where, strict=False))
    dataset = loader(name, content, **check_options(loader, rest, kind, _COMMON_OPTIONS))
    return replace(dataset, in_memory=_identity(kind, dataset))


def load_arrays(
    name: str,
    pairs: Sequence[tuple[Any, Any]],
    *,
    test_fraction: float | None = None,
    layout: str | None = None,
    classes: object = None,
    columns: Sequence[str] | None = None,
) -> Dataset:
    """Load arrays x and y. `columns` are the names of a table's features."""
    parts = [
        (_array(x, f"{part}x"), _labels(y, f"{part}y"), f"{part}x", f"{part}y")
        for (x, y), part in zip(pairs, ("", "test "), strict=False)
    ]
    return array_dataset(name, parts, class_list(classes), test_fraction, layout, columns)


def load_samples(
    name: str,
    parts: Sequence[tuple[Any, str]],
    *,
    test_fraction: float | None = None,
    layout: str | None = None,
    image_size: object = None,
    classes: object = None,
    length: int = LENGTH,
    vocabulary: int = VOCABULARY,
) -> Dataset:
    """Load torch Datasets whose items are pairs (input, label). An input is numbers, an image or a text."""
    samples = [_samples(data, where) for data, where in parts]
    names = known_classes(classes, _class_names(parts[0][0]))
    inputs, sources = [x for x, _ in samples], [where for _, where in parts]
    if isinstance(inputs[0][0], str):
        texts = [
            Part(list(map(str, x)), read_labels(y, where, "item {}".format), where)
            for (x, y), where in zip(samples, sources, strict=True)
        ]
        return assemble(name, "text", texts, names, test_fraction, length, vocabulary)
    if is_image(inputs[0][0]):
        size, layout = parse_size(image_size), "nchw"
        inputs = [_pixels(images, where, size) for images, where in zip(inputs, sources, strict=True)]
        channels = max(len(image) for part in inputs for image in part)
        inputs = [[x if len(x) == channels else x.repeat(channels, axis=0) for x in part] for part in inputs]
    arrays = [(_stack(x, where), y, where, where) for (_, y), x, where in zip(samples, inputs, sources, strict=True)]
    return array_dataset(name, arrays, names, test_fraction, layout)


def _parts(data: Any, test: Any) -> tuple[Any, Any]:
    """Return the training part and the test part, which may be None."""
    if isinstance(data, Mapping):
        data, test = _splits(data, test)
    _check_form(data)
    if test is not None:
        _check_form(test)
        forms = (_is_frame, _is_hugging_face, _is_pair)
        if any(form(data) != form(test) for form in forms):
            raise UserError(
                f"test is of type {type(test).__name__}; expected {type(data).__name__}, like the training part"
            )
    return data, test


def _splits(data: Mapping[Any, Any], test: Any) -> tuple[Any, Any]:
    """Return the parts of a DatasetDict, or of another mapping from split names to data."""
    kind, splits = type(data).__name__, list(data)
    if len(splits) == 1:
        return data[splits[0]], test
    if "train" not in splits:
        raise UserError(f"{kind}: splits {', '.join(map(str, splits)) or '(none)'}; expected one named train")
    test_split = next((name for name in TEST_SPLITS if name in splits), None)
    if test_split is not None and test is not None:
        raise UserError(f"{kind} has a split {test_split!r}; leave out test")
    return data["train"], test if test_split is None else data[test_split]


def _check_form(data: object) -> None:
    if isinstance(data, np.ndarray | torch.Tensor):
        raise UserError(f"data is a single {type(data).__name__}; expected a pair (x, y) of inputs and labels")
    known = _is_pair(data) or _is_frame(data) or _is_hugging_face(data)
    if not known and (not hasattr(data, "__getitem__") or isinstance(data, str | bytes | tuple | Mapping)):
        raise UserError(f"data is of type {type(data).__name__}; expected {FORMS}")
    if not hasattr(data, "__len__"):
        raise UserError(f"{type(data).__name__} has no length, so it is a stream; expected a Dataset with a length")


def _is_pair(data: object) -> bool:
    return isinstance(data, tuple) and len(data) == 2


def _is_frame(data: object) -> bool:
    return all(hasattr(data, name) for name in ("columns", "iloc", "dtypes"))


def _is_hugging_face(data: object) -> bool:
    return all(hasattr(data, name) for name in ("features", "column_names", "with_format"))


def _array(values: Any, where: str) -> npt.NDArray[Any]:
    if isinstance(values, torch.Tensor):
        values = values.detach().cpu().numpy()
    try:
        return np.asarray(values)
    except ValueError as error:
        raise UserError(f"{where}: rows of unequal length; expected an array of numbers") from error


def _labels(values: Any, where: str) -> npt.NDArray[Any]:
    """Convert labels to an array. A list keeps its objects, because numpy would turn [1, "a"] into strings."""
    return np.array(values, dtype=object) if isinstance(values, list | tuple) else _array(values, where)


def _table(data: Any, where: str) -> Table:
    return _frame_table(data, None, where) if _is_frame(data) else _hugging_face_table(data, where)


def _hugging_face_table(data: Any, where: str) -> Table:
    """Read the rows that the Dataset shows, which may be fewer than it stores."""
    features = data.features.to_dict() if hasattr(data.features, "to_dict") else {}
    return arrow_table(data.with_format("arrow")[:], where, features)


def _frame_table(frame: Any, labels: Any, where: str) -> Table:
    """Read the columns of a pandas DataFrame. Labels that are not one of its columns become the last column."""
    columns: dict[str, Column] = {}
    mistakes: dict[str, str] = {}
    for position, key in enumerate(frame.columns):
        name = str(key)
        if name in columns:
            raise UserError(f"{where}: column {name!r} appears twice; expected different names")
        columns[name], content = _frame_column(frame.iloc[:, position])
        if content is not None:
            mistakes[name] = unusable(where, name, content)
    if labels is not None:
        name = str(getattr(labels, "name", None) or "label")
        while name in columns:
            name += "_"
        columns[name] = _label_column(labels)
    return Table(where, "row {}".format, columns, mistakes=mistakes)


def _frame_column(column: Any) -> tuple[Column, str | None]:
    """Read a column of a pandas DataFrame. If it cannot be an input, also say what it holds."""
    missing = np.asarray(column.isna())
    if column.dtype.kind in "biuf" and str(column.dtype) != "category":
        if column.dtype.kind in "iu" and not missing.any():
            return np.asarray(column), None
        return column.to_numpy(dtype=np.float64, na_value=np.nan), None
    values = [None if gap else value for gap, value in zip(missing.tolist(), column.tolist(), strict=True)]
    texts = [None if value is None else number_text(value) if _is_number(value) else str(value) for value in values]
    categorical = str(column.dtype) == "category"
    return make_strings(texts, categorical), None if categorical else _odd_content(column, values)


def _odd_content(column: Any, values: Sequence[Any]) -> str | None:
    """Describe what a column holds if that is neither numbers nor texts."""
    if column.dtype.kind in "mM":
        return "dates or times"
    odd = next(
        (value for value in values if value is not None and not (isinstance(value, str) or _is_number(value))), None
    )
    if isinstance(odd, datetime.date | datetime.time | datetime.timedelta):
        return "dates or times"
    return None if odd is None else f"values of type {type(odd).__name__}"


def _is_number(value: object) -> bool:
    return isinstance(value, int | float | np.number | np.bool_)


def _label_column(labels: Any) -> Column:
    """Read labels that are given beside a table."""
    values = _labels(labels, "y")
    if values.dtype.kind != "O":
        return values
    return make_strings([None if v is None or v != v else v for v in values.tolist()]) if _all_texts(values) else values


def _all_texts(values: npt.NDArray[Any]) -> bool:
    return all(value is None or value != value or isinstance(value, str) for value in values)


def _samples(data: Any, where: str) -> tuple[list[Any], npt.NDArray[Any]]:
    """Read the inputs and the labels of all items."""
    inputs, labels = [], []
    for index in range(len(data)):
        item = data[index]
        if not isinstance(item, tuple | list) or len(item) != 2:
            raise UserError(f"{where}: item {index} has type {type(item).__name__}; expected a pair (input, label)")
        inputs.append(item[0])
        labels.append(item[1].item() if hasattr(item[1], "item") else item[1])
    if not inputs:
        raise UserError(f"{where}: no samples")
    return inputs, np.array(labels, dtype=object)


def _pixels(images: Sequence[Any], where: str, size: Size | None) -> list[Any]:
    return [image_pixels(image, f"{where}: item {index}", size) for index, image in enumerate(images)]


def _stack(inputs: Sequence[Any], where: str) -> Array:
    arrays = [_array(value, f"{where}: item {index}") for index, value in enumerate(inputs)]
    odd = next((i for i, array in enumerate(arrays) if array.shape != arrays[0].shape), None)
    if odd is not None:
        raise UserError(
            f"{where}: item {odd} has shape {arrays[odd].shape}, item 0 {arrays[0].shape}; expected the same"
        )
    return np.stack(arrays)


def _class_names(data: Any) -> tuple[str, ...] | None:
    """Return the class names of a torchvision dataset, or of a subset of one."""
    names = getattr(data, "classes", None) or getattr(getattr(data, "dataset", None), "classes", None)
    return tuple(map(str, names)) if isinstance(names, list | tuple) else None


def _identity(kind: str, dataset: Dataset) -> dict[str, object]:
    """Return what a configuration records about data that it cannot contain."""
    digest = hashlib.sha256("\n".join(dataset.classes).encode())
    for samples in (dataset.train, dataset.test):
        for array in (samples.x, samples.y):
            digest.update(f"{array.dtype.str}{array.shape}".encode())
            digest.update(np.ascontiguousarray(array).tobytes())
    return {
        "in_memory": kind,
        "train": list(dataset.train.x.shape),
        "test": list(dataset.test.x.shape),
        "sha256": digest.hexdigest(),
    }


def in_memory_error(options: Mapping[str, object]) -> UserError:
    """Make the error for a configuration whose data was a Python object."""
    shape = " and ".join(f"{part} {'×'.join(map(str, options[part]))}" for part in ("train", "test"))  # type: ignore[call-overload]
    return UserError(
        f"the data of this run was a {options['in_memory']} in Python ({shape}, SHA-256 "
        f"{str(options['sha256'])[:12]}…), which a configuration cannot contain; pass it to fs.federation in Python"
    )
