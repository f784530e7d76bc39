"""A table of a report: what can be read, copied and saved as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass

Cell = str | int | float | None


@dataclass(frozen=True)
class Table:
    """Columns and rows; None is an empty cell."""

    key: str
    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(f"a row of {len(row)} cells under {len(self.columns)} columns in {self.key}")

    def is_numeric(self, column: int) -> bool:
        """Whether its numbers are to stand under one another; the first column names the rows."""
        return column > 0 and any(isinstance(row[column], int | float) for row in self.rows)

    def csv(self) -> str:
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(self.columns)
        writer.writerows(["" if cell is None else cell for cell in row] for row in self.rows)
        return text.getvalue()


def number(value: float | None, digits: int = 2) -> float | None:
    """Rounded to what is meant; -0.0 is 0."""
    return None if value is None or value != value else round(value, digits) + 0.0
