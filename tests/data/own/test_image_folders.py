"""A user's own folder of images, one folder per class."""

from __future__ import annotations

import struct
import sys
import zlib
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from fedskew.data import load
from fedskew.errors import UserError


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


def test_test_images_in_a_file_are_refused(tmp_path: Path) -> None:
    for name in "ab":
        save(tmp_path / "pets" / name / "1.png")
    file = tmp_path / "test.csv"
    file.write_text("image,label\n")
    with pytest.raises(UserError, match=r"test is '.*test\.csv'; expected a folder like .*pets"):
        load(tmp_path / "pets", test=file)


@pytest.mark.parametrize("test", ["test", "val", "valid"])
def test_train_and_test_folders_are_the_split(tmp_path: Path, test: str) -> None:
    for part, names in (("train", "ab"), (test, "ac")):
        for name in names:
            save(tmp_path / part / name / "1.bmp", mode="L" if part == "train" else "RGB")
    data = load(tmp_path)
    assert data.classes == ("a", "b", "c")
    assert (data.train.y.tolist(), data.test.y.tolist()) == ([0, 1], [0, 2])
    assert data.train.x.shape == (2, 3, 6, 5)  # grey beside colour


def test_the_test_images_may_be_in_another_folder(tmp_path: Path) -> None:
    for part, names in (("first", "ab"), ("second", "ac")):
        for name in names:
            save(tmp_path / part / name / "1.bmp")
    data = load(tmp_path / "first", test=tmp_path / "second")
    assert (data.classes, data.train.y.tolist(), data.test.y.tolist()) == (("a", "b", "c"), [0, 1], [0, 2])
    (tmp_path / "first").rename(tmp_path / "train")
    (tmp_path / "test").mkdir()
    with pytest.raises(UserError, match="has a test part; leave out test"):
        load(tmp_path, test=tmp_path / "second")


def test_grey_images_stay_grey_unless_one_is_coloured(tmp_path: Path) -> None:
    for i in range(5):
        save(tmp_path / "a" / f"{i}.png", mode="L", value=7)
        save(tmp_path / "b" / f"{i}.png", mode="I;16", value=7 * 256)
    data = load(tmp_path, image_bits=16)
    assert data.input_shape == (1, 6, 5)
    assert np.unique(data.train.x).tolist() == [7]
    save(tmp_path / "b" / "3.png", mode="RGBA", value=9)
    data = load(tmp_path, image_bits=16)
    assert data.input_shape == (3, 6, 5)
    assert np.unique(np.concatenate([data.train.x, data.test.x])).tolist() == [7, 9]


def test_big_endian_grey_images_of_16_bits_are_grey(tmp_path: Path) -> None:
    for name, level in (("a", 7), ("b", 9)):
        (tmp_path / name).mkdir()
        for i in range(5):
            pixels = np.full((6, 5), level * 256, ">u2")
            Image.frombytes("I;16B", (5, 6), pixels.tobytes()).save(tmp_path / name / f"{i}.tif")
    data = load(tmp_path, image_bits=16)
    assert data.input_shape == (1, 6, 5)
    assert np.unique(data.train.x).tolist() == [7, 9]


def grey16(path: Path, largest: int, images: int = 5) -> None:
    """Save grey 16-bit images with pixels from 0 to `largest`."""
    path.mkdir(parents=True, exist_ok=True)
    ramp = np.linspace(0, largest, 30).reshape(6, 5)
    for i in range(images):
        Image.fromarray(ramp.astype(np.uint16)).save(path / f"{i}.png")


@pytest.mark.parametrize(("largest", "bits"), [(255, 8), (4095, 12), (16383, 14)])
def test_images_of_fewer_bits_in_16_need_the_number_of_bits(tmp_path: Path, largest: int, bits: int) -> None:
    for name in ("a", "b"):
        grey16(tmp_path / name, largest)
    with pytest.raises(UserError, match=rf"a/0\.png: no pixel .* is above {largest}; expected .* set image_bits to"):
        load(tmp_path)
    assert load(tmp_path, image_bits=str(bits)).train.x.max() == 255
    if bits > 8:
        assert load(tmp_path, image_bits=16).train.x.max() == largest >> 8
        with pytest.raises(UserError, match=f"a pixel is {largest}; expected 0 to {largest // 2}, because image_bits"):
            load(tmp_path, image_bits=bits - 1)
    ramp = Image.fromarray(np.full((6, 5), largest, np.int32))
    with pytest.raises(UserError, match=f"list: item 0: no pixel .* is above {largest}"):
        load([(ramp, 0), (ramp, 1)] * 5)
    assert load([(ramp, 0), (ramp, 1)] * 5, image_bits=bits).train.x.min() == 255


def test_images_of_16_bits_are_read_alike_whatever_the_other_images_are(tmp_path: Path) -> None:
    for part, largest in (("train", 65535), ("test", 30000)):
        for name in ("a", "b"):
            grey16(tmp_path / part / name, largest)
    data = load(tmp_path)
    assert (data.train.x.max(), data.test.x.max()) == (255, 30000 >> 8)
    assert data.notes == ()
    for name in ("a", "b"):
        grey16(tmp_path / "test" / name, 4095)
    with pytest.raises(UserError, match=r"test/a/0\.png: no pixel of this and the other 16-bit images is above 4095"):
        load(tmp_path)


def test_images_of_8_and_of_16_bits_in_one_dataset_are_noted(tmp_path: Path) -> None:
    for i in range(5):
        save(tmp_path / "a" / f"{i}.png", mode="L")
    grey16(tmp_path / "b", 65535)
    assert any("some images have 8 bits" in note and "b/0.png" in note for note in load(tmp_path).notes)


