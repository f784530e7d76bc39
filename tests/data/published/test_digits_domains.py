"""The Digits domains from files in their publishers' formats, and clients with one domain each."""

from __future__ import annotations

import bz2
import gzip
import json
from pathlib import Path

import numpy as np
import pytest
from scipy.io import savemat

from fedskew.cli import main
from fedskew.data import IID, DomainDirichlet, federation, load
from fedskew.data.dataset import Dataset
from fedskew.errors import UserError
from fedskew.experiment.run import run


def _images(n: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(n).integers(0, 256, (n, *shape), dtype=np.uint8)


def write_mnist(folder: Path, train: int = 60, test: int = 20) -> np.ndarray:
    folder.mkdir(parents=True, exist_ok=True)
    x = _images(train, 28, 28)
    for name, array in (
        ("train-images-idx3-ubyte", x),
        ("train-labels-idx1-ubyte", np.arange(train, dtype=np.uint8) % 10),
        ("t10k-images-idx3-ubyte", _images(test, 28, 28)),
        ("t10k-labels-idx1-ubyte", np.arange(test, dtype=np.uint8) % 10),
    ):
        head = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes()
        (folder / f"{name}.gz").write_bytes(gzip.compress(head + array.tobytes()))
    return x


def write_usps(folder: Path, train: int = 50, test: int = 20) -> np.ndarray:
    """LIBSVM's lines: a label from 1 to 10, then `index:value` from 1 on, value from −1 to 1; zeros are left out."""
    folder.mkdir(parents=True, exist_ok=True)
    pixels = np.round(np.random.default_rng(3).uniform(-1, 1, (train, 256)), 4)
    pixels[0, 5] = 0.0
    for name, rows in (("usps.bz2", pixels), ("usps.t.bz2", pixels[:test])):
        lines = (
            f"{i % 10 + 1} " + " ".join(f"{j}:{value:g}" for j, value in enumerate(row, start=1) if value)
            for i, row in enumerate(rows)
        )
        (folder / name).write_bytes(bz2.compress("\n".join(lines).encode() + b"\n"))
    return pixels


def write_mat(folder: Path, prefix: str, train: int = 70, test: int = 30, zero: int = 10) -> np.ndarray:
    """SVHN's form: X is (32, 32, 3, n), y (n, 1) with 10 for the zero."""
    folder.mkdir(parents=True, exist_ok=True)
    x = _images(train, 32, 32, 3)
    for part, images in (("train", x), ("test", x[:test])):
        y = (np.arange(len(images)) % 10).astype(np.uint8)
        y[y == 0] = zero
        savemat(folder / f"{prefix}{part}_32x32.mat", {"X": images.transpose(1, 2, 3, 0), "y": y[:, None]})
    return x


@pytest.fixture
def data_dir(tmp_path: Path, cache: Path) -> Path:
    folder = tmp_path / "data"
    write_mnist(folder / "mnist")
    write_usps(folder / "usps")
    write_mat(folder / "svhn", "")
    write_mat(folder / "syn-digits", "synth_", zero=0)
    return folder


def test_usps_pixels_and_labels(tmp_path: Path, cache: Path) -> None:
    pixels = write_usps(tmp_path / "usps")
    usps = load("usps", tmp_path)
    assert usps.input_shape == (1, 16, 16)
    assert usps.train.y[:12].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1]
    expected = np.floor((pixels + 1) / 2 * 255).reshape(-1, 1, 16, 16)
    assert np.abs(usps.train.x - expected).max() <= 1
    assert usps.train.x[0, 0, 0, 5] == 127  # left out of the file: zero, which is grey
    assert (len(usps.train), len(usps.test)) == (50, 20)


@pytest.mark.parametrize(("name", "prefix", "zero"), [("svhn", "", 10), ("syn-digits", "synth_", 0)])
def test_matlab_images_and_labels(name: str, prefix: str, zero: int, tmp_path: Path, cache: Path) -> None:
    x = write_mat(tmp_path / name, prefix, zero=zero)
    loaded = load(name, tmp_path)
    assert np.array_equal(loaded.train.x, x.transpose(0, 3, 1, 2))
    assert loaded.train.y.tolist() == [i % 10 for i in range(70)]
    assert len(loaded.test) == 30


@pytest.mark.parametrize(
    ("name", "file", "content", "message"),
    [
        ("usps", "usps.bz2", b"not bzip2", "usps.bz2: cannot be read"),
        ("usps", "usps.bz2", bz2.compress(b"1 1:200 2:7\n"), "pixel value 200; expected −1 to 1"),
        ("svhn", "train_32x32.mat", b"nothing", "train_32x32.mat: cannot be read"),
    ],
)
def test_damaged_files_are_named(name: str, file: str, content: bytes, message: str, data_dir: Path) -> None:
    (data_dir / name / file).write_bytes(content)
    with pytest.raises(UserError, match=message):
        load(name, data_dir)


def test_a_matlab_file_of_other_content_is_refused(data_dir: Path) -> None:
    savemat(data_dir / "svhn" / "train_32x32.mat", {"X": np.zeros((4, 4)), "y": np.zeros(4)})
    with pytest.raises(UserError, match=r"X has shape \(4, 4\) and type float64; expected \(32, 32, 3, n\), uint8"):
        load("svhn", data_dir)


@pytest.mark.parametrize("damage", ["bytes", "labels"])
def test_a_damaged_matlab_file_is_refused(damage: str, data_dir: Path) -> None:
    file = data_dir / "svhn" / "train_32x32.mat"
    labels = ["one", "two"] if damage == "labels" else [1, 2]
    x = np.random.default_rng(0).integers(0, 256, (32, 32, 3, 2), dtype=np.uint8)
    savemat(file, {"X": x, "y": labels}, do_compression=True)
    if damage == "bytes":
        content = bytearray(file.read_bytes())
        content[1000:1030] = bytes(30)
        file.write_bytes(content)
    with pytest.raises(UserError, match=r"train_32x32.mat: cannot be read .*expected a MATLAB file with X and y"):
        load("svhn", data_dir)


