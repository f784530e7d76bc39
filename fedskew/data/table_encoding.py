"""Encode a table's columns as a model's inputs.

Numbers are standardised, and gaps (missing values) among them are filled. Categories become one-hot features. A further
feature may mark the gaps of a column. The user gives the encoding, or it is fitted on the training part. It is saved
with the run and exported with the model. In a federation, all sites use one encoding, so that an input means the same
everywhere.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import yaml

from fedskew.data.spelling import composed
from fedskew.errors import UserError

Numbers = npt.NDArray[np.float64]
Index = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Strings:
    """A column of texts: its distinct values, and for each row the index of its value, or −1 for a gap."""

    values: tuple[str, ...]
    codes: Index
    categorical: bool = False
    """Whether the column's type says that its values are categories. They may look like numbers."""

    def __len__(self) -> int:
        return len(self.codes)

    def take(self, rows: Index) -> Strings:
        return Strings(self.values, self.codes[rows], self.categorical)

    def to_list(self) -> list[str | None]:
        """Return each row's text, or None for a gap."""
        texts = (*self.values, None)  # code −1, a gap, reads the last entry
        return [texts[code] for code in self.codes.tolist()]


@dataclass(frozen=True, eq=False)
class RawTable:
    """A table's input columns before they are encoded."""

    names: tuple[str, ...]
    """All columns, in order."""
    numbers: Numbers
    """The columns of numbers, in order: [rows, columns of numbers]. NaN is a gap."""
    strings: Mapping[str, Strings]
    """The columns of texts."""

    def __len__(self) -> int:
        return len(self.numbers)

    @property
    def number_names(self) -> tuple[str, ...]:
        return tuple(name for name in self.names if name not in self.strings)

    def take(self, rows: Index) -> RawTable:
        """Return the table with these rows only."""
        chosen = {name: column.take(rows) for name, column in self.strings.items()}
        return RawTable(self.names, self.numbers[rows], chosen)


@dataclass(frozen=True)
class ColumnEncoding:
    """How one column becomes features.

    A column of numbers becomes one standardised feature, in which the mean fills a gap. A column of categories becomes
    one feature per known value. An unknown value or a gap is 0 in all of these features. With `marks_gaps`, a further
    feature is 1 for a gap and 0 otherwise.
    """

    name: str
    mean: float = 0.0
    std: float = 1.0
    categories: tuple[str, ...] | None = None
    """The known values; None for a column of numbers."""
    marks_gaps: bool = False

    @property
    def features(self) -> tuple[str, ...]:
        own = (self.name,) if self.categories is None else tuple(f"{self.name}={value}" for value in self.categories)
        return (*own, f"{self.name} missing") if self.marks_gaps else own

    @property
    def scaling(self) -> tuple[tuple[float, float], ...]:
        """Mean and standard deviation of each feature. They are 0 and 1 for features that are not standardised."""
        first = (self.mean, self.std) if self.categories is None else (0.0, 1.0)
        return (first, *((0.0, 1.0),) * (len(self.features) - 1)) if self.features else ()

    def to_json(self) -> dict[str, Any]:
        kind: dict[str, Any] = (
            {"mean": self.mean, "std": self.std} if self.categories is None else {"categories": list(self.categories)}
        )
        return {"name": self.name, **kind, "marks_gaps": self.marks_gaps}


@dataclass(frozen=True)
class UnknownValues:
    """The values of a column that are not among its categories."""

    column: ColumnEncoding
    values: tuple[str, ...]
    rows: int
    """The number of rows with one of these values."""
    known_rows: int
    """The number of rows with a known value."""


