"""A user's own data, in every form that is read, and the line that each mistake gets."""

from __future__ import annotations

import io
import json
import lzma
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from fedskew.data import load
from fedskew.data.holdout import stratified_holdout
from fedskew.errors import UserError

Y = np.arange(20) % 4


def grey(n: int = 20) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (n, 6, 5), dtype=np.uint8)


def colour(n: int = 20) -> np.ndarray:
    return np.random.default_rng(1).integers(0, 256, (n, 3, 6, 5), dtype=np.uint8)


def npz(tmp_path: Path, **arrays: Any) -> Path:
    np.savez(tmp_path / "own.npz", **arrays)
    return tmp_path / "own.npz"


# Held-out test sets


@given(st.lists(st.integers(0, 5), min_size=30, max_size=200), st.floats(0.05, 0.95))
def test_a_holdout_takes_the_nearest_share_of_each_class(labels: list[int], fraction: float) -> None:
    y = np.array(labels)
    wanted = [round(int((y == c).sum()) * fraction) for c in range(6)]
    if sum(wanted) in (0, len(y)):
        with pytest.raises(UserError, match="too few"):
            stratified_holdout(y, fraction, "here")
        return
    train, test = stratified_holdout(y, fraction, "here")
    assert sorted([*train, *test]) == list(range(len(y)))
    assert np.bincount(y[test], minlength=6).tolist() == wanted


def test_a_holdout_is_the_same_on_every_machine() -> None:
    _, test = stratified_holdout(np.zeros(20, dtype=np.int64), 0.2, "here")
    assert test.tolist() == [2, 5, 8, 16]


# .npz


@pytest.mark.parametrize(
    ("x", "shape"),
    [
        (grey(), (1, 6, 5)),
        (colour(), (3, 6, 5)),
        (colour().transpose(0, 2, 3, 1), (3, 6, 5)),
        (colour()[:, :1], (1, 6, 5)),
        (colour().astype(np.int64), (3, 6, 5)),
        (colour().astype(np.float32), (3, 6, 5)),
    ],
)
def test_images_of_any_layout_become_bytes_with_channels_first(
    tmp_path: Path, x: np.ndarray, shape: tuple[int, ...]
) -> None:
    data = load(npz(tmp_path, x_train=x, y_train=Y, x_test=x[:5], y_test=Y[:5]))
    assert data.kind == "image"
    assert data.train.x.dtype == np.uint8
    assert data.input_shape == shape
    source = grey()[:, None] if x.ndim == 3 else colour()[:, : shape[0]]
    np.testing.assert_array_equal(data.train.x, source)
    np.testing.assert_array_equal(data.test.x, source[:5])


def test_the_statistics_of_own_images_are_those_of_the_training_part(tmp_path: Path) -> None:
    data = load(npz(tmp_path, x_train=colour(), y_train=Y, x_test=colour()[:2], y_test=Y[:2]))
    assert data.mean == pytest.approx((colour() / 255).mean(axis=(0, 2, 3)))
    assert data.std == pytest.approx((colour() / 255).std(axis=(0, 2, 3)))


def test_floats_up_to_one_are_scaled_to_bytes(tmp_path: Path) -> None:
    data = load(npz(tmp_path, x_train=colour() / 255, y_train=Y, x_test=colour()[:4] / 510, y_test=Y[:4]))
    np.testing.assert_array_equal(data.train.x, colour())
    np.testing.assert_array_equal(data.test.x, np.rint(colour()[:4] / 2))  # with the training part's scale


def test_axes_that_cannot_be_told_apart_need_a_layout(tmp_path: Path) -> None:
    x = np.zeros((20, 3, 8, 3), np.uint8)
    path = npz(tmp_path, x=x, y=Y)
    with pytest.raises(UserError, match=r"both of axes 1 and 3 .*layout=nchw or layout=nhwc"):
        load(path)
    assert load(path, layout="nhwc").input_shape == (3, 3, 8)
    assert load(path, layout="nchw").input_shape == (3, 8, 3)
    with pytest.raises(UserError, match="unknown layout 'nhcw'; did you mean"):
        load(path, layout="nhcw")


