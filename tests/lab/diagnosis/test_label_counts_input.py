"""Counts as people have them: with and without header and names, as one file or one file a client."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fedskew.errors import UserError
from fedskew.lab.diagnosis.label_counts import read_counts


def written(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("text", "clients", "classes", "first"),
    [
        ("site,cat,dog\nBerlin,1,2\nRome,3,4\n", ("Berlin", "Rome"), ("cat", "dog"), [1, 2]),
        ("cat,dog\n1,2\n3,4\n", ("0", "1"), ("cat", "dog"), [1, 2]),
        ("7,2\n3,4\n", ("0", "1"), ("0", "1"), [7, 2]),
        ("Berlin,1,2\nRome,3,4\n", ("Berlin", "Rome"), ("0", "1"), [1, 2]),
        ("0,5,2\n1,3,4\n", ("0", "1"), ("0", "1"), [5, 2]),
        (",1,0\nx,5,2\n", ("x",), ("1", "0"), [5, 2]),
        ("0,1,2\n7,8,9\n", ("0",), ("0", "1", "2"), [7, 8, 9]),
        ("\ufeffclient,a,b\n\n0,1,2\n", ("0",), ("a", "b"), [1, 2]),
        ("site;a;b\nRome;1;2\n", ("Rome",), ("a", "b"), [1, 2]),
    ],
)
def test_a_table_is_understood(
    text: str, clients: tuple[str, ...], classes: tuple[str, ...], first: list[int], tmp_path: Path
) -> None:
    found = read_counts(written(tmp_path / "counts.csv", text))
    assert found.clients == clients
    assert found.classes == classes
    assert found.counts[0].tolist() == first


def test_histograms_of_a_folder_are_put_together(tmp_path: Path) -> None:
    written(tmp_path / "berlin.csv", "class,count\n2,5\n10,7\n")
    written(tmp_path / "rome.json", json.dumps({"9": 4, "2": 0}))
    found = read_counts(tmp_path)
    assert found.clients == ("berlin", "rome")
    assert found.classes == ("2", "9", "10"), "numbers in their order"
    assert found.counts.tolist() == [[5, 0, 7], [0, 4, 0]]


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("a,b\n1,two\n", "'two' in column 2"),
        ("a,b\n1,-2\n", "expected a number of samples"),
        ("1,-2,3\n4,5,6\n", "'-2' in column 2 of client row 1"),
        ("1.5,2,3\n4,5,6\n", "'1.5' in column 1 of client row 1"),
        ("1,,3\n4,5,6\n", "'' in column 2 of client row 1"),
        ("a,b\n1\n", "1 cells; expected 2"),
        ("a,b\n", "no clients"),
        ("a,b\n1,2\n0,0\n", "client '1' has no samples"),
        ("client,a\n0,1\n", "expected two or more"),
        ("", "is empty"),
        ("client,a,a\nx,1,2\n", "two classes are called 'a'"),
        ("client,a,b\nx,1,2\nx,3,4\n", "two clients are called 'x'"),
    ],
)
def test_what_is_wrong_is_named(text: str, error: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=error):
        read_counts(written(tmp_path / "counts.csv", text))


def test_no_file_and_an_empty_folder_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no file or folder"):
        read_counts(tmp_path / "none.csv")
    with pytest.raises(UserError, match="expected one histogram per client"):
        read_counts(tmp_path)


def test_two_histograms_of_one_client_are_refused(tmp_path: Path) -> None:
    written(tmp_path / "a.csv", "x,1\ny,2\n")
    written(tmp_path / "a.json", '{"x": 1, "y": 2}')
    with pytest.raises(UserError, match="two histograms for one client"):
        read_counts(tmp_path)


def test_true_is_no_number_of_samples(tmp_path: Path) -> None:
    written(tmp_path / "a.json", '{"x": true, "y": 2}')
    with pytest.raises(UserError, match="expected an object"):
        read_counts(tmp_path)
