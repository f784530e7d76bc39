"""The user's own counts: what the CSV may look like and what is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fedskew.data import Counts, Dataset, Federation, Samples, federation
from fedskew.data.partitions.rule import Labels
from fedskew.errors import UserError

LABELS = np.repeat(np.arange(3), 10)
NAMES = ("cat", "dog", "owl")
WANTED = [[10, 0, 2], [0, 3, 4]]


def counts(tmp_path: Path, text: str, names: tuple[str, ...] = NAMES) -> list[list[int]]:
    path = tmp_path / "counts.csv"
    path.write_text(text, encoding="utf-8")
    parts = Counts(path).split(LABELS, 3, 0, names=names)
    return [np.bincount(LABELS[part], minlength=3).tolist() for part in parts]


@pytest.mark.parametrize(
    "text",
    [
        "10,0,2\n0,3,4\n",
        "cat,dog,owl\n10,0,2\n0,3,4\n",
        "\ufeffcat, dog, owl\r\n10, 0, 2\r\n\r\n0, 3, 4\r\n",
        "owl,cat,dog\n2,10,0\n4,0,3\n",
        "client,cat,dog,owl\nward A,10,0,2\nward B,0,3,4\n",
        ",owl,cat,dog\n0,2,10,0\n1,4,0,3\n",
        "ward A,10,0,2\nward B,0,3,4\n",
        "0,10,0,2\n1,0,3,4\n",
        "1,10,0,2\n2,0,3,4\n",
        "site;Cat;Dog;Owl\nA;10.0;0;2\nB;0;3;4\n",
        "site,cat,dog,owl,total\nA,10,0,2,12\nB,0,3,4,7\ntotal,10,3,6,19\n",
    ],
)
def test_header_and_client_names_are_optional(tmp_path: Path, text: str) -> None:
    assert counts(tmp_path, text) == WANTED


def test_a_first_row_with_numbered_class_names_is_a_header(tmp_path: Path) -> None:
    assert counts(tmp_path, "client,0,1,2\n0,10,0,2\n1,0,3,4\n", ("0", "1", "2")) == WANTED
    assert counts(tmp_path, "0,1,2\n10,0,2\n0,3,4\n", ("0", "1", "2")) == WANTED


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "is empty"),
        ("cat,dog,owl\n", "no clients"),
        ("1,2,3\n1,2\n", "line 2: 2 columns; expected 3"),
        ("5,1,2,3\n9,1,2,3\n", "4 columns of counts; expected 3"),
        ("1,2,3\n1,-2,3\n", "line 2 column 2: '-2'"),
        ("1,-2,3\n", "line 1 column 2: '-2'"),
        ("1,2.5,3\n", "column 2: '2.5'"),
        ("cat,dog,owl\n1,x,3\n", "line 2 column 2: 'x'"),
        ("cat,dog,awl\n1,2,3\n", "'awl'; did you mean 'owl'"),
        ("cat,dog,dog\n1,2,3\n", "two classes are called 'dog'"),
        ("1,2,3\n0,0,0\n", "client '1' has no samples"),
        ("1,2,1\n" * 11, "class 'cat' has 10 samples to share among 11 clients"),
        ("1,2,99999999999999999999\n", "column 3"),
        ("1,2,\x00\n", "counts.csv"),
    ],
)
def test_bad_counts_are_refused(tmp_path: Path, text: str, reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        counts(tmp_path, text)


def arranged(tmp_path: Path, text: str) -> Federation:
    path = tmp_path / "sites.csv"
    path.write_text(text, encoding="utf-8")
    x = np.arange(30, dtype=np.float32)[:, None]
    samples = Samples(x, LABELS)
    return federation(Dataset("pets", "table", NAMES, samples, samples), Counts(path), seed=0)


def test_counts_beyond_the_data_are_scaled_by_one_factor_that_is_said(tmp_path: Path) -> None:
    fed = arranged(tmp_path, "site,cat,dog,owl\nRome,40,0,10\nOslo,1,9,10\n")
    assert fed.label_counts.tolist() == [[9, 0, 2], [1, 2, 2]]
    assert fed.client_names == ("Rome", "Oslo")
    (note,) = fed.notes
    assert "counts scaled by 0.244, because pets has fewer samples" in note
    assert fed.resplit(1).label_counts.tolist() == fed.label_counts.tolist()


def test_scaling_keeps_proportions_and_every_nonzero_count(tmp_path: Path) -> None:
    rows = np.random.default_rng(0).integers(0, 2000, (4, 3))
    rows[2, 1] = 0
    fed = arranged(tmp_path, "\n".join(",".join(map(str, row)) for row in rows))
    factor = (10 / rows.sum(axis=0)).min()
    assert (np.abs(fed.label_counts - rows * factor) <= 1).all()
    assert ((fed.label_counts > 0) == (rows > 0)).all()


def test_fewer_classes_by_name_leave_the_others_out_of_the_data(tmp_path: Path) -> None:
    fed = arranged(tmp_path, "owl,cat\n3,4\n5,0\n")
    assert fed.dataset.classes == ("cat", "owl")
    assert fed.label_counts.tolist() == [[4, 3], [0, 5]]
    assert sorted(np.unique(fed.dataset.test.y)) == [0, 1]
    assert set(fed.dataset.test.x[fed.dataset.test.y == 1, 0]) == set(range(20, 30)), "owls are still owls"
    assert "no column for dog; classes without a column are left out" in fed.notes[0]
    assert fed.client_names == ()


def test_classes_that_differ_only_in_case_are_told_apart(tmp_path: Path) -> None:
    assert counts(tmp_path, "a,A,b\n10,0,2\n0,3,4\n", ("a", "A", "b")) == WANTED
    assert counts(tmp_path, "A,B,a\n0,2,10\n3,4,0\n", ("a", "A", "b")) == WANTED


def test_other_classes_go_by_place_and_keep_the_file_s_names(tmp_path: Path) -> None:
    fed = arranged(tmp_path, "site,flu,cold\nRome,3,4\nOslo,5,0\n")
    assert fed.dataset.classes == ("flu", "cold")
    assert fed.label_counts.tolist() == [[3, 4], [5, 0]]
    assert "classes of pets stand in for yours: flu = cat, cold = dog" in fed.notes[0]
    assert fed.resplit(3).dataset.classes == ("flu", "cold")


def test_more_classes_share_the_data_s(tmp_path: Path) -> None:
    fed = arranged(tmp_path, "site,a,b,c,d\nRome,1,2,3,4\nOslo,1,1,1,1\n")
    assert fed.dataset.classes == NAMES
    assert fed.label_counts.tolist() == [[5, 2, 3], [2, 1, 1]]
    assert "--data synthetic --set data.classes=4" in fed.notes[0]


def test_a_restricted_federation_keeps_the_names(tmp_path: Path) -> None:
    fed = arranged(tmp_path, "site,cat,dog,owl\nRome,4,0,1\nOslo,1,2,1\n")
    assert fed.restrict([0]).client_names == ("Rome", "Oslo")


def test_a_missing_or_binary_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"missing\.csv: No such file"):
        Counts(tmp_path / "missing.csv").split(LABELS, 3, 0)
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00\x01")
    with pytest.raises(UserError, match=r"binary\.csv"):
        Counts(tmp_path / "binary.csv").split(LABELS, 3, 0)


def test_a_header_with_a_wrong_number_is_not_taken_for_a_client(tmp_path: Path) -> None:
    path = tmp_path / "counts.csv"
    path.write_text("client,1,2,3\na,1,1,1\n")
    labels = Labels(np.repeat([0, 1, 2], 5), ("0", "1", "2"))
    with pytest.raises(UserError, match=r"unknown class in .*: '3'"):
        Counts(path).counts(labels, 0)


def test_a_folder_of_histograms_is_read_as_diagnose_reads_it(tmp_path: Path) -> None:
    (tmp_path / "Rome.csv").write_text("cat,4\nowl,1\n")
    (tmp_path / "Oslo.json").write_text('{"dog": 3}')
    samples = Samples(np.arange(30, dtype=np.float32)[:, None], LABELS)
    fed = federation(Dataset("pets", "table", NAMES, samples, samples), Counts(tmp_path), seed=0)
    assert fed.client_names == ("Oslo", "Rome")
    assert fed.label_counts.tolist() == [[0, 3, 0], [4, 0, 1]]
