"""Label counts per client: from a CSV file, a folder of histograms, or a federation.

The partition `counts` and `fedskew diagnose` use them.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fedskew.data.csv_files import find_delimiter, read_csv
from fedskew.data.partitions.rule import IntArray
from fedskew.errors import UserError, plural

if TYPE_CHECKING:
    from fedskew.data.federation import Federation

FORMS = "expected a CSV file (one row per client, one column per class) or a folder with one histogram per client"
_CLIENT_HEADINGS = ("", "client", "clients", "site", "sites", "name", "id", "hospital", "hospitals", "institution",
                    "centre", "center")  # fmt: skip
"""Headings of a first column that contains the clients' names."""
_TOTALS = ("total", "totals", "sum", "sums", "all", "overall", "grand total", "all sites", "all clients", "σ", "gesamt",
           "insgesamt", "summe", "somme", "totale")  # fmt: skip
"""Names of a row or a column of sums."""
_NUMBER = re.compile(r"[-+]?\d+([.,]\d*)?")
_DIGITS = 15
"""The largest number of digits of a count."""
_COUNT = re.compile(rf"\d{{1,{_DIGITS}}}([.,](?!000$)0*)?")
"""A whole number. Spreadsheets may also write 12 as 12.0, or as 12,0 with a decimal comma. But 12,000 may be twelve
thousand, so it is refused."""
_SMALLEST_TOTAL = 100
"""An unnamed last row or column is a total only if it has at least this many samples. In smaller tables, a client may
have as many samples as all others together by chance."""


@dataclass(frozen=True, eq=False)
class LabelCounts:
    """The number of samples of each class on each client."""

    clients: tuple[str, ...]
    classes: tuple[str, ...]
    counts: IntArray
    """[clients, classes]."""
    names_clients: bool = True
    """Whether the source names the clients. Otherwise they are numbered."""
    names_classes: bool = True
    notes: tuple[str, ...] = field(default=())
    """Lines for the user about the source, for example about what was left out."""
    several_labels: bool = False
    """Whether a sample may have several labels. It then counts once for each."""

    def __post_init__(self) -> None:
        if self.counts.shape[1] < 2:
            found = "one class" if self.counts.shape[1] else "no class"
            raise UserError(f"counts of {found}; expected at least 2 classes")
        for what, names in (("clients", self.clients), ("classes", self.classes)):
            if twice := [name for name in names if names.count(name) > 1]:
                raise UserError(f"two {what} are called {twice[0]!r}; expected different names")
        for name, row in zip(self.clients, self.counts, strict=True):
            if row.sum() == 0:
                raise UserError(f"client {name!r} has no samples; expected at least 1")


def federation_counts(federation: Federation) -> LabelCounts:
    """Return the label counts of a federation."""
    names, notes = federation.client_labels, federation.notes
    several_labels = federation.dataset.task.name == "multi-label"
    if several_labels:
        notes = (*notes, "Samples may have several labels or none. A sample counts once for each of its labels.")
        for name, row in zip(names, federation.label_counts, strict=True):
            if row.sum() == 0:
                raise UserError(f"no sample of client {name!r} has a label; expected at least 1 label per client")
    return LabelCounts(
        names, federation.dataset.classes, federation.label_counts, bool(federation.client_names), True, notes,
        several_labels,
    )  # fmt: skip


def read_counts(path: str | os.PathLike[str], data_classes: Sequence[str] = ()) -> LabelCounts:
    """Read label counts from a file or a folder.

    `data_classes` are the classes of the data, if known. They help to recognise a header and a column of client names.
    """
    source = Path(path)
    if source.is_dir():
        return _read_folder(source)
    if not source.exists():
        raise UserError(f"no file or folder {str(path)!r}; {FORMS}")
    return _read_table(source, data_classes)


class _Row(NamedTuple):
    line: int
    cells: list[str]


