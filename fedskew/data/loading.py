"""`load`: load a dataset by name, or a user's own data."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from fedskew.data.catalogue import DATASETS
from fedskew.data.dataset import Dataset, check_options, keep_classes
from fedskew.data.own.forms import load_own
from fedskew.data.own.objects import in_memory_error, load_object
from fedskew.data.published.file_search import ensure_files
from fedskew.data.spelling import composed
from fedskew.errors import UserError, expect, unknown


def load(data: object, data_dir: str | PathLike[str] | None = None, **options: Any) -> Dataset:
    """Load a dataset by name, or your own data by path or as a Python object.

    `hf:owner/name` is a dataset of the Hugging Face hub, with the further options `subset` and `revision`. A Python
    object is one of these:
        a pair (x, y). x is an array, a DataFrame or a dictionary of several inputs
        a pandas or Polars DataFrame, or an Arrow table
        a torch Dataset of pairs (input, label)
        a Hugging Face Dataset or DatasetDict
        a scikit-learn Bunch

    fedskew looks for the files of a named dataset in `data_dir`, in the folder set by FEDSKEW_DATA and in the user's
    cache. Missing files are downloaded into the cache. A few datasets have to be made with their publisher's scripts.

    The option `keep` is a list of classes. Only their samples are kept, and the classes are numbered in the order of
    the list. It does not apply to Python objects.

    Some named datasets have `options`, which `fedskew datasets` lists. These are the options of your own data:
        test=None: test data of the same form; for a table file or a folder of images, the path of the test data
        test_fraction=0.2: the share of each class held out if there is no test part
        classes=None: the names of all classes, in order, if some may have no samples
        name=None: the name of the data, for Python objects
        label=None: the label column of a table, or a list of columns of 0 and 1. The default is Hugging
            Face's ClassLabel column, or the column called label, labels, class, target or y
        columns=None: the input columns of a table, or the names of an array's features. The default is all
        drop=None: columns to leave out, such as a patient ID
        categorical=None: columns of categories that look like numbers, or have more than 100 values
        missing=None: further values that mean a gap, such as -999. A label with such a value is refused, unless
            it is one of `classes`
        site=None: the column that says where a row is from. It is not an input
        encoding=None: a file that says how columns become inputs. The default is fitted on the training part
        rename=None: old and new names of columns
        delimiter=None, decimal=".": the character between the cells of a CSV file, and the decimal mark
        text=None: the text column, if there are several columns
        length, vocabulary: the number of words kept from each text, and the size of the vocabulary
        image_size=None: resize all images to 32 (square) or "32x48" (height × width)
        image_bits=None: how many bits of a pixel a scanner used in 16-bit images, such as 12. The default is 16, but
            if all images are then dark, they are refused
        layout=None: "nchw" or "nhwc", if the shape of an array of images is ambiguous
    """
    if "in_memory" in options:
        raise in_memory_error(options)
    if isinstance(data, Dataset):
        if options:
            raise UserError(f"option {next(iter(options))!r} does not apply to a Dataset that is already loaded")
        return data
    if not isinstance(data, str | PathLike):
        return load_object(data, options)
    given = {"name": str(data), **{key: _plain(value) for key, value in options.items() if value is not None}}
    kept = options.pop("keep", None)
    dataset = _load_named(str(data), data_dir, options)
    return replace(dataset if kept is None else _keep_named(dataset, kept), source=given)


def _plain(value: object) -> object:
    """Convert the value of an option to a type that a configuration can store."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, PathLike) or (isinstance(value, float) and not math.isfinite(value)):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def _load_named(name: str, data_dir: str | PathLike[str] | None, options: dict[str, Any]) -> Dataset:
    entry = DATASETS.get(name.lower())
    if entry is not None:
        check_options(entry.loader, options, entry.name)
        if entry.components:
            return entry.loader(partial(load, data_dir=data_dir), **options)
        if entry.published is None:
            return entry.loader(**options)
        return entry.loader(ensure_files(entry.published, data_dir), **options)
    if name.startswith("hf:"):
        from fedskew.data.own.hub import load_hub

        return load_hub(name, options)
    path = Path(os.path.expanduser(name))  # unlike `Path.expanduser`, it accepts an unknown user
    if _exists(path):
        return load_own(path, options)
    if re.fullmatch(r"[\w.]+:[\w-]+", name):
        raise UserError(
            f"{name!r} is code, but data are a name or a path; pass data that your own code makes to "
            "fedskew.federation, in Python"
        )
    if path.suffix or len(path.parts) > 1:
        raise UserError(f"{name!r} does not exist; expected a file, a folder or one of {', '.join(DATASETS)}")
    raise unknown("dataset or path", name, DATASETS)


def _keep_named(dataset: Dataset, kept: Any) -> Dataset:
    """Keep only the classes of these names."""
    if dataset.task.name != "single-label":
        raise UserError(f"option keep needs one class per sample, but {dataset.name!r} has several; leave out keep")
    names = [composed(str(name)) for name in (kept if isinstance(kept, list | tuple) else str(kept).split(","))]
    for name in names:
        if name not in dataset.classes:
            raise unknown(f"class of {dataset.name}:", name, dataset.classes)
    expect(len(set(names)) == len(names), "keep", kept, "each class once")
    expect(len(names) > 1, "keep", kept, "at least 2 classes")
    return keep_classes(dataset, [dataset.classes.index(name) for name in names])


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # for example, the name is too long
        return False


def is_named(data: object) -> bool:
    """Return whether this is the name of a dataset in the catalogue, not a user's own data."""
    return isinstance(data, str) and data.lower() in DATASETS
