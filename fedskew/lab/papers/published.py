"""The numbers that the papers print, as data: one CSV file a paper, a row a cell."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

FOLDER = files("fedskew.lab.papers") / "published"


@dataclass(frozen=True)
class Number:
    """A printed number, in the unit it is printed in; `mean` is None where the paper has no legible number."""

    table: str
    dataset: str
    split: str
    condition: str
    method: str
    metric: str
    mean: float | None
    std: float | None
    note: str

    @property
    def hyperparameter(self) -> str | None:
        """Its name, if this is no result but a setting."""
        kind, _, name = self.metric.partition(":")
        return name if kind == "hyperparameter" else None


@cache
def numbers(paper: str) -> tuple[Number, ...]:
    """Everything of one paper, in the order of its tables; nothing for a comparison of our own."""
    path = FOLDER / f"{paper}.csv"
    if not path.is_file():
        return ()
    return tuple(_number(row) for row in csv.DictReader(path.read_text(encoding="utf-8").splitlines()))


def _number(row: dict[str, Any]) -> Number:
    mean, std = row.pop("mean"), row.pop("std")
    return Number(**row, mean=float(mean) if mean else None, std=float(std) if std else None)
