"""pyarrow and Python's csv module read the same table from a CSV file, so that sites with and without pyarrow agree."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedskew.data import load
from fedskew.data.own.columns import Cells, as_label_values
from fedskew.data.own.table_files import csv_table
from fedskew.errors import UserError

ROWS = 24
NUMBERS = ("0", "1", "2", "10", "0.5", "-3", "+1", "1e3", "1.", ".5", "00", "9007199254740993", "9007199254740995")
ODD_NUMBERS = ("1_000", "0x10", "1,5", "inf", "-Infinity", "1e400", "nan(x)", "-nan", "١", "1 2", "--1", "5 kg")
GAPS = ("", "NA", "nan", "NaN", "null", "None", "?", "n/a")
BOOLEANS = ("true", "false", "True", "False", "TRUE", "FALSE")
TEXTS = ("a", "b", "A", "é", "a b", 'say "a"', "x,y", "two\nlines", "unknown", "ΑΣ", "ας")
CONTENTS = (NUMBERS, BOOLEANS, TEXTS)
MIXTURES = (*CONTENTS, ODD_NUMBERS, *((*c, *GAPS) for c in CONTENTS), NUMBERS + ODD_NUMBERS, NUMBERS + TEXTS + BOOLEANS)
SPACES = (("",), ("", " "), ("", "  ", "\t", "\v", "\u00a0", "\u2003", "\x1c"))


@st.composite
def columns(draw: st.DrawFn, fewest: int = 1) -> list[str]:
    """A column that repeats up to six cells, at least `fewest`, perhaps with spaces and quotes."""
    contents = draw(st.lists(st.sampled_from(draw(st.sampled_from(MIXTURES))), min_size=fewest, max_size=6))
    spaces, quotes = st.sampled_from(draw(st.sampled_from(SPACES))), draw(st.sampled_from(("", "", '"')))
    pattern = [cell(draw(spaces) + content + draw(spaces), quotes) for content in contents]
    return [pattern[row % len(pattern)] for row in range(ROWS)]


def cell(text: str, quotes: str) -> str:
    quotes = '"' if any(mark in text for mark in '",\n') else quotes
    return quotes + text.replace('"', '""') + quotes


TABLES = st.fixed_dictionaries({"label": columns(2), "a": columns()}, optional={"b": columns(), "site": columns()})
OPTIONS = st.fixed_dictionaries(
    {"label": st.just("label")},
    optional={
        "decimal": st.just(","),
        "missing": st.sampled_from(("unknown", "-3", "1.0", "ας", "A")),
        "categorical": st.just("a"),
    },
)


def csv_text(table: dict[str, list[str]]) -> str:
    return "\n".join([",".join(table), *map(",".join, zip(*table.values(), strict=True))]) + "\n"


def outcome(path: Path, **options: Any) -> object:
    """What is read from the file, or the message with which it is refused."""
    try:
        data = load(path, **options)
    except UserError as error:
        return str(error)
    encoding = None if data.encoding is None else data.encoding.to_json()
    parts = [(p.x.tolist(), p.y.tolist(), None if p.site is None else p.site.tolist()) for p in (data.train, data.test)]
    return data.kind, data.classes, data.columns, data.sites, data.notes, encoding, parts


def is_read_by_pyarrow(path: Path) -> bool:
    return not any(isinstance(cells.content, list) for cells in csv_table(path, ",").columns.values())


@given(TABLES, OPTIONS)
def test_both_readers_read_the_same_table(
    tmp_path_factory: pytest.TempPathFactory, table: dict[str, list[str]], options: dict[str, str]
) -> None:
    path = tmp_path_factory.getbasetemp() / "readers.csv"
    path.write_text(csv_text(table), encoding="utf-8")
    options = options | ({"site": "site"} if "site" in table else {})
    assert is_read_by_pyarrow(path)
    with_pyarrow = outcome(path, **options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "pyarrow", None)
        assert not is_read_by_pyarrow(path)
        assert outcome(path, **options) == with_pyarrow


@pytest.fixture(params=["pyarrow", "csv"])
def _reader(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read CSV files with pyarrow, or as if it were not installed."""
    if request.param == "csv":
        monkeypatch.setitem(sys.modules, "pyarrow", None)


@pytest.mark.usefixtures("_reader")
def test_spaces_around_labels_do_not_change_the_order_of_classes(tmp_path: Path) -> None:
    path = tmp_path / "spaces.csv"
    path.write_text("a, label\n" + "0.37, 1\n0.5, 10 \n0.1,+2\n" * 10)
    dataset = load(path)
    assert dataset.classes == ("1", "2", "10")
    assert np.bincount(dataset.train.y).tolist() == [8, 8, 8]


@pytest.mark.usefixtures("_reader")
@pytest.mark.parametrize("labels", [("1", "2"), ("9007199254740993", "9007199254740995"), ("ill", "well")])
@pytest.mark.parametrize("decimal", [".", ","])
def test_a_missing_label_is_refused(tmp_path: Path, labels: tuple[str, str], decimal: str) -> None:
    path = tmp_path / "gap.csv"
    path.write_text("a;label\n" + f"1;{labels[0]}\n2;{labels[1]}\n" * 30 + "3; \n")
    with pytest.raises(UserError, match=r"no label in line 62; expected one for every sample"):
        load(path, decimal=decimal)


def test_a_missing_cell_among_large_labels_stays_a_gap() -> None:
    labels = ["9007199254740993", "", "9007199254740995"]
    for content in (labels, pyarrow.array(labels)):
        assert list(as_label_values(Cells(content))) == ["9007199254740993", None, "9007199254740995"]
    assert list(as_label_values(Cells(labels[::2]))) == [9007199254740993, 9007199254740995]


@pytest.mark.usefixtures("_reader")
def test_nan_with_words_in_brackets_is_no_number(tmp_path: Path) -> None:
    path = tmp_path / "words.csv"
    path.write_text("a,label\n" + "1,x\n2.5,y\n" * 10 + "nan(x),x\n")
    with pytest.raises(UserError, match=r"'nan\(x\)' in column 'a', line 22; expected a number"):
        load(path)


@pytest.mark.usefixtures("_reader")
def test_a_delimiter_need_not_be_ascii(tmp_path: Path) -> None:
    path = tmp_path / "paragraphs.csv"
    path.write_text("a§label\n" + "1§x\n2§y\n" * 10, encoding="utf-8")
    assert load(path, delimiter="§").classes == ("x", "y")
