"""Tables on disk: CSV and Parquet files, and Hugging Face datasets written by `save_to_disk`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedskew.data.csv_files import DECOMPRESSION_ERRORS, find_delimiter, open_decompressed, read_csv, read_header
from fedskew.data.own.columns import Cells, Column, EncodedImages, boolean_strings, is_unnamed, make_strings
from fedskew.data.own.table_columns import Table
from fedskew.data.spelling import composed
from fedskew.errors import UserError, plural, shorten

CSV_SUFFIXES = tuple(kind + packed for kind in (".csv", ".tsv") for packed in ("", ".gz", ".xz"))
TEST_NAMES = ("test", "validation", "valid", "val")
"""Names of a test part: a split of a saved dataset, a table file or a folder of images."""


def csv_table(path: Path, delimiter: str | None = None, decimal: str = ".") -> Table:
    """Read a CSV file with a header. By default, the delimiter is found in the header: a comma, a semicolon or a tab.

    If pyarrow is installed, it reads the file, because it is fast. If pyarrow is missing or fails, Python's csv
    module reads the file and reports the line of any mistake.
    """
    _check_marks(delimiter, decimal)
    delimiter = delimiter or find_delimiter(path)
    content = _read_fast(path, delimiter)
    if content is None:
        content = _read_rows(path, delimiter)
    header, contents = [composed(name) for name in content[0]], content[1]
    repeated = [name for name in header if name and header.count(name) > 1]
    if repeated:
        raise UserError(f"{path}: column {repeated[0]!r} appears twice; expected different names")
    if not len(contents[0]):
        raise UserError(f"{path}: no rows; expected a line of column names and one line per sample")
    named = {
        name or f"Unnamed: {place}": Cells(cells, decimal)
        for place, (name, cells) in enumerate(zip(header, contents, strict=True))
    }
    # A delimiter at the end of each line makes an empty column without a name. It is left out.
    columns: dict[str, Column] = {
        name: cells for name, cells in named.items() if not is_unnamed(name) or cells.strings.values
    }
    return Table(str(path), _LineNames(path, delimiter), columns)


@dataclass(frozen=True)
class _LineNames:
    """Names a row by its line in the file. To find the line, it reads the file again, but only for an error message."""

    path: Path
    delimiter: str

    def __call__(self, index: int) -> str:
        rows = read_csv(self.path, self.delimiter)
        return f"line {rows[index + 1][0]}"


def _check_marks(delimiter: object, decimal: object) -> None:
    if delimiter is not None and (not isinstance(delimiter, str) or len(delimiter) != 1 or delimiter in '"\n\r'):
        raise UserError(f"delimiter is {delimiter!r}; expected one character such as ;")
    if decimal not in (".", ","):
        raise UserError(f"decimal is {decimal!r}; expected . or ,")


def _read_fast(path: Path, delimiter: str) -> tuple[list[str], list[Any]] | None:
    """Read the header and the cells of each column with pyarrow.

    Return None if pyarrow is not installed or cannot read the file, if it finds more or fewer columns than the header
    has, or if the delimiter is not ASCII, such as §, which pyarrow does not accept.
    """
    try:
        from pyarrow import ArrowException, csv, string
    except ImportError:
        return None
    header = [name.strip() for name in read_header(path, delimiter)]
    names = [f"f{place}" for place in range(len(header))]
    if not names or not delimiter.isascii():
        return None
    try:
        with open_decompressed(path) as file:
            table = csv.read_csv(
                file,
                csv.ReadOptions(autogenerate_column_names=True),
                csv.ParseOptions(delimiter=delimiter, newlines_in_values=True),
                csv.ConvertOptions(column_types=dict.fromkeys(names, string()), strings_can_be_null=False),
            )
    except (ArrowException, OSError, *DECOMPRESSION_ERRORS):
        return None
    if table.column_names != names:
        return None
    return header, [join_chunks(column).slice(1) for column in table.columns]


def _read_rows(path: Path, delimiter: str) -> tuple[list[str], list[list[str]]]:
    """Read the header and the cells of each column. All lines must have as many cells as the header."""
    rows = read_csv(path, delimiter)
    if not rows:
        raise UserError(f"{path}: no rows; expected a line of column names and one line per sample")
    header = [name.strip() for name in rows[0][1]]
    for line, cells in rows[1:]:
        if len(cells) != len(header):
            found = plural(len(cells), "cell")
            raise UserError(f"{path}: line {line} has {found}; expected {len(header)}, as in the first line")
    return header, [[cells[place] for _, cells in rows[1:]] for place in range(len(header))]


def parquet_table(path: Path) -> Table:
    pyarrow = import_pyarrow()
    try:
        table = pyarrow.parquet.read_table(path)
    except (OSError, pyarrow.ArrowException) as error:
        raise UserError(f"{path}: cannot be read ({error}); expected a Parquet file") from error
    return arrow_table(table, str(path), {})


def arrow_table(table: Any, where: str, features: dict[str, Any]) -> Table:
    """Read an Arrow table. `features` are Hugging Face's descriptions of its columns, with the class names."""
    metadata = table.schema.metadata or {}
    table = table.rename_columns([composed(name) for name in table.column_names])  # without the metadata
    features = features or _features_in(metadata)
    class_names = {
        composed(name): tuple(composed(str(text)) for text in feature["names"])
        for name, feature in features.items()
        if isinstance(feature, dict) and feature.get("_type") == "ClassLabel" and "names" in feature
    }
    names = table.column_names
    if repeated := [name for name in names if names.count(name) > 1]:
        raise UserError(f"{where}: column {repeated[0]!r} appears twice; expected different names")
    is_dictionary = import_pyarrow().types.is_dictionary
    categories = {name for name in names if is_dictionary(table.schema.field(name).type)} | _pandas_categories(metadata)
    read = {name: _arrow_column(table.column(name), where, name) for name in names}
    columns = {name: column for name, (column, _) in read.items()}
    mistakes = {name: mistake for name, (_, mistake) in read.items() if mistake is not None}
    return Table(where, "row {}".format, columns, class_names, mistakes, frozenset(categories))


