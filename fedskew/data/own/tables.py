"""A user's CSV and Parquet files, and what the columns of a table are taken for."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedskew.data.dataset import Dataset
from fedskew.data.images import Pixels, Size, decode_all, parse_size, same_channels
from fedskew.data.own.arrays import inputs_of
from fedskew.data.own.assembly import Array, Part, assemble
from fedskew.data.own.labels import Labels, class_list, read_labels
from fedskew.data.published.text import LENGTH, VOCABULARY, read_csv
from fedskew.errors import UserError, unknown

LABEL_NAMES = ("label", "labels", "class", "target", "y")
CSV_SUFFIXES = (".csv", ".csv.gz", ".csv.xz")


@dataclass(frozen=True)
class EncodedImages:
    """A column of image files' bytes."""

    files: list[bytes]


Column = Array | list[str] | EncodedImages
"""Numbers (one or more a row), strings, or images."""


@dataclass(frozen=True)
class Table:
    """A file's columns by name."""

    where: str
    row: Callable[[int], str]
    columns: dict[str, Column]
    class_names: dict[str, tuple[str, ...]] = field(default_factory=dict)
    mistakes: dict[str, str] = field(default_factory=dict)
    """What is wrong with a column, should it be used as numbers: it may be the label or left aside."""


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
) -> Dataset:
    """One table, or train and test: a label column, and numbers, one text or one image column beside it."""
    label = _label_column(tables[0], label)
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
    kind, x = inputs_of(pixels, [table.where for table in tables], "nchw" if inputs.kind == "encoded" else layout)
    parts = [Part(v, y, table.where) for v, y, table in zip(x, labels, tables, strict=True)]
    dataset = assemble(name, kind, parts, names, test_fraction)
    named = kind == "table" and dataset.input_shape == (len(inputs.names),)
    return replace(dataset, columns=inputs.names) if named else dataset


def csv_table(path: Path) -> Table:
    """A CSV file with a header; a column is numeric if most of its cells are."""
    rows = read_csv(path)
    if len(rows) < 2:
        raise UserError(f"{path}: no rows; expected a line of column names and one line per sample")
    header = [name.strip() for name in rows[0][1]]
    repeated = [name for name in header if header.count(name) > 1]
    if repeated:
        raise UserError(f"{path}: column {repeated[0]!r} appears twice; expected different names")
    for line, cells in rows[1:]:
        if len(cells) != len(header):
            raise UserError(f"{path}: line {line} has {len(cells)} cells; expected {len(header)} as in the first line")
    lines = [line for line, _ in rows[1:]]

    def row(index: int) -> str:
        return f"line {lines[index]}"

    columns: dict[str, Column] = {}
    mistakes = {}
    for i, name in enumerate(header):
        cells = [cells[i] for _, cells in rows[1:]]
        columns[name], odd = _typed(cells)
        if odd is not None:
            what = repr(cells[odd]) if cells[odd].strip() else "an empty cell"
            mistakes[name] = f"{path}: {what} in column {name!r}, {row(odd)}; expected a number"
    return Table(str(path), row, columns, mistakes=mistakes)


def parquet_table(path: Path) -> Table:
    pyarrow = import_pyarrow()
    try:
        table = pyarrow.parquet.read_table(path)
    except (OSError, pyarrow.ArrowException) as error:
        raise UserError(f"{path}: cannot be read ({error}); expected a Parquet file") from error
    return arrow_table(table, str(path), {})


def arrow_table(table: Any, where: str, features: dict[str, Any]) -> Table:
    """An Arrow table; `features` are Hugging Face's notes on its columns, which name the classes."""
    features = features or _features_in(table.schema.metadata or {})
    class_names = {
        name: tuple(feature["names"])
        for name, feature in features.items()
        if isinstance(feature, dict) and feature.get("_type") == "ClassLabel" and "names" in feature
    }
    columns = {name: _arrow_column(table.column(name), where, name) for name in table.column_names}
    return Table(where, "row {}".format, columns, class_names)


def _features_in(metadata: dict[bytes, bytes]) -> dict[str, Any]:
    """Hugging Face's notes inside the file; whatever else stands there is none of ours."""
    try:
        features = json.loads(metadata.get(b"huggingface", b"{}"))["info"]["features"]
    except (ValueError, KeyError, TypeError):
        return {}
    return features if isinstance(features, dict) else {}


def import_pyarrow() -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise UserError("reading Parquet and Arrow files needs pyarrow: pip install 'fedskew[data]'") from error
    return pyarrow


def _typed(cells: list[str]) -> tuple[Column, int | None]:
    """Numbers, or the cells as they are; and which cell spoils a column of which most are numbers."""
    try:
        return np.array(cells, dtype=np.float64), None
    except ValueError:
        odd = [index for index, cell in enumerate(cells) if not _is_number(cell)]
    return cells, odd[0] if 2 * len(odd) < len(cells) else None


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