@dataclass(frozen=True)
class TableEncoding:
    """How the columns of a table become features, column by column."""

    columns: tuple[ColumnEncoding, ...]

    @cached_property
    def features(self) -> tuple[str, ...]:
        """The names of the model's inputs."""
        return tuple(feature for column in self.columns for feature in column.features)

    @property
    def scaling(self) -> tuple[tuple[float, float], ...]:
        return tuple(pair for column in self.columns for pair in column.scaling)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the table's columns."""
        return tuple(column.name for column in self.columns)

    @property
    def only_numbers(self) -> bool:
        """Whether each column is one standardised number. Then names, means and deviations describe the encoding."""
        return all(column.categories is None and not column.marks_gaps for column in self.columns)

    def encode(self, table: RawTable) -> npt.NDArray[np.float32]:
        """Return the features of each row: [rows, features]. The table must have the same columns in the same order."""
        out = np.zeros((len(table), len(self.features)), np.float32)
        scaled = self._standardised(table)
        position, start = 0, 0
        for column in self.columns:
            if column.categories is None:
                values = scaled[:, position]
                gaps = np.isnan(table.numbers[:, position])
                out[:, start] = np.where(gaps, 0.0, values)
                position += 1
            else:
                gaps = _mark_categories(out, start, column.categories, table.strings[column.name])
            start += len(column.features)
            if column.marks_gaps:
                out[:, start - 1] = gaps
        return out

    def _standardised(self, table: RawTable) -> Numbers:
        numbers = [column for column in self.columns if column.categories is None]
        mean = np.array([column.mean for column in numbers])
        std = np.array([column.std for column in numbers])
        with np.errstate(over="ignore", invalid="ignore"):  # the caller refuses inputs that are not finite
            scaled: Numbers = (table.numbers - mean) / std
        return scaled

    def unknown_values(self, tables: Sequence[RawTable]) -> list[UnknownValues]:
        """Return the columns with values that are not categories of the encoding."""
        found = []
        for column in self.columns:
            if column.categories is None:
                continue
            rows: Counter[str] = Counter()
            for table in tables:
                rows.update(_count_values(table.strings[column.name]))
            known = sum(rows.pop(value, 0) for value in column.categories)
            if rows:
                found.append(UnknownValues(column, tuple(sorted(rows)), rows.total(), known))
        return found

    def to_json(self) -> list[dict[str, Any]]:
        return [column.to_json() for column in self.columns]

    @classmethod
    def from_json(cls, value: object, where: str = "encoding") -> TableEncoding:
        """Read an encoding that `to_json` or a person wrote. `mean` and `std` default to 0 and 1."""
        if isinstance(value, Mapping) and "columns" in value:
            value = value["columns"]
        if not isinstance(value, Sequence) or isinstance(value, str) or not value:
            raise UserError(f"{where}: not a list of columns; expected entries such as {_EXAMPLE}")
        columns = tuple(_column_from_json(entry, where) for entry in value)
        names = [column.name for column in columns]
        if twice := [name for name in names if names.count(name) > 1]:
            raise UserError(f"{where}: column {twice[0]!r} appears twice; expected different names")
        encoding = cls(columns)
        if len(set(encoding.features)) < len(encoding.features):
            twice = [name for name in encoding.features if encoding.features.count(name) > 1]
            raise UserError(f"{where}: two inputs are called {twice[0]!r}; expected different names")
        return encoding

    def save(self, path: str | Path) -> None:
        """Write the encoding to a JSON file, which the option `encoding` reads."""
        try:
            Path(path).write_text(json.dumps({"columns": self.to_json()}, indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            raise UserError(f"cannot write {path}: {error.strerror or error}") from error


@dataclass(frozen=True)
class PooledEncoding(TableEncoding):
    """An encoding that was fitted to the sums of several sites. It may lack all categories of a site that hid them."""


@dataclass(frozen=True)
class DraftEncoding(TableEncoding):
    """The columns of an encoding and their kinds, before its categories, means and deviations are known.

    In a federation, the server fits these to sums that the sites send (`column_sums.py`). A site computes its sums from
    the values before encoding, so `Dataset.raw_train` keeps the training part of a table that is read with a draft.
    """


_EXAMPLE = '{"name": "age", "mean": 60, "std": 15} and {"name": "sex", "categories": ["f", "m"]}'
_YAML_BOOLEAN = "tag:yaml.org,2002:bool"
_KEYS = ("name", "mean", "std", "categories", "marks_gaps")


def fit_encoding(table: RawTable) -> TableEncoding:
    """Fit an encoding to the training part of one table. A column with gaps gets a feature that marks them."""
    with np.errstate(over="ignore", invalid="ignore"):  # the caller refuses moments that are not finite
        mean, std = _moments(table.numbers)
    gaps = np.isnan(table.numbers).sum(axis=0)
    columns, position = [], 0
    for name in table.names:
        strings = table.strings.get(name)
        if strings is None:
            moments = float(mean[position]), float(std[position])
            columns.append(ColumnEncoding(name, *moments, marks_gaps=bool(gaps[position])))
            position += 1
        else:
            used = sorted({strings.values[code] for code in np.unique(strings.codes) if code >= 0})
            has_gaps = bool((strings.codes < 0).any())
            columns.append(ColumnEncoding(name, categories=tuple(used), marks_gaps=has_gaps))
    return TableEncoding(tuple(columns))


def columns_with_rare_categories(
    encoding: TableEncoding, parts: Sequence[npt.NDArray[np.generic]], fewest: int
) -> tuple[str, ...]:
    """Return the columns with a category of fewer than `fewest` rows. `parts` are all encoded rows of a table."""
    rows = sum(np.count_nonzero(part, axis=0) for part in parts)
    ends = np.cumsum([len(column.features) for column in encoding.columns])
    found = []
    for column, end in zip(encoding.columns, ends.tolist(), strict=True):
        start = end - len(column.features)
        own = np.asarray(rows)[start : start + len(column.categories or ())]
        if column.categories and (own < fewest).any():
            found.append(column.name)
    return tuple(found)


def read_encoding(source: object) -> TableEncoding:
    """Read the option `encoding`: a `TableEncoding`, its JSON value, or the path of a JSON or YAML file."""
    if isinstance(source, TableEncoding):
        return source
    if not isinstance(source, str | Path):
        return TableEncoding.from_json(source)
    try:
        content = _parse(Path(os.path.expanduser(source)).read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise UserError(f"cannot read {source}: {error.strerror or error}; expected an encoding file") from error
    except (ValueError, yaml.YAMLError) as error:
        raise UserError(f"{source}: neither JSON nor YAML; expected an encoding file") from error
    if isinstance(content, Mapping) and isinstance(content.get("inputs"), Mapping):  # the model.json of an export
        content = content["inputs"].get("encoding")
    return TableEncoding.from_json(content, str(source))


def _parse(text: str) -> object:
    """Parse JSON or YAML. JSON is tried first, because YAML refuses its tabs and misreads its escapes of emoji."""
    try:
        return json.loads(text)
    except ValueError:
        return yaml.load(text, _Loader)


class _Loader(yaml.SafeLoader):
    """A safe loader for which yes, no, on and off are texts: they may be categories."""

    yaml_implicit_resolvers = {  # noqa: RUF012 - as in the base class
        first: [(tag, form) for tag, form in resolvers if tag != _YAML_BOOLEAN]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


_Loader.add_implicit_resolver(_YAML_BOOLEAN, re.compile("(?i:true|false)$"), list("tTfF"))


def _column_from_json(entry: object, where: str) -> ColumnEncoding:
    if not isinstance(entry, Mapping) or not isinstance(entry.get("name"), str):
        raise UserError(f"{where}: {entry!r} is not a column; expected entries such as {_EXAMPLE}")
    name = composed(entry["name"])
    if strange := [key for key in entry if key not in _KEYS]:
        raise UserError(f"{where}: column {name!r} has the key {strange[0]!r}; expected {', '.join(_KEYS)}")
    categories = entry.get("categories")
    if categories is not None and not isinstance(categories, list | tuple):
        raise UserError(f"{where}: categories of {name!r} are {categories!r}; expected a list such as [f, m]")
    try:
        mean, std = float(entry.get("mean", 0.0)), float(entry.get("std", 1.0))
    except (TypeError, ValueError) as error:
        raise UserError(f"{where}: mean or std of {name!r} is not a number; expected, say, 60 and 15") from error
    if not (np.isfinite(mean) and np.isfinite(std) and std > 0):
        raise UserError(
            f"{where}: column {name!r} has mean {mean:g} and std {std:g}; expected finite numbers, and std above 0"
        )
    marks_gaps = entry.get("marks_gaps", False)
    if not isinstance(marks_gaps, bool):
        raise UserError(f"{where}: marks_gaps of {name!r} is {marks_gaps!r}; expected true or false")
    values = None if categories is None else tuple(str(value) for value in categories)
    if values is not None and len({composed(value) for value in values}) == len(values):
        values = tuple(composed(value) for value in values)
    if values is not None and len(set(values)) < len(values):
        raise UserError(f"{where}: a category of {name!r} is listed twice; expected each category once")
    return ColumnEncoding(name, mean, std, values, marks_gaps)


def _moments(numbers: Numbers) -> tuple[Numbers, Numbers]:
    """Return each column's mean and standard deviation. Gaps are ignored. A constant column has deviation 1."""
    gaps = np.isnan(numbers)
    if not gaps.any():
        mean, std = numbers.mean(axis=0), numbers.std(axis=0)
        constant = (numbers == numbers[:1]).all(axis=0)
    else:
        known = np.maximum((~gaps).sum(axis=0), 1)
        filled = np.where(gaps, 0.0, numbers)
        mean = filled.sum(axis=0) / known
        std = np.sqrt((np.where(gaps, 0.0, numbers - mean) ** 2).sum(axis=0) / known)
        first = filled[np.argmax(~gaps, axis=0), np.arange(numbers.shape[1])]
        constant = (gaps | (numbers == first)).all(axis=0)
        mean = np.where(constant, first, mean)
    std = np.where(constant | (std == 0), 1.0, std)
    return mean, std


def _count_values(column: Strings) -> dict[str, int]:
    """Return the number of rows of each value that occurs."""
    counts = np.bincount(column.codes[column.codes >= 0], minlength=len(column.values)).tolist()
    return {value: count for value, count in zip(column.values, counts, strict=True) if count}


def _mark_categories(
    out: npt.NDArray[np.float32], start: int, categories: Sequence[str], column: Strings
) -> npt.NDArray[np.bool_]:
    """Set the feature of each row's category to 1, and return which rows are gaps."""
    place = {value: number for number, value in enumerate(categories)}
    # Unknown values and gaps have no category (−1). The code of a gap, −1, reads the last entry.
    lookup = np.array([*(place.get(value, -1) for value in column.values), -1], np.int64)
    category = lookup[column.codes]
    rows = np.flatnonzero(category >= 0)
    out[rows, start + category[rows]] = 1.0
    return column.codes < 0
