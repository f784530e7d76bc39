"""Tables as users bring them: each is read without losing anything, or refused in one line that says why."""

from __future__ import annotations

import gzip
import io
from collections.abc import Callable
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import fedskew as fs
from fedskew.data.own.labels import ClassesElsewhere

N = 30
AGES = [f"{20 + i % 7}.5" for i in range(N)]
LABELS = [("ill", "well")[i % 2] for i in range(N)]


def damaged(content: bytes) -> bytes:
    """The content, with bytes in the middle changed."""
    return content[:20] + bytes(255 - byte for byte in content[20:60]) + content[60:]


def csv(label: list[str] | None = None, delimiter: str = ",", end: str = "\n", **columns: list[str]) -> str:
    """A CSV file with the columns `age`, those given, and `y`."""
    table = {"age": AGES, **columns, "y": label or LABELS}
    lines = [delimiter.join(table), *(delimiter.join(cells) for cells in zip(*table.values(), strict=True))]
    return end.join(lines) + end


def cells(*values: str) -> list[str]:
    """Thirty cells that repeat these values."""
    return [values[i % len(values)] for i in range(N)]


def quoted(*values: str) -> list[str]:
    return cells(*(f'"{value}"' for value in values))


@dataclass
class Case:
    """One table. It is refused with `line`, or read with these rows, columns, classes and notes."""

    name: str
    content: Any
    line: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    rows: int = N
    columns: tuple[str, ...] = ("age", "x")
    classes: tuple[str, ...] = ("ill", "well")
    note: str = ""
    check: Callable[[fs.Dataset], bool] | None = None
    suffix: str = ".csv"


def arrow(**columns: Any) -> pa.Table:
    return pa.table({"age": [float(age) for age in AGES], **columns, "y": LABELS})


def frame(**columns: Any) -> pd.DataFrame:
    return pd.DataFrame({"age": [float(age) for age in AGES], **columns, "y": LABELS})


def raw(dataset: fs.Dataset, column: str) -> set[float]:
    """The different values of an input before it was standardised."""
    place = dataset.columns.index(column)
    mean, std = dataset.scaling[place]
    values = np.concatenate([dataset.train.x[:, place], dataset.test.x[:, place]])
    return {round(float(value), 4) for value in values * std + mean}


def parquet_bytes(table: pa.Table) -> bytes:
    file = io.BytesIO()
    pq.write_table(table, file)
    return file.getvalue()


