"""CIFAR-10 and CIFAR-100 in the publisher's binary version. The Python version is a pickle, which is unsafe to load."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedskew.data.dataset import Dataset, Samples
from fedskew.errors import UserError, plural

_PIXELS = 3 * 32 * 32


@dataclass(frozen=True)
class Variant:
    """The differences between CIFAR-10 and CIFAR-100."""

    name: str
    classes: int
    label_bytes: int
    """The number of label bytes before each image. The last one is the label. CIFAR-100's first one is a superclass."""
    names_file: str
    mean: tuple[float, ...]
    std: tuple[float, ...]


CIFAR10 = Variant(
    "cifar10",
    10,
    1,
    "batches.meta.txt",
    (0.49139968, 0.48215827, 0.44653124),
    (0.24703233, 0.24348505, 0.26158768),
)
CIFAR100 = Variant("cifar100", 100, 2, "fine_label_names.txt", (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762))

CIFAR10_LAYOUT = (*((f"data_batch_{i}.bin",) for i in range(1, 6)), ("test_batch.bin",))
CIFAR100_LAYOUT = (("train.bin",), ("test.bin",))

_CIFAR10_NAMES = (
    "airplane",
    "automobile",
    "bird",
    "cat",
    "deer",
    "dog",
    "frog",
    "horse",
    "ship",
    "truck",
)


def load_cifar(variant: Variant, files: list[Path]) -> Dataset:
    """Load the training batches, in order, and the test batch, which is the last of `files`."""
    batches = [_read_batch(variant, path) for path in files]
    x = np.concatenate([batch.x for batch in batches[:-1]])
    y = np.concatenate([batch.y for batch in batches[:-1]])
    names = _names(variant, files[-1].parent)
    return Dataset(variant.name, "image", names, Samples(x, y), batches[-1], variant.mean, variant.std)


def _read_batch(variant: Variant, path: Path) -> Samples:
    try:
        data = np.fromfile(path, np.uint8)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror or error})") from error
    record_size = variant.label_bytes + _PIXELS
    if len(data) == 0 or len(data) % record_size:
        raise UserError(
            f"{path}: {len(data)} bytes; expected a positive multiple of {record_size} for {variant.name}'s binary "
            "version"
        )
    rows = data.reshape(-1, record_size)
    y = rows[:, variant.label_bytes - 1].astype(np.int64)
    outside = np.flatnonzero(y >= variant.classes)
    if len(outside):
        row = int(outside[0])
        raise UserError(f"{path}: label {y[row]} in record {row}; expected 0 to {variant.classes - 1}")
    return Samples(np.ascontiguousarray(rows[:, variant.label_bytes :]).reshape(-1, 3, 32, 32), y)


def _names(variant: Variant, folder: Path) -> tuple[str, ...]:
    """Read the class names from the publisher's list. Without that file, use known names or numbers."""
    path = folder / variant.names_file
    if path.is_file():
        names = tuple(path.read_text(encoding="utf-8", errors="replace").split())
        if len(names) != variant.classes:
            raise UserError(f"{path}: {plural(len(names), 'class name')}; expected {variant.classes}")
        return names
    if variant is CIFAR10:
        return _CIFAR10_NAMES
    return tuple(str(label) for label in range(variant.classes))