def _read_table(path: Path, data_classes: Sequence[str]) -> LabelCounts:
    rows = _read_rows(path)
    width = len(rows[0].cells)
    for row in rows:
        if len(row.cells) != width:
            found = plural(len(row.cells), "column")
            raise UserError(f"{path} line {row.line}: {found}; expected {width}, as in the first row")
    has_header = _is_header(rows[0].cells, data_classes)
    header, body = (rows[0].cells, rows[1:]) if has_header else ([""] * width, rows)
    if not body:
        raise UserError(f"{path}: a header but no clients; expected one row of counts per client")
    has_names = _names_clients(header if has_header else None, [row.cells[0] for row in body], data_classes)
    start = 1 if has_names else 0
    counts = [[_parse_count(cell, path, row.line, column) for column, cell in enumerate(row.cells[start:], start + 1)]
              for row in body]  # fmt: skip
    classes = header[start:] if has_header else [str(c) for c in range(width - start)]
    clients = [row.cells[0] for row in body] if has_names else [str(k) for k in range(len(body))]
    return _without_totals(path, _Table(clients, classes, np.array(counts, np.int64), has_names, has_header))


def _read_rows(path: Path) -> list[_Row]:
    rows = [_Row(line, [cell.strip() for cell in cells]) for line, cells in read_csv(path, find_delimiter(path))]
    rows = [row for row in rows if any(row.cells)]
    if not rows:
        raise UserError(f"{path} is empty; {FORMS}")
    return rows


def _is_name(cell: str) -> bool:
    """Return whether a cell is a name. Empty cells and numbers are not names, not even an invalid count such as -3."""
    return cell != "" and _NUMBER.fullmatch(cell) is None


def _is_header(row: Sequence[str], data_classes: Sequence[str]) -> bool:
    """Return whether a row names the classes.

    Numbers count as class names if the first cell is a heading for the clients, if the numbers are 0, 1, 2 …, or if
    they are the data's classes.
    """
    is_numbered = len(row) > 2 and list(row) == [str(c) for c in range(len(row))]
    is_listed = len(data_classes) > 0 and sorted(data_classes) in (sorted(row), sorted(row[1:]))
    return row[0].lower() in _CLIENT_HEADINGS or any(map(_is_name, row[1:])) or is_numbered or is_listed


def _names_clients(header: Sequence[str] | None, first: Sequence[str], data_classes: Sequence[str]) -> bool:
    """Return whether the first column, whose cells are `first`, contains the clients' names.

    Numbers count as names if the column has a heading for the clients, if the other headings are the data's classes, or
    if there is no header and they are 0, 1, 2 … or 1, 2, 3 …
    """
    if any(map(_is_name, first)):
        return True
    if header is None:
        return _is_numbering(first)
    if header[0].lower() in _CLIENT_HEADINGS:
        return True
    known = {name.lower() for name in data_classes}
    return header[0].lower() not in known and len(known) > 0 and {name.lower() for name in header[1:]} == known


def _is_numbering(names: Sequence[str]) -> bool:
    """Return whether a column is 0, 1, 2 … or 1, 2, 3 …, which numbers the clients."""
    numbers = [str(i) for i in range(len(names) + 1)]
    return len(names) > 1 and list(names) in (numbers[:-1], numbers[1:])


def _parse_count(cell: str, path: Path, line: int, column: int) -> int:
    if not _COUNT.fullmatch(cell):
        raise UserError(
            f"{path} line {line} column {column}: {cell!r}; expected a number of samples, 0 or more, without a "
            "separator for thousands"
        )
    return int(re.split("[.,]", cell)[0])


# -- rows and columns of sums ----------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Table:
    clients: list[str]
    classes: list[str]
    counts: IntArray
    names_clients: bool
    names_classes: bool


def _without_totals(path: Path, table: _Table) -> LabelCounts:
    """Leave out the row and the column of totals, if there are any.

    Raise `UserError` if a row or a column is named a total but is not the sum of the others.
    """
    clients, classes, counts, notes = list(table.clients), list(table.classes), table.counts, []
    column = _find_total(path, "column", classes if table.names_classes else None, counts.T)
    if column is not None:
        notes.append(f"{path}: column {column + 1} of the counts is the sum of the others and was left out")
        del classes[column]
        counts = np.delete(counts, column, axis=1)
    row = _find_total(path, "row", clients if table.names_clients else None, counts)
    if row is not None:
        notes.append(f"{path}: row {row + 1} of the counts is the sum of the others and was left out")
        del clients[row]
        counts = np.delete(counts, row, axis=0)
    return LabelCounts(tuple(clients), tuple(classes), counts, table.names_clients, table.names_classes, tuple(notes))


