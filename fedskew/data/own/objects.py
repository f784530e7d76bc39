"""Load a user's data from Python objects: arrays, DataFrames, torch and Hugging Face Datasets, scikit-learn Bunches.

Objects of other packages are recognised by their attributes, so these packages do not have to be installed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fedskew.data.dataset import Dataset, check_options
from fedskew.data.images import BitDepths, image_pixels, is_image, parse_bits, parse_size
from fedskew.data.own.arrays import ArrayPart, array_dataset, make_array, make_label_array, refuse_unused_options
from fedskew.data.own.assembly import Array, Part, assemble
from fedskew.data.own.fields import load_fields
from fedskew.data.own.frames import frame_table, is_frame
from fedskew.data.own.labels import StoredClasses, class_list, known_classes, read_labels
from fedskew.data.own.table_columns import Table
from fedskew.data.own.table_files import TEST_NAMES, arrow_table
from fedskew.data.own.tables import load_tables
from fedskew.data.published.text import LENGTH, VOCABULARY
from fedskew.data.spelling import composed
from fedskew.errors import UserError

_OBJECT_FORMS = (
    "a pair of arrays (x, y), a pandas or Polars DataFrame, an Arrow table, a torch Dataset, a Hugging Face Dataset"
)
_FORMS = f"a dataset's name, a path, {_OBJECT_FORMS} or a scikit-learn Bunch"
_COMMON_OPTIONS = ("name", "test")


def load_object(data: object, options: dict[str, Any]) -> Dataset:
    """Load `data`. Its form decides which options it has, besides `name` and `test` (a test set of the same form)."""
    if _is_bunch(data):
        data, options = _unpack_bunch(data, options)
    train, test = _parts(data, options.get("test"))
    parts = [train] if test is None else [train, test]
    is_pair = _is_pair(train)
    kind = type(train[0]).__name__ if is_pair else type(train).__name__
    name = options.get("name", "arrays" if is_pair else kind.lower())
    if not isinstance(name, str) or not name.strip():
        raise UserError(f"name is {name!r}; expected text")
    rest = {key: value for key, value in options.items() if key not in _COMMON_OPTIONS}
    sources = (kind, f"test {kind}")
    if is_pair and rest.get("classes") is None and (names := _label_names([y for _, y in parts])):
        rest["classes"] = StoredClasses(names)
    loader: Callable[..., Dataset]
    content: list[Any]
    if is_pair and is_frame(train[0]):
        if "label" in rest:
            raise UserError(f"label is {rest['label']!r}, but the labels are y of the pair (x, y); leave out label")
        first = frame_table(train[0], sources[0], train[1])
        rest["label"] = next(reversed(first.columns))  # `frame_table` adds the labels as the last column
        others = [frame_table(x, sources[1], y, rest["label"]) for x, y in parts[1:]]
        loader, content = load_tables, [first, *others]
    elif is_frame(train) or _is_hugging_face(train):
        loader, content = load_tables, [_table(part, source) for part, source in zip(parts, sources, strict=False)]
    elif is_pair and isinstance(train[0], Mapping):
        loader, content = load_fields, parts
    elif is_pair:
        loader, content = load_arrays, parts
    else:
        loader, content = load_samples, list(zip(parts, sources, strict=False))
    dataset = loader(name, content, **check_options(loader, rest, kind, _COMMON_OPTIONS))
    return replace(dataset, in_memory=_identity(kind, dataset))


def _label_names(labels: Sequence[Any]) -> list[str] | None:
    """Return the column names of labels that are DataFrames with several columns. Otherwise, return None.

    If the test labels are a DataFrame, too, it must have the same columns.
    """
    names = [list(map(str, getattr(y, "column_names", None) or y.columns)) if is_frame(y) else [] for y in labels]
    if len(names[0]) < 2:
        return None
    if names[-1] and names[-1] != names[0]:
        raise UserError(f"test y has the columns {', '.join(names[-1])}; expected {', '.join(names[0])}, as in y")
    return names[0]


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
        ArrayPart(make_array(x, f"{part}x"), make_label_array(y, f"{part}y"), f"{part}x", f"{part}y")
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
    image_bits: object = None,
    classes: object = None,
    length: int | None = None,
    vocabulary: int | None = None,
) -> Dataset:
    """Load torch Datasets whose items are pairs (input, label). An input is numbers, an image or a text."""
    samples = [_samples(data, where) for data, where in parts]
    names = known_classes(classes, _class_names(parts[0][0]))
    inputs, sources = [x for x, _ in samples], [where for _, where in parts]
    of_images: dict[str, object] = {"image_size": image_size, "image_bits": image_bits}
    for_text = {"length": length, "vocabulary": vocabulary}
    depths = BitDepths(parse_bits(image_bits))
    if isinstance(inputs[0][0], str):
        refuse_unused_options(sources[0], "texts", {**of_images, "layout": layout})
        texts = [
            Part([composed(str(text)) for text in x], read_labels(y, where, "item {}".format), where)
            for (x, y), where in zip(samples, sources, strict=True)
        ]
        form = (LENGTH if length is None else length, VOCABULARY if vocabulary is None else vocabulary)
        return assemble(name, "text", texts, names, test_fraction, *form)
    if is_image(inputs[0][0]):
        refuse_unused_options(sources[0], "Pillow images", {"layout": layout, **for_text})
        size, layout = parse_size(image_size), "nchw"
        inputs = [
            image_pixels(images, f"{where}: item {{}}".format, size, depths)
            for images, where in zip(inputs, sources, strict=True)
        ]
        channels = max(len(image) for part in inputs for image in part)
        inputs = [[x if len(x) == channels else x.repeat(channels, axis=0) for x in part] for part in inputs]
    else:
        refuse_unused_options(sources[0], "numbers", {**of_images, **for_text})
    arrays = [
        ArrayPart(_stack(x, where), y, where, where) for (_, y), x, where in zip(samples, inputs, sources, strict=True)
    ]
    dataset = array_dataset(name, arrays, names, test_fraction, layout)
    return replace(dataset, notes=(*dataset.notes, *depths.notes(name)))


def _unpack_bunch(data: Any, options: dict[str, Any]) -> tuple[tuple[Any, Any], dict[str, Any]]:
    """Return the pair (x, y) of a Bunch, and the options. Names in the Bunch are defaults for the options."""
    x, y = data["data"], data["target"]
    known: dict[str, Any] = {"name": "bunch"}
    names = data.get("target_names")
    if names is not None and _are_positions(y, len(names)):
        known["classes"] = StoredClasses(map(str, names))
    if data.get("feature_names") is not None and isinstance(x, np.ndarray):
        known["columns"] = [str(name) for name in data["feature_names"]]
    test: Any = options.get("test")
    unpacked = {"test": (test["data"], test["target"])} if _is_bunch(test) else {}
    return (x, y), {**known, **options, **unpacked}


def _are_positions(y: Any, classes: int) -> bool:
    """Return whether labels are positions in a list of class names.

    They are not if `target_names` is the name of the label column, as in some Bunches.
    """
    labels = np.asarray(y)
    is_numbers = labels.ndim == 1 and labels.dtype.kind in "iu"
    return is_numbers and classes > 1 and bool(((labels >= 0) & (labels < classes)).all())


def _parts(data: Any, test: Any) -> tuple[Any, Any]:
    """Return the training part and the test part, which may be None."""
    if isinstance(data, Mapping):
        data, test = _splits(data, test)
        _check_form(data, "the training part", _OBJECT_FORMS)
    else:
        _check_form(data, "data", _FORMS)
    if test is not None:
        forms = (is_frame, _is_hugging_face, _is_pair)
        if any(form(data) != form(test) for form in forms):
            expected = "a pair (x, y)" if _is_pair(data) else type(data).__name__
            raise UserError(f"test is of type {type(test).__name__}; expected {expected}, like the training part")
        _check_form(test, "test", f"{_OBJECT_FORMS}, like the training part")
    return data, test


def _splits(data: Mapping[Any, Any], test: Any) -> tuple[Any, Any]:
    """Return the parts of a DatasetDict, or of another mapping from split names to data."""
    kind, splits = type(data).__name__, list(data)
    if len(splits) == 1:
        return data[splits[0]], test
    if "train" not in splits:
        raise UserError(f"{kind}: splits {', '.join(map(str, splits)) or '(none)'}; expected one named train")
    test_split = next((name for name in TEST_NAMES if name in splits), None)
    if test_split is not None and test is not None:
        raise UserError(f"{kind} has a split {test_split!r}; leave out test")
    return data["train"], test if test_split is None else data[test_split]


def _check_form(data: object, name: str, forms: str) -> None:
    if hasattr(data, "collect") and not hasattr(data, "__len__"):
        raise UserError(f"{type(data).__name__} has no rows yet; expected a DataFrame: call collect() first")
    if isinstance(data, np.ndarray | torch.Tensor):
        raise UserError(f"{name} is a single {type(data).__name__}; expected a pair (x, y) of inputs and labels")
    known = _is_pair(data) or is_frame(data) or _is_hugging_face(data)
    if not known and (not hasattr(data, "__getitem__") or isinstance(data, str | bytes | tuple | Mapping)):
        raise UserError(f"{name} is of type {type(data).__name__}; expected {forms}")
    if not hasattr(data, "__len__"):
        raise UserError(f"{type(data).__name__} has no length, so it is a stream; expected a Dataset with a length")


def _is_pair(data: object) -> bool:
    return isinstance(data, tuple) and len(data) == 2


def _is_bunch(data: object) -> bool:
    """Return whether this is a Bunch, which scikit-learn's `load_*` and `fetch_*` functions return."""
    return isinstance(data, Mapping) and "data" in data and "target" in data


