"""Datasets by name, on small files of every published form and, where they are, on the real ones."""

from __future__ import annotations

import gzip
import io
import lzma
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from archives import unpacks_tar
from PIL import Image

from fedskew.data import DATASETS, Dataset, load
from fedskew.data.catalogue import find_location, size_on_disk
from fedskew.data.published.cifar import CIFAR10
from fedskew.data.published.text import NEWSGROUPS_CLASSES
from fedskew.errors import UserError

Pixels = np.ndarray


def pixels(n: int, *shape: int) -> Pixels:
    return np.random.default_rng(n).integers(0, 256, (n, *shape), dtype=np.uint8)


def idx(array: np.ndarray) -> bytes:
    head = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes()
    return head + array.astype(np.uint8).tobytes()


def write_idx(folder: Path, pack: bool, train: int = 20, test: int = 10) -> tuple[Pixels, Pixels]:
    folder.mkdir(parents=True, exist_ok=True)
    x, z = pixels(train, 28, 28), pixels(test, 28, 28)
    parts = {
        "train-images-idx3-ubyte": x,
        "train-labels-idx1-ubyte": np.arange(train) % 10,
        "t10k-images-idx3-ubyte": z,
        "t10k-labels-idx1-ubyte": np.arange(test) % 10,
    }
    for name, array in parts.items():
        if pack:
            (folder / f"{name}.gz").write_bytes(gzip.compress(idx(array)))
        else:
            (folder / name).write_bytes(idx(array))
    return x, z


def test_every_entry_tells_what_a_table_of_datasets_shows() -> None:
    medical = ["path", "chest", "derma", "oct", "pneumonia", "retina", "breast", "blood", "tissue"]
    medical += ["organa", "organc", "organs"]
    assert list(DATASETS) == [
        "digits",
        "synthetic",
        "mnist",
        "fashion-mnist",
        "usps",
        "svhn",
        "syn-digits",
        "digits-domains",
        "cifar10",
        "cifar100",
        "tiny-imagenet",
        "cinic10",
        "ag_news",
        "20newsgroups",
        *(f"{name}mnist" for name in medical),
        "femnist",
        "fed-isic2019",
    ]
    for name, entry in DATASETS.items():
        assert entry.name == name
        assert all((entry.description, entry.licence, entry.citation, entry.sources))
        if entry.published:
            for file in entry.published.files:
                algorithm, _, digest = file.checksum.partition(":")
                assert len(digest) == {"md5": 32, "sha256": 64}[algorithm]
    assert DATASETS["ag_news"].options == ("length", "vocabulary")
    assert DATASETS["digits"].options == ()


def test_digits_are_those_of_scikit_learn() -> None:
    """They are read without importing scikit-learn, so that a run starts sooner."""
    from sklearn.datasets import load_digits

    source, dataset = load_digits(), load("digits")
    images = np.rint(source.images * (255 / 16)).astype(np.uint8)
    rows = [tuple(image) for image in images.reshape(len(images), -1)]
    expected = sorted(zip(rows, source.target.tolist(), strict=True))
    found = []
    for part in (dataset.train, dataset.test):
        found += zip([tuple(image) for image in part.x.reshape(len(part), -1)], part.y.tolist(), strict=True)
    assert sorted(found) == expected


def test_digits_without_scikit_learn_are_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedskew.data.published.digits.find_spec", lambda _: None)
    with pytest.raises(UserError, match=r"digits is a file of scikit-learn, which was not found; run pip install"):
        load("digits")


def test_digits_are_stratified_and_the_same_every_time() -> None:
    one, two = load("digits"), load("DIGITS")
    entry = DATASETS["digits"]
    assert (len(one.train), len(one.test), len(one.classes)) == (entry.train, entry.test, entry.classes)
    assert one.train.x.dtype == np.uint8
    assert one.input_shape == (1, 8, 8)
    assert one.train.x.max() == 255
    np.testing.assert_array_equal(one.test.x, two.test.x)
    whole = np.bincount(np.concatenate([one.train.y, one.test.y]))
    assert np.abs(np.bincount(one.test.y) - whole / 5).max() <= 0.5
    scaled = one.train.x / 255
    assert one.mean == pytest.approx([scaled.mean()], abs=1e-4)
    assert one.std == pytest.approx([scaled.std()], abs=1e-4)


