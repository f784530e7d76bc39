"""Datasets whose samples come from known sites: the writers of FEMNIST (LEAF), the centres of Fed-ISIC2019 (FLamby).

Their publishers offer scripts rather than files, so nothing is downloaded. `--partition column` splits them by site.
"""

from __future__ import annotations

import json
import string
from pathlib import Path
from typing import Any

import numpy as np

from fedskew.data.csv_files import read_csv
from fedskew.data.dataset import Dataset, Samples
from fedskew.data.images import channel_statistics, decode_all, parse_size
from fedskew.errors import UserError

FEMNIST_LAYOUT = (("train/all_data*.json",), ("test/all_data*.json",))
FEMNIST_HELP = "run LEAF's data/femnist/preprocess.sh -t sample, and put its folders train and test there"
ISIC_LAYOUT = (("train_test_split",), ("ISIC_2019_Training_Input_preprocessed",))
ISIC_HELP = "run FLamby's scripts for fed_isic2019, and put the preprocessed images and FLamby's train_test_split there"

_FEMNIST_CLASSES = tuple(string.digits + string.ascii_uppercase + string.ascii_lowercase)
_SIDE = 28
_ISIC_CLASSES = ("MEL", "NV", "BCC", "AK", "BKL", "DF", "VASC", "SCC")
"""The classes, in the order of their numbers in the column `target` of train_test_split."""
_ISIC_SITES = ("BCN", "HAM_vidir_molemax", "HAM_vidir_modern", "HAM_rosendahl", "MSK", "HAM_vienna_dias")
"""The centres, in the order of their numbers in the column `center` (from FLamby's README)."""
_ISIC_COLUMNS = ("image", "target", "center", "fold")


def load_femnist(files: list[Path]) -> Dataset:
    """Load LEAF's JSON files: handwritten digits and letters, with the writer of each."""
    parts = [_read_leaf(sorted(file.parent.glob("all_data*.json"))) for file in files]
    writers = tuple(sorted({writer for _, _, names in parts for writer in names}))
    number = {writer: index for index, writer in enumerate(writers)}
    train, test = (
        Samples(x, y, site=np.array([number[writer] for writer in names], np.int64)) for x, y, names in parts
    )
    statistics = channel_statistics(train.x)
    return Dataset("femnist", "image", _FEMNIST_CLASSES, train, test, *statistics, sites=writers, site_column="writer")


def _read_leaf(paths: list[Path]) -> tuple[Any, Any, list[str]]:
    """Return the images, the labels and the writers of the samples in these files."""
    images, labels, writers = [], [], []
    for path in paths:
        for writer, samples in _read_user_data(path).items():
            try:
                x = np.rint(np.array(samples["x"], np.float32) * 255)
                if not ((x >= 0) & (x <= 255)).all():  # NaN fails both comparisons
                    raise ValueError("x has a value outside 0 to 1")
                y = np.array(samples["y"], np.int64)
                images.append(x.astype(np.uint8).reshape(len(y), 1, _SIDE, _SIDE))
            except (KeyError, TypeError, ValueError) as error:
                raise UserError(f"{path}: the samples of {writer!r} cannot be read ({error}); {_LEAF_FORM}") from error
            labels.append(y)
            writers += [writer] * len(y)
    if not writers:
        raise UserError(f"{paths[0].parent}: no samples; {_LEAF_FORM}")
    return np.concatenate(images), np.concatenate(labels), writers


_LEAF_FORM = "expected LEAF's form: user_data with x (784 numbers from 0 to 1) and y (0 to 61) per user"


def _read_user_data(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))["user_data"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: cannot be read ({error}); {_LEAF_FORM}") from error
    if not isinstance(found, dict):
        raise UserError(f"{path}: user_data is not a mapping; {_LEAF_FORM}")
    return found


def load_fed_isic(files: list[Path], *, image_size: object = 64) -> Dataset:
    """Load FLamby's images of skin lesions, with the centre of each. Images are resized to `image_size`."""
    table, folder = files
    rows = _isic_rows(table)
    train, test = (_isic_samples([row for row in rows if row["fold"] == part], folder, table, image_size)
                   for part in ("train", "test"))  # fmt: skip
    statistics = channel_statistics(train.x)
    return Dataset(
        "fed-isic2019", "image", _ISIC_CLASSES, train, test, *statistics, sites=_ISIC_SITES, site_column="center"
    )


def _isic_rows(table: Path) -> list[dict[str, str]]:
    lines = read_csv(table)
    header = lines[0][1] if lines else []
    if missing := [name for name in _ISIC_COLUMNS if name not in header]:
        raise UserError(f"{table}: no column {missing[0]!r}; expected {', '.join(_ISIC_COLUMNS)}, as in FLamby")
    rows = [dict(zip(header, cells, strict=False)) for _, cells in lines[1:]]
    for row, (line, _) in zip(rows, lines[1:], strict=True):
        for name, count in (("target", len(_ISIC_CLASSES)), ("center", len(_ISIC_SITES))):
            if row.get(name) not in tuple(map(str, range(count))):
                raise UserError(f"{table}: {name} is {row.get(name)!r} in line {line}; expected 0 to {count - 1}")
    return rows


def _isic_samples(rows: list[dict[str, str]], folder: Path, table: Path, image_size: object) -> Samples:
    if not rows:
        raise UserError(f"{table}: the column fold lacks train or test; expected both")
    paths = [folder / f"{row['image']}.jpg" for row in rows]
    x = decode_all(paths, lambda index: str(paths[index]), parse_size(image_size), colour=True)
    y, site = (np.array([int(row[name]) for row in rows], np.int64) for name in ("target", "center"))
    return Samples(x, y, site=site)