def test_a_test_set_is_cut_where_there_is_none(tmp_path: Path) -> None:
    path = npz(tmp_path, x=grey(), y=Y)
    data = load(str(path))
    assert np.bincount(data.train.y).tolist() == [4] * 4
    assert np.bincount(data.test.y).tolist() == [1] * 4
    assert np.bincount(load(path, test_fraction=0.4).test.y).tolist() == [2] * 4


def test_a_table_is_standardised_by_its_training_part(tmp_path: Path) -> None:
    x = np.random.default_rng(2).normal(5, 3, (20, 4))
    x[:, 2] = 7.0
    data = load(npz(tmp_path, x_train=x, y_train=Y, x_test=2 * x[:4], y_test=Y[:4]))
    assert data.kind == "table"
    assert data.train.x.dtype == np.float32
    np.testing.assert_allclose(data.train.x.mean(axis=0), 0, atol=1e-6)
    np.testing.assert_allclose(data.train.x.std(axis=0), [1, 1, 0, 1], atol=1e-6)
    np.testing.assert_allclose(data.test.x[:, 0], (2 * x[:4, 0] - x[:, 0].mean()) / x[:, 0].std(), rtol=1e-5)
    np.testing.assert_allclose(data.scaling, [(c.mean(), c.std() or 1.0) for c in x.T], rtol=1e-12)


@pytest.mark.parametrize(
    ("y", "classes", "names", "first"),
    [
        (Y, None, ("0", "1", "2", "3"), [0, 1, 2]),
        (Y + 10, None, ("10", "11", "12", "13"), [0, 1, 2]),
        (Y.astype(np.float32), None, ("0", "1", "2", "3"), [0, 1, 2]),
        (Y[:, None], None, ("0", "1", "2", "3"), [0, 1, 2]),
        (Y % 2 == 0, None, ("0", "1"), [1, 0, 1]),
        (np.array(list("dcba"))[Y], None, ("a", "b", "c", "d"), [3, 2, 1]),
        (np.array([b"x", b"y"])[Y % 2], None, ("x", "y"), [0, 1, 0]),
        (Y, list("abcdefg"), tuple("abcdefg"), [0, 1, 2]),  # three vacant classes
        (np.array(list("dcba"))[Y], list("edcba"), tuple("edcba"), [1, 2, 3]),
    ],
)
def test_labels_are_numbers_or_names(
    tmp_path: Path, y: np.ndarray, classes: list[str] | None, names: tuple[str, ...], first: list[int]
) -> None:
    extra = {} if classes is None else {"classes": np.array(classes)}
    data = load(npz(tmp_path, x_train=grey(), y_train=y, x_test=grey(), y_test=y, **extra))
    assert data.classes == names
    assert data.train.y[:3].tolist() == first
    assert data.train.y.dtype == np.int64


def with_value(array: np.ndarray, index: Any, value: float) -> np.ndarray:
    array = array.copy()
    array[index] = value
    return array


TABLE = np.random.default_rng(3).normal(size=(20, 3))