@pytest.mark.parametrize("pack", [True, False])
@pytest.mark.parametrize("folder", ["mnist", "MNIST/raw", ""])
def test_mnist_is_read_from_idx_files(cache: Path, tmp_path: Path, pack: bool, folder: str) -> None:
    x, z = write_idx(tmp_path / "d" / folder, pack)
    data = load("mnist", tmp_path / "d")
    np.testing.assert_array_equal(data.train.x[:, 0], x)
    np.testing.assert_array_equal(data.test.x[:, 0], z)
    assert data.train.y.tolist() == [*range(10)] * 2
    assert (data.mean, data.std) == ((0.1307,), (0.3081,))
    assert torch.from_numpy(data.train.x).shape == (20, 1, 28, 28)  # warns if the array is read-only


def test_mnist_can_be_merged_and_cut_again(cache: Path, tmp_path: Path) -> None:
    write_idx(tmp_path, True, train=60, test=20)
    data = load("mnist", tmp_path, test_fraction=0.25)
    assert (len(data.train), len(data.test)) == (60, 20)
    assert np.bincount(data.test.y).tolist() == [2] * 10


def test_fashion_mnist_has_its_own_names_and_statistics(cache: Path, tmp_path: Path) -> None:
    write_idx(tmp_path / "FashionMNIST" / "raw", False)
    data = load("fashion-mnist", tmp_path)
    assert data.classes[0] == "T-shirt/top"
    assert (data.mean, data.std) == ((0.5,), (0.5,))


def test_fashion_mnist_files_are_not_taken_for_mnist(cache: Path, tmp_path: Path) -> None:
    write_idx(tmp_path, False)
    first = np.array([9, 2, 1, 1, 6, 1, 4, 6, 5, 7])
    (tmp_path / "t10k-labels-idx1-ubyte").write_bytes(idx(first))
    assert len(load("fashion-mnist", tmp_path).test) == 10
    with pytest.raises(UserError, match="this is fashion-mnist; expected mnist"):
        load("mnist", tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("train-images-idx3-ubyte", idx(pixels(20, 28, 28))[:-1], r"train-images.*15679 bytes.*expected 15680"),
        ("train-images-idx3-ubyte", b"<html>", r"train-images.*not an idx file"),
        ("train-images-idx3-ubyte", b"\0\0\x08\x03" + b"\xff" * 12, r"train-images.* 0 bytes.*expected 7922816"),
        ("train-labels-idx1-ubyte", idx(np.arange(9)), r"20 images but .*train-labels.* 9 labels"),
        ("t10k-labels-idx1-ubyte", idx(np.array([0, 1, 2, 10] * 3)[:10]), r"label 10 in row 3; expected 0 to 9"),
    ],
)
def test_a_bad_idx_file_is_named(cache: Path, tmp_path: Path, name: str, content: bytes, complaint: str) -> None:
    write_idx(tmp_path, False)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=complaint):
        load("mnist", tmp_path)


def test_a_truncated_gz_is_named(cache: Path, tmp_path: Path) -> None:
    write_idx(tmp_path, True)
    file = tmp_path / "t10k-images-idx3-ubyte.gz"
    file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(UserError, match=r"t10k-images-idx3-ubyte.gz: cannot be read"):
        load("mnist", tmp_path)


def cifar_files(variant: str, n: int = 4) -> dict[str, bytes]:
    if variant == "cifar10":
        names = [f"data_batch_{i}.bin" for i in range(1, 6)] + ["test_batch.bin"]
        return {name: b"".join(bytes([i]) + bytes([k] * 3072) for i in range(n)) for k, name in enumerate(names)}
    record = [bytes([19 - i, 90 + i]) + bytes([i] * 3072) for i in range(n)]
    fine = "\n".join(f"thing_{i}" for i in range(100)).encode()
    return {"train.bin": b"".join(record), "test.bin": record[1], "fine_label_names.txt": fine}