DIFFERENT = [f"text number {i}" for i in range(N)]
FILES = [
    # Nothing, or too little
    Case("empty file", "", "no rows; expected a line of column names"),
    Case("only line ends", "\n\n\n", "no rows"),
    Case("only a header", "age,y\n", "no rows"),
    Case("only a header with a BOM", "\ufeffage,y\n", "no rows"),
    Case("one row", "age,y\n3,ill\n", "1 sample is too few to hold out 0.2 of each class"),
    Case("one class", csv(cells("ill"), x=cells("1")), "has one class (ill); expected at least 2 classes"),
    Case("only the label", "y\n" + "ill\nwell\n" * 9, "no column besides the label 'y'"),
    # The shape of the file
    Case("a cell too many", csv(x=cells("1")) + "1,2,ill,4\n", "line 32 has 4 cells; expected 3"),
    Case("a cell too few", csv(x=cells("1")) + "1,ill\n", "line 32 has 2 cells; expected 3"),
    Case("an unclosed quote", csv(x=['"1', *cells("1")[1:]]), "cells; expected 3"),
    Case("repeated names", csv(x=cells("1")).replace("age", "x"), "column 'x' appears twice"),
    Case("a delimiter at the end of lines", csv(x=cells("1", "2")).replace("\n", ",\n")),
    Case("semicolons", csv(x=cells("1", "2"), delimiter=";")),
    Case("tabs", csv(x=cells("1", "2"), delimiter="\t")),
    Case("tabs in a .tsv file", csv(x=cells("1", "2"), delimiter="\t"), suffix=".tsv"),
    Case("bars", csv(x=cells("1", "2"), delimiter="|"), options={"delimiter": "|"}),
    Case("a delimiter of two characters", csv(), "delimiter is '::'; expected one character", {"delimiter": "::"}),
    Case("line ends of Windows", csv(x=cells("1", "2"), end="\r\n")),
    Case("line ends of old Macs", csv(x=cells("1", "2"), end="\r")),
    Case("blank lines", csv(x=cells("1", "2")).replace("\n", "\n\n")),
    Case("spaces after commas", csv(x=cells("1", "2")).replace(",", ", ")),
    Case("line ends and commas within quotes", csv(x=quoted("a,\nb", "c")), columns=("age", "x=a,\nb", "x=c")),
    # Bytes
    Case("a BOM", "\ufeff" + csv(x=cells("1", "2"))),
    Case("Latin-1", csv(x=cells("Köln", "Bonn")).encode("latin-1"), "not UTF-8 text (byte 0xf6)"),
    Case("UTF-16", csv(x=cells("1")).encode("utf-16"), "not UTF-8 text"),
    Case("zero bytes", csv(x=cells("1", "\0")), columns=("age", "x=\0", "x=1")),
    Case("umlauts in UTF-8", csv(x=cells("Köln", "Bonn")), columns=("age", "x=Bonn", "x=Köln")),
    Case("not gzipped", csv(), "cannot be read", suffix=".csv.gz"),
    Case("cut off", gzip.compress(csv(x=DIFFERENT).encode())[:-30], "cannot be read", suffix=".csv.gz"),
    Case("damaged inside", damaged(gzip.compress(csv(x=DIFFERENT).encode())), "cannot be read", suffix=".csv.gz"),
    Case("gzipped", gzip.compress(csv(x=cells("1", "2")).encode()), suffix=".csv.gz"),
    # Numbers
    Case("infinity", csv(x=["inf", *cells("1")[1:]]), "infinite value in column 'x', line 2"),
    Case("minus infinity", csv(x=["-Infinity", *cells("1")[1:]]), "infinite value in column 'x', line 2"),
    Case("too large for a double", csv(x=["1e999", *cells("1")[1:]]), "infinite value in column 'x', line 2"),
    Case("too large to be squared", csv(x=cells("1e300", "-1e300")), "column 'x' are too large to be standardised"),
    Case("huge whole numbers", csv(x=cells("9" * 30, "1")), check=lambda d: max(raw(d, "x")) > 9e29),
    Case("a word among numbers", csv(x=["forty", *cells("1")[1:]]), "'forty' in column 'x', line 2; expected a number"),
    Case("decimal commas", csv(x=cells("1,5", "2"), delimiter=";"), "holds '1,5'; expected numbers; if the comma"),
    Case(
        "decimal commas, said",
        csv(x=cells("1,5", "2"), delimiter=";").replace(".5;", ",5;"),
        options={"decimal": ","},
        check=lambda d: raw(d, "x") == {1.5, 2.0},
    ),
    Case("a decimal mark that is none", csv(), "decimal is '|'; expected . or ,", {"decimal": "|"}),
    Case("thousands", csv(x=quoted("1,234", "5,678")), "holds '1,234'; expected numbers"),
    Case(
        "units", csv(x=[f"{60 + i % 15} bpm" for i in range(N)]), "holds numbers with the unit 'bpm', such as '60 bpm'"
    ),
    Case("numbers in scientific notation", csv(x=cells("1e3", "2E-1")), check=lambda d: raw(d, "x") == {1000.0, 0.2}),
    Case("underscores in numbers", csv(x=cells("1_000", "2_000")), columns=("age", "x=1_000", "x=2_000")),
    Case("a constant column", csv(x=cells("7")), note="x has only one value in the training part"),
    Case("true and false", csv(x=cells("true", "False")), check=lambda d: raw(d, "x") == {0.0, 1.0}),
    # Gaps
    Case(
        "gaps",
        csv(x=cells("1", "", "NA", "nan", "NULL", "?", "n/a", "2")),
        columns=("age", "x", "x missing"),
        note="gaps in x (23); the mean replaces missing numbers, and 1 more input marks the gaps",
    ),
    Case(
        "gaps among categories",
        csv(x=cells("a", "", "b")),
        columns=("age", "x=a", "x=b", "x missing"),
        note="gaps in x (10); a missing category is 0 in all inputs of its column, and 1 more input marks the gaps",
    ),
    Case(
        "a marker of gaps",
        csv(x=cells("1", "-999", "2")),
        options={"missing": -999},
        columns=("age", "x", "x missing"),
        check=lambda d: raw(d, "x") == {1.0, 1.5, 2.0},
    ),
    Case(
        "a word for gaps",
        csv(x=cells("1", "unknown", "2")),
        options={"missing": ["unknown"]},
        columns=("age", "x", "x missing"),
    ),
    Case("no value at all", csv(x=cells("")), "column 'x' has no value; leave it out with drop=x"),
    Case("only NA", csv(x=cells("NA")), "column 'x' has no value; leave it out with drop=x"),
    # Categories and texts
    Case("yes and no", csv(x=cells("yes", "no")), columns=("age", "x=no", "x=yes")),
    Case(
        "codes with leading zeros",
        csv(x=cells("007", "7")),
        options={"categorical": "x"},
        columns=("age", "x=007", "x=7"),
    ),
    Case("a different text in each row", csv(x=DIFFERENT), "leave it out with drop=x, or use it alone with text=x"),
    Case(
        "free text",
        csv(x=DIFFERENT).rstrip() * 1 + "\n" + "".join(f"1,t{i},ill\n" * 2 for i in range(90)),
        "column 'x' has 120 different texts",
        rows=210,
    ),
    Case(
        "many categories, said",
        csv(x=DIFFERENT),
        options={"categorical": ["x"]},
        columns=("age", *(f"x={text}" for text in sorted(DIFFERENT))),
        check=lambda d: len(d.columns) >= 20,
    ),
    # Identifiers and dates
    Case(
        "an unnamed index",
        csv(x=cells("1", "2")).replace("age,", ",age,", 1).replace("\n2", "\n0,2"),
        "column 'Unnamed: 0' has no name, like the index that pandas writes",
    ),
    Case("row numbers", csv(x=[str(i) for i in range(N)]), "column 'x' has a different whole number in each row"),
    Case(
        "whole numbers that are a measurement", csv(x=[str(i * i) for i in range(N)]), options={"columns": ["age", "x"]}
    ),
    Case(
        "dates",
        csv(x=[f"2024-01-{i + 1:02d}" for i in range(N)]),
        "column 'x' holds dates or times such as '2024-01-01'",
    ),
    Case("dates and a word", csv(x=cells("soon", "2024-01-02", "2024-03-04")), "dates or times such as '2024-01-02'"),
    Case("decimal commas and a whole number", csv(x=quoted("12", "1,5")), "column 'x' holds '1,5'"),
    Case("only label and site", csv().replace("age", "site"), "besides the label 'y' and the site", {"site": "site"}),
    Case("dates with dots", csv(x=cells("31.12.2024", "1.1.25")), "column 'x' holds dates or times"),
    Case("dates with slashes", csv(x=cells("12/31/2024", "")), "column 'x' holds dates or times"),
    Case("times", csv(x=cells("12:30", "23:59:59")), "column 'x' holds dates or times"),
    # Labels
    Case("no label column", csv().replace("y\n", "z\n", 1), "no column named label, labels, class, target, y"),
    Case("another name of the label", csv(), "unknown label column", {"label": "yy"}),
    Case("a label without a name", csv(["", *LABELS[1:]], x=cells("1")), "no label in line 2"),
    Case("labels with spaces around", csv(cells(" ill", "well "), x=cells("1", "2"))),
    Case("labels of numbers and names", csv(cells("1", "2", "other"), x=cells("1", "2")), classes=("1", "2", "other")),
    Case("whole numbers as floats", csv(cells("1.0", "2.0"), x=cells("1", "2")), classes=("1", "2")),
    Case(
        "labels that are no whole numbers",
        csv(cells("1.5", "2"), x=cells("1")),
        "label 1.5 in line 2; expected a whole",
    ),
    Case("labels that are too large", csv(cells("1e20", "2"), x=cells("1")), "label 1e+20 in line 2; expected"),
    Case("a class with one sample", csv(["rare", *LABELS[1:]], x=cells("1", "2")), classes=("ill", "rare", "well")),
    # Parquet
    Case("not Parquet", b"hello", "cannot be read", suffix=".parquet"),
    Case("Parquet that was cut off", parquet_bytes(arrow())[:-20], "cannot be read", suffix=".parquet"),
    Case("Parquet without rows", arrow().slice(0, 0), "no samples"),
    Case("Parquet without columns", pa.table({}), "no samples"),
    Case(
        "Parquet with an index",
        frame().set_index(pd.Index([*range(9, N), *range(9)])),
        "column '__index_level_0__' has no name",
        suffix=".parquet",
    ),
    Case("nested records", arrow(x=[{"a": 1}] * N), "column 'x' holds struct<a: int64> values; expected numbers"),
    Case("lists of texts", arrow(x=[["a"]] * N), "column 'x' holds lists of string values; expected numbers"),
    Case("lists of unequal length", arrow(x=[[1], [1, 2]] * 15), "lists of unequal length in column 'x', row 1"),
    Case("lists", arrow(x=[[i % 3, i % 5] for i in range(N)]), columns=("age", "x[0]", "x[1]")),
    Case("lists with gaps", arrow(x=[[1.0, None], [2.0, 3.0]] * 15), columns=("age", "x[0]", "x[1]", "x[1] missing")),
    Case("inner lists missing", arrow(x=[[[1.0], [2.0]], [[3.0], None]] * 15), "no value in column 'x', row 1"),
    Case("lists that are missing", arrow(x=[[1.0], None] * 15), "no value in column 'x', row 1"),
    Case(
        "dictionaries",
        arrow(x=pa.array([[("a", 1)]] * N, pa.map_(pa.string(), pa.int64()))),
        "column 'x' holds map<string, int64",
    ),
    Case("timestamps", arrow(x=pa.array(range(N), pa.timestamp("s"))), "column 'x' holds dates or times"),
    Case("durations", arrow(x=pa.array(range(N), pa.duration("s"))), "column 'x' holds dates or times"),
    Case("decimals", arrow(x=[Decimal("1.50"), Decimal("2.25")] * 15), check=lambda d: raw(d, "x") == {1.5, 2.25}),
    Case("half precision", arrow(x=pa.array(np.array([1, 2] * 15, np.float16)))),
    Case("unsigned numbers of 64 bits", arrow(x=pa.array([2**64 - 1, 0] * 15, pa.uint64()))),
    Case("whole numbers with gaps", arrow(x=[1, None, 2] * 10), columns=("age", "x", "x missing")),
    Case("booleans with gaps", arrow(x=[True, None, False] * 10), columns=("age", "x", "x missing")),
    Case("a column of nulls", arrow(x=pa.nulls(N)), "column 'x' has no value"),
    Case("bytes that are no image", arrow(x=[b"abc"] * N), "unreadable image"),
    Case("categories of Arrow", arrow(x=pa.array(["1", "2"] * 15).dictionary_encode()), columns=("age", "x=1", "x=2")),
    Case("large strings", arrow(x=pa.array(["a", "b"] * 15, pa.large_string())), columns=("age", "x=a", "x=b")),
]