def test_the_domains_are_joined_at_one_size(data_dir: Path) -> None:
    joined = load("digits-domains", data_dir)
    assert joined.domains == ("mnist", "usps", "svhn", "syn-digits")
    assert joined.input_shape == (3, 32, 32)
    assert joined.train.domain is not None
    assert np.bincount(joined.train.domain).tolist() == [60, 50, 70, 70]
    grey = joined.train.x[joined.train.domain < 2]
    assert (grey[:, 0] == grey[:, 1]).all()
    assert (grey[:, 0] == grey[:, 2]).all()
    svhn = load("svhn", data_dir)
    assert np.array_equal(joined.train.x[joined.train.domain == 2], svhn.train.x)
    mnist = load("mnist", data_dir)
    means = [part.train.x.mean() for part in (mnist,)]
    assert grey[:60].mean() == pytest.approx(means[0], rel=0.01)


def test_some_domains_and_a_share_of_each(data_dir: Path) -> None:
    joined = load("digits-domains", data_dir, domains="usps, mnist", fraction=0.2)
    assert joined.domains == ("usps", "mnist")
    assert joined.train.domain is not None
    assert np.bincount(joined.train.domain).tolist() == [10, 20]  # at least one of each of ten classes
    assert len(joined.test) == 40
    assert np.array_equal(joined.train.x, load("digits-domains", data_dir, domains="usps,mnist", fraction=0.2).train.x)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"domains": "mnist,uspz"}, "unknown domain 'uspz'; did you mean 'usps'"),
        ({"domains": 4}, "domains is 4; expected two or more names"),
        ({"domains": "mnist"}, "two or more different names from"),
        ({"domains": ["mnist", "mnist"]}, "two or more different names from"),
        ({"fraction": 0}, "fraction is 0; expected a number > 0 and ≤ 1"),
        ({"fraction": True}, "fraction is True"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, object], message: str, data_dir: Path) -> None:
    with pytest.raises(UserError, match=message):
        load("digits-domains", data_dir, **options)


def test_every_client_has_one_domain_and_skewed_labels(data_dir: Path) -> None:
    joined = load("digits-domains", data_dir)
    fed = federation(joined, DomainDirichlet(clients=6, beta=0.3, min_size=5), seed=1)
    assert fed.domains == ("mnist", "mnist", "usps", "usps", "svhn", "syn-digits")
    assert joined.train.domain is not None
    for indices, name in zip(fed.indices, fed.domains, strict=True):
        assert {joined.domains[d] for d in joined.train.domain[indices]} == {name}
    assert fed.unused == 0
    assert (fed.label_counts[:4] == 0).any()  # label skew within a domain, too
    assert len(fed.vacant(4)) == 0  # the only client of its domain has all of it


def test_the_domain_of_each_client_is_shown(data_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    split = ["--data", "digits-domains", "--data-dir", str(data_dir), "--partition", "domain-dirichlet"]
    command = ["partition", *split, "--clients", "4", "--set", "partition.min_size=2"]
    assert not main(command)
    assert "syn-digits" in capsys.readouterr().out
    assert not main([*command, "--json"])
    told = json.loads(capsys.readouterr().out)
    assert [group["domain"] for group in told["groups"]] == ["mnist", "usps", "svhn", "syn-digits"]


def test_the_number_of_clients_of_each_domain_may_be_said(data_dir: Path) -> None:
    joined = load("digits-domains", data_dir)
    fed = federation(joined, DomainDirichlet(clients=7, beta=5.0, min_size=1, per_domain=(1, 3, 2, 1)), seed=1)
    assert [fed.domains.count(name) for name in joined.domains] == [1, 3, 2, 1]
    for wrong in ((1, 2), (1, 1, 1, 1), (4, 1, 1, 2)):
        with pytest.raises(UserError, match="expected one number of clients for each of 4 domains, 7 in total"):
            federation(joined, DomainDirichlet(clients=7, min_size=1, per_domain=wrong), seed=1)
    with pytest.raises(UserError, match="3 clients for 4 domains; expected at least one client per domain"):
        federation(joined, DomainDirichlet(clients=3, min_size=1), seed=1)


def test_data_without_domains_cannot_be_split_by_them() -> None:
    with pytest.raises(UserError, match="the dataset has no domains; use the partition dirichlet"):
        federation("digits", DomainDirichlet(clients=4), seed=0)
    assert federation("digits", IID(4), seed=0).domains == ()


@pytest.mark.parametrize("method", ["fedavg", "fpl", "fpl+fedvls"])
@pytest.mark.parametrize("engine", ["plain", "stacked"])
def test_a_run_reports_every_domain(engine: str, method: str, data_dir: Path) -> None:
    joined: Dataset = load("digits-domains", data_dir, domains="mnist,usps,svhn")
    fed = federation(joined, DomainDirichlet(clients=3, beta=1.0, min_size=5), seed=0)
    result = run(fed, method, "dnn", rounds=2, lr=0.05, engine=engine, device="cpu", local_epochs=1)
    for row in result.history[1:]:
        assert list(row.domain_accuracy) == ["mnist", "usps", "svhn"]
    sizes = {"mnist": 20, "usps": 20, "svhn": 30}
    right = sum(result.domain_accuracy[name] * sizes[name] for name in sizes)
    assert right / 70 == pytest.approx(result.accuracy)
    assert result.summary()["domain_accuracy"] == result.domain_accuracy