@pytest.mark.parametrize(
    ("arrays", "complaint"),
    [
        ({"x": with_value(TABLE, (7, 1), np.nan), "y": Y}, r"own.npz x: NaN or infinite value in row 7"),
        ({"x": with_value(colour() / 255, (9, 0, 0, 0), np.nan), "y": Y}, r"own.npz x: NaN.* in row 9"),
        ({"x": with_value(colour() / 255, (3, 0, 0, 0), -0.5), "y": Y}, r"negative .* in row 3"),
        ({"x": TABLE, "y": Y[:-1]}, r"20 inputs but 19 labels; expected equal lengths"),
        ({"x": TABLE, "y": with_value(Y, 5, 9), "classes": list("abcd")}, r"label '9' in row 5; expected 0 to 3"),
        ({"x": TABLE, "y": with_value(Y, 5, -1), "classes": list("abcd")}, r"label '-1' in row 5"),
        ({"x": TABLE, "y": np.array(["a", "z"] * 10), "classes": list("ab")}, r"label 'z' in row 1; expected a, b"),
        ({"x": TABLE, "y": Y, "classes": np.array([], dtype="U1")}, r"class list is empty"),
        ({"x": TABLE, "y": Y, "classes": list("abca")}, r"class 'a' is listed twice"),
        ({"x": TABLE, "y": with_value(Y.astype(float), 4, 1.5)}, r"label 1.5 in row 4; expected a whole number"),
        ({"x": TABLE, "y": with_value(Y.astype(float), 4, np.nan)}, r"label nan in row 4"),
        ({"x": TABLE, "y": np.array(["a", " "] * 10)}, r"no label in row 1"),
        ({"x": TABLE, "y": np.eye(20)}, r"labels have shape \(20, 20\); expected one label per sample"),
        ({"x": TABLE, "y": 0 * Y}, r"has 1 classes; expected at least 2"),
        ({"x": TABLE[:, 0], "y": Y}, r"1 dimensions; expected 2"),
        ({"x": np.array(["a"] * 20)[:, None], "y": Y}, r"values of type <U1; expected numbers"),
        ({"x": np.array([object()] * 20), "y": Y}, r"holds Python objects, which are never unpickled"),
        ({"x": TABLE}, r"no array 'y'; expected .*; found x"),
        ({"x_train": TABLE, "y_train": Y}, r"no array 'x_test'"),
        ({"x_train": TABLE, "y_train": Y, "x_test": TABLE[:, :2], "y_test": Y}, r"train inputs have shape \(3,\)"),
        ({"x_train": TABLE, "y_train": Y, "x_test": grey(), "y_test": Y}, r"own.npz x_test: 3 dimensions"),
        (
            {"x_train": TABLE, "y_train": Y, "x_test": TABLE, "y_test": np.array(["a"] * 20)},
            r"numbers in one and strings in the other",
        ),
        ({"x": TABLE[:3], "y": Y[:3]}, r"3 samples are too few"),
    ],
)
def test_bad_arrays_are_named_with_the_first_row(tmp_path: Path, arrays: dict[str, Any], complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        load(npz(tmp_path, **arrays))


def test_a_file_that_is_no_npz_is_refused(tmp_path: Path) -> None:
    (tmp_path / "own.npz").write_bytes(b"hello")
    with pytest.raises(UserError, match=r"own.npz: not a .npz file"):
        load(tmp_path / "own.npz")
    (tmp_path / "own.doc").write_bytes(b"hello")
    with pytest.raises(UserError, match=r"own.doc: unknown form of data; expected a .npz"):
        load(tmp_path / "own.doc")


@pytest.mark.parametrize("fraction", [0, 1, -0.1, "half", True])
def test_a_test_fraction_lies_between_none_and_all(tmp_path: Path, fraction: object) -> None:
    with pytest.raises(UserError, match="test_fraction is"):
        load(npz(tmp_path, x=TABLE, y=Y), test_fraction=fraction)


def test_a_test_fraction_beside_a_test_set_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is a test set already; leave test_fraction out"):
        load(npz(tmp_path, x_train=TABLE, y_train=Y, x_test=TABLE, y_test=Y), test_fraction=0.2)


# Folders of images


def save(path: Path, size: tuple[int, int] = (6, 5), mode: str = "RGB", value: int = 50) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, (size[1], size[0]), value if mode in ("L", "I;16") else (value,) * len(mode)).save(path)


def test_a_folder_of_images_by_class(tmp_path: Path) -> None:
    for name in ("dog", "cat"):
        for i in range(5):
            save(tmp_path / "pets" / name / "deep" / f"{i}.png")
    (tmp_path / "pets" / "newt").mkdir()
    (tmp_path / "pets" / "dog" / "notes.txt").write_text("no image")
    (tmp_path / "pets" / ".hidden").mkdir()
    data = load(tmp_path / "pets")
    assert data.classes == ("cat", "dog", "newt")  # no newts: vacant
    assert data.input_shape == (3, 6, 5)
    assert (len(data.train), len(data.test)) == (8, 2)
    assert sorted(data.test.y.tolist()) == [0, 1]
    assert data.name == "pets"


