"""The user's own counts: what the CSV may look like and what is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fedskew.data import Counts
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
        ("1,2\n", "line 1: 2 columns; expected 3 classes"),
        ("1,2,3\n1,2\n", "line 2: 2 columns; expected 3"),
        ("5,1,2,3\n9,1,2,3\n", "4 columns of counts; expected 3"),
        ("1,2,3\n1,-2,3\n", "line 2 column 2: '-2'"),
        ("1,-2,3\n", "line 1 column 2: '-2'"),
        ("1,2.5,3\n", "column 2: '2.5'"),
        ("cat,dog,owl\n1,x,3\n", "line 2 column 2: 'x'"),
        ("cat,dog,awl\n1,2,3\n", "'awl'; did you mean 'owl'"),
        ("cat,dog,dog\n1,2,3\n", "no column for class 'owl'"),
        ("1,2,3\n0,0,0\n", "line 2: a client without samples"),
        ("1,2,9\n1,2,9\n", "class 'owl' adds up to 18 samples; expected at most the 10"),
        ("1,2,99999999999999999999\n", "column 3"),
        ("1,2,\x00\n", "counts.csv"),
    ],
)
def test_bad_counts_are_refused(tmp_path: Path, text: str, reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        counts(tmp_path, text)


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
