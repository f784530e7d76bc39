"""Tables on disk: CSV and Parquet files, and Hugging Face datasets written by `save_to_disk`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedskew.data.own.assembly import Array
from fedskew.data.own.tables import Column, EncodedImages, Table
from fedskew.data.published.text import read_csv
from fedskew.errors import UserError

CSV_SUFFIXES = (".csv", ".csv.gz", ".csv.xz")
TEST_SPLITS = ("test", "validation", "valid", "val")


def csv_table(path: Path) -> Table:
    """Read a CSV file with a header. A column is numeric if most of its cells are numbers."""
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
        columns[name], odd = _read_cells(cells)
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
    """Read an Arrow table. `features` are Hugging Face's descriptions of its columns, which name the classes."""
    features = features or _features_in(table.schema.metadata or {})
    class_names = {
        name: tuple(feature["names"])
        for name, feature in features.items()
        if isinstance(feature, dict) and feature.get("_type") == "ClassLabel" and "names" in feature
    }
    columns = {name: _arrow_column(table.column(name), where, name) for name in table.column_names}
    return Table(where, "row {}".format, columns, class_names)


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
        raise UserError("reading Parquet and Arrow files needs pyarrow: pip install 'fedskew[data]'") from error
    return pyarrow


def _read_cells(cells: list[str]) -> tuple[Column, int | None]:
    """Read cells as numbers or as strings. If most but not all are numbers, also return the first that is not."""
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


def is_saved_dataset(folder: Path) -> bool:
    return (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file()


def saved_tables(folder: Path) -> list[Table]:
    """Read the training table and, if the dataset has one, the test table."""
    if not (folder / "dataset_dict.json").is_file():
        return [_split(folder)]
    splits = [str(name) for name in _json(folder / "dataset_dict.json").get("splits") or []]
    if len(splits) == 1:
        return [_split(folder / splits[0])]
    if "train" not in splits:
        raise UserError(f"{folder}: splits {', '.join(splits) or '(none)'}; expected one named train")
    test = next((name for name in TEST_SPLITS if name in splits), None)
    return [_split(folder / name) for name in ("train", test) if name]


def _split(folder: Path) -> Table:
    pyarrow = import_pyarrow()
    state = _json(folder / "state.json")
    try:
        names = [Path(entry["filename"]).name for entry in state["_data_files"]]
    except (KeyError, TypeError):
        names = []
    if not names:
        raise UserError(f"{folder / 'state.json'}: lists no data files; expected what save_to_disk writes")
    info = folder / "dataset_info.json"
    features = _json(info).get("features") if info.is_file() else None
    table = pyarrow.concat_tables([_arrow_file(folder / name) for name in names])
    return arrow_table(table, str(folder), features if isinstance(features, dict) else {})


def _arrow_file(path: Path) -> Any:
    pyarrow = import_pyarrow()
    try:
        with pyarrow.OSFile(str(path)) as source, pyarrow.ipc.open_stream(source) as reader:
            return reader.read_all()
    except (OSError, pyarrow.ArrowException) as error:
        raise UserError(f"{path}: cannot be read ({error}); expected an Arrow stream") from error


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read ({error}); expected JSON") from error
    if not isinstance(content, dict):
        raise UserError(f"{path}: not a JSON object; expected what save_to_disk writes")
    return content


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


def _nested(column: Any, where: str, name: str) -> Array:
    """Read numbers, or nested lists of numbers of equal length, as one array."""
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