@pytest.mark.parametrize(
    ("variant", "folder"), [("cifar10", "cifar-10-batches-bin"), ("cifar100", "cifar-100-binary"), ("cifar100", "")]
)
def test_cifar_is_read_from_its_binary_version(cache: Path, tmp_path: Path, variant: str, folder: str) -> None:
    (tmp_path / "d" / folder).mkdir(parents=True)
    for name, content in cifar_files(variant).items():
        (tmp_path / "d" / folder / name).write_bytes(content)
    data = load(variant, tmp_path / "d")
    assert data.input_shape == (3, 32, 32)
    if variant == "cifar10":
        assert data.train.y.tolist() == [0, 1, 2, 3] * 5
        assert data.train.x[:, 2, 31, 31].tolist() == [0] * 4 + [1] * 4 + [2] * 4 + [3] * 4 + [4] * 4
        assert data.classes[:2] == ("airplane", "automobile")
    else:
        assert data.train.y.tolist() == [90, 91, 92, 93]  # the fine label, not the coarse one before it
        assert data.test.x[0, 0, 0, 0] == 1
        assert data.classes[90] == "thing_90"
        assert len(data.classes) == 100


def test_cifar_channels_are_planes(cache: Path, tmp_path: Path) -> None:
    record = bytes([0]) + bytes([10] * 1024) + bytes([20] * 1024) + bytes([30] * 1024)
    for name in cifar_files("cifar10"):
        (tmp_path / name).write_bytes(record)
    assert load("cifar10", tmp_path).train.x[0, :, 5, 7].tolist() == [10, 20, 30]


@unpacks_tar
def test_cifar_is_unpacked_from_the_publishers_archive(cache: Path, tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "cifar-10-binary.tar.gz", "w:gz") as archive:
        for name, content in cifar_files("cifar10").items():
            member = tarfile.TarInfo(f"cifar-10-batches-bin/{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    assert len(load("cifar10", tmp_path).train) == 20


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (bytes(3072), r"data_batch_3.bin: 3072 bytes; expected a positive multiple of 3073"),
        (bytes(3073) + bytes([10]) + bytes(3072), r"data_batch_3.bin: label 10 in record 1; expected 0 to 9"),
        (b"", r"data_batch_3.bin: 0 bytes; expected a positive multiple"),
    ],
)
def test_a_bad_cifar_batch_is_named(cache: Path, tmp_path: Path, content: bytes, complaint: str) -> None:
    for name, good in cifar_files("cifar10").items():
        (tmp_path / name).write_bytes(content if name == "data_batch_3.bin" else good)
    with pytest.raises(UserError, match=complaint):
        load("cifar10", tmp_path)


def image(path: Path, value: int, size: int, mode: str = "RGB") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, (size, size), value if mode == "L" else (value, 0, 255)).save(path)


def write_tiny_imagenet(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "wnids.txt").write_text("n02\nn01\nn03\n")
    (folder / "words.txt").write_text("n01\tcat, house cat\nn02\tcrane\nn03\tcrane, derrick\nn99\tunused\n")
    for i, wnid in enumerate(("n01", "n02", "n03")):
        for k in range(2):
            image(folder / "train" / wnid / "images" / f"{wnid}_{k}.JPEG", 40 * i, 64, "L" if k else "RGB")
    for k in range(3):
        image(folder / "val" / "images" / f"val_{k}.JPEG", 10, 64)
    lines = [f"val_{k}.JPEG\t{wnid}\t0\t0\t9\t9\n" for k, wnid in enumerate(("n03", "n01", "n03"))]
    (folder / "val" / "val_annotations.txt").write_text("".join(lines))
    image(folder / "test" / "images" / "test_0.JPEG", 0, 64)


def test_tiny_imagenet_takes_its_validation_part_for_testing(cache: Path, tmp_path: Path) -> None:
    write_tiny_imagenet(tmp_path / "tiny-imagenet-200")
    data = load("tiny-imagenet", tmp_path)
    assert data.input_shape == (3, 64, 64)  # grey files among the coloured ones, as in the real set
    assert data.train.y.tolist() == [0, 0, 1, 1, 2, 2]  # wnids in sorted order
    assert data.test.y.tolist() == [2, 0, 2]
    assert data.classes == ("cat", "n02", "n03")  # two cranes keep their ids