@pytest.mark.parametrize("test", ["test", "val", "valid"])
def test_train_and_test_folders_are_the_split(tmp_path: Path, test: str) -> None:
    for part, names in (("train", "ab"), (test, "ac")):
        for name in names:
            save(tmp_path / part / name / "1.bmp", mode="L" if part == "train" else "RGB")
    data = load(tmp_path)
    assert data.classes == ("a", "b", "c")
    assert (data.train.y.tolist(), data.test.y.tolist()) == ([0, 1], [0, 2])
    assert data.train.x.shape == (2, 3, 6, 5)  # grey beside colour


def test_grey_images_stay_grey_unless_one_is_coloured(tmp_path: Path) -> None:
    for i in range(5):
        save(tmp_path / "a" / f"{i}.png", mode="L", value=7)
        save(tmp_path / "b" / f"{i}.png", mode="I;16", value=7 * 256)
    data = load(tmp_path)
    assert data.input_shape == (1, 6, 5)
    assert np.unique(data.train.x).tolist() == [7]
    save(tmp_path / "b" / "3.png", mode="RGBA", value=9)
    data = load(tmp_path)
    assert data.input_shape == (3, 6, 5)
    assert np.unique(np.concatenate([data.train.x, data.test.x])).tolist() == [7, 9]


def test_images_of_different_sizes_need_an_image_size(tmp_path: Path) -> None:
    for i in range(5):
        save(tmp_path / "a" / f"{i}.png")
        save(tmp_path / "b" / f"{i}.png", size=(8, 8) if i == 2 else (6, 5))
    with pytest.raises(UserError, match=r"b/2.png: 8x8 pixels, but .*a/0.png has 6x5; .*give image_size"):
        load(tmp_path)
    for size, shape in ((4, (3, 4, 4)), ("4x7", (3, 4, 7)), ([3, 9], (3, 3, 9))):
        assert load(tmp_path, image_size=size).input_shape == shape
    for wrong in ("big", 0, -3, (1, 2, 3), 2.5, True):
        with pytest.raises(UserError, match="image_size is"):
            load(tmp_path, image_size=wrong)


def test_an_unreadable_image_is_named(tmp_path: Path) -> None:
    for name in "ab":
        save(tmp_path / name / "1.jpg", size=(64, 64))
    content = (tmp_path / "b" / "1.jpg").read_bytes()
    for broken in (b"", b"text", content[: len(content) // 2]):
        (tmp_path / "b" / "1.jpg").write_bytes(broken)
        with pytest.raises(UserError, match=r"b/1.jpg: unreadable image"):
            load(tmp_path)


def test_a_folder_without_classes_or_images_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="class list is empty"):
        load(tmp_path)
    (tmp_path / "a").mkdir()
    with pytest.raises(UserError, match="no images; expected one folder of images per class"):
        load(tmp_path)
    with pytest.raises(UserError, match=r"unknown option .*'label'"):
        load(tmp_path, label="a")


def test_a_missing_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "pets" / "cat" / "1.png")
    pq.write_table(pa.table({"a": [1.0], "y": [0]}), tmp_path / "own.parquet")
    monkeypatch.setitem(sys.modules, "PIL", None)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    for path, package in ((tmp_path / "pets", "Pillow"), (tmp_path / "own.parquet", "pyarrow")):
        with pytest.raises(UserError, match=rf"needs {package}: pip install 'fedskew\[data\]'"):
            load(path)


# Tables


