"""Turns rows of a table into a model's inputs. This module's source is exported with table models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


class Rows:
    """Maps the columns of a table to inputs: numbers as they are, one input per category, and gaps.

    A gap among numbers becomes the mean. An unknown category has 0 in all inputs of its column. Some columns have a
    further input, which is 1 for a gap.
    """

    def __init__(self, columns: Sequence[Mapping[str, Any]]) -> None:
        self.columns = columns

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> Tensor:
        """Return the inputs of rows such as {"age": 61, "sex": "f"}: float64, n × inputs, not standardised yet."""
        inputs = [[number for column in self.columns for number in _inputs(column, row)] for row in rows]
        return torch.tensor(inputs, dtype=torch.float64)


def _inputs(column: Mapping[str, Any], row: Mapping[str, Any]) -> list[float]:
    if column["name"] not in row:
        raise ValueError(f"a row has no column {column['name']!r}; expected it, with None for a gap")
    value = row[column["name"]]
    gap = value is None or value != value or (isinstance(value, str) and not value.strip())
    categories = column.get("categories")
    if categories is None:
        found = [column["mean"] if gap else float(value)]
    else:
        text = "" if gap else _text(value)
        found = [float(text == category) for category in categories]
    return [*found, float(gap)] if column.get("marks_gaps") else found


def _text(value: Any) -> str:
    """Write a number as training did: 3.0 as 3."""
    if isinstance(value, str):
        return value.strip()
    return str(int(value)) if float(value).is_integer() else repr(float(value))