def _is_hugging_face(data: object) -> bool:
    return all(hasattr(data, name) for name in ("features", "column_names", "with_format"))


def _table(data: Any, where: str) -> Table:
    return frame_table(data, where) if is_frame(data) else _hugging_face_table(data, where)


def _hugging_face_table(data: Any, where: str) -> Table:
    """Read the rows of a Hugging Face Dataset. `[:]` leaves out rows that the Dataset does not select."""
    features = data.features.to_dict() if hasattr(data.features, "to_dict") else {}
    return arrow_table(data.with_format("arrow")[:], where, features)


def _samples(data: Any, where: str) -> tuple[list[Any], npt.NDArray[Any]]:
    """Read the inputs and the labels of all items."""
    inputs, labels = [], []
    for index in range(len(data)):
        item = data[index]
        if not isinstance(item, tuple | list) or len(item) != 2:
            raise UserError(f"{where}: item {index} has type {type(item).__name__}; expected a pair (input, label)")
        inputs.append(item[0])
        labels.append(item[1].tolist() if hasattr(item[1], "tolist") else item[1])
    if not inputs:
        raise UserError(f"{where}: no samples")
    return inputs, np.array(labels, dtype=object)


def _stack(inputs: Sequence[Any], where: str) -> Array:
    arrays = [make_array(value, f"{where}: item {index}") for index, value in enumerate(inputs)]
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
    """Return the type, the shapes and a hash of data in memory, for a run's configuration."""
    digest = hashlib.sha256("\n".join(dataset.classes).encode())
    for samples in (dataset.train, dataset.test):
        for array in (samples.x, samples.y, *(() if samples.site is None else (samples.site,))):
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