def _pandas_categories(metadata: dict[bytes, bytes]) -> set[str]:
    """Return the columns that were categories in pandas. Parquet stores categories that are numbers as numbers."""
    try:
        columns = json.loads(metadata.get(b"pandas", b"{}"))["columns"]
        return {composed(column["field_name"]) for column in columns if column["pandas_type"] == "categorical"}
    except (ValueError, KeyError, TypeError):
        return set()


def _features_in(metadata: dict[bytes, bytes]) -> dict[str, Any]:
    """Return Hugging Face's column descriptions from the metadata of a file, if there are any."""
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
        raise UserError(
            "reading Parquet files, Arrow data or Polars DataFrames needs pyarrow: pip install 'fedskew[data]'"
        ) from error
    return pyarrow


def is_saved_dataset(folder: Path) -> bool:
    return (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file()


def saved_tables(folder: Path) -> list[Table]:
    """Read the training table and, if the dataset has one, the test table."""
    if not (folder / "dataset_dict.json").is_file():
        return [_read_split(folder)]
    splits = [str(name) for name in _read_json(folder / "dataset_dict.json").get("splits") or []]
    if len(splits) == 1:
        return [_read_split(folder / splits[0])]
    if "train" not in splits:
        raise UserError(f"{folder}: splits {', '.join(splits) or '(none)'}; expected one named train")
    test = next((name for name in TEST_NAMES if name in splits), None)
    return [_read_split(folder / name) for name in ("train", test) if name]


def _read_split(folder: Path) -> Table:
    pyarrow = import_pyarrow()
    state = _read_json(folder / "state.json")
    try:
        names = [Path(entry["filename"]).name for entry in state["_data_files"]]
    except (KeyError, TypeError):
        names = []
    if not names:
        raise UserError(f"{folder / 'state.json'}: lists no data files; expected what save_to_disk writes")
    info = folder / "dataset_info.json"
    features = _read_json(info).get("features") if info.is_file() else None
    try:
        table = pyarrow.concat_tables([_read_arrow_file(folder / name) for name in names])
    except pyarrow.ArrowInvalid as error:
        raise UserError(f"{folder}: the files {shorten(names)} do not have the same columns and types") from error
    return arrow_table(table, str(folder), features if isinstance(features, dict) else {})


def _read_arrow_file(path: Path) -> Any:
    pyarrow = import_pyarrow()
    try:
        with pyarrow.OSFile(str(path)) as source, pyarrow.ipc.open_stream(source) as reader:
            return reader.read_all()
    except (OSError, pyarrow.ArrowException) as error:
        raise UserError(f"{path}: cannot be read ({error}); expected an Arrow stream") from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read ({error}); expected JSON") from error
    if not isinstance(content, dict):
        raise UserError(f"{path}: not a JSON object; expected what save_to_disk writes")
    return content


def join_chunks(chunked: Any) -> Any:
    """Return the column of a pyarrow table as one array."""
    pyarrow = import_pyarrow()
    column = chunked.combine_chunks()
    if isinstance(column, pyarrow.ChunkedArray):
        return pyarrow.concat_arrays(column.chunks) if column.num_chunks else pyarrow.array([], chunked.type)
    return column


def _arrow_column(chunked: Any, where: str, name: str) -> tuple[Column, str | None]:
    """Read a column. If it cannot be an input, also return the reason."""
    pyarrow = import_pyarrow()
    types = pyarrow.types
    column = join_chunks(chunked)
    if isinstance(column.type, pyarrow.BaseExtensionType):
        column = column.storage
    categorical = types.is_dictionary(column.type)
    if categorical:
        column = column.dictionary_decode()
    kind = column.type
    if types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind):
        return make_strings(column, categorical), None
    if types.is_null(kind):
        return make_strings([None] * len(column)), None
    if types.is_temporal(kind) and not types.is_interval(kind):
        return make_strings(column.cast(pyarrow.string())), describe_unusable(where, name, "dates or times")
    if types.is_binary(kind) or types.is_large_binary(kind):
        _refuse_gaps(column, where, name)
        return EncodedImages(column.to_pylist()), None
    if types.is_struct(kind):
        if not {"bytes", "path"} & {field.name for field in kind}:
            return make_strings(["…"] * len(column)), describe_unusable(where, name, f"{kind} values")
        _refuse_gaps(column, where, name)
        return _image_structs(column, where, name), None
    if types.is_decimal(kind):
        column = column.cast(pyarrow.float64())
    return _nested(column, where, name)


