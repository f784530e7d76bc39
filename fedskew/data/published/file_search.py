"""Find a dataset's files, and unpack or download them if they are missing."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from fedskew.data.published.download import ARCHIVES, RemoteFile, extract, fetch
from fedskew.errors import UserError
from fedskew.locks import exclusive

Layout = tuple[tuple[str, ...], ...]
"""For each file or folder of a dataset, the patterns of its name, the preferred one first."""


@dataclass(frozen=True)
class Published:
    """A dataset's files: their names, the folders that usually contain them, and where to download them."""

    name: str
    layouts: tuple[Layout, ...]
    folders: tuple[str, ...]
    files: tuple[RemoteFile, ...]
    extra_folders: tuple[Path, ...] = ()
    """More folders to search, for example those of a Linux distribution's package."""
    how_to_get: str = ""
    """What the user must do to get the files, if there is nothing to download."""


def cache_folder() -> Path:
    """Return the user's cache, for downloads and unpacked archives."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "fedskew"


def shared_folder() -> Path | None:
    """Return the folder that FEDSKEW_DATA names. It may not exist. None if the variable is not set."""
    given = os.environ.get("FEDSKEW_DATA")
    return Path(os.path.expanduser(given)) if given else None


def roots(data_dir: str | os.PathLike[str] | None) -> list[Path]:
    """List the folders to search: `data_dir`, FEDSKEW_DATA and the cache."""
    # Neither YAML, an env file nor `--data-dir=~/x` expands ~.
    folder = Path(os.path.expanduser(data_dir)) if data_dir else None
    if folder is not None and not folder.is_dir():
        found = "is not a folder" if folder.exists() else "does not exist"
        raise UserError(f"data folder {str(data_dir)!r} {found}; expected a folder")
    given = [folder, shared_folder(), cache_folder()]
    return [path for path in given if path]


def find_files(published: Published, data_dir: str | os.PathLike[str] | None) -> list[Path] | None:
    """Return the dataset's files, or None if they are missing. Nothing is unpacked or downloaded."""
    return _first_match(published, list(_folders(published, roots(data_dir))))


def find_members(published: Published, data_dir: str | os.PathLike[str] | None) -> tuple[Path | None, set[Path]]:
    """Return the folder that has the dataset, and what belongs to the dataset there: files and folders.

    If the dataset's files are missing, return None and an empty set.
    """
    files = find_files(published, data_dir)
    if not files:
        return None, set()
    folder = Path(os.path.commonpath([path.parent for path in files]))
    return folder, {folder / path.relative_to(folder).parts[0] for path in files}


def ensure_files(published: Published, data_dir: str | os.PathLike[str] | None) -> list[Path]:
    """Return the dataset's files, in the order of their layout. They are unpacked or downloaded if necessary."""
    folders = list(_folders(published, roots(data_dir)))
    if found := _first_match(published, folders):
        return found
    cache = cache_folder()
    with _one_process_at_a_time(cache, published.name):
        if found := _first_match(published, folders):
            return found
        _fill_cache(published, folders, cache)
    if found := _first_match(published, _folders(published, [cache])):
        return found
    raise UserError(
        f"the files of {published.name} in {cache / published.name} are incomplete; remove them and run again"
    )


def _fill_cache(published: Published, folders: list[Path], cache: Path) -> None:
    target = cache / published.name
    archive = next(_archives(published, folders), None)
    if archive is not None:
        extract(archive, target)
        if not _first_match(published, _folders(published, [cache])):
            raise UserError(
                f"{archive}: does not contain the files of {published.name}; expected the publisher's archive"
            )
        return
    if published.how_to_get:
        raise UserError(f"the files of {published.name} are not in {target}: {published.how_to_get}")
    for file in published.files:
        if file.name.endswith(ARCHIVES):
            archive = fetch(file, cache)
            extract(archive, target)
            archive.unlink()
        else:
            fetch(file, target)


@contextmanager
def _one_process_at_a_time(cache: Path, name: str) -> Iterator[None]:
    """Hold a lock, so that runs that start together download and unpack only once."""
    lock = cache / f".{name}.lock"
    try:
        cache.mkdir(parents=True, exist_ok=True)
        lock.touch()
    except OSError as error:
        raise UserError(f"cannot write to the cache {cache}: {error.strerror or error}") from error
    with exclusive(lock):
        yield


def _folders(published: Published, bases: list[Path]) -> Iterator[Path]:
    for base in bases:
        # The dataset's own folder is first, because several datasets have a train.csv.
        for top in (base / published.name, base):
            for sub in published.folders:
                yield top / sub
            yield top
    yield from published.extra_folders


def _first_match(published: Published, folders: Iterator[Path] | list[Path]) -> list[Path] | None:
    for folder in folders:
        if folder.is_dir():
            for layout in published.layouts:
                found = [_pick(folder, patterns) for patterns in layout]
                if all(found):
                    return [path for path in found if path]
    return None


def _pick(folder: Path, patterns: tuple[str, ...]) -> Path | None:
    for pattern in patterns:
        if matches := sorted(folder.glob(pattern)):
            return matches[0]
    return None


def _archives(published: Published, folders: list[Path]) -> Iterator[Path]:
    for folder in folders:
        for file in published.files:
            if file.name.endswith(ARCHIVES) and (folder / file.name).is_file():
                yield folder / file.name
