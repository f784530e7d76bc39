"""A Hugging Face dataset saved to disk."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from own_data import Y, colour, encoded

from fedskew.data import load
from fedskew.errors import UserError


def save_split(folder: Path, table: pa.Table, features: dict[str, Any], files: int = 2) -> None:
    """What `Dataset.save_to_disk` writes."""
    folder.mkdir(parents=True)
    names = [f"data-{i:05d}-of-{files:05d}.arrow" for i in range(files)]
    size = -(-len(table) // files)
    for i, name in enumerate(names):
        with pa.OSFile(str(folder / name), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table.slice(i * size, size), max_chunksize=3)
    state = {"_data_files": [{"filename": name} for name in names], "_split": folder.name, "_format_type": None}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text(json.dumps({"features": features, "citation": ""}))


IMAGE_FEATURES = {"img": {"_type": "Image"}, "fine": {"names": ["cat", "dog", "newt"], "_type": "ClassLabel"}}


def image_table(n: int) -> pa.Table:
    struct = pa.struct({"bytes": pa.binary(), "path": pa.string()})
    images = pa.array([{"bytes": encoded(i), "path": None} for i in range(n)], struct)
    return pa.table({"img": images, "id": [f"no {i}" for i in range(n)], "fine": [i % 2 for i in range(n)]})


def test_a_saved_dataset_of_images(tmp_path: Path) -> None:
    save_split(tmp_path / "hf" / "train", image_table(10), IMAGE_FEATURES)
    save_split(tmp_path / "hf" / "test", image_table(4), IMAGE_FEATURES, files=1)
    (tmp_path / "hf" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    data = load(tmp_path / "hf")
    assert data.classes == ("cat", "dog", "newt")
    assert (len(data.train), len(data.test), data.input_shape) == (10, 4, (3, 6, 5))
    assert data.train.x[:, 0, 0, 0].tolist() == list(range(10))
    assert data.train.y.tolist() == [0, 1] * 5


def test_one_saved_split_has_a_test_set_cut_from_it(tmp_path: Path) -> None:
    save_split(tmp_path / "train", image_table(10), IMAGE_FEATURES)
    assert (len(load(tmp_path / "train").train), len(load(tmp_path / "train").test)) == (8, 2)
    assert load(tmp_path / "train", image_size=4).input_shape == (3, 4, 4)


def test_a_saved_dataset_of_arrays_and_one_of_text(tmp_path: Path) -> None:
    x = colour(10)
    table = pa.table({"pixels": pa.array(x.tolist(), pa.list_(pa.list_(pa.list_(pa.uint8())))), "label": Y[:10]})
    save_split(tmp_path / "arrays", table, {})
    data = load(tmp_path / "arrays", test_fraction=0.4)
    np.testing.assert_array_equal(np.sort(np.concatenate([data.train.x, data.test.x]), axis=0), np.sort(x, axis=0))
    save_split(tmp_path / "both" / "train", table, {})
    save_split(tmp_path / "both" / "validation", table, {})
    (tmp_path / "both" / "dataset_dict.json").write_text('{"splits": ["train", "validation"]}')
    both = load(tmp_path / "both")
    np.testing.assert_array_equal(both.test.x, x)
    assert both.train.x.flags.writeable  # Arrow's memory is not, of which torch warns
    save_split(tmp_path / "text", pa.table({"text": ["a b"] * 10, "label": Y[:10] % 2}), {})
    assert load(tmp_path / "text", length=3).train.x.tolist() == [[2, 3, 0]] * 8


def test_intervals_are_left_out_on_request(tmp_path: Path) -> None:
    """pyarrow cannot write a month_day_nano_interval as text."""
    waits = pa.array([(1, 2, 3)] * 8, pa.month_day_nano_interval())
    save_split(tmp_path / "train", pa.table({"wait": waits, "age": range(8), "ill": [0, 1] * 4}), {})
    with pytest.raises(UserError, match=r"column 'wait' holds month_day_nano_interval values; .* drop=wait"):
        load(tmp_path / "train", label="ill")
    assert load(tmp_path / "train", label="ill", drop="wait").input_shape == (1,)


def test_a_broken_saved_dataset_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "train"
    save_split(folder, image_table(10).set_column(2, "fine", pa.array([0, 1, 5] * 3 + [0])), IMAGE_FEATURES)
    with pytest.raises(UserError, match=r"label '5' in row 2; expected 0 to 2"):
        load(folder)
    second = folder / "data-00001-of-00002.arrow"
    other = pa.table({"img": [1], "id": ["no 5"], "fine": [0]})
    with pa.OSFile(str(second), "wb") as sink, pa.ipc.new_stream(sink, other.schema) as writer:
        writer.write_table(other)
    with pytest.raises(UserError, match=r"data-00001-of-00002.arrow' do not have the same columns and types"):
        load(folder)
    second.write_bytes(b"rubbish")
    with pytest.raises(UserError, match=r"data-00001-of-00002.arrow: cannot be read"):
        load(folder)
    (folder / "state.json").write_text('{"_data_files": [{}]}')
    with pytest.raises(UserError, match=r"state.json: lists no data files"):
        load(folder)
    (folder / "state.json").write_text("{")
    with pytest.raises(UserError, match=r"state.json: cannot be read"):
        load(folder)
