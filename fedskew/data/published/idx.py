"""MNIST and Fashion-MNIST: the publishers' idx files, plain or gzipped."""

from __future__ import annotations

import gzip
import math
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fedskew.data.dataset import Dataset, Samples, check_fraction, stratified_holdout
from fedskew.errors import UserError, plural

PARTS = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
LAYOUT = tuple((part, f"{part}.gz") for part in PARTS)


@dataclass(frozen=True)
class IdxDataset:
    """A dataset in idx format. `first_test_labels` tells MNIST from Fashion-MNIST, which has the same file names."""

    name: str
    classes: tuple[str, ...]
    mean: tuple[float]
    std: tuple[float]
    first_test_labels: tuple[int, ...]


MNIST = IdxDataset("mnist", tuple("0123456789"), (0.1307,), (0.3081,), (7, 2, 1, 0, 4, 1, 4, 9, 5, 9))
FASHION = IdxDataset(
    "fashion-mnist",
    (
        "T-shirt/top",
        "Trouser",
        "Pullover",
        "Dress",
        "Coat",
        "Sandal",
        "Shirt",
        "Sneaker",
        "Bag",
        "Ankle boot",
    ),
    (0.5,),
    (0.5,),
    (9, 2, 1, 1, 6, 1, 4, 6, 5, 7),
)


def load_idx(dataset: IdxDataset, files: list[Path], *, test_fraction: float | None = None) -> Dataset:
    """Load a dataset from its four files.

    `test_fraction` merges both parts and holds out a new stratified test set, as FedVLS did for MNIST with 0.25.
    """
    train = _samples(files[0], files[1])
    test = _samples(files[2], files[3])
    _check_identity(dataset, test, files[3])
    if test_fraction is not None:
        train, test = _split_again(train, test, test_fraction, dataset.name)
    return Dataset(dataset.name, "image", dataset.classes, train, test, dataset.mean, dataset.std)


def read_idx(path: Path) -> npt.NDArray[np.uint8]:
    """Read an idx file of unsigned bytes.

    Its header is two zero bytes, the type (8 for unsigned bytes), the number of dimensions, and four bytes for the size
    of each dimension.
    """
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{path}: cannot be read ({error}); expected an idx file") from error
    if len(data) < 4 or data[:3] != b"\x00\x00\x08" or len(data) < 4 + 4 * data[3]:
        raise UserError(f"{path}: not an idx file of unsigned bytes; expected the publisher's file")
    dimensions = data[3]
    shape = tuple(np.frombuffer(data, ">u4", dimensions, 4).tolist())
    body = np.frombuffer(data, np.uint8, offset=4 + 4 * dimensions)
    if len(body) != math.prod(shape):
        raise UserError(f"{path}: {len(body)} bytes of data; expected {math.prod(shape)} for its shape {shape}")
    return body.reshape(shape).copy()  # the buffer is read-only, which torch warns about


def _samples(images: Path, labels: Path) -> Samples:
    x, y = read_idx(images), read_idx(labels).astype(np.int64)
    if x.ndim != 3 or y.ndim != 1:
        found = plural(x.ndim, "dimension")
        raise UserError(f"{images}: {found}, {labels}: {y.ndim}; expected 3 for images and 1 for labels")
    if len(x) != len(y):
        raise UserError(
            f"{images} has {plural(len(x), 'image')} but {labels} has {plural(len(y), 'label')}; expected equal numbers"
        )
    return Samples(x[:, None], y)


def _check_identity(dataset: IdxDataset, test: Samples, path: Path) -> None:
    first = tuple(test.y[:10].tolist())
    for other in (MNIST, FASHION):
        if other is not dataset and first == other.first_test_labels:
            raise UserError(f"{path}: this is {other.name}; expected {dataset.name}; keep them in separate folders")


def _split_again(train: Samples, test: Samples, fraction: float, name: str) -> tuple[Samples, Samples]:
    check_fraction(fraction)
    x, y = np.concatenate([train.x, test.x]), np.concatenate([train.y, test.y])
    kept, tested = stratified_holdout(y, fraction, name)
    return Samples(x[kept], y[kept]), Samples(x[tested], y[tested])
