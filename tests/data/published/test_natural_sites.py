"""FEMNIST and Fed-ISIC2019 from files of their form, split by their sites."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import fedskew as fs
from fedskew.cli import main

RANDOM = np.random.default_rng(0)


def write_femnist(folder: Path, **changes: Any) -> dict[str, list[int]]:
    """LEAF's files: two with training samples, one with test samples."""
    users = {"f0001_41": [0, 10, 36], "f0002_02": [61, 5], "f0003_10": [1, 2, 3, 4]}
    parts = [("train", "0", ["f0001_41", "f0003_10"]), ("train", "1", ["f0002_02"]), ("test", "0", list(users))]
    for part, number, names in parts:
        (folder / part).mkdir(parents=True, exist_ok=True)
        samples = {
            name: {"x": [[round(float(v), 3) for v in RANDOM.random(784)] for _ in users[name]], "y": users[name]}
            for name in names
        }
        content = {"users": names, "num_samples": [len(users[name]) for name in names], "user_data": samples}
        path = folder / part / f"all_data_{number}_niid_0_keep_0_{part}_9.json"
        path.write_text(json.dumps(content | changes))
    return users


def test_every_writer_of_femnist_is_a_client(cache: Path, tmp_path: Path) -> None:
    users = write_femnist(tmp_path / "femnist")
    fed = fs.federation("femnist", fs.Column(), data_dir=tmp_path)
    assert fed.client_names == tuple(sorted(users))
    assert fed.sizes.tolist() == [3, 2, 4]
    assert fed.dataset.input_shape == (1, 28, 28)
    assert fed.dataset.classes[10] == "A"
    assert fed.dataset.classes[61] == "z"
    assert sorted(fed.dataset.train.y[fed.indices[1]].tolist()) == [5, 61]
    assert fed.dataset.site_column == "writer"
    written = json.loads(next((tmp_path / "femnist" / "train").glob("all_data_1*")).read_text())
    pixels = np.rint(np.array(written["user_data"]["f0002_02"]["x"]) * 255).reshape(2, 1, 28, 28)
    np.testing.assert_array_equal(fed.dataset.train.x[fed.indices[1]], pixels)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"user_data": 3}, "user_data is not a mapping"),
        ({"user_data": {"f1": {"x": [[1.0]], "y": [1]}}}, "the samples of 'f1' cannot be read"),
        ({"user_data": {"f1": {"x": [[255.0] * 784], "y": [1]}}}, "'f1' cannot be read (x has a value outside 0 to 1)"),
        ({"user_data": {"f1": {"x": [[float("nan")] * 784], "y": [1]}}}, "(x has a value outside 0 to 1)"),
        ({"user_data": {}}, "no samples; expected LEAF's form"),
        ({"user_data": {"f1": {"x": [], "y": []}}}, "no samples; expected LEAF's form"),
    ],
)
def test_other_files_are_refused(changes: dict[str, Any], line: str, cache: Path, tmp_path: Path) -> None:
    write_femnist(tmp_path, **changes)
    with pytest.raises(fs.UserError) as caught:
        fs.load("femnist", tmp_path)
    assert line in str(caught.value)


def write_isic(folder: Path, split: str | None = None) -> None:
    images = folder / "ISIC_2019_Training_Input_preprocessed"
    images.mkdir(parents=True)
    lines = ["image,extra,target,center,fold,fold2"]
    for i in range(24):
        name, center, fold = f"ISIC_{i:07d}", i % 3, "test" if i % 4 == 0 else "train"
        Image.new("RGB", (30 + i, 24), (10 * i, 0, 0)).save(images / f"{name}.jpg")
        lines.append(f"{name},x,{i % 8},{center},{fold},{fold}_{center}")
    (folder / "train_test_split").write_text("\n".join(lines) + "\n" if split is None else split)


def test_every_centre_of_isic_is_a_client(cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_isic(tmp_path / "fed-isic2019")
    fed = fs.federation("fed-isic2019", fs.Column("center"), data_dir=tmp_path)
    assert fed.client_names == ("BCN", "HAM_vidir_molemax", "HAM_vidir_modern")
    assert (len(fed.dataset.train), len(fed.dataset.test), fed.dataset.input_shape) == (18, 6, (3, 64, 64))
    assert fs.load("fed-isic2019", tmp_path, image_size=32).input_shape == (3, 32, 32)
    run = ["run", "--data", "fed-isic2019", "--data-dir", str(tmp_path), "--partition", "column", "--rounds", "1", "-q"]
    assert main([*run, "--set", "data.image_size=8", "--method", "fedavg", "--out", str(tmp_path / "run")]) == 0
    assert fs.load_run(tmp_path / "run").client_labels == fed.client_names


@pytest.mark.parametrize(
    ("split", "line"),
    [
        ("image,target,fold\n", "no column 'center'; expected image, target, center, fold"),
        ("image,target,center,fold\na,9,0,train\n", "target is '9' in line 2; expected 0 to 7"),
        ("image,target,center,fold\na,1,6,train\n", "center is '6' in line 2; expected 0 to 5"),
        ("image,target,center,fold\n", "the column fold lacks train or test"),
    ],
)
def test_another_split_of_isic_is_refused(split: str, line: str, cache: Path, tmp_path: Path) -> None:
    write_isic(tmp_path, split)
    with pytest.raises(fs.UserError) as caught:
        fs.load("fed-isic2019", tmp_path)
    assert line in str(caught.value)


@pytest.mark.parametrize("name", ["femnist", "fed-isic2019"])
def test_without_files_one_line_says_how_to_get_them(name: str, cache: Path) -> None:
    with pytest.raises(fs.UserError, match=f"the files of {name} are not in .*: run "):
        fs.load(name)