def csv_file(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


IRIS = "width,height,label\n" + "".join(f"{i},{i * 0.5},{'ab'[i % 2]}\n" for i in range(10))


@pytest.mark.parametrize("packed", [False, True])
def test_a_csv_of_numbers_is_a_table(tmp_path: Path, packed: bool) -> None:
    path = csv_file(tmp_path / "iris.csv", IRIS)
    if packed:
        path = tmp_path / "iris.csv.xz"
        path.write_bytes(lzma.compress(IRIS.encode()))
    data = load(path)
    assert (data.kind, data.classes, data.input_shape) == ("table", ("a", "b"), (2,))
    assert data.columns == ("width", "height")
    assert (len(data.train), len(data.test)) == (8, 2)
    np.testing.assert_allclose(data.train.x[:, 0], data.train.x[:, 1], rtol=1e-6)


def test_the_label_column_is_told_or_found_by_its_usual_names(tmp_path: Path) -> None:
    assert load(csv_file(tmp_path / "1.csv", IRIS.replace("label", "Target"))).classes == ("a", "b")
    path = csv_file(tmp_path / "2.csv", IRIS.replace("label", "species"))
    assert load(path, label="species").classes == ("a", "b")
    with pytest.raises(UserError, match=r"label=NAME; columns: width, height, species"):
        load(path)
    with pytest.raises(UserError, match="'specis'; did you mean 'species'"):
        load(path, label="specis")


def test_numeric_labels_of_a_csv_are_sorted_as_numbers(tmp_path: Path) -> None:
    rows = "".join(f"{i},{(2, 10)[i % 2]}\n" for i in range(10))
    assert load(csv_file(tmp_path / "n.csv", "a,y\n" + rows)).classes == ("2", "10")


def test_labels_may_be_names_that_mostly_look_like_numbers(tmp_path: Path) -> None:
    rows = "".join(f"{i},{('1', '2', 'other')[i % 3]}\n" for i in range(30))
    assert load(csv_file(tmp_path / "n.csv", "a,kind\n" + rows), label="kind").classes == ("1", "2", "other")


def test_a_column_of_strings_is_text(tmp_path: Path) -> None:
    rows = "".join(f'"some words, {i}","{"ab"[i % 2]}"\n' for i in range(10))
    data = load(csv_file(tmp_path / "t.csv", "review,label\n" + rows), length=4)
    assert (data.kind, data.input_shape) == ("text", (4,))
    assert data.train.x[:, :2].tolist() == [[2, 3]] * 8
    rows = "".join(f'{i},"some words","{"ab"[i % 2]}"\n' for i in range(10))
    path = csv_file(tmp_path / "u.csv", "id,review,label\n" + rows)
    with pytest.raises(UserError, match=r"'review' holds strings; .*text=NAME"):
        load(path)
    assert load(path, text="review").kind == "text"
    with pytest.raises(UserError, match="'revue'; did you mean 'review'"):
        load(path, text="revue")


def test_a_folder_with_train_and_test_tables_is_the_split(tmp_path: Path) -> None:
    csv_file(tmp_path / "train.csv", IRIS)
    csv_file(tmp_path / "test.csv", "label,height,width\na,1,2\n")  # in another order
    data = load(tmp_path)
    assert (len(data.train), len(data.test)) == (10, 1)
    np.testing.assert_allclose(data.test.x[0], (np.array([2, 1]) - [4.5, 2.25]) / [8.25**0.5, 8.25**0.5 / 2], rtol=1e-6)
    csv_file(tmp_path / "test.csv", "label,height\na,1\n")
    with pytest.raises(UserError, match=r"test.csv: no column 'width', which the training data has"):
        load(tmp_path)
    csv_file(tmp_path / "test.csv", "label,height,width\na,1,2\nb,2,3\nb,2,wide\n")
    with pytest.raises(UserError, match=r"test.csv: 'wide' in column 'width', line 4; expected a number"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (IRIS.replace("3,1.5", "x,1.5"), r"own.csv: 'x' in column 'width', line 5; expected a number"),
        (IRIS.replace("3,1.5", ",1.5"), r"an empty cell in column 'width', line 5"),
        (IRIS.replace("3,1.5", "nan,1.5"), r"own.csv: NaN or infinite value in column 'width', line 5"),
        (IRIS.replace("3,1.5", "3,1.5,1"), r"line 5 has 4 cells; expected 3"),
        (IRIS.replace("2.5,b", "2.5,"), r"no label in line 7"),
        (IRIS.replace("height", "width"), r"column 'width' appears twice"),
        ("a,label\n", r"no rows"),
        ("", r"no rows"),
        ("label\na\nb\n", r"no column beside the label 'label'"),
    ],
)
def test_a_bad_cell_is_named_with_its_line(tmp_path: Path, text: str, complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        load(csv_file(tmp_path / "own.csv", text))


def test_parquet_columns_keep_their_types(tmp_path: Path) -> None:
    table = pa.table(
        {
            "a": pa.array(range(10), pa.int16()),
            "b": pa.array([[i, -i] for i in range(10)], pa.list_(pa.float32())),
            "label": pa.array(["x", "y"] * 5).dictionary_encode(),
        }
    )
    pq.write_table(table, tmp_path / "own.parquet")
    data = load(tmp_path / "own.parquet")
    assert (data.kind, data.classes, data.input_shape) == ("table", ("x", "y"), (3,))
    np.testing.assert_allclose(data.train.x[:, 1], -data.train.x[:, 2], rtol=1e-6)


@pytest.mark.parametrize(
    ("columns", "complaint"),
    [
        ({"a": [1.0, None, 3.0], "y": [0, 1, 0]}, r"no value in column 'a', row 1"),
        ({"a": [1.0, 2.0, float("inf")], "y": [0, 1, 0]}, r"infinite value in column 'a', row 2"),
        ({"a": [[1], [2, 3], [4]], "y": [0, 1, 0]}, r"unequal length in column 'a', row 1"),
        ({"a": [[[1, 2]], [[3, 4]], [[5]]], "y": [0, 1, 0]}, r"unequal length in column 'a', row 2"),
        ({"a": pa.array([1, 2, 3], pa.timestamp("s")), "y": [0, 1, 0]}, r"column 'a' holds timestamp"),
    ],
)
def test_a_bad_parquet_value_is_named(tmp_path: Path, columns: dict[str, Any], complaint: str) -> None:
    pq.write_table(pa.table(columns), tmp_path / "own.parquet")
    with pytest.raises(UserError, match=complaint):
        load(tmp_path / "own.parquet")


def test_a_file_that_is_no_parquet_is_refused(tmp_path: Path) -> None:
    (tmp_path / "own.parquet").write_bytes(b"hello")
    with pytest.raises(UserError, match=r"own.parquet: cannot be read"):
        load(tmp_path / "own.parquet")


# Hugging Face datasets saved to disk


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


def encoded(value: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (5, 6), (value, 0, 0)).save(file, "PNG")
    return file.getvalue()


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


def test_a_broken_saved_dataset_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "train"
    save_split(folder, image_table(10).set_column(2, "fine", pa.array([0, 1, 5] * 3 + [0])), IMAGE_FEATURES)
    with pytest.raises(UserError, match=r"label '5' in row 2; expected 0 to 2"):
        load(folder)
    (folder / "data-00001-of-00002.arrow").write_bytes(b"rubbish")
    with pytest.raises(UserError, match=r"data-00001-of-00002.arrow: cannot be read"):
        load(folder)
    (folder / "state.json").write_text('{"_data_files": [{}]}')
    with pytest.raises(UserError, match=r"state.json: names no data files"):
        load(folder)
    (folder / "state.json").write_text("{")
    with pytest.raises(UserError, match=r"state.json: cannot be read"):
        load(folder)


def test_an_unreadable_image_in_a_table_is_named_by_row(tmp_path: Path) -> None:
    files = [encoded(i) for i in range(9)] + [b"broken"]
    pq.write_table(pa.table({"image": pa.array(files, pa.binary()), "label": [0, 1] * 5}), tmp_path / "own.parquet")
    with pytest.raises(UserError, match=r"own.parquet row 9: unreadable image"):
        load(tmp_path / "own.parquet")
