"""Counts from a user's CSV file: exactly how many samples of each class a client has."""

from __future__ import annotations

import csv
import os
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedskew.data.partitions.rule import CountedPartition, IntArray, Labels, file_path, register
from fedskew.errors import UserError, unknown

Row = tuple[int, list[str]]
"""Line number and cells."""


@register
@dataclass(frozen=True)
class Counts(CountedPartition):
    """The counts in a CSV file: one row per client, one column per class.

    A header row with the class names and a first column with client names are optional. With a header, the columns may
    be in any order. The first row is a header if a cell of it is not a whole number, or if it lists the class names.
    Samples beyond the counts stay unused.
    """

    name: ClassVar[str] = "counts"
    uses_all: ClassVar[bool] = False
    path: str | os.PathLike[str]

    def __post_init__(self) -> None:
        file_path("path", self.path)

    def counts(self, labels: Labels, seed: int) -> IntArray:  # noqa: ARG002 - the counts are not random
        rows = _read(self.path)
        column_of_class, body = self._columns(rows, labels)
        counts = np.array([[self._count(row, j) for j in column_of_class] for row in body], np.int64)
        self._check_counts(counts, body, labels)
        return counts

    def _columns(self, rows: list[Row], labels: Labels) -> tuple[list[int], list[Row]]:
        """The column of each class, and the rows with counts."""
        line, first = rows[0]
        named = len(first) - labels.classes
        if named not in (0, 1):
            raise UserError(
                f"{self.path} line {line}: {len(first)} columns; expected {labels.classes} classes, "
                "and optionally one column of client names before them"
            )
        for line, cells in rows:
            if len(cells) != len(first):
                raise UserError(f"{self.path} line {line}: {len(cells)} columns; expected {len(first)}")
        header = first[named:]
        in_order = list(range(named, len(first)))
        if header == list(labels.names):
            return in_order, self._clients(rows[1:])
        titled = bool(named) and first[0].lower() == "client"
        if not titled and sorted(header) != sorted(labels.names) and all(_is_number(cell) for cell in header):
            if named and not _is_numbering([cells[0] for _, cells in rows]):
                raise UserError(f"{self.path}: {len(first)} columns of counts; expected {labels.classes}")
            return in_order, rows
        for cell in header:
            if cell not in labels.names:
                raise unknown(f"class in {self.path}:", cell, labels.names)
        for name in labels.names:
            if name not in header:
                raise UserError(f"{self.path}: no column for class {name!r}; expected one for every class")
        return [named + header.index(name) for name in labels.names], self._clients(rows[1:])

    def _clients(self, body: list[Row]) -> list[Row]:
        if not body:
            raise UserError(f"{self.path}: a header but no clients; expected one row of counts per client")
        return body

    def _count(self, row: Row, column: int) -> int:
        line, cells = row
        if not cells[column].isdecimal() or len(cells[column]) > 15:
            raise UserError(
                f"{self.path} line {line} column {column + 1}: {cells[column]!r}; "
                "expected a number of samples, 0 or more"
            )
        return int(cells[column])

    def _check_counts(self, counts: IntArray, body: list[Row], labels: Labels) -> None:
        empty = np.flatnonzero(counts.sum(axis=1) == 0)
        if len(empty):
            line = body[int(empty[0])][0]
            raise UserError(f"{self.path} line {line}: a client without samples; expected at least 1")
        wanted = counts.sum(axis=0)
        over = np.flatnonzero(wanted > labels.class_sizes)
        if len(over):
            c = int(over[0])
            raise UserError(
                f"{self.path}: class {labels.names[c]!r} adds up to {wanted[c]} samples; "
                f"expected at most the {labels.class_sizes[c]} that the data have"
            )


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


def _is_numbering(names: list[str]) -> bool:
    """Whether a first column without a heading has client names or numbers, rather than counts."""
    numbers = [str(i) for i in range(len(names) + 1)]
    return names in (numbers[:-1], numbers[1:]) or not all(_is_number(name) for name in names)


def _read(path: str | os.PathLike[str]) -> list[Row]:
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file)
            rows = [(reader.line_num, [cell.strip() for cell in cells]) for cells in reader]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"cannot read {path}: {reason}; expected a CSV file of counts") from error
    rows = [row for row in rows if any(row[1])]
    if not rows:
        raise UserError(f"{path} is empty; expected one row of counts per client")
    return rows
