"""How a table's columns become inputs: exact numbers on small tables."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedskew.data.table_encoding import RawTable, Strings, TableEncoding, fit_encoding, read_encoding
from fedskew.errors import UserError

NAN = float("nan")


def strings(*texts: str | None) -> Strings:
    values = tuple(dict.fromkeys(text for text in texts if text is not None))
    return Strings(values, np.array([-1 if text is None else values.index(text) for text in texts]))


def table(numbers: list[list[float]], town: Strings) -> RawTable:
    return RawTable(("age", "town", "pulse"), np.array(numbers), {"town": town})


TRAIN = table([[1.0, 10.0], [3.0, NAN], [5.0, 30.0]], strings("Bonn", "Rome", None))


def test_numbers_are_standardised_categories_one_hot_and_gaps_marked() -> None:
    encoding = fit_encoding(TRAIN)
    assert encoding.features == ("age", "town=Bonn", "town=Rome", "town missing", "pulse", "pulse missing")
    root = (8 / 3) ** 0.5
    expected = [[-2 / root, 1, 0, 0, -1, 0], [0, 0, 1, 0, 0, 1], [2 / root, 0, 0, 1, 1, 0]]
    np.testing.assert_allclose(encoding.encode(TRAIN), expected, rtol=1e-6)
    assert encoding.scaling == ((3.0, root), (0, 1), (0, 1), (0, 1), (20.0, 10.0), (0, 1))
    assert encoding.encode(TRAIN).dtype == np.float32


def test_unknown_values_and_new_gaps_become_zeros() -> None:
    encoding = fit_encoding(TRAIN)
    test = table([[NAN, NAN], [3.0, 20.0]], strings("Oslo", None))
    np.testing.assert_array_equal(encoding.encode(test), [[0, 0, 0, 0, 0, 1], [0, 0, 0, 1, 0, 0]])
    (town,) = encoding.unknown_values([TRAIN, test])
    assert (town.column.name, town.values, town.rows, town.known_rows) == ("town", ("Oslo",), 1, 2)
    assert encoding.unknown_values([TRAIN]) == []


def test_a_constant_column_becomes_zero_and_stays_small_for_other_values() -> None:
    constant = RawTable(("a", "b"), np.array([[0.1, NAN], [0.1, 7.0], [0.1, 7.0]]), {})
    encoding = fit_encoding(constant)
    np.testing.assert_allclose(encoding.encode(constant)[:, :2], 0, atol=1e-15)
    assert abs(encoding.encode(RawTable(("a", "b"), np.array([[0.2, 8.0]]), {}))).max() <= 1


def test_an_encoding_survives_its_file(tmp_path: Path) -> None:
    encoding = fit_encoding(TRAIN)
    encoding.save(tmp_path / "encoding.json")
    assert read_encoding(str(tmp_path / "encoding.json")) == encoding
    assert read_encoding(json.loads(json.dumps(encoding.to_json()))) == encoding
    assert read_encoding(encoding) is encoding


@pytest.mark.parametrize("indent", ["\t", 2, None])
def test_json_has_escapes_and_tabs_that_yaml_does_not_read(tmp_path: Path, indent: str | int | None) -> None:
    columns = [{"name": "mood", "categories": ["\U0001f600", "é"]}]
    (tmp_path / "e.json").write_text(json.dumps(columns, indent=indent), encoding="utf-8-sig")
    assert read_encoding(tmp_path / "e.json").columns[0].categories == ("\U0001f600", "é")


@pytest.mark.parametrize(("words", "expected"), [("yes, No", ("yes", "No")), ("false, True", ("False", "True"))])
def test_words_in_yaml_are_categories(tmp_path: Path, words: str, expected: tuple[str, ...]) -> None:
    (tmp_path / "e.yaml").write_text(f"- {{name: smoker, categories: [{words}], marks_gaps: true}}\n")
    (column,) = read_encoding(tmp_path / "e.yaml").columns
    assert (column.categories, column.marks_gaps) == (expected, True)


def test_a_person_may_write_the_file(tmp_path: Path) -> None:
    (tmp_path / "e.yaml").write_text("columns:\n- {name: age, mean: 60, std: 15}\n- {name: sex, categories: [f, m]}\n")
    encoding = read_encoding(tmp_path / "e.yaml")
    assert encoding.features == ("age", "sex=f", "sex=m")
    assert not encoding.only_numbers


@pytest.mark.parametrize(
    ("content", "line"),
    [
        ("3", "not a list of columns"),
        ("[]", "not a list of columns"),
        ("[age]", "'age' is not a column"),
        ("[{name: age, average: 3}]", "column 'age' has the key 'average'; expected name, mean, std, categories,"),
        ("[{name: age, mean: old}]", "mean or std of 'age' is not a number; expected"),
        ("[{name: age, marks_gaps: 'false'}]", "marks_gaps of 'age' is 'false'; expected true or false"),
        ("[{name: age, std: 0}]", "column 'age' has mean 0 and std 0; expected finite numbers, and std above 0"),
        ("[{name: sex, categories: f}]", "categories of 'sex' are 'f'; expected a list"),
        ("[{name: sex, categories: [f, f]}]", "a category of 'sex' is listed twice"),
        ("[{name: a}, {name: a}]", "column 'a' appears twice"),
        ("[{name: a, categories: [b]}, {name: a=b}]", "two inputs are called 'a=b'"),
        ("{", "neither JSON nor YAML"),
    ],
)
def test_mistakes_in_the_file_get_one_line(tmp_path: Path, content: str, line: str) -> None:
    (tmp_path / "e.yaml").write_text(content)
    with pytest.raises(UserError) as caught:
        read_encoding(str(tmp_path / "e.yaml"))
    assert line in str(caught.value)
    with pytest.raises(UserError, match="cannot read"):
        read_encoding(str(tmp_path / "absent.yaml"))


def test_an_encoding_of_numbers_only_says_so() -> None:
    only: dict[str, Any] = {"name": "age", "mean": 1.0, "std": 2.0, "marks_gaps": False}
    assert TableEncoding.from_json([only]).only_numbers
    assert not TableEncoding.from_json([only | {"marks_gaps": True}]).only_numbers
