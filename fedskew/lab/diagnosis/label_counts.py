"""Label counts per client: from a CSV file, a folder of histograms, or a federation."""

from __future__ import annotations

import csv
import json
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedskew.data import Federation
from fedskew.data.partitions.rule import IntArray
from fedskew.errors import UserError

_NAMES = ("", "client", "clients", "site", "sites", "name", "id")
"""Headings of a first column that names the clients."""
_NUMBER = re.compile(r"[-+]?\d+([.,]\d*)?")
FORMS = "expected a CSV file (a row per client, a column per class) or a folder with one histogram per client"


@dataclass(frozen=True, eq=False)
class LabelCounts:
    """Clients × classes."""

    clients: tuple[str, ...]
    classes: tuple[str, ...]
    counts: IntArray

    def __post_init__(self) -> None:
        if self.counts.shape[1] < 2:
            raise UserError(f"counts of {self.counts.shape[1]} class; expected two or more, one column per class")
        for what, names in (("clients", self.clients), ("classes", self.classes)):
            if twice := [name for name in names if names.count(name) > 1]:
                raise UserError(f"two {what} are called {twice[0]!r}; expected distinct names")
        for name, row in zip(self.clients, self.counts, strict=True):
            if row.sum() == 0:
                raise UserError(f"client {name!r} has no samples; expected at least 1")


def federation_counts(federation: Federation) -> LabelCounts:
    names = tuple(str(k) for k in range(federation.clients))
    return LabelCounts(names, federation.dataset.classes, federation.label_counts)


def read_counts(path: str | Path) -> LabelCounts:
    """Read label counts from a file or a folder."""
    place = Path(path)
    if place.is_dir():
        return _read_folder(place)
    if not place.is_file():
        raise UserError(f"no file or folder {str(path)!r}; {FORMS}")
    return _read_table(place)


def _read_table(path: Path) -> LabelCounts:
    rows = _cells(path)
    width = len(rows[0])
    for number, row in enumerate(rows, start=1):
        if len(row) != width:
            raise UserError(f"{path} row {number}: {len(row)} cells; expected {width}, as in the first row")
    titled = _is_header(rows[0])
    header, body = (rows[0], rows[1:]) if titled else ([""] * width, rows)
    if not body:
        raise UserError(f"{path}: a header but no clients; expected one row of counts per client")
    first = [row[0] for row in body]
    named = header[0].lower() in _NAMES if titled else any(map(_is_name, first)) or _is_numbering(first)
    start = 1 if named else 0
    counts = [[_count(cell, path, i, j) for j, cell in enumerate(row[start:], start)] for i, row in enumerate(body)]
    classes = header[start:] if titled else [str(c) for c in range(width - start)]
    clients = first if named else [str(k) for k in range(len(body))]
    return LabelCounts(tuple(clients), tuple(classes), np.array(counts, np.int64))


def _cells(path: Path) -> list[list[str]]:
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            first = file.readline()
            file.seek(0)
            mark = next((m for m in ",;\t" if m in first), ",")
            rows = [[cell.strip() for cell in row] for row in csv.reader(file, delimiter=mark)]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}; {FORMS}") from error
    rows = [row for row in rows if any(row)]
    if not rows:
        raise UserError(f"{path} is empty; {FORMS}")
    return rows


def _is_count(cell: str) -> bool:
    return cell.isdecimal()


def _is_name(cell: str) -> bool:
    """Whether a cell is a name. -3, 1.5 and empty cells are not names but wrong counts, which are reported."""
    return cell != "" and _NUMBER.fullmatch(cell) is None


def _is_header(row: list[str]) -> bool:
    """Whether a row names the classes. Numbers count as names after a heading of the clients, or as 0, 1, 2 …"""
    numbered = len(row) > 2 and row == [str(c) for c in range(len(row))]
    return row[0].lower() in _NAMES or any(map(_is_name, row[1:])) or numbered


def _is_numbering(names: list[str]) -> bool:
    """Whether a column is 0, 1, 2 … or 1, 2, 3 …, which numbers clients and does not count samples."""
    numbers = [str(i) for i in range(len(names) + 1)]
    return len(names) > 1 and names in (numbers[:-1], numbers[1:])


def _count(cell: str, path: Path, row: int, column: int) -> int:
    if not _is_count(cell) or len(cell) > 15:
        raise UserError(
            f"{path}: {cell!r} in column {column + 1} of client row {row + 1}; expected a number of samples, 0 or more"
        )
    return int(cell)


def _read_folder(folder: Path) -> LabelCounts:
    """Read `NAME.csv` (a class and its count per row) or `NAME.json` (an object of counts) for each client."""
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
    """Sort 10 after 9."""
    return (not name.isdecimal(), int(name) if name.isdecimal() else 0, name)


def _histogram(path: Path) -> dict[str, int]:
    if path.suffix.lower() == ".csv":
        rows = _cells(path)
        if any(len(row) != 2 for row in rows):
            raise UserError(f"{path}: expected two columns, a class and its number of samples")
        rows = rows if _is_count(rows[0][1]) else rows[1:]
        return {name: _count(cell, path, i, 1) for i, (name, cell) in enumerate(rows)}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path}: {error}; expected an object of classes and counts") from error
    whole = isinstance(content, dict) and all(type(v) is int and v >= 0 for v in content.values())
    if not whole:
        raise UserError(f'{path}: expected an object such as {{"cat": 120, "dog": 0}}')
    return {str(name): int(v) for name, v in content.items()}
