"""Counts as people have them: with and without header and names, as one file or one file a client."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fedskew.data.label_counts import read_counts
from fedskew.errors import UserError


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
        ("site\ta, b\tc\nRome\t1\t2\n", ("Rome",), ("a, b", "c"), [1, 2]),
        ("site,a,b\nRome,1.0,2.\n", ("Rome",), ("a", "b"), [1, 2]),
        ("site;a;b\nRome;1,0;2,00\n", ("Rome",), ("a", "b"), [1, 2]),
        ("hospital,a,b\n0,1,2\n", ("0",), ("a", "b"), [1, 2]),
    ],
)
def test_a_table_is_understood(
    text: str, clients: tuple[str, ...], classes: tuple[str, ...], first: list[int], tmp_path: Path
) -> None:
    found = read_counts(written(tmp_path / "counts.csv", text))
    assert found.clients == clients
    assert found.classes == classes
    assert found.counts[0].tolist() == first


@pytest.mark.parametrize(
    ("text", "dropped"),
    [
        ("site,a,b,Total\nRome,1,2,3\nOslo,3,4,7\n", ["column 3"]),
        ("site,total,a,b\nRome,3,1,2\nOslo,7,3,4\n", ["column 1"]),
        ("site;a;b\nRome;1;2\nOslo;3;4\nGesamt;4;6\n", ["row 3"]),
        ("site;a;b\nall sites;4;6\nRome;1;2\nOslo;3;4\n", ["row 1"]),
        ("site,a,b,sum\nRome,1,2,3\nOslo,3,4,7\nALL,4,6,10\n", ["column 3", "row 3"]),
        ("100,200\n300,400\n400,600\n", ["row 3"]),
        (",a,b\nRome,100,200\nOslo,300,400\n,400,600\n", ["row 3"]),
    ],
)
def test_a_total_is_left_out_with_a_note(text: str, dropped: list[str], tmp_path: Path) -> None:
    found = read_counts(written(tmp_path / "counts.csv", text))
    scale = 100 if "100" in text else 1
    assert (found.counts // scale).tolist() == [[1, 2], [3, 4]]
    assert len(found.notes) == len(dropped)
    for what, note in zip(dropped, found.notes, strict=True):
        assert f"{what} of the counts is the sum of the others and was left out" in note


def test_a_client_that_happens_to_have_the_sum_of_the_others_is_kept(tmp_path: Path) -> None:
    for text in ("1,0\n0,1\n1,1\n", "site,a,b\nRome,100,0\nOslo,0,100\nBerlin,100,100\n"):
        found = read_counts(written(tmp_path / "counts.csv", text))
        assert len(found.clients) == 3
        assert found.notes == ()


def test_a_total_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="column 'total' is not the sum of the others"):
        read_counts(written(tmp_path / "counts.csv", "site,a,b,total\nRome,1,2,4\n"))
    (tmp_path / "h").mkdir()
    written(tmp_path / "h" / "rome.json", '{"a": 1, "b": 2, "total": 4}')
    with pytest.raises(UserError, match="'total' is not the sum"):
        read_counts(tmp_path / "h")


def test_a_class_with_the_name_of_a_total_is_to_be_renamed(tmp_path: Path) -> None:
    # ALL is acute lymphoblastic leukaemia.
    with pytest.raises(UserError, match=r"column 'ALL' is not the sum of the others; .* rename it if it is a class"):
        read_counts(written(tmp_path / "counts.csv", "site,AML,ALL\nRome,1,2\nOslo,3,1\n"))
    with pytest.raises(UserError, match=r"row 'all' is not the sum of the others; .* rename it if it is a client"):
        read_counts(written(tmp_path / "counts.csv", "site,a,b\nall,1,2\nOslo,3,1\n"))


def test_a_histogram_s_total_is_left_out(tmp_path: Path) -> None:
    written(tmp_path / "rome.csv", "class;count\na;1\nb;2\ntotal;3\n")
    assert read_counts(tmp_path).counts.tolist() == [[1, 2]]


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
        ("a,b\n1,two\n", "line 2 column 2: 'two'"),
        ("a,b\n1,-2\n", "expected a number of samples"),
        ("1,-2,3\n4,5,6\n", "line 1 column 2: '-2'"),
        ("1.5,2,3\n4,5,6\n", "line 1 column 1: '1.5'"),
        ('site,a,b\nRome,"1,000",2\n', "line 2 column 2: '1,000'; expected .*without a separator for thousands"),
        ("site;a;b\nRome;1.000;2\n", "line 2 column 2: '1.000'"),
        ("1,,3\n4,5,6\n", "line 1 column 2: ''"),
        ("a,b\n1\n", "1 column; expected 2"),
        ("a,b\n", "no clients"),
        ("a,b\n1,2\n0,0\n", "client '1' has no samples"),
        ("client,a\n0,1\n", "counts of one class; expected at least 2 classes"),
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


@pytest.mark.parametrize("count", ["-3", "1.5", "1.000"])
def test_a_wrong_count_in_the_first_row_of_a_histogram_is_no_header(count: str, tmp_path: Path) -> None:
    written(tmp_path / "Rome.csv", f"cat,{count}\ndog,4\n")
    with pytest.raises(UserError, match=rf"Rome.csv line 1 column 2: '{count}'; expected a number of samples"):
        read_counts(tmp_path)


def test_a_class_that_a_histogram_lists_twice_is_refused(tmp_path: Path) -> None:
    written(tmp_path / "rome.csv", "class,count\na,1\nb,2\na,3\n")
    with pytest.raises(UserError, match="class 'a' appears twice; expected each class once"):
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


def test_a_histogram_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"x": 1, "y": 2}', encoding="utf-8-sig")
    assert read_counts(tmp_path).counts.tolist() == [[1, 2]]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ('{"x": 99999999999999999999, "y": 2}', "expected an object"),
        ('{"x": 1, "y": 2, "x": 3}', "class 'x' appears twice; expected each class once"),
    ],
)
def test_a_wrong_histogram_in_json_is_refused(text: str, complaint: str, tmp_path: Path) -> None:
    written(tmp_path / "a.json", text)
    with pytest.raises(UserError, match=complaint):
        read_counts(tmp_path)


def test_a_table_of_names_only_has_no_class(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="counts of no class; expected at least 2 classes"):
        read_counts(written(tmp_path / "names.csv", "hospital\nRome\nOslo\n"))