FRAMES = [
    Case("no rows", frame().iloc[:0], "no samples"),
    Case("no columns", pd.DataFrame(index=range(5)), "no samples"),
    Case("repeated columns", pd.concat([frame(), frame()], axis=1), "column 'age' appears twice"),
    Case("numbers and words", frame(x=[1, 2, "x"] * 10), "'x' in column 'x', row 2; expected a number"),
    Case("numbers as texts", frame(x=["1", "2"] * 15)),
    Case("lists", frame(x=[[1]] * N), "column 'x' holds values of type list"),
    Case("dictionaries", frame(x=[{}] * N), "column 'x' holds values of type dict"),
    Case("bytes", frame(x=[b"a"] * N), "column 'x' holds values of type bytes"),
    Case("complex numbers", frame(x=[1 + 2j] * N), "column 'x' holds values of type complex"),
    Case("dates", frame(x=pd.Timestamp("2024-01-01")), "column 'x' holds dates or times"),
    Case("Python dates", frame(x=[pd.Timestamp("2024-01-01").date()] * N), "column 'x' holds dates or times"),
    Case("durations", frame(x=pd.Timedelta(1, "D")), "column 'x' holds dates or times"),
    Case("periods", frame(x=pd.period_range("2024-01", periods=N, freq="M")), "column 'x' holds values of type Period"),
    Case("nullable numbers", frame(x=pd.array([1, None, 2] * 10, "Int64")), columns=("age", "x", "x missing")),
    Case(
        "nullable booleans", frame(x=pd.array([True, None, False] * 10, "boolean")), columns=("age", "x", "x missing")
    ),
    Case("categories of numbers", frame(x=pd.Categorical([1, 2] * 15)), columns=("age", "x=1", "x=2")),
    Case("intervals", frame(x=pd.cut([1, 5] * 15, [0, 3, 9])), columns=("age", "x=(0, 3]", "x=(3, 9]")),
    Case("names that are numbers", frame(x=[1.5, 2] * 15).rename(columns={"x": 7}), columns=("age", "7")),
    Case("names in levels", frame(x=[1.5, 2] * 15).rename(columns={"x": ("a", "b")}), columns=("age", "('a', 'b')")),
    Case("sparse numbers", frame(x=pd.arrays.SparseArray([0.0, 1.0] * 15))),
    Case("unnamed columns", frame(**{"Unnamed: 0": [1, 2] * 15}), "column 'Unnamed: 0' has no name"),
    Case("a label with gaps", frame().assign(y=["ill", None] * 15), "no label in row 1"),
    Case("dates as labels", frame().assign(y=pd.Timestamp("2024-01-01")), "holds dates or times; expected labels"),
]


