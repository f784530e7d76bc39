"""Folders of `.npy` arrays, which stay on disk."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import fedskew as fs
from fedskew.data import dataset as dataset_module
from fedskew.engine.data.device import DeviceSamples
from fedskew.errors import UserError

SHORT = {"rounds": 2, "clients_per_round": 2, "local_epochs": 1, "device": "cpu"}


def write(folder: Path, shape: tuple[int, ...] = (6,), dtype: str = "float32") -> None:
    rng = np.random.default_rng(0)
    folder.mkdir(exist_ok=True)
    for part, rows in (("train", 60), ("test", 20)):
        values = 40 * rng.standard_normal((rows, *shape)) + 100
        np.save(folder / f"x_{part}.npy", values.astype(dtype))
        np.save(folder / f"y_{part}.npy", (np.arange(rows) % 3).astype(np.uint8))


@pytest.mark.parametrize(("shape", "dtype", "kind"), [((6,), "float32", "table"), ((1, 8, 8), "uint8", "image")])
def test_a_run_has_the_same_bits_as_in_memory(tmp_path: Path, shape: tuple[int, ...], dtype: str, kind: str) -> None:
    write(tmp_path / "data", shape, dtype)
    mapped = fs.load(tmp_path / "data", classes=["a", "b", "c"])
    assert (mapped.kind, mapped.classes, mapped.input_shape) == (kind, ("a", "b", "c"), shape)
    assert isinstance(mapped.train.x, np.memmap)
    held = DeviceSamples(mapped, mapped.train, torch.device("cpu"))
    assert held.x.data_ptr() == mapped.train.x.ctypes.data  # no copy

    samples = [fs.Samples(np.array(part.x), part.y) for part in (mapped.train, mapped.test)]
    copied = fs.Dataset("data", mapped.kind, mapped.classes, *samples, mapped.mean, mapped.std)
    results = [fs.run(fs.federation(data, fs.IID(4), seed=0), "fedavg", "dnn", **SHORT) for data in (mapped, copied)]
    weights = [[p.detach().numpy() for p in result.model.parameters()] for result in results]
    assert all((a == b).all() for a, b in zip(*weights, strict=True))


def test_images_are_normalised_as_those_of_an_npz_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, (2, 8, 8), "uint8")
    arrays = {path.stem: np.load(path) for path in tmp_path.glob("*.npy")}
    np.savez(tmp_path / "same.npz", **arrays)
    in_memory = fs.load(tmp_path / "same.npz", layout="nchw")
    monkeypatch.setattr(dataset_module, "BLOCK_VALUES", 1000)  # several blocks
    mapped = fs.load(tmp_path)
    assert (mapped.mean, mapped.std) == (in_memory.mean, in_memory.std)


def test_the_row_of_a_bad_value_is_named_in_every_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path)
    x = np.load(tmp_path / "x_train.npy")
    x[47, 2] = np.nan
    np.save(tmp_path / "x_train.npy", x)
    monkeypatch.setattr(dataset_module, "BLOCK_VALUES", 60)
    with pytest.raises(UserError, match="NaN or infinite value in row 47"):
        fs.load(tmp_path)


def test_a_wrong_array_is_one_line(tmp_path: Path) -> None:
    write(tmp_path, dtype="float64")
    with pytest.raises(UserError, match=r"float64 of shape .60, 6.; expected float32 tables .* or uint8 images"):
        fs.load(tmp_path)
    write(tmp_path)
    for labels in (["a", "b", "c"] * 20, [True, False] * 30):
        np.save(tmp_path / "y_train.npy", np.array(labels))
        with pytest.raises(UserError, match="labels are names or booleans; expected the numbers of the classes"):
            fs.load(tmp_path)
    (tmp_path / "y_train.npy").write_bytes(b"nothing")
    with pytest.raises(UserError, match=r"cannot be read .* expected what numpy.save writes"):
        fs.load(tmp_path)
    (tmp_path / "y_train.npy").unlink()
    with pytest.raises(UserError, match=r"y_train.npy does not exist; expected x_train.npy, x_test.npy"):
        fs.load(tmp_path)


def test_the_columns_of_a_label_matrix_are_numbered_or_named(tmp_path: Path) -> None:
    write(tmp_path)
    for part, rows in (("train", 60), ("test", 20)):
        np.save(tmp_path / f"y_{part}.npy", np.random.default_rng(rows).integers(0, 2, (rows, 4)).astype(np.uint8))
    assert fs.load(tmp_path).classes == ("0", "1", "2", "3")
    assert fs.load(tmp_path, classes="a,b,c,d").classes == ("a", "b", "c", "d")
    with pytest.raises(
        UserError, match=r"y_train.npy: 4 columns of labels, but classes lists a, b; expected a differen"
    ):
        fs.load(tmp_path, classes="a,b")


def test_a_label_matrix_with_one_label_per_row_or_other_columns_is_refused(tmp_path: Path) -> None:
    write(tmp_path)
    for part, rows in (("train", 60), ("test", 20)):
        np.save(tmp_path / f"y_{part}.npy", np.eye(4, dtype=np.uint8)[np.arange(rows) % 4])
    with pytest.raises(UserError, match="every row has exactly one 1, so each sample has one class"):
        fs.load(tmp_path)
    np.save(tmp_path / "y_test.npy", np.ones((20, 3), np.uint8))
    with pytest.raises(UserError, match="columns of labels; expected the same number"):
        fs.load(tmp_path)
    np.save(tmp_path / "y_test.npy", np.ones(20, np.uint8))
    with pytest.raises(UserError, match="one class per sample in one part and several labels in the other"):
        fs.load(tmp_path, classes="a,b,c,d")


def test_an_archive_with_the_name_of_an_array_is_refused(tmp_path: Path) -> None:
    write(tmp_path)
    with (tmp_path / "y_test.npy").open("wb") as file:
        np.savez(file, y=np.arange(20) % 3)
    with pytest.raises(UserError, match=r"y_test.npy: cannot be read \(it is an archive of arrays\)"):
        fs.load(tmp_path)