def test_the_size_of_a_dataset_in_folders_is_that_of_all_files_in_them(cache: Path, tmp_path: Path) -> None:
    write_tiny_imagenet(tmp_path / "tiny-imagenet-200")
    for part in ("train", "test"):
        image(tmp_path / "cinic10" / part / "airplane" / "x.png", 9, 32)
        image(tmp_path / "cinic10" / part / "bird" / "x.png", 9, 32)
    used = {
        "tiny-imagenet": ("tiny-imagenet-200", "wnids.txt", "train", "val"),
        "cinic10": ("cinic10", "train", "test"),
    }
    for name, (folder, *members) in used.items():
        files = [file for member in members for file in (tmp_path / folder).rglob(f"{member}/**/*")]
        files += [tmp_path / folder / member for member in members]
        assert find_location(DATASETS[name], tmp_path) == str(tmp_path / folder)
        assert size_on_disk(DATASETS[name], tmp_path) == sum(f.stat().st_size for f in files if f.is_file())


def test_tiny_imagenet_may_be_sorted_into_classes_or_still_be_zipped(cache: Path, tmp_path: Path) -> None:
    source = tmp_path / "source" / "tiny-imagenet-200"
    write_tiny_imagenet(source)
    (source / "val" / "val_annotations.txt").unlink()
    for k, wnid in enumerate(("n03", "n01", "n03")):
        (source / "val" / wnid).mkdir(exist_ok=True)
        (source / "val" / "images" / f"val_{k}.JPEG").rename(source / "val" / wnid / f"val_{k}.JPEG")
    with zipfile.ZipFile(tmp_path / "tiny-imagenet-200.zip", "w") as archive:
        for path in sorted(source.rglob("*")):
            archive.write(path, path.relative_to(source.parent))
    assert load("tiny-imagenet", tmp_path).test.y.tolist() == [0, 2, 2]


def test_a_bad_annotation_is_named(cache: Path, tmp_path: Path) -> None:
    write_tiny_imagenet(tmp_path)
    (tmp_path / "val" / "val_annotations.txt").write_text("val_0.JPEG\tn01\nval_1.JPEG\tn77\n")
    with pytest.raises(UserError, match=r"val_annotations.txt: line 2 is .*n77"):
        load("tiny-imagenet", tmp_path)


@pytest.mark.parametrize("folder", ["CINIC-10", "cinic10", ""])
def test_cinic10_trains_on_train_and_tests_on_test(cache: Path, tmp_path: Path, folder: str) -> None:
    root = tmp_path / "d" / folder
    for part, names in {
        "train": ("airplane", "bird"),
        "valid": ("airplane", "bird"),
        "test": ("airplane", "bird"),
    }.items():
        for name in names:
            image(root / part / name / "x-1.png", 9, 32)
    image(root / "train" / "bird" / "x-2.png", 7, 32, "L")
    data = load("cinic10", tmp_path / "d")
    assert data.classes == ("airplane", "bird")
    assert data.train.y.tolist() == [0, 1, 1]
    assert data.test.y.tolist() == [0, 1]
    assert data.train.x[0, :, 0, 0].tolist() == [9, 0, 255]
    assert data.train.x[2, :, 0, 0].tolist() == [7, 7, 7]


def test_a_damaged_image_of_a_dataset_is_named(cache: Path, tmp_path: Path) -> None:
    for part in ("train", "test"):
        for name in ("airplane", "bird"):
            image(tmp_path / part / name / "1.png", 9, 32)
    (tmp_path / "test" / "bird" / "1.png").write_bytes(b"not an image")
    with pytest.raises(UserError, match=r"test/bird/1.png: unreadable image"):
        load("cinic10", tmp_path)


AG_TRAIN = (
    '"3","Oil up","Prices of ""oil"" rise"\n"1","Talks","It\'s peace\\\nat last, they say"\n"2","Cup","The cup"\n'
)
AG_TEST = '"4","Chip","A new chip and the cup"\n"2","",""\n'