def write(case: Case, folder: Path) -> Any:
    """The case's table as a file."""
    if isinstance(case.content, pa.Table):
        path = folder / "table.parquet"
        pq.write_table(case.content, path)
        return path
    path = folder / f"table{case.suffix}"
    if isinstance(case.content, pd.DataFrame):
        case.content.to_parquet(path)
    elif isinstance(case.content, str):
        path.write_bytes(case.content.encode())
    else:
        path.write_bytes(case.content)
    return path


def test_there_are_sixty_kinds() -> None:
    assert len({case.name for case in FILES}) == len(FILES) >= 60


@pytest.mark.parametrize("case", FILES, ids=lambda case: case.name)
def test_a_file_is_read_whole_or_refused_in_one_line(case: Case, tmp_path: Path) -> None:
    expect(case, write(case, tmp_path))


@pytest.mark.parametrize("case", FRAMES, ids=lambda case: case.name)
def test_a_data_frame_is_read_whole_or_refused_in_one_line(case: Case) -> None:
    expect(case, case.content)


TEXT_FILES = [case for case in FILES if case.suffix != ".parquet" and not isinstance(case.content, pa.Table)]


@pytest.mark.parametrize("case", TEXT_FILES, ids=lambda case: case.name)
def test_pythons_own_reader_gives_the_same(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedskew.data.own.table_files._read_fast", lambda *_: None)
    expect(case, write(case, tmp_path))


def expect(case: Case, data: Any) -> None:
    if case.line:
        with pytest.raises(fs.UserError) as refused:
            fs.load(data, **case.options)
        assert case.line in str(refused.value)
        assert "\n" not in str(refused.value)
        return
    dataset = fs.load(data, **case.options)
    assert len(dataset.train) + len(dataset.test) == case.rows
    assert dataset.classes == case.classes
    assert case.check is not None or dataset.columns == case.columns
    assert case.check is None or case.check(dataset)
    assert any(case.note in note for note in (*dataset.notes, ""))
    assert np.isfinite(dataset.train.x).all()


def test_categories_that_the_training_part_lacks_are_said(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text(csv(x=cells("a", "b")))
    (tmp_path / "test.csv").write_text(csv(x=cells("a", "c", "d"), y2=cells("1")))
    dataset = fs.load(tmp_path)
    assert dataset.columns == ("age", "x=a", "x=b")
    assert dataset.test.x[:3, 1:].tolist() == [[1, 0], [0, 0], [0, 0]]
    expected = "column 'x' has values that are not among its categories (c, d); they become 0"
    assert any(expected in note for note in dataset.notes)


@pytest.mark.parametrize("values", [("0", "1", "NA"), ("1", "?", "2"), ("True", "null", "False")])
def test_gaps_among_labels_that_are_numbers_are_not_a_class(tmp_path: Path, values: tuple[str, ...]) -> None:
    path = tmp_path / "labels.csv"
    path.write_text(csv(cells(*values)))
    with pytest.raises(fs.UserError, match=r"in line \d is not a label; expected one for every sample"):
        fs.load(path)
    assert fs.load(path, classes=list(values)).classes == values


def test_a_class_may_be_called_none_among_names(tmp_path: Path) -> None:
    path = tmp_path / "labels.csv"
    path.write_text(csv(cells("none", "mild", "severe")))
    assert fs.load(path).classes == ("mild", "none", "severe")


@pytest.mark.parametrize(
    "dates",
    [
        ("12 Jan 2024", "1 May 2023"),
        ("03-FEB-24", "17-Mar-23"),
        ("March 5, 2024", "Apr 1 2023"),
        ("3:45 PM", "11:10am"),
    ],
)
def test_dates_with_names_of_months_are_refused(dates: tuple[str, ...]) -> None:
    table = pd.DataFrame({"age": AGES, "seen": cells(*dates), "y": LABELS})
    with pytest.raises(fs.UserError, match="column 'seen' holds dates or times such as"):
        fs.load(table)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (["0,5", "1,5"], "if the comma is the decimal mark"),
        (["2024-01-02", "2024-02-03"], "holds dates or times"),
        ([f"{i} mg" for i in range(N)], "with the unit 'mg'"),
    ],
)
def test_an_only_column_of_dates_or_measurements_is_not_text(tmp_path: Path, values: list[str], message: str) -> None:
    path = tmp_path / "one.csv"
    path.write_text("dose;y\n" + "".join(f"{dose};{y}\n" for dose, y in zip(cells(*values), LABELS, strict=True)))
    with pytest.raises(fs.UserError, match=message):
        fs.load(path)
    assert fs.load(path, text="dose").kind == "text"