def _find_total(path: Path, axis: str, names: Sequence[str] | None, counts: IntArray) -> int | None:
    """Return the index of the row of totals, or None. To find a column of totals, pass the transposed counts.

    A row whose name is in `_TOTALS` must be the sum of the others. An unnamed last row is a row of totals only if it is
    that sum and has at least `_SMALLEST_TOTAL` samples.
    """
    for row, name in enumerate(names or ()):
        if name.lower() in _TOTALS:
            if not _adds_up(counts, row):
                raise UserError(
                    f"{path}: {axis} {name!r} is not the sum of the others; "
                    f"leave it out, or rename it if it is a {'class' if axis == 'column' else 'client'}"
                )
            return row
    is_unnamed = names is None or names[-1:] == [""]
    is_large = len(counts) > 2 and int(counts[-1].sum()) >= _SMALLEST_TOTAL
    return len(counts) - 1 if is_unnamed and is_large and _adds_up(counts, -1) else None


def _adds_up(counts: IntArray, row: int) -> bool:
    return len(counts) > 1 and bool((counts.sum(axis=0) == 2 * counts[row]).all())


# -- a folder of histograms ------------------------------------------------------------------------------


def _read_folder(folder: Path) -> LabelCounts:
    """Read one file per client: `NAME.csv` (a class and its count per row) or `NAME.json` (an object of counts)."""
    files = sorted(p for p in folder.iterdir() if p.suffix.lower() in (".csv", ".json"))
    if not files:
        raise UserError(f"{folder} has no .csv or .json file; expected one histogram per client")
    histograms = {path.stem: _histogram(path) for path in files}
    if len(histograms) < len(files):
        raise UserError(f"{folder}: two histograms for one client; expected one file per client")
    classes = sorted({name for histogram in histograms.values() for name in histogram}, key=_by_number)
    counts = [[histogram.get(name, 0) for name in classes] for histogram in histograms.values()]
    return LabelCounts(tuple(histograms), tuple(classes), np.array(counts, np.int64))


def _by_number(name: str) -> tuple[bool, int, str]:
    """Return a sort key that puts 10 after 9."""
    return (not name.isdecimal(), int(name) if name.isdecimal() else 0, name)


def _histogram(path: Path) -> dict[str, int]:
    if path.suffix.lower() == ".csv":
        rows = _read_rows(path)
        if any(len(row.cells) != 2 for row in rows):
            raise UserError(f"{path}: expected two columns, a class and its number of samples")
        rows = rows[1:] if _is_name(rows[0].cells[1]) else rows
        _refuse_twice(path, [row.cells[0] for row in rows])
        found = {row.cells[0]: _parse_count(row.cells[1], path, row.line, 2) for row in rows}
    else:
        found = _json_histogram(path)
    return {name: number for name, number in found.items() if not _is_sum(path, name, found)}


def _is_sum(path: Path, name: str, histogram: dict[str, int]) -> bool:
    """Return whether an entry is the total. Raise `UserError` if it is named a total but does not add up."""
    if name.lower() not in _TOTALS:
        return False
    if histogram[name] != sum(histogram.values()) - histogram[name]:
        raise UserError(f"{path}: {name!r} is not the sum of the others; leave it out, or rename it if it is a class")
    return True


def _refuse_twice(path: Path, names: Sequence[str]) -> None:
    if twice := [name for name in names if names.count(name) > 1]:
        raise UserError(f"{path}: class {twice[0]!r} appears twice; expected each class once")


def _json_histogram(path: Path) -> dict[str, int]:
    def entries(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        _refuse_twice(path, [name for name, _ in pairs])
        return dict(pairs)

    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"), object_pairs_hook=entries)
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path}: {error}; expected an object of classes and counts") from error
    valid = isinstance(content, dict) and all(type(v) is int and 0 <= v < 10**_DIGITS for v in content.values())
    if not valid:
        raise UserError(f'{path}: expected an object such as {{"cat": 120, "dog": 0}}')
    return {str(name): int(v) for name, v in content.items()}