def describe_unusable(where: str, name: str, content: str) -> str:
    """Return the message for a column that cannot be an input."""
    return (
        f"{where}: column {name!r} holds {content}; expected numbers or categories; turn it into one of them, or leave "
        f"it out with drop={name}"
    )


def _refuse_gaps(column: Any, where: str, name: str, values_per_row: int = 1) -> None:
    if column.null_count:
        row = int(column.is_null().to_numpy(zero_copy_only=False).argmax()) // values_per_row
        raise UserError(f"{where}: no value in column {name!r}, row {row}; expected one for every sample")


def _image_structs(column: Any, where: str, name: str) -> EncodedImages:
    """Read Hugging Face's images: the bytes of an image file, or its path."""
    files = []
    for index, image in enumerate(column.to_pylist()):
        content, path = image.get("bytes"), image.get("path")
        if content is None and path and Path(path).is_file():
            content = Path(path).read_bytes()
        if content is None:
            raise UserError(f"{where}: no image in column {name!r}, row {index} (path {path!r}); expected its bytes")
        files.append(content)
    return EncodedImages(files)


def _nested(column: Any, where: str, name: str) -> tuple[Column, str | None]:
    """Read numbers, or nested lists of numbers of equal length, as one array.

    If the column cannot be an input, also return the reason.
    """
    types = import_pyarrow().types
    shape = [len(column)]
    while types.is_list(column.type) or types.is_large_list(column.type) or types.is_fixed_size_list(column.type):
        values_per_row = max(int(np.prod(shape[1:])), 1)
        _refuse_gaps(column, where, name, values_per_row)
        lengths = column.value_lengths().to_numpy(zero_copy_only=False)
        odd = np.flatnonzero(lengths != lengths[:1])
        if len(odd):
            row = int(odd[0]) // values_per_row
            raise UserError(f"{where}: lists of unequal length in column {name!r}, row {row}; expected equal lengths")
        shape.append(int(lengths[0]) if len(lengths) else 0)
        column = column.flatten()
    kind = column.type
    if not (types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind)):
        lists = "lists of " if len(shape) > 1 else ""
        return make_strings(["…"] * shape[0]), describe_unusable(where, name, f"{lists}{kind} values")
    if types.is_boolean(kind) and column.null_count and len(shape) == 1:
        return boolean_strings(column.to_pylist()), None
    if column.null_count:
        column = column.cast("float64", safe=False)  # safe would refuse whole numbers that float64 rounds
    values: npt.NDArray[np.generic] = column.to_numpy(zero_copy_only=False).copy()  # Arrow's memory is read-only
    if values.dtype.kind == "b" and len(shape) > 1:
        values = values.astype(np.int64)
    return values.reshape(shape), None
