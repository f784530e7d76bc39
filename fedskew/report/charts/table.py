"""The tables of a report, which can be saved as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass

Cell = str | int | float | None


@dataclass(frozen=True)
class Table:
    """Columns and rows. None is an empty cell, and `key` names the table's file."""

    key: str
    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(f"table {self.key}: a row has {len(row)} cells, expected {len(self.columns)}")

    def is_numeric(self, column: int) -> bool:
        """Whether to align the column as numbers. The first column holds row names."""
        return column > 0 and any(isinstance(row[column], int | float) for row in self.rows)

    def csv(self) -> str:
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(self.columns)
        writer.writerows(["" if cell is None else cell for cell in row] for row in self.rows)
        return text.getvalue()


def number(value: float | None, digits: int = 2) -> float | None:
    """Round a number. NaN becomes None, and -0.0 becomes 0."""
    return None if value is None or value != value else round(value, digits) + 0.0