def test_the_training_data_are_no_test_part(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text(csv())
    with pytest.raises(fs.UserError, match="which is the training data; leave out test"):
        fs.load(tmp_path / "train.csv", test=tmp_path / "train.csv")


def test_long_numbers_as_labels_are_not_rounded(tmp_path: Path) -> None:
    codes = ("9007199254740992", "9007199254740993", "900000000000207008")
    (tmp_path / "codes.csv").write_text(csv(cells(*codes)))
    assert set(fs.load(tmp_path / "codes.csv").classes) == set(codes)


def test_a_column_to_drop_may_be_absent_from_the_test_table(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text(csv(room=cells("a", "b")))
    (tmp_path / "test.csv").write_text(csv())
    assert fs.load(tmp_path, drop="room").columns == ("age",)
    with pytest.raises(fs.UserError, match="unknown column to drop"):
        fs.load(tmp_path, drop="rom")


def test_a_column_of_lists_is_read_with_its_encoding(tmp_path: Path) -> None:
    table = pa.table({"x": [[i % 3 + 0.5, i % 5] for i in range(N)], "age": [i % 7 for i in range(N)], "y": LABELS})
    data = fs.load(table)
    assert data.encoding is not None
    data.encoding.save(tmp_path / "encoding.json")
    again = fs.load(table, encoding=tmp_path / "encoding.json")
    assert again.columns == data.columns == ("x[0]", "x[1]", "age")
    assert (again.train.x == data.train.x).all()


def test_options_apply_to_a_column_of_lists() -> None:
    table = pa.table({"x": [[i % 2, i] for i in range(N)], "y": LABELS})
    assert fs.load(table, columns=["x"]).columns == ("x[0]", "x[1]")
    assert fs.load(table, categorical="x").columns[:2] == ("x[0]=0", "x[0]=1")
    longer = pa.table({"x": [[i % 2, i, 1] for i in range(N)], "y": LABELS})
    with pytest.raises(fs.UserError, match="column 'x' does not hold as many values per row as in the training"):
        fs.load(table, test=longer, columns=["x"])


def test_the_note_about_gaps_names_the_columns_whose_gaps_are_marked(tmp_path: Path) -> None:
    gaps = [None if i % 4 == 0 else i % 7 for i in range(N)]
    table = pa.table({"a": gaps, "b": [i % 3 for i in range(N)], "y": LABELS})
    encoding = fs.load(table).encoding
    assert encoding is not None
    encoding.save(tmp_path / "encoding.json")
    both, other = (pa.table({"a": a, "b": gaps, "y": LABELS}) for a in (gaps, [i % 3 for i in range(N)]))
    (note,) = fs.load(both, encoding=tmp_path / "encoding.json").notes
    assert note.endswith("the mean replaces missing numbers, and 1 more input marks the gaps in a")
    (note,) = fs.load(other, encoding=tmp_path / "encoding.json").notes
    assert note.endswith("the mean replaces missing numbers")


def test_numbers_in_place_of_lists_are_not_called_lists() -> None:
    lists, plain = (
        pa.table({"x": x, "y": LABELS}) for x in ([[i % 2, i] for i in range(N)], [i % 2 for i in range(N)])
    )
    with pytest.raises(fs.UserError, match="column 'x' does not hold as many values per row as in the training"):
        fs.load(lists, test=plain, columns=["x"])


def test_only_strange_columns_are_advised_to_be_dropped(tmp_path: Path) -> None:
    table = pa.table({"age": [i % 7 for i in range(N)], "x": [i % 3 for i in range(N)], "y": LABELS})
    encoding = fs.load(table).encoding
    assert encoding is not None
    encoding.save(tmp_path / "encoding.json")
    with pytest.raises(fs.UserError, match=r"^columns 'x' are missing; expected the columns of the encoding$"):
        fs.load(table.drop_columns(["x"]), encoding=tmp_path / "encoding.json")
    with pytest.raises(fs.UserError, match="leave others out with drop, or rename them"):
        fs.load(table.rename_columns(["age", "z", "y"]), encoding=tmp_path / "encoding.json")


@pytest.mark.parametrize("places", [[[1.0, None]] * N, [[i % 3, i] for i in range(N)]], ids=["empty", "identifier"])
def test_a_column_of_lists_is_left_out_as_advised(places: list[list[Any]]) -> None:
    table = pa.table({"x": places, "age": [i % 7 for i in range(N)], "y": LABELS})
    with pytest.raises(fs.UserError, match=r"column 'x\[1\]' has .*; leave it out with drop=x(,|$)"):
        fs.load(table)
    assert fs.load(table, drop="x").columns == ("age",)


def test_a_column_with_a_comma_in_its_name_is_left_out_as_advised() -> None:
    table = pa.table({"a, b": list(range(N)), "age": [i % 7 for i in range(N)], "y": LABELS})
    with pytest.raises(fs.UserError, match="leave it out with drop=a, b"):
        fs.load(table)
    assert fs.load(table, drop="a, b").columns == ("age",)


def test_markers_of_gaps_in_a_set_are_not_silently_ignored() -> None:
    table = pa.table({"age": [-999 if i % 4 == 3 else i % 7 for i in range(N)], "y": LABELS})
    with pytest.raises(fs.UserError, match=r"missing is \{-999\}; expected values that stand for a gap"):
        fs.load(table, missing={-999})
    assert "age missing" in fs.load(table, missing=np.int64(-999)).columns


def test_only_csv_files_are_advised_to_set_a_decimal_mark() -> None:
    with pytest.raises(fs.UserError, match="if the comma is the decimal mark, turn the texts into numbers"):
        fs.load(pa.table({"x": cells("1,5", "2,5"), "age": [i % 7 for i in range(N)], "y": LABELS}))


def test_the_only_input_is_not_advised_to_be_left_out() -> None:
    with pytest.raises(fs.UserError, match=r"such as days, or read it as text with text=x$"):
        fs.load(pa.table({"x": cells("2020-01-02", "2021-03-04"), "y": LABELS}))


def test_arrays_of_several_dimensions_are_no_column_of_a_table() -> None:
    numbers = pa.table({"x": [i % 3 + 0.5 for i in range(N)], "age": [i % 7 for i in range(N)], "y": LABELS})
    arrays = numbers.set_column(0, "x", pa.array([[[1.0, 2.0], [3.0, 4.0]]] * N))
    with pytest.raises(fs.UserError, match="column 'x' holds arrays; expected numbers or categories"):
        fs.load(numbers, test=arrays)
    with pytest.raises(fs.UserError, match="column 'x' holds arrays; expected numbers or categories"):
        fs.load(arrays, encoding=[{"name": "x"}, {"name": "age"}])


def test_a_second_column_that_is_called_like_a_label_is_no_silent_input(tmp_path: Path) -> None:
    path = tmp_path / "two.csv"
    path.write_text(csv(x=cells("1", "2"), Label=LABELS))
    with pytest.raises(fs.UserError, match=r"'Label' and 'y' both have the name of a label; name the label column"):
        fs.load(path)
    assert fs.load(path, label="y", drop="Label").columns == ("age", "x")
    assert fs.load(path, drop="y").columns == ("age", "x")
    assert "Label=ill" in fs.load(path, label="y").columns
    assert fs.load(path, columns=["age", "y"]).columns == ("age", "y=ill", "y=well")
    assert fs.load(path, columns=["age"]).columns == ("age",)
    with pytest.raises(fs.UserError, match="both have the name of a label"):  # the second one would be text
        fs.load(pd.DataFrame({"label": LABELS, "target": LABELS}))
    with pytest.raises(fs.UserError, match="both have the name of a label"):
        fs.load(pa.table({"label": LABELS, "y": [[i % 2, i % 3] for i in range(N)]}))


def test_boolean_categories_have_the_same_names_from_every_source(tmp_path: Path) -> None:
    values = [(True, False, None)[i % 3] for i in range(N)]
    frame = pd.DataFrame({"age": np.array(AGES, float), "x": pd.array(values, "boolean"), "y": LABELS})
    frame.to_parquet(tmp_path / "t.parquet")
    sources: list[Any] = [tmp_path / "t.parquet", frame, frame.astype({"x": object}), frame.astype({"x": "category"})]
    for spelling in (str, str.lower, str.upper):
        texts = ["" if value is None else spelling(str(value)) for value in values]
        sources.append(tmp_path / f"{len(sources)}.csv")
        sources[-1].write_text(csv(x=texts))
    loaded = [fs.load(source, categorical="x") for source in sources]
    for data in loaded:
        assert data.columns == ("age", "x=False", "x=True", "x missing")
        assert (data.train.x == loaded[0].train.x).all()
    sites = [fs.load(source, site="x").sites for source in (frame.dropna(), frame.dropna().astype(object))]
    assert sites == [("False", "True")] * 2


@pytest.mark.parametrize("spellings", [("false", "true"), ("0", "1"), ("FALSE", "TRUE")])
def test_an_older_encoding_may_spell_booleans_in_another_way(spellings: tuple[str, str]) -> None:
    encoding = [{"name": "age"}, {"name": "x", "categories": list(spellings)}]
    table = pd.DataFrame({"age": np.array(AGES, float), "x": [True, False] * (N // 2), "y": LABELS})
    data = fs.load(table, encoding=encoding)
    assert data.columns == ("age", f"x={spellings[0]}", f"x={spellings[1]}")
    assert (data.train.x[:, 1:].sum(axis=1) == 1).all()
    assert not data.notes


def test_one_and_zero_are_the_categories_of_a_boolean_column() -> None:
    table = pd.DataFrame({"age": np.array(AGES, float), "x": [True, False] * (N // 2), "y": LABELS})
    encoding = fs.load(table, categorical="x").encoding
    numbers = table.astype({"x": int})
    for data in (fs.load(numbers, encoding=encoding), fs.load(table, test=numbers, categorical="x")):
        assert data.columns == ("age", "x=False", "x=True")
        assert (data.test.x[:, 1:].sum(axis=1) == 1).all()
        assert not data.notes
    mixed = table.astype({"x": object}).assign(x=["True", "1", "0"] * (N // 3))
    assert (fs.load(mixed, encoding=encoding).train.x[:, 1:].sum(axis=1) == 1).all()


def test_words_for_a_gap_do_not_hide_a_wrong_text_among_numbers(tmp_path: Path) -> None:
    (tmp_path / "gaps.csv").write_text(csv(x=cells("1.5", "", "2.5", "", "", "NA", "NA", "", "", "oops")))
    with pytest.raises(fs.UserError, match="'oops' in column 'x', line 11; expected a number"):
        fs.load(tmp_path / "gaps.csv")
    (tmp_path / "gaps.csv").write_text(csv(x=cells("1", "2", "NA", "NA", "3A")))
    assert fs.load(tmp_path / "gaps.csv").columns == ("age", "x=1", "x=2", "x=3A", "x=NA")


def test_texts_among_many_gaps_are_categories(tmp_path: Path) -> None:
    (tmp_path / "gaps.csv").write_text(csv(x=cells("yes", "", "", "", "no"), flag=cells("true", "", "", "", "false")))
    data = fs.load(tmp_path / "gaps.csv")
    assert data.columns == ("age", "x=no", "x=yes", "x missing", "flag", "flag missing")


def test_a_label_that_missing_lists_is_refused(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(csv(cells("1", "2", "-999"), x=cells("1", "-999", "2")))
    with pytest.raises(fs.UserError, match=r"'-999' in line 4 is not a label, because missing lists it; .*'classes'"):
        fs.load(tmp_path / "t.csv", missing=[-999])
    assert fs.load(tmp_path / "t.csv", missing=[-999], classes=["1", "2", "-999"]).classes == ("1", "2", "-999")
    (tmp_path / "t.csv").write_text(csv(cells("ill", "unknown"), x=cells("1", "2")))
    with pytest.raises(fs.UserError, match="'unknown' in line 3 is not a label, because missing lists it"):
        fs.load(tmp_path / "t.csv", missing="unknown")


def test_a_class_of_other_sites_is_a_label_although_missing_lists_it(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(csv(cells("0", "1"), x=cells("0", "1.5", "2")))
    assert fs.load(tmp_path / "t.csv", missing=[0], classes=ClassesElsewhere(["0", "1"])).classes == ("0", "1")
    with pytest.raises(fs.UserError, match="'0' in line 2 is not a label, because missing lists it"):
        fs.load(tmp_path / "t.csv", missing=[0], classes=ClassesElsewhere(["1", "2"]))


def test_a_note_names_the_columns_beside_a_text() -> None:
    table = pd.DataFrame({"age": np.array(AGES, float), "text": [f"word{i % 7} more" for i in range(N)], "y": LABELS})
    assert fs.load(table, text="text").notes == ("dataframe: the inputs are 'text'; not used: 'age'",)
    assert fs.load(table, text="text", drop="age").notes == ()