@pytest.mark.parametrize(
    ("train", "test", "write"),
    [
        ("ag_news_csv/train.csv", "ag_news_csv/test.csv", lambda text: text),
        ("ag_news/train_union_39k.csv.xz", "ag_news/test.csv.xz", lzma.compress),
        ("train.csv.gz", "test.csv.gz", gzip.compress),
    ],
)
def test_ag_news_is_read_plain_or_packed(
    cache: Path, tmp_path: Path, train: str, test: str, write: Callable[[bytes], bytes]
) -> None:
    for name, text in ((train, AG_TRAIN), (test, AG_TEST)):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(write(text.encode()))
    data = load("ag_news", tmp_path, length=6)
    assert data.kind == "text"
    assert data.train.y.tolist() == [2, 0, 1]
    assert data.test.y.tolist() == [3, 1]
    # cup and oil twice; then once each, by alphabet: at, it's, last, of, peace, prices, rise, say, talks, the, ...
    assert data.vocabulary == 2 + 14
    assert data.train.x[2].tolist() == [2, 13, 2, 0, 0, 0]
    assert data.test.x[0].tolist() == [1, 1, 1, 1, 1, 13]
    assert data.test.x[1].tolist() == [1, 0, 0, 0, 0, 0]  # no words at all


def test_a_fourth_column_and_a_header_of_ag_news_are_ignored(cache: Path, tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text('Class Index,Title,Description\n1,a,b,somewhere\n2,c,d,"else, where"\n')
    (tmp_path / "test.csv").write_text("1,a,d\n")
    data = load("ag_news", tmp_path, length=4)
    assert data.train.x.tolist() == [[2, 3, 0, 0], [4, 5, 0, 0]]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("1,a,b\n5,a,b\n", r"test.csv: class '5' in line 2; expected 1 to 4"),
        ("1,a,b\n\n2,a\n", r"test.csv: line 3 has 2 columns"),
        (b"1,a,\xff\n", r"test.csv: not UTF-8"),
    ],
)
def test_a_bad_row_of_ag_news_is_named(cache: Path, tmp_path: Path, text: str | bytes, complaint: str) -> None:
    (tmp_path / "train.csv").write_text(AG_TRAIN)
    (tmp_path / "test.csv").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UserError, match=complaint):
        load("ag_news", tmp_path)


@unpacks_tar
def test_20newsgroups_is_read_from_csv_and_from_the_publishers_archive(cache: Path, tmp_path: Path) -> None:
    long = "word " * 40_000  # more than a csv field may hold by default
    (tmp_path / "csv" / "20newsgroups").mkdir(parents=True)
    for part, text in (("train", long), ("test", "word here")):
        rows = f'"sci.med","{text}"\n"alt.atheism","other"\n'
        (tmp_path / "csv" / "20newsgroups" / f"20newsgroups-{part}.csv.xz").write_bytes(lzma.compress(rows.encode()))
    data = load("20newsgroups", tmp_path / "csv", length=3)
    assert data.train.x.tolist() == [[2, 2, 2], [3, 0, 0]]
    assert data.test.x.tolist() == [[2, 1, 0], [3, 0, 0]]
    assert data.train.y.tolist() == [NEWSGROUPS_CLASSES.index("sci.med"), 0]
    (tmp_path / "raw").mkdir()
    with tarfile.open(tmp_path / "raw" / "20news-bydate.tar.gz", "w:gz") as archive:
        for part in ("train", "test"):
            for group, text in (("alt.atheism", b"other \xe9t\xe9"), ("sci.med", b"word")):
                member = tarfile.TarInfo(f"20news-bydate-{part}/{group}/123")
                member.size = len(text)
                archive.addfile(member, io.BytesIO(text))
    assert load("20newsgroups", tmp_path / "raw", length=2).train.x.tolist() == [[2, 4], [3, 0]]


def test_only_messages_are_read_from_the_folders_of_20newsgroups(cache: Path, tmp_path: Path) -> None:
    for part in ("train", "test"):
        group = tmp_path / f"20news-bydate-{part}" / "sci.med"
        (group / ".ipynb_checkpoints").mkdir(parents=True)
        (group / ".DS_Store").write_bytes(b"\0\1")
        (group / "58043").write_text("word")
    data = load("20newsgroups", tmp_path, length=2)
    assert (data.train.x.tolist(), data.train.y.tolist()) == ([[2, 0]], [NEWSGROUPS_CLASSES.index("sci.med")])