def test_16_bit_images_of_which_some_use_fewer_bits_are_noted(tmp_path: Path) -> None:
    grey16(tmp_path / "a", 4095)
    grey16(tmp_path / "b", 65535)
    (note,) = load(tmp_path).notes
    assert "5 of 10 16-bit images have no pixel above 16383" in note
    assert load(tmp_path, image_bits=16).notes == ()


@pytest.mark.parametrize("value", [7, 17, "many", 12.5, True])
def test_a_wrong_number_of_bits_is_refused(tmp_path: Path, value: object) -> None:
    for name in ("a", "b"):
        grey16(tmp_path / name, 65535)
    with pytest.raises(UserError, match=r"image_bits is .*; expected a whole number from 8 to 16"):
        load(tmp_path, image_bits=value)


def test_colour_images_of_16_bits_are_not_silently_dark(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for i in range(5):
            (tmp_path / name / f"{i}.png").write_bytes(colour16(np.full((6, 5, 3), 4000)))
    with pytest.raises(UserError, match=r"a/0\.png: no pixel .* is above 4095"):
        load(tmp_path)
    with pytest.raises(UserError, match="a 16-bit image in colour, of which only the upper 8 bits are read"):
        load(tmp_path, image_bits=12)
    assert load(tmp_path, image_bits=16).train.x.max() == 4000 >> 8


def colour16(pixels: np.ndarray) -> bytes:
    """Write a PNG file with 16 bits per channel, which Pillow cannot write."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    height, width, _ = pixels.shape
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in pixels)
    header = struct.pack(">IIBBBBB", width, height, 16, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def test_pixels_outside_16_bits_are_refused(tmp_path: Path) -> None:
    for value in (-1024, 70000):
        image = Image.fromarray(np.full((6, 5), value, np.int32))
        with pytest.raises(UserError, match=f"list: item 0: a pixel is {value}; expected 0 to 65535"):
            load([(image, 0), (image, 1)] * 5)


def test_black_images_are_refused(tmp_path: Path) -> None:
    for name in ("a", "b"):
        save(tmp_path / name / "1.png", mode="I;16", value=0)
    with pytest.raises(UserError, match=r"a/1\.png: this and all other images are black after conversion to 8 bits"):
        load(tmp_path)
    dark = Image.fromarray(np.zeros((6, 5), np.int32))
    with pytest.raises(UserError, match="list: item 0: this and all other images are black after conversion to 8 bits"):
        load([(dark, 0), (dark, 1)] * 5)


def test_an_image_of_floats_is_refused_because_its_range_is_not_known(tmp_path: Path) -> None:
    save(tmp_path / "a" / "1.png", mode="L")
    (tmp_path / "b").mkdir()
    bright = Image.fromarray(np.full((6, 5), 0.8, np.float32))
    bright.save(tmp_path / "b" / "1.tiff")
    with pytest.raises(UserError, match=r"b/1.tiff: an image of 32-bit floats \(mode F\); expected 8 or 16 bits"):
        load(tmp_path)
    with pytest.raises(UserError, match="an image of 32-bit floats"):
        load([(bright, 0), (bright, 1)] * 5)


def test_images_of_different_sizes_need_an_image_size(tmp_path: Path) -> None:
    for i in range(5):
        save(tmp_path / "a" / f"{i}.png")
        save(tmp_path / "b" / f"{i}.png", size=(8, 8) if i == 2 else (6, 5))
    with pytest.raises(UserError, match=r"b/2.png: 8x8 pixels, but .*a/0.png has 6x5; .*set image_size to resize all"):
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
    with pytest.raises(UserError, match="no sub-folders, so there are no classes"):
        load(tmp_path)
    (tmp_path / "a").mkdir()
    with pytest.raises(UserError, match="no images; expected one folder of images per class"):
        load(tmp_path)
    (tmp_path / "train").mkdir()
    with pytest.raises(UserError, match="train: no sub-folders, so there are no classes"):
        load(tmp_path)
    with pytest.raises(UserError, match=r"unknown option .*'label'"):
        load(tmp_path, label="a")


def test_a_missing_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "pets" / "cat" / "1.png")
    pq.write_table(pa.table({"a": [1.0], "y": [0]}), tmp_path / "own.parquet")
    monkeypatch.setitem(sys.modules, "PIL", None)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    for path, needs in (
        (tmp_path / "pets", "needs Pillow"),
        (tmp_path / "own.parquet", "Polars DataFrames needs pyarrow"),
    ):
        with pytest.raises(UserError, match=rf"{needs}: pip install 'fedskew\[data\]'"):
            load(path)


def test_folders_with_numbers_as_names_keep_their_classes(tmp_path: Path) -> None:
    for name in ("0", "1"):
        for i in range(5):
            save(tmp_path / "digits" / name / f"{i}.png", value=200 * int(name))
    data = load(tmp_path / "digits", classes=["1", "0"])
    bright = data.train.x.mean(axis=(1, 2, 3)) > 100
    assert (data.train.y == np.where(bright, 0, 1)).all()


def test_columns_beside_images_are_named_or_refused(tmp_path: Path) -> None:
    save(tmp_path / "a.png")
    images = [(tmp_path / "a.png").read_bytes()] * 10
    pq.write_table(pa.table({"scan": images, "age": range(10), "y": [0, 1] * 5}), tmp_path / "scans.parquet")
    assert load(tmp_path / "scans.parquet").notes == ("scans.parquet: the inputs are 'scan'; not used: 'age'",)
    with pytest.raises(UserError, match="columns lists 'age', which cannot be an input together with 'scan'"):
        load(tmp_path / "scans.parquet", columns=["scan", "age"])
