"""Load users' tables: find the label column, and whether the others are numbers, text or images."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from fedskew.data.dataset import Dataset
from fedskew.data.images import Pixels, Size, decode_all, parse_size, same_channels
from fedskew.data.own.arrays import convert_inputs
from fedskew.data.own.assembly import Array, Part, assemble
from fedskew.data.own.fields import load_fields, token_columns
from fedskew.data.own.labels import Labels, class_list, read_labels
from fedskew.data.published.text import LENGTH, VOCABULARY
from fedskew.errors import UserError, unknown

LABEL_NAMES = ("label", "labels", "class", "target", "y")


@dataclass(frozen=True)
class EncodedImages:
    """A column of images, each as the bytes of an image file."""

    files: list[bytes]


Column = Array | list[str] | EncodedImages
"""Numbers (one or more per row), strings, or images."""


@dataclass(frozen=True)
class Table:
    """The columns of a table by name."""

    where: str
    row: Callable[[int], str]
    columns: dict[str, Column]
    class_names: dict[str, tuple[str, ...]] = field(default_factory=dict)
    mistakes: dict[str, str] = field(default_factory=dict)
    """Why a column cannot be used as numbers. This matters only if the column is an input."""
    gaps: dict[str, int] = field(default_factory=dict)
    """The first row without a value, for columns with such a row."""


@dataclass(frozen=True)
class _Inputs:
    kind: str
    names: tuple[str, ...]


def load_tables(
    name: str,
    tables: list[Table],
    *,
    label: str | None = None,
    text: str | None = None,
    test_fraction: float | None = None,
    image_size: object = None,
    layout: str | None = None,
    length: int = LENGTH,
    vocabulary: int = VOCABULARY,
    classes: object = None,
    rename: object = None,
    columns: object = None,
    drop: object = None,
) -> Dataset:
    """Load one table, or a training and a test table.

    A table has a label column. Its inputs are columns of numbers, or one column of texts, or one of image files.
    """
    tables = [_rename_columns(table, rename) for table in tables]
    label = _label_column(tables[0], label)
    tables = [_select_columns(table, columns, drop, label) for table in tables]
    if tokens := token_columns(tables[0].columns):
        pairs = [({n: _column(table, n) for n in tokens}, _column(table, label)) for table in tables]
        found = class_list(classes) or tables[0].class_names.get(label)
        return load_fields(name, pairs, test_fraction=test_fraction, classes=found)
    inputs = _choose_inputs(tables[0], label, text)
    labels = [_labels(table, label) for table in tables]
    names = class_list(classes) or tables[0].class_names.get(label)
    if inputs.kind == "text":
        texts = [Part(_text(table, inputs.names[0]), y, table.where) for table, y in zip(tables, labels, strict=True)]
        return assemble(name, "text", texts, names, test_fraction, length, vocabulary)
    if inputs.kind == "encoded":
        size = parse_size(image_size)
        pixels: list[Array] = [*same_channels([_decoded(table, inputs.names[0], size) for table in tables])]
    else:
        pixels = [_numbers(table, inputs.names) for table in tables]
    kind, x = convert_inputs(pixels, [table.where for table in tables], "nchw" if inputs.kind == "encoded" else layout)
    parts = [Part(v, y, table.where) for v, y, table in zip(x, labels, tables, strict=True)]
    dataset = assemble(name, kind, parts, names, test_fraction)
    named = kind == "table" and dataset.input_shape == (len(inputs.names),)
    return replace(dataset, columns=inputs.names) if named else dataset


def _rename_columns(table: Table, rename: object) -> Table:
    """Rename columns. `rename` maps old names to new ones."""
    changes = {} if rename is None else rename
    if not isinstance(changes, dict):
        raise UserError(f"rename is {rename!r}; expected old and new names such as {{patient_age: age}}")
    for old in changes:
        if old not in table.columns:
            raise unknown(f"column to rename in {table.where}:", str(old), table.columns)
    names = {name: str(changes.get(name, name)) for name in table.columns}
    for new in names.values():
        if list(names.values()).count(new) > 1:
            raise UserError(f"{table.where}: two columns are called {new!r} after rename; expected different names")
    return _with_columns(table, names)


def _select_columns(table: Table, columns: object, drop: object, label: str) -> Table:
    """The table with the label and only some `columns`, or without those in `drop`."""
    kept = list(table.columns)
    if columns is not None:
        kept = [*_listed("columns", columns, table), label]
    if drop is not None:
        dropped = _listed("drop", drop, table)
        if label in dropped:
            raise UserError(f"drop has {label!r}, which is the label; expected other columns")
        kept = [name for name in kept if name not in dropped]
    return _with_columns(table, {name: name for name in kept})


def _with_columns(table: Table, names: dict[str, str]) -> Table:
    """The table with these columns only, under new names."""
    return replace(
        table,
        columns={new: table.columns[old] for old, new in names.items()},
        class_names={new: table.class_names[old] for old, new in names.items() if old in table.class_names},
        mistakes={new: table.mistakes[old] for old, new in names.items() if old in table.mistakes},
        gaps={new: table.gaps[old] for old, new in names.items() if old in table.gaps},
    )


def _listed(option: str, value: object, table: Table) -> list[str]:
    listed = [part.strip() for part in value.split(",")] if isinstance(value, str) else value
    if not isinstance(listed, list | tuple) or not all(isinstance(name, str) for name in listed):
        raise UserError(f"{option} is {value!r}; expected a list of columns such as [age, pulse]")
    for name in listed:
        if name not in table.columns:
            raise unknown(
                f"column to {'keep' if option == 'columns' else 'drop'} in {table.where}:", name, table.columns
            )
    return list(listed)


def _label_column(table: Table, label: str | None) -> str:
    if label is not None:
        if label not in table.columns:
            raise unknown(f"label column in {table.where}:", str(label), table.columns)
        return label
    if len(table.class_names) == 1:
        return next(iter(table.class_names))
    for name in LABEL_NAMES:
        for column in table.columns:
            if column.lower() == name:
                return column
    raise UserError(
        f"{table.where}: no column named {', '.join(LABEL_NAMES)}; name the label column with label=NAME; "
        f"columns: {', '.join(table.columns)}"
    )


def _choose_inputs(table: Table, label: str, text: str | None) -> _Inputs:
    others = {name: column for name, column in table.columns.items() if name != label}
    if text is not None:
        if not isinstance(others.get(text), list):
            raise unknown(f"text column in {table.where}:", str(text), _text_names(others) or others)
        return _Inputs("text", (text,))
    encoded = [name for name, column in others.items() if isinstance(column, EncodedImages)]
    pixels = [name for name, column in others.items() if isinstance(column, np.ndarray) and column.ndim > 2]
    if len(encoded + pixels) > 1:
        raise UserError(f"{table.where}: columns {', '.join(encoded + pixels)} all hold images; expected one")
    if encoded or pixels:
        return _Inputs("encoded" if encoded else "numbers", (*encoded, *pixels))
    for name in others:
        _require_numbers(table, name)
    texts = _text_names(others)
    if len(texts) == 1 and len(others) == 1:
        return _Inputs("text", (texts[0],))
    if texts:
        raise UserError(
            f"{table.where}: column {texts[0]!r} holds strings; expected numbers besides the label {label!r}, "
            "or name the text column with text=NAME"
        )
    if not others:
        raise UserError(f"{table.where}: no column besides the label {label!r}; expected inputs")
    return _Inputs("numbers", tuple(others))


def _require_numbers(table: Table, name: str) -> None:
    _require_values(table, name)
    if name in table.mistakes:
        raise UserError(table.mistakes[name])


def _require_values(table: Table, name: str) -> None:
    if name in table.gaps:
        row = table.row(table.gaps[name])
        raise UserError(f"{table.where}: no value in column {name!r}, {row}; expected one for every sample")


def _text_names(columns: dict[str, Column]) -> list[str]:
    return [name for name, column in columns.items() if isinstance(column, list)]


def _column(table: Table, name: str) -> Column:
    if name not in table.columns:
        raise UserError(f"{table.where}: no column {name!r}, but the training data has one; expected the same columns")
    return table.columns[name]


def _labels(table: Table, name: str) -> Labels:
    column = _column(table, name)
    _require_values(table, name)
    if isinstance(column, EncodedImages):
        raise UserError(f"{table.where}: the label column {name!r} holds images; expected numbers or strings")
    return read_labels(np.asarray(column), f"{table.where} column {name!r}", table.row)


def _text(table: Table, name: str) -> list[str]:
    column = _column(table, name)
    _require_values(table, name)
    if not isinstance(column, list):
        raise UserError(f"{table.where}: column {name!r} holds no strings; expected text as in the training data")
    return column


def _decoded(table: Table, name: str, size: Size | None) -> Pixels:
    column = _column(table, name)
    if not isinstance(column, EncodedImages):
        raise UserError(f"{table.where}: column {name!r} holds no images; expected them as in the training data")
    if not column.files:
        raise UserError(f"{table.where}: no samples")
    return decode_all(column.files, lambda index: f"{table.where} {table.row(index)}", size)


def _numbers(table: Table, names: tuple[str, ...]) -> Array:
    blocks = []
    for name in names:
        column = _column(table, name)
        _require_numbers(table, name)
        if not isinstance(column, np.ndarray):
            raise UserError(f"{table.where}: column {name!r} holds strings; expected numbers as in the training data")
        if column.ndim > 2:
            return column
        if not len(column):
            raise UserError(f"{table.where}: no samples")
        block = column.reshape(len(column), -1).astype(np.float64)
        bad = np.flatnonzero(~np.isfinite(block).all(axis=1))
        if len(bad):
            raise UserError(
                f"{table.where}: NaN or infinite value in column {name!r}, {table.row(int(bad[0]))}; "
                "expected finite numbers"
            )
        blocks.append(block)
    return np.concatenate(blocks, axis=1)