def test_the_vocabulary_keeps_the_most_frequent_words(cache: Path, tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text("1,b b b,a a c c\n2,d,e\n")
    (tmp_path / "test.csv").write_text("1,a b,c d\n")
    data = load("ag_news", tmp_path, vocabulary=4, length=5)
    assert data.vocabulary == 4
    assert data.test.x.tolist() == [[3, 2, 1, 1, 0]]


@pytest.mark.parametrize(
    ("name", "options", "complaint"),
    [
        ("ag_news", {"lenght": 3}, r"unknown option of ag_news: 'lenght'; did you mean 'length'"),
        ("ag_news", {"length": 0}, r"length is 0; expected a whole number ≥ 1"),
        ("ag_news", {"vocabulary": 1.5}, r"vocabulary is 1.5; expected a whole number"),
        ("digits", {"length": 3}, r"unknown option 'length'; digits has no options"),
        ("mnst", {}, r"unknown dataset or path 'mnst'; did you mean 'mnist'"),
        ("no/such/file", {}, r"'no/such/file' does not exist; expected a file, a folder or one of digits"),
        ("~nobody-here/x.csv", {}, r"'~nobody-here/x.csv' does not exist; expected a file, a folder or one of digits"),
        ("file.npz", {}, r"'file.npz' does not exist"),
    ],
)
def test_a_wrong_name_or_option_gets_the_nearest_one(
    cache: Path, tmp_path: Path, name: str, options: dict[str, object], complaint: str
) -> None:
    (tmp_path / "train.csv").write_text(AG_TRAIN)
    (tmp_path / "test.csv").write_text(AG_TEST)
    with pytest.raises(UserError, match=complaint):
        load(name, tmp_path, **options)


def sizes(data: Dataset) -> tuple[int, int, int]:
    return len(data.train), len(data.test), len(data.classes)


def published_sizes(name: str) -> tuple[int, int, int]:
    entry = DATASETS[name]
    return entry.train, entry.test, entry.classes


def test_the_real_mnist(real_data: Path) -> None:
    data = load("mnist", real_data)
    assert sizes(data) == published_sizes("mnist")
    assert data.train.y[:10].tolist() == [5, 0, 4, 1, 9, 2, 1, 3, 1, 4]
    assert data.test.y[:10].tolist() == [7, 2, 1, 0, 4, 1, 4, 9, 5, 9]
    assert data.train.x.mean() / 255 == pytest.approx(data.mean[0], abs=1e-4)


def test_the_real_mnist_cut_again_has_the_sizes_of_fedvls(real_data: Path) -> None:
    assert sizes(load("mnist", real_data, test_fraction=0.25)) == (52_500, 17_500, 10)


def test_the_real_fashion_mnist(real_data: Path) -> None:
    data = load("fashion-mnist", real_data)
    assert sizes(data) == published_sizes("fashion-mnist")
    assert data.train.y[:10].tolist() == [9, 0, 0, 3, 0, 2, 7, 2, 5, 5]
    assert data.test.y[:10].tolist() == [9, 2, 1, 1, 6, 1, 4, 6, 5, 7]


def test_the_real_cifar10(real_data: Path) -> None:
    if not (real_data / "cifar-10-batches-bin").is_dir():
        pytest.skip("FEDSKEW_DATA holds no cifar-10-batches-bin")
    data = load("cifar10", real_data)
    assert sizes(data) == published_sizes("cifar10")
    assert np.bincount(data.train.y).tolist() == [5000] * 10
    assert data.train.y[:10].tolist() == [6, 9, 9, 4, 1, 1, 2, 7, 8, 3]
    assert data.train.x.mean(axis=(0, 2, 3)) / 255 == pytest.approx(CIFAR10.mean, abs=1e-4)


@pytest.mark.slow
def test_the_real_ag_news(real_data: Path) -> None:
    data = load("ag_news", real_data)
    assert len(data.test) == DATASETS["ag_news"].test
    assert np.bincount(data.test.y).tolist() == [1900] * 4
    assert data.test.y[:3].tolist() == [2, 3, 3]
    assert len(data.train) in (39_771, DATASETS["ag_news"].train)  # a third of it is what could be had
    assert data.train.x.max() == data.vocabulary - 1


@pytest.mark.slow
def test_the_real_20newsgroups(real_data: Path) -> None:
    data = load("20newsgroups", real_data)
    assert len(data.classes) == 20
    assert (len(data.train), len(data.test)) in ((11_293, 7_528), (11_314, 7_532))
    assert np.bincount(data.test.y, minlength=20)[0] == 319
