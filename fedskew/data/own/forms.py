"""Load a user's data by path. The path and its content determine the format."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from fedskew.data.dataset import Dataset, check_options
from fedskew.data.images import BitDepths, parse_bits, parse_size, same_channels
from fedskew.data.own.arrays import load_npz
from fedskew.data.own.assembly import Part, assemble
from fedskew.data.own.labels import Labels, StoredClasses, known_classes
from fedskew.data.own.mapped import is_mapped, load_mapped
from fedskew.data.own.table_columns import Table
from fedskew.data.own.table_files import (
    CSV_SUFFIXES,
    TEST_NAMES,
    csv_table,
    is_saved_dataset,
    parquet_table,
    saved_tables,
)
from fedskew.data.own.tables import load_tables
from fedskew.data.published.image_folders import class_folders, labelled_images, read_images
from fedskew.errors import UserError

_FORMS = (
    "a .npz, .csv, .tsv (also .gz, .xz) or .parquet file, a folder with one folder of images per class, a folder with "
    "train.csv and test.csv (or .parquet), a folder with x_train.npy, y_train.npy, x_test.npy and y_test.npy, "
    "or a Hugging Face dataset saved to disk"
)
_CSV_OPTIONS = ("delimiter", "decimal")
_TABLE_SUFFIXES = (*CSV_SUFFIXES, ".parquet")


def load_own(path: Path, options: dict[str, Any]) -> Dataset:
    """Load the data at `path`, which must exist. The option `test` is the path of test data (tables, images)."""
    if path.suffix.lower() == ".npz":
        return load_npz(path, **check_options(load_npz, options, str(path)))
    if is_mapped(path):
        return load_mapped(path, **check_options(load_mapped, options, str(path)))
    if is_table(path):
        check_options(load_tables, options, str(path), (*_CSV_OPTIONS, "test"))
        csv_options = {key: options[key] for key in _CSV_OPTIONS if options.get(key) is not None}
        rest = {key: value for key, value in options.items() if key not in (*_CSV_OPTIONS, "test")}
        return load_tables(path.resolve().name, _tables(path, options.get("test"), csv_options), **rest)
    if path.is_dir():
        return load_image_folder(path, **check_options(load_image_folder, options, str(path)))
    raise UserError(f"{path}: unknown data format; expected {_FORMS}")


def load_image_folder(
    folder: Path,
    *,
    test: object = None,
    test_fraction: float | None = None,
    image_size: object = None,
    image_bits: object = None,
    classes: object = None,
) -> Dataset:
    """Load one folder of images per class. The names of these folders are the classes.

    The class folders are in `folder`, or in its sub-folders train and test. The test folder may also be called val,
    valid or validation, or `test` gives its path. `classes` lists all classes if some have no folder.
    """
    size, depths = parse_size(image_size), BitDepths(parse_bits(image_bits))
    folders = [folder]
    if (folder / "train").is_dir():
        test_folder = next((folder / name for name in TEST_NAMES if (folder / name).is_dir()), None)
        folders = [folder / "train", *([test_folder] if test_folder else [])]
    if test is not None:
        folders = [*folders, _test_path(folder, test, len(folders))]
        if not folders[-1].is_dir():
            raise UserError(f"test is {str(test)!r}; expected a folder like {folder}")
    found_names = tuple(sorted({name for part_folder in folders for name in class_folders(part_folder)}))
    # A single class folder does not show which other classes exist. Then the classes of other sites are used, if known.
    names = tuple(known_classes(classes, found_names if len(found_names) > 1 else None) or found_names)
    if not found_names:
        raise UserError(f"{folders[0]}: no sub-folders, so there are no classes; expected {_FORMS}")
    if unlisted := [name for name in found_names if name not in names]:
        raise UserError(f"{folder}: folder {unlisted[0]!r} is not one of the classes; expected {', '.join(names)}")
    images = [labelled_images(part_folder, names) for part_folder in folders]
    samples = [
        read_images(found, str(part_folder), size, depths=depths)
        for found, part_folder in zip(images, folders, strict=True)
    ]
    pixels = same_channels([part.x.astype(np.uint8, copy=False) for part in samples])
    parts = [
        Part(x, Labels(part.y, str(part_folder), [str(path) for path, _ in found].__getitem__), str(part_folder))
        for x, part, part_folder, found in zip(pixels, samples, folders, images, strict=True)
    ]
    name = folder.resolve().name
    dataset = assemble(name, "image", parts, StoredClasses(names), test_fraction)
    return replace(dataset, notes=(*dataset.notes, *depths.notes(name)))


def is_table(path: Path) -> bool:
    """Return whether this is a table file, a folder with train.csv or similar, or a saved Hugging Face dataset."""
    return bool(_table_files(path)) or (path.is_dir() and is_saved_dataset(path))


def _table_files(path: Path, test_names: Sequence[str] = TEST_NAMES) -> list[Path]:
    """Return the table file itself, or the training table of a folder and its test table. Empty if there is none."""
    if not path.is_dir():
        return [path] if _has_suffix(path, _TABLE_SUFFIXES) else []
    for suffix in _TABLE_SUFFIXES:
        train = path / f"train{suffix}"
        if train.is_file():
            tests = (path / f"{name}{ending}" for name in test_names for ending in (suffix, *_TABLE_SUFFIXES))
            return [train, *[test for test in tests if test.is_file()][:1]]
    return []


def _has_suffix(path: Path, suffixes: tuple[str, ...]) -> bool:
    """Return whether the file's name ends in one of these. Capitals are accepted: some programs write DATA.CSV."""
    return path.name.lower().endswith(suffixes)


def _tables(path: Path, test: object, csv_options: dict[str, Any]) -> list[Table]:
    """Read the training table and, if there is one, the test table."""
    if csv_options and not any(_has_suffix(file, CSV_SUFFIXES) for file in _table_files(path)):
        option, value = next(iter(csv_options.items()))
        raise UserError(f"{option} is {value!r}, but {path} is not a CSV file; leave out {option}")
    if test is None:
        return _read_tables(path, csv_options)
    tables = _read_tables(path, csv_options, ["test"])  # the option `test` replaces val.csv in a folder, not test.csv
    test_path = _test_path(path, test, len(tables))
    if not is_table(test_path):
        raise UserError(f"test is {str(test)!r}; expected a table like {path}")
    test_tables = _read_tables(test_path, csv_options)
    if len(test_tables) > 1:
        raise UserError(f"test is {str(test)!r}, which has two parts; expected one table")
    return [*tables, *test_tables]


def _read_tables(path: Path, csv_options: dict[str, Any], test_names: Sequence[str] = TEST_NAMES) -> list[Table]:
    files = [] if path.is_dir() and is_saved_dataset(path) else _table_files(path, test_names)
    if not files:
        return saved_tables(path)
    return [
        csv_table(file, **csv_options) if _has_suffix(file, CSV_SUFFIXES) else parquet_table(file) for file in files
    ]


def _test_path(path: Path, test: object, parts: int) -> Path:
    """Return the option `test` as a path. `parts` is the number of parts in the data at `path`."""
    if not isinstance(test, str | PathLike):
        raise UserError(f"test is of type {type(test).__name__}; expected a path, like {path}")
    if parts > 1:
        raise UserError(f"{path} has a test part; leave out test")
    found = Path(os.path.expanduser(test))
    if not found.exists():
        raise UserError(f"test is {str(test)!r}, which does not exist; expected a path like {path}")
    if found.samefile(path):
        raise UserError(f"test is {str(test)!r}, which is the training data; leave out test to hold out a part of it")
    return found