def _label_column(table: Table, wanted: str | None) -> str:
    if wanted is not None:
        if wanted not in table.columns:
            raise unknown(f"label column in {table.where}:", str(wanted), table.columns)
        return wanted
    if len(table.class_names) == 1:
        return next(iter(table.class_names))
    for name in LABEL_NAMES:
        for column in table.columns:
            if column.lower() == name:
                return column
    raise UserError(
        f"{table.where}: no column named {', '.join(LABEL_NAMES)}; say which is the label with label=NAME; "
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
        _refuse_mistake(table, name)
    texts = _text_names(others)
    if len(texts) == 1 and len(others) == 1:
        return _Inputs("text", (texts[0],))
    if texts:
        raise UserError(
            f"{table.where}: column {texts[0]!r} holds strings; expected numbers beside the label {label!r}, "
            "or say which column is the text with text=NAME"
        )
    if not others:
        raise UserError(f"{table.where}: no column beside the label {label!r}; expected inputs")
    return _Inputs("numbers", tuple(others))


def _refuse_mistake(table: Table, name: str) -> None:
    if name in table.mistakes:
        raise UserError(table.mistakes[name])


def _text_names(columns: dict[str, Column]) -> list[str]:
    return [name for name, column in columns.items() if isinstance(column, list)]


def _column(table: Table, name: str) -> Column:
    if name not in table.columns:
        raise UserError(f"{table.where}: no column {name!r}, which the training data has; expected the same columns")
    return table.columns[name]


def _labels(table: Table, name: str) -> Labels:
    column = _column(table, name)
    if isinstance(column, EncodedImages):
        raise UserError(f"{table.where}: the label column {name!r} holds images; expected numbers or strings")
    return read_labels(np.asarray(column), f"{table.where} column {name!r}", table.row)


def _text(table: Table, name: str) -> list[str]:
    column = _column(table, name)
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
        _refuse_mistake(table, name)
        if not isinstance(column, np.ndarray):
            raise UserError(f"{table.where}: column {name!r} holds strings; expected numbers as in the training data")
        if column.ndim > 2:
            return column
        block = column.reshape(len(column), -1).astype(np.float64)
        bad = np.flatnonzero(~np.isfinite(block).all(axis=1))
        if len(bad):
            raise UserError(
                f"{table.where}: NaN or infinite value in column {name!r}, {table.row(int(bad[0]))}; "
                "expected finite numbers"
            )
        blocks.append(block)
    return np.concatenate(blocks, axis=1)


def _arrow_column(chunked: Any, where: str, name: str) -> Column:
    pyarrow = import_pyarrow()
    types = pyarrow.types
    column = chunked.combine_chunks()
    if isinstance(column, pyarrow.ChunkedArray):
        column = pyarrow.concat_arrays(column.chunks) if column.num_chunks else pyarrow.array([], chunked.type)
    if isinstance(column.type, pyarrow.BaseExtensionType):
        column = column.storage
    if types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if column.null_count:
        first = column.is_null().to_numpy(zero_copy_only=False).argmax()
        raise UserError(f"{where}: no value in column {name!r}, row {first}; expected one for every sample")
    if types.is_string(column.type) or types.is_large_string(column.type):
        return list(column.to_pylist())
    if types.is_binary(column.type) or types.is_large_binary(column.type):
        return EncodedImages(column.to_pylist())
    if types.is_struct(column.type):
        return _image_structs(column, where, name)
    if types.is_decimal(column.type):
        column = column.cast(pyarrow.float64())
    return _nested(column, where, name)


def _image_structs(column: Any, where: str, name: str) -> EncodedImages:
    """Hugging Face's images: the file's bytes, or the path where the file lies."""
    files = []
    for index, image in enumerate(column.to_pylist()):
        content, path = image.get("bytes"), image.get("path")
        if content is None and path and Path(path).is_file():
            content = Path(path).read_bytes()
        if content is None:
            raise UserError(f"{where}: no image in column {name!r}, row {index} (path {path!r}); expected its bytes")
        files.append(content)
    return EncodedImages(files)


def _nested(column: Any, where: str, name: str) -> Array:
    """Numbers, or lists of equal length of them, however deep, as one array."""
    types = import_pyarrow().types
    shape = [len(column)]
    while types.is_list(column.type) or types.is_large_list(column.type) or types.is_fixed_size_list(column.type):
        lengths = column.value_lengths().to_numpy(zero_copy_only=False)
        odd = np.flatnonzero(lengths != lengths[:1])
        if len(odd):
            row = int(odd[0]) // max(int(np.prod(shape[1:])), 1)
            raise UserError(f"{where}: lists of unequal length in column {name!r}, row {row}; expected equal lengths")
        shape.append(int(lengths[0]) if len(lengths) else 0)
        column = column.flatten()
    kind = column.type
    if not (types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind)):
        raise UserError(f"{where}: column {name!r} holds {kind} values; expected numbers, strings or images")
    values: npt.NDArray[np.generic] = column.to_numpy(zero_copy_only=False).copy()  # Arrow's memory is read-only
    if values.dtype.kind == "b":
        values = values.astype(np.int64)
    return values.reshape(shape)
