"""Turn rows of a table into a model's inputs. This module's source is exported with table models."""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

_GAPS = ("", "na", "n/a", "#n/a", "nan", "<na>", "null", "none", "?")
"""Texts that are gaps in a column of numbers, in lower case. Among categories, only an empty text and <NA> are gaps."""


class Rows:
    """Maps the columns of a table to inputs.

    A column of numbers gives one input, and a gap becomes the mean. A column of categories gives one input per known
    category, and an unknown category gives 0 in all of them. Some columns have a further input, which is 1 for a gap.
    """

    def __init__(self, columns: Sequence[Mapping[str, Any]]) -> None:
        self.columns = columns

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> Tensor:
        """Return the inputs of rows such as {"age": 61, "sex": "f"}: float64, n × inputs, not standardised yet."""
        inputs = [[number for column in self.columns for number in _inputs(column, row)] for row in rows]
        return torch.tensor(inputs, dtype=torch.float64).view(len(rows), sum(map(_width, self.columns)))


def _width(column: Mapping[str, Any]) -> int:
    """The number of inputs that the column gives."""
    categories = column.get("categories")
    return (1 if categories is None else len(categories)) + bool(column.get("marks_gaps"))


def _inputs(column: Mapping[str, Any], row: Mapping[str, Any]) -> list[float]:
    if column["name"] not in row:
        raise ValueError(f"a row has no column {column['name']!r}; expected it, with None for a gap")
    value = row[column["name"]]
    categories = column.get("categories")
    gaps = _GAPS if categories is None else ("",)
    is_gap = value is None or str(value) == "<NA>" or value != value
    is_gap = is_gap or (isinstance(value, str) and value.strip().lower() in gaps)
    if categories is None:
        found = [column["mean"] if is_gap else float(value)]
    else:
        text = "" if is_gap else _text(value, categories)
        found = [float(text == category) for category in categories]
    return [*found, float(is_gap)] if column.get("marks_gaps") else found


def _text(value: Any, categories: Sequence[str]) -> str:
    """Write a category as in training: 3.0 as 3, letters in NFC, and booleans as the known categories spell them."""
    if isinstance(value, str) or str(value) in ("True", "False"):
        text = unicodedata.normalize("NFC", str(value).strip())
        whole = text[:-2] if text.endswith((".0", ",0")) else text
        if text not in categories and whole in categories and whole.removeprefix("-").isdecimal():
            return whole
    else:
        text = str(int(value)) if float(value).is_integer() else repr(float(value))
    for number, word in (("0", "False"), ("1", "True")):
        if text not in categories and text.capitalize() in (number, word):
            spellings = (word, word.lower(), word.upper(), number)
            return next((spelling for spelling in spellings if spelling in categories), text)
    return text
