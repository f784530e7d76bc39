"""Unpack publishers' archives without letting them write anywhere else."""

from __future__ import annotations

import os
import shutil
import tarfile
import tempfile
import zipfile
import zlib
from pathlib import Path

from fedskew.errors import UserError

SUFFIXES = (".tar.gz", ".tgz", ".tar", ".zip")


def extract(archive: Path, folder: Path) -> None:
    """Unpack `archive` into `folder`, which shows nothing until every member is out."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
        try:
            _unpack(archive, work)
            _move_into(work, folder)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    except (tarfile.TarError, zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise UserError(f"{archive}: damaged archive ({error}); expected the publisher's file") from error
    except OSError as error:
        raise UserError(f"cannot unpack {archive} into {folder}: {error.strerror or error}") from error


def _unpack(archive: Path, work: Path) -> None:
    if archive.suffix == ".zip":
        with zipfile.ZipFile(archive) as members:
            for member in members.namelist():
                if not (work / member).resolve().is_relative_to(work.resolve()):
                    raise zipfile.BadZipFile(f"{member!r} points outside the archive")
            members.extractall(work)
    else:
        if not hasattr(tarfile, "data_filter"):  # Python before 3.11.4
            raise UserError(f"{archive} cannot be unpacked safely by this Python; unpack it yourself, beside itself")
        with tarfile.open(archive) as members:
            members.extractall(work, filter="data")


def _move_into(work: Path, folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    for entry in work.iterdir():
        target = folder / entry.name
        if target.is_dir():
            shutil.rmtree(target)
        os.replace(entry, target)
