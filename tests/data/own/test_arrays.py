"""A user's own .npz: images, tables, labels, and the line that each mistake gets."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from own_data import Y, colour, grey, npz

from fedskew.data import load
from fedskew.errors import UserError


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


@pytest.mark.parametrize("as_floats", ["x_train", "x_test"])
def test_floats_are_scaled_even_if_the_other_part_has_bytes(tmp_path: Path, as_floats: str) -> None:
    x = {"x_train": colour(), "x_test": colour()[:4]}
    data = load(npz(tmp_path, y_train=Y, y_test=Y[:4], **(x | {as_floats: x[as_floats] / 255})))
    np.testing.assert_array_equal(data.train.x, colour())
    np.testing.assert_array_equal(data.test.x, colour()[:4])


def test_axes_that_cannot_be_told_apart_need_a_layout(tmp_path: Path) -> None:
    x = np.zeros((20, 3, 8, 3), np.uint8)
    path = npz(tmp_path, x=x, y=Y)
    with pytest.raises(UserError, match="both axis 1 and axis 3 have size 1, 3 or 4, so the channels are unknown"):
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
        (Y % 2 == 0, None, ("False", "True"), [1, 0, 1]),
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


def test_a_damaged_array_is_not_taken_for_python_objects(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "own.npz", "w") as file:
        file.writestr("x.npy", b"\x93NUMPY\x01\x00")
    with pytest.raises(UserError, match=r"own.npz: cannot be read \(.*\); expected a .npz file"):
        load(tmp_path / "own.npz")


def test_damaged_compression_and_members_that_are_no_arrays_are_one_line(tmp_path: Path) -> None:
    path = tmp_path / "own.npz"
    np.savez_compressed(path, x=TABLE, y=np.arange(20) % 2)
    content = bytearray(path.read_bytes())
    content[60:120] = bytes(60)
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"own.npz: cannot be read \(.*\); expected a .npz file"):
        load(path)
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("x", b"1 2 3")
    with pytest.raises(UserError, match=r"own.npz: 'x' is not an array; expected what numpy.savez writes"):
        load(path)


@pytest.mark.parametrize("shape", [(0, 3), (0, 8, 8)])
def test_inputs_without_samples_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(UserError, match="x: no samples"):
        load((np.zeros(shape), np.arange(3)))


@pytest.mark.parametrize(
    ("arrays", "complaint"),
    [
        ({"x": with_value(TABLE, (7, 1), np.inf), "y": Y}, r"own.npz x: infinite value in row 7"),
        ({"x": with_value(colour() / 255, (9, 0, 0, 0), np.nan), "y": Y}, r"own.npz x: image 9 .* is NaN"),
        ({"x": with_value(colour() / 255, (3, 0, 0, 0), -0.5), "y": Y}, r"image 3 .* is NaN, negative"),
        ({"x": TABLE, "y": Y[:-1]}, r"20 inputs but 19 labels; expected equal lengths"),
        ({"x": TABLE, "y": with_value(Y, 5, 9), "classes": list("abcd")}, r"label '9' in row 5; expected 0 to 3"),
        ({"x": TABLE, "y": with_value(Y, 5, -1), "classes": list("abcd")}, r"label '-1' in row 5"),
        ({"x": TABLE, "y": np.array(["a", "z"] * 10), "classes": list("ab")}, r"label 'z' in row 1; expected a, b"),
        ({"x": TABLE, "y": Y, "classes": np.array([], dtype="U1")}, r"class list is empty"),
        ({"x": TABLE, "y": Y, "classes": list("abca")}, r"class 'a' is listed twice"),
        ({"x": TABLE, "y": with_value(Y.astype(float), 4, 1.5)}, r"label 1.5 in row 4; expected a whole number"),
        ({"x": TABLE, "y": with_value(Y.astype(float), 4, np.nan)}, r"label nan in row 4"),
        ({"x": TABLE, "y": np.array(["a", " "] * 10)}, r"no label in row 1"),
        ({"x": TABLE, "y": np.eye(20)}, r"every row has exactly one 1, so each sample has one class"),
        ({"x": TABLE, "y": 0 * Y}, r"has one class"),
        ({"x": TABLE[:, 0], "y": Y}, r"1 dimension; expected 2"),
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


def test_the_suffix_may_be_in_upper_case(tmp_path: Path) -> None:
    path = npz(tmp_path, x_train=grey(), y_train=Y, x_test=grey(), y_test=Y)
    np.testing.assert_array_equal(load(path.rename(tmp_path / "OWN.NPZ")).train.y, Y)


def test_a_file_that_is_no_npz_is_refused(tmp_path: Path) -> None:
    (tmp_path / "own.npz").write_bytes(b"hello")
    with pytest.raises(UserError, match=r"own.npz: not a .npz file"):
        load(tmp_path / "own.npz")
    (tmp_path / "own.doc").write_bytes(b"hello")
    with pytest.raises(UserError, match=r"own.doc: unknown data format; expected a .npz"):
        load(tmp_path / "own.doc")


@pytest.mark.parametrize("fraction", [0, 1, -0.1, "half", True])
def test_a_test_fraction_lies_between_none_and_all(tmp_path: Path, fraction: object) -> None:
    with pytest.raises(UserError, match="test_fraction is"):
        load(npz(tmp_path, x=TABLE, y=Y), test_fraction=fraction)


def test_a_test_fraction_beside_a_test_set_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is the test set; leave out test_fraction"):
        load(npz(tmp_path, x_train=TABLE, y_train=Y, x_test=TABLE, y_test=Y), test_fraction=0.2)


def test_numbers_in_the_class_list_are_names() -> None:
    x = np.arange(40.0).reshape(20, 2)
    lacking_a_class = load((x, [1, 2] * 10), classes=["1", "2", "3"])
    assert lacking_a_class.train.y.max() == 1, "the labels 1 and 2 were read as positions"
    assert load((x, [0, 1] * 10), classes=[1, 0]).train.y[:2].tolist() == [1, 0]
    assert set(load((x, [5, 7] * 10), classes="7,5").train.y.tolist()) == {0, 1}
    with pytest.raises(UserError, match="label '4' in row 1; expected 1, 2, 3"):
        load((x, [1, 4] * 10), classes=["1", "2", "3"])


def test_numbers_outside_the_class_list_are_positions(tmp_path: Path) -> None:
    x = np.arange(40.0).reshape(20, 2)
    assert load((x, [0, 1] * 10), classes=["3", "5"]).train.y[:2].tolist() == [0, 1]
    np.savez(tmp_path / "stored.npz", x=x, y=[0, 1] * 10, classes=["1", "0"])
    stored = load(tmp_path / "stored.npz")
    assert stored.train.y[:2].tolist() == [0, 1], "class names within the data belong to positions"


def test_a_test_part_beside_x_and_y_is_not_ignored(tmp_path: Path) -> None:
    x, y = np.arange(40.0).reshape(20, 2), [0, 1] * 10
    np.savez(tmp_path / "mixed.npz", x=x, y=y, x_test=x, y_test=y)
    with pytest.raises(UserError, match="arrays x, y and x_test; expected x_train"):
        load(tmp_path / "mixed.npz")
