"""A user's table: its columns by name, and how they are renamed, chosen and split."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from fedskew.data.own.columns import Column
from fedskew.data.spelling import composed
from fedskew.data.table_encoding import Strings
from fedskew.errors import UserError, unknown

_PURPOSES = {"columns": "keep", "drop": "drop", "categorical": "read as categories", "label": "read as a label"}


@dataclass(frozen=True)
class Table:
    """The columns of a table by name."""

    where: str
    """The file or object, for messages."""
    row: Callable[[int], str]
    """Describes a row by its index, for messages."""
    columns: dict[str, Column]
    class_names: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """The class names of Hugging Face's `ClassLabel` columns, by column."""
    mistakes: dict[str, str] = field(default_factory=dict)
    """For each column that cannot be an input, the error message. It is raised only if the column is used."""
    categories: frozenset[str] = frozenset()
    """In an Arrow table, the columns that are categories by type or metadata. Their values may be numbers."""
    split_from: dict[str, str] = field(default_factory=dict)
    """For each column, the name of the column that it was before `split_lists`. Empty before that."""


def number_as_name(name: Any) -> Any:
    """Return a whole number as a name (2 as `2`), because columns may be numbered, and a text in composed form.

    Other values are not changed.
    """
    if isinstance(name, str):
        return composed(name)
    return str(name) if isinstance(name, int | np.integer) and not isinstance(name, bool) else name


def rename_columns(table: Table, rename: object) -> Table:
    """Rename columns. `rename` maps old names to new ones."""
    changes = {} if rename is None else rename
    if not isinstance(changes, dict):
        raise UserError(f"rename is {rename!r}; expected old and new names such as {{patient_age: age}}")
    changes = {number_as_name(old): new for old, new in changes.items()}
    for old in changes:
        if old not in table.columns:
            raise unknown(f"column to rename in {table.where}:", str(old), table.columns)
    names = {name: composed(str(changes.get(name, name))) for name in table.columns}
    for new in names.values():
        if list(names.values()).count(new) > 1:
            raise UserError(f"{table.where}: two columns are called {new!r} after rename; expected different names")
    return _with_columns(table, names)


def select_columns(table: Table, columns: object, drop: object, label_and_site: tuple[str, ...]) -> Table:
    """Keep only the `columns`, and leave out those in `drop`. Label and site always stay."""
    kept = list(table.columns)
    if columns is not None:
        chosen = [name for name in parse_columns("columns", columns, table) if name not in label_and_site]
        kept = [*chosen, *(name for name in label_and_site if name in table.columns)]
    if drop is not None:
        dropped = parse_columns("drop", drop, table)
        if label_and_site[0] in dropped:
            raise UserError(f"drop has {label_and_site[0]!r}, which is the label; expected other columns")
        kept = [name for name in kept if name not in dropped or name in label_and_site]
    return _with_columns(table, {name: name for name in kept})


def columns_to_drop(drop: object, table: Table, training: Table) -> object:
    """Return the columns to leave out of `table`. A test table may lack some of them."""
    if drop is None or table is training:
        return drop
    return [name for name in parse_columns("drop", drop, training) if name in table.columns]


def name_categories(table: Table, label: str) -> Table:
    """Replace numbers by class names in `ClassLabel` columns other than the label. The number −1 is a gap."""
    named: dict[str, Column] = {}
    for name, values in table.class_names.items():
        column = table.columns[name]
        if name != label and isinstance(column, np.ndarray) and column.ndim == 1:
            codes = np.nan_to_num(column.astype(np.float64), nan=-1).astype(np.int64)
            if len(codes) and codes.max() < len(values):
                named[name] = Strings(values, np.maximum(codes, -1), categorical=True)
    return replace(table, columns=table.columns | named)


def split_lists(table: Table, training: Table, label_and_site: tuple[str, ...]) -> Table:
    """Replace each column of lists by one column for each place in the list.

    Refuse lists whose length is not that of the training table's lists.
    """
    columns: dict[str, Column] = {}
    split_from: dict[str, str] = {}
    for name, column in table.columns.items():
        parts = {name: column} if name in label_and_site else _list_parts(name, column)
        if name not in label_and_site and len(parts) != len(_list_parts(name, training.columns.get(name, column))):
            raise UserError(
                f"{table.where}: column {name!r} does not hold as many values per row as in the training data; "
                "expected equally many"
            )
        if twice := [part for part in parts if part in columns]:
            raise UserError(f"{table.where}: two columns are called {twice[0]!r}; rename one of them")
        columns |= parts
        split_from |= dict.fromkeys(parts, name)
    return replace(table, columns=columns, split_from=split_from)


def _list_parts(name: str, column: Column) -> dict[str, Column]:
    """Return a column of lists as one column for each place in the list, and any other column as it is."""
    if not isinstance(column, np.ndarray) or column.ndim != 2:
        return {name: column}
    return {f"{name}[{place}]": column[:, place] for place in range(column.shape[1])}


def split_names(names: Iterable[str], table: Table) -> frozenset[str]:
    """Return these columns' names after `split_lists`."""
    return frozenset(part for name in names for part in _list_parts(name, table.columns[name]))


def _with_columns(table: Table, names: dict[str, str]) -> Table:
    """Return the table with these columns only, renamed. `names` maps old names to new ones."""
    return replace(
        table,
        columns={new: table.columns[old] for old, new in names.items()},
        class_names={new: table.class_names[old] for old, new in names.items() if old in table.class_names},
        mistakes={new: table.mistakes[old] for old, new in names.items() if old in table.mistakes},
        categories=frozenset(new for old, new in names.items() if old in table.categories),
    )


def parse_columns(option: str, value: object, table: Table) -> list[str]:
    """Parse an option that lists columns. Raise `UserError` if the table lacks one of them."""
    value = number_as_name(value)
    listed = value
    if isinstance(value, str):
        listed = [value] if value in table.columns else [part.strip() for part in value.split(",")]
    if isinstance(listed, list | tuple):
        listed = list(map(number_as_name, listed))
    if not isinstance(listed, list | tuple) or not all(isinstance(name, str) for name in listed):
        raise UserError(f"{option} is {value!r}; expected a list of columns such as [age, pulse]")
    for name in listed:
        if name not in table.columns:
            raise unknown(f"column to {_PURPOSES[option]} in {table.where}:", name, table.columns)
    return list(listed)
