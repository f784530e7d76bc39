"""MedMNIST from files of its form."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedskew as fs
from fedskew.data.published.medmnist import MEDMNIST, MedicalImages

RANDOM = np.random.default_rng(0)


def write(folder: Path, images: MedicalImages, **changes: Any) -> dict[str, np.ndarray]:
    """A file as MedMNIST publishes it, with few samples."""
    folder.mkdir(parents=True, exist_ok=True)
    arrays = {}
    for part, samples in (("train", 60), ("val", 9), ("test", 20)):
        shape = (samples, 28, 28, 3) if images.channels == 3 else (samples, 28, 28)
        arrays[f"{part}_images"] = RANDOM.integers(0, 256, shape, np.uint8)
        labels = np.arange(samples, dtype=np.uint8)[:, None] % len(images.classes)
        several = RANDOM.integers(0, 2, (samples, len(images.classes)), np.uint8)
        arrays[f"{part}_labels"] = several if images.several_labels else labels
    arrays |= changes
    np.savez(folder / f"{images.name}.npz", **{name: array for name, array in arrays.items() if array is not None})
    return arrays


@pytest.mark.parametrize("images", MEDMNIST, ids=lambda images: images.name)
def test_each_of_the_twelve_is_read_from_its_file(images: MedicalImages, cache: Path, tmp_path: Path) -> None:
    arrays = write(tmp_path / "medmnist", images)
    data = fs.load(images.name, tmp_path)
    assert (data.name, data.kind, data.classes) == (images.name, "image", images.classes)
    assert (len(data.train), len(data.test), data.input_shape) == (60, 20, (images.channels, 28, 28))
    pixels = arrays["train_images"] if images.channels == 1 else arrays["train_images"][..., 2]
    np.testing.assert_array_equal(data.train.x[:, -1], pixels)
    labels = arrays["test_labels"] if images.several_labels else arrays["test_labels"][:, 0]
    np.testing.assert_array_equal(data.test.y, labels)
    assert fs.federation(data, fs.IID(clients=3)).clients == 3


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"train_images": None}, "train_images cannot be read"),
        ({"train_images": np.zeros((60, 32, 32), np.uint8)}, "train_images has shape (60, 32, 32) and type uint8"),
        ({"train_images": np.zeros((60, 28, 28))}, "type float64; expected (n, 28, 28), uint8"),
        (
            {"train_labels": np.zeros((59, 1), np.uint8)},
            "train_labels has shape (59, 1) and type uint8; expected (60, 1)",
        ),
        ({"train_labels": np.zeros((60, 1))}, "type float64; expected (60, 1), whole numbers"),
        ({"test_labels": np.full((20, 1), 2, np.uint8)}, "pneumoniamnist test: label 2 in row 0; expected 0 to 1"),
    ],
)
def test_another_file_is_refused_in_one_line(changes: dict[str, Any], line: str, cache: Path, tmp_path: Path) -> None:
    write(tmp_path, next(images for images in MEDMNIST if images.name == "pneumoniamnist"), **changes)
    with pytest.raises(fs.UserError) as caught:
        fs.load("pneumoniamnist", tmp_path)
    assert line in str(caught.value)


def _write_no_archive(path: Path) -> None:
    path.write_bytes(b"no archive")


def _write_one_array(path: Path) -> None:
    with path.open("wb") as file:
        np.save(file, np.zeros(3))


def _write_damaged(path: Path) -> None:
    np.savez_compressed(path, train_images=RANDOM.integers(0, 256, (60, 28, 28), np.uint8))
    content = path.read_bytes()
    path.write_bytes(content[:100] + b"\xff" * 3000 + content[3100:])


@pytest.mark.parametrize("write_file", [_write_no_archive, _write_one_array, _write_damaged])
def test_what_is_no_archive_is_refused_in_one_line(
    write_file: Callable[[Path], None], cache: Path, tmp_path: Path
) -> None:
    write_file(tmp_path / "pneumoniamnist.npz")
    with pytest.raises(fs.UserError, match="expected a MedMNIST file"):
        fs.load("pneumoniamnist", tmp_path)
