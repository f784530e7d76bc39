"""Load a user's data by path, after detecting its format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from fedskew.data.dataset import Dataset, check_options
from fedskew.data.images import parse_size, same_channels
from fedskew.data.own.arrays import load_npz
from fedskew.data.own.assembly import Part, assemble
from fedskew.data.own.labels import Labels, class_list
from fedskew.data.own.table_files import CSV_SUFFIXES, csv_table, is_saved_dataset, parquet_table, saved_tables
from fedskew.data.own.tables import Table, load_tables
from fedskew.data.published.image_folders import class_folders, labelled_images, read_images
from fedskew.errors import UserError

_FORMS = (
    "a .npz, .csv (also .gz, .xz) or .parquet file, a folder with one folder of images per class, a folder with "
    "train.csv and test.csv (or .parquet), or a Hugging Face dataset saved to disk"
)
_TEST_FOLDERS = ("test", "val", "valid", "validation")


def load_own(path: Path, options: dict[str, Any]) -> Dataset:
    """Load the data at `path`, which exists."""
    if path.suffix == ".npz":
        return load_npz(path, **check_options(load_npz, options, str(path)))
    tables = _tables(path)
    if tables:
        return load_tables(path.resolve().name, tables, **check_options(load_tables, options, str(path)))
    if path.is_dir():
        return load_image_folder(path, **check_options(load_image_folder, options, str(path)))
    raise UserError(f"{path}: unknown data format; expected {_FORMS}")


def load_image_folder(
    folder: Path, *, test_fraction: float | None = None, image_size: object = None, classes: object = None
) -> Dataset:
    """Load one folder of images per class, directly or under train/ and test/. The folder names are the classes."""
    size = parse_size(image_size)
    folders = [folder]
    if (folder / "train").is_dir():
        test = next((folder / name for name in _TEST_FOLDERS if (folder / name).is_dir()), None)
        folders = [folder / "train", *([test] if test else [])]
    found_names = tuple(sorted({name for part_folder in folders for name in class_folders(part_folder)}))
    names = class_list(classes) or found_names
    if not found_names:
        raise UserError(f"{folder}: no sub-folders, so there are no classes; expected {_FORMS}")
    if unlisted := [name for name in found_names if name not in names]:
        raise UserError(f"{folder}: folder {unlisted[0]!r} is not a listed class; expected {', '.join(names)}")
    images = [labelled_images(part_folder, names) for part_folder in folders]
    samples = [read_images(found, str(part_folder), size) for found, part_folder in zip(images, folders, strict=True)]
    pixels = same_channels([part.x.astype(np.uint8, copy=False) for part in samples])
    parts = [
        Part(x, Labels(part.y, str(part_folder), [str(path) for path, _ in found].__getitem__), str(part_folder))
        for x, part, part_folder, found in zip(pixels, samples, folders, images, strict=True)
    ]
    return assemble(folder.resolve().name, "image", parts, names, test_fraction)


def _tables(path: Path) -> list[Table]:
    if path.is_dir():
        if is_saved_dataset(path):
            return saved_tables(path)
        for suffix in (*CSV_SUFFIXES, ".parquet"):
            train, test = path / f"train{suffix}", path / f"test{suffix}"
            if train.is_file():
                return [_table(train), *([_table(test)] if test.is_file() else [])]
        return []
    return [_table(path)] if path.name.endswith((*CSV_SUFFIXES, ".parquet")) else []


def _table(path: Path) -> Table:
    return parquet_table(path) if path.suffix == ".parquet" else csv_table(path)
