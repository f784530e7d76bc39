"""Tables that public objects show: as text, as HTML for notebooks, and as pandas DataFrames."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from fedskew.errors import UserError

Records = Sequence[Mapping[str, object]]
"""The rows of a table. The keys of the first row are the headings."""


def data_frame(records: Records, columns: Sequence[str] | None = None) -> Any:
    """Return a pandas DataFrame with one row per record and, by default, one column per key."""
    try:
        import pandas
    except ImportError as error:
        raise UserError("a DataFrame needs pandas: pip install pandas") from error
    return pandas.DataFrame.from_records([dict(record) for record in records], columns=columns)


def text_table(records: Records) -> str:
    """Format the records as text in columns, with columns of numbers aligned right."""
    cells = _cells(records)
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    are_numeric = [all(isinstance(record[key], int | float) for record in records) for key in records[0]]
    lines = (
        "  ".join(
            cell.rjust(width) if is_numeric else cell.ljust(width)
            for cell, width, is_numeric in zip(row, widths, are_numeric, strict=True)
        )
        for row in cells
    )
    return "\n".join(line.rstrip() for line in lines)


def html_table(records: Records, caption: str = "") -> str:
    """Format the records as an HTML table, for notebooks."""
    head, *body = _cells(records)
    title = f"<caption>{escape(caption)}</caption>" if caption else ""
    headings = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    rows = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in body)
    return f"<table>{title}<thead><tr>{headings}</tr></thead><tbody>{rows}</tbody></table>"


def _cells(records: Records) -> list[list[str]]:
    return [list(records[0]), *([_format(value) for value in record.values()] for record in records)]


def _format(value: object) -> str:
    if value is None:
        return "–"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
