"""Read CSV files, plain or compressed, with line numbers, and find their delimiter."""

from __future__ import annotations

import csv
import gzip
import io
import lzma
import zlib
from itertools import islice
from pathlib import Path

from fedskew.errors import UserError

DELIMITERS = (",", ";", "\t")
DECOMPRESSION_ERRORS = (EOFError, lzma.LZMAError, zlib.error)
"""What reading a damaged .gz or .xz file may raise, besides OSError."""

_MAX_CELL = 2**31 - 1
"""The maximum number of characters in a cell. Python's default is too small for long texts, and Windows allows no more
than this."""

Rows = list[tuple[int, list[str]]]
"""Each row: the number of its last line in the file, and its cells."""


def read_csv(path: Path, delimiter: str = ",", rows: int | None = None) -> Rows:
    """Read the rows of a UTF-8 file, or only the first `rows` of them. Empty lines are skipped.

    A file that ends in .gz or .xz is decompressed.
    """
    previous_limit = csv.field_size_limit(_MAX_CELL)
    try:
        with io.TextIOWrapper(open_decompressed(path), encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file, delimiter=delimiter)
            return list(islice(((reader.line_num, cells) for cells in reader if cells), rows))
    except (OSError, *DECOMPRESSION_ERRORS) as error:
        raise UserError(f"{path}: cannot be read ({error})") from error
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path}: not UTF-8 text (byte {error.object[error.start]:#x}); expected a UTF-8 CSV file"
        ) from error
    except csv.Error as error:
        raise UserError(f"{path}: not a CSV file: line {reader.line_num}: {error}") from error
    finally:
        csv.field_size_limit(previous_limit)


def read_header(path: Path, delimiter: str) -> list[str]:
    """Read the cells of the first row. An empty file has none."""
    rows = read_csv(path, delimiter, 1)
    return rows[0][1] if rows else []


def open_decompressed(path: Path) -> gzip.GzipFile | lzma.LZMAFile | io.BufferedReader:
    """Open a file to read its bytes. A file that ends in .gz or .xz is decompressed."""
    if path.suffix.lower() == ".gz":
        return gzip.open(path)
    if path.suffix.lower() == ".xz":
        return lzma.open(path)
    return path.open("rb")


def find_delimiter(path: Path) -> str:
    """Return the delimiter that divides the first row into the most cells. A tie goes to the first in `DELIMITERS`."""
    counts = {delimiter: len(read_header(path, delimiter)) for delimiter in DELIMITERS}
    return max(DELIMITERS, key=lambda delimiter: counts[delimiter])
