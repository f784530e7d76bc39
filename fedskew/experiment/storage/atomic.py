"""Atomic writes: a file is written under a temporary name, forced to disk, and renamed.

A kill or a power cut leaves the old file or the new one, never a part of one. The temporary name is fixed, so that the
next attempt overwrites what a kill left behind. A run folder's lock keeps writers apart.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from fedskew.errors import UserError

_AT_ONCE = 8

_Item = TypeVar("_Item")
_Done = TypeVar("_Done")


def temporary(path: Path) -> Path:
    """Where `path` is written before it is renamed."""
    return path.with_name(f".{path.name}.tmp")


def replace_file(path: Path, write: Callable[[Path], None]) -> None:
    """Replace `path` by the file that `write` writes to the temporary path it is given."""
    replace_files({path: write})


def write_file(path: Path, content: bytes | str) -> None:
    """Write a whole file or nothing; text becomes UTF-8."""
    data = content.encode() if isinstance(content, str) else content

    def write(draft: Path) -> None:
        draft.write_bytes(data)

    replace_file(path, write)


def replace_files(writes: Mapping[Path, Callable[[Path], None]]) -> None:
    """Replace several files, each atomically. Each folder's list of names is forced to disk once."""

    def replace(path: Path) -> None:
        draft = temporary(path)
        with reporting_os_errors("write", path):
            try:
                writes[path](draft)
                sync(draft)
                os.replace(draft, path)
            except BaseException:
                draft.unlink(missing_ok=True)  # makes room on a full disk
                raise

    at_once(replace, list(writes))
    for folder in {path.parent for path in writes}:
        with reporting_os_errors("write", folder):
            sync(folder)


def at_once(do: Callable[[_Item], _Done], items: Sequence[_Item]) -> list[_Done]:
    """Apply `do` to each item, several at a time, because most of the time is spent waiting for the disk."""
    if len(items) < 2:
        return [do(item) for item in items]
    with ThreadPoolExecutor(min(_AT_ONCE, len(items))) as pool:
        return list(pool.map(do, items))


def sync(path: Path) -> None:
    """Force a file's content, or a folder's list of names, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def reporting_os_errors(verb: str, path: Path) -> Iterator[None]:
    """Turn a full disk, a missing permission and the like into one line with the path and the reason."""
    try:
        yield
    except OSError as error:
        raise UserError(f"cannot {verb} {path}: {error.strerror or error}") from error
