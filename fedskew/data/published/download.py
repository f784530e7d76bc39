"""Download a publisher's files, check them and unpack archives."""

from __future__ import annotations

import hashlib
import http.client
import os
import shutil
import ssl
import sys
import tarfile
import tempfile
import urllib.error
import urllib.request
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from fedskew.errors import UserError

_TIMEOUT = 30.0
"""Give up an attempt after this many seconds without an answer or data."""
_BLOCK = 1 << 18
"""The number of bytes to read at a time."""


@dataclass(frozen=True)
class RemoteFile:
    """A file that a publisher offers for download."""

    name: str
    urls: tuple[str, ...]
    """The addresses of the file, which are tried in order."""
    checksum: str
    """`md5:…` or `sha256:…`."""


class _BrokenConnectionError(Exception):
    """The connection ended early. The bytes received so far are kept for the next attempt."""


_NETWORK_ERRORS = (
    _BrokenConnectionError,
    urllib.error.URLError,
    http.client.HTTPException,
    TimeoutError,
    ConnectionError,
    ssl.SSLError,
)


def fetch(file: RemoteFile, folder: Path) -> Path:
    """Return the path of the file in `folder`. Download the file if it does not exist.

    The download goes to a `.part` file. If it stops early, a later call continues it. The file is renamed after its
    checksum was verified.
    """
    target = folder / file.name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not target.exists():
            _download(file, target)
    except OSError as error:
        raise UserError(f"cannot write {target}: {error.strerror or error}") from error
    return target


def _download(file: RemoteFile, target: Path) -> None:
    part = target.with_name(target.name + ".part")
    failures = []
    for url in file.urls:
        try:
            _receive(url, part, file.name)
        except _NETWORK_ERRORS as error:
            failures.append(f"{url}: {getattr(error, 'reason', None) or error}")
            continue
        found = _digest(part, file.checksum)
        if found == file.checksum:
            os.replace(part, target)
            return
        part.unlink()
        failures.append(f"{url}: wrong checksum {found}, expected {file.checksum}")
    again = "run again to continue" if part.exists() else "run again"
    raise UserError(
        f"could not download {file.name} ({'; '.join(failures)}); {again}, "
        f"or put {file.name} into {target.parent}, or name its folder with --data-dir"
    )


def _receive(url: str, part: Path, label: str) -> None:
    """Download `url` into `part`, from where an earlier attempt stopped."""
    start = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(url, headers={"User-Agent": "fedskew"})
    if start:
        request.add_header("Range", f"bytes={start}-")
    try:
        response = urllib.request.urlopen(request, timeout=_TIMEOUT)
    except urllib.error.HTTPError as error:
        error.close()
        if start and error.code == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
            return  # an earlier attempt may have received the whole file: the caller checks the checksum
        raise
    with response:
        if response.status != http.HTTPStatus.PARTIAL_CONTENT:
            start = 0
        length = response.headers.get("Content-Length")
        total = start + int(length) if length else None
        with part.open("ab" if start else "wb") as out:
            received = start + _copy(response, out, start, total, label)
    if total is not None and received < total:
        raise _BrokenConnectionError(f"the connection broke after {received} of {total} bytes")


def _copy(response: BinaryIO, out: BinaryIO, start: int, total: int | None, label: str) -> int:
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    copied = 0
    with Progress(*columns, console=console, transient=True, disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task(label, total=total, completed=start)
        while block := response.read(_BLOCK):
            out.write(block)
            copied += len(block)
            progress.advance(task, len(block))
    return copied


def _digest(path: Path, checksum: str) -> str:
    algorithm = checksum.partition(":")[0]
    with path.open("rb") as file:
        return f"{algorithm}:{hashlib.file_digest(file, algorithm).hexdigest()}"


ARCHIVES = (".tar.gz", ".tgz", ".tar", ".zip")
"""The endings of the names of archives."""


def extract(archive: Path, folder: Path) -> None:
    """Unpack `archive` into `folder`. Nothing appears in `folder` until all members are unpacked."""
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
            raise UserError(f"{archive} cannot be unpacked safely by this Python; unpack it in its folder yourself")
        with tarfile.open(archive) as members:
            members.extractall(work, filter="data")


def _move_into(work: Path, folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    for entry in work.iterdir():
        target = folder / entry.name
        if target.is_dir():
            shutil.rmtree(target)
        os.replace(entry, target)
