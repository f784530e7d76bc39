"""A backup of a federation's server, taken while the server runs.

A plain copy of the server's files can be unusable, because they change during the copy. Here, SQLite copies its own
database. The audit log and its head (the file with its last hash) are copied while they are locked. The other files of
the run are copied in such an order that the run can be resumed from the copy.

    superlink.db    the SuperLink's database, with the registered keys
    run/            the run folder
    app/            the app
    keys/           certificates and keys, if they are given
"""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

from fedskew.errors import UserError
from fedskew.experiment.storage.files import reporting_os_errors
from fedskew.experiment.storage.run_folder import RunFolder
from fedskew.flower.chained_log import ChainedLog, head_path, read_chain

_ATTEMPTS = 10
"""The most attempts to copy checkpoints. An attempt fails if the run removes all of them before they are copied."""


@dataclass(frozen=True)
class Backup:
    """What a backup holds."""

    folder: Path
    round: int | None
    """The round after which the run resumes. None if the run has no checkpoint yet."""
    is_finished: bool


def back_up(folder: Path, run: Path, app: Path, database: Path, keys: Path | None = None) -> Backup:
    """Write and check a backup. The folder must be new or empty. Afterwards, only its owner can enter it."""
    if not RunFolder(run).config_path.exists():
        raise UserError(f"{run} is not the folder of a run; expected the app's federation.folder, once a run has begun")
    _require_database(database)
    for copied in (run, app, *([] if keys is None else [keys])):
        if not copied.is_dir():
            raise UserError(f"{copied} is not a folder; expected the app's folder, or with --keys that of the keys")
        if folder.resolve().is_relative_to(copied.resolve()):
            raise UserError(f"{folder} is inside {copied}, which is copied; choose a folder outside it")
    with reporting_os_errors("write", folder):
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise UserError(f"{folder} exists and is not an empty folder; choose another")
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.chmod(0o700)
        _copy_folder(app, folder / "app")
        if keys is not None:
            _copy_folder(keys, folder / "keys")
        copy_run(run, folder / "run")
    copy_database(database, folder / "superlink.db")
    return _check_backup(folder)


def _copy_folder(source: Path, target: Path) -> None:
    try:
        shutil.copytree(source, target)
    except shutil.Error as error:
        file, _, reason = error.args[0][0]  # the first of the files that cannot be copied
        raise UserError(f"cannot copy {file}: {reason}") from error


def copy_database(source: Path, target: Path) -> None:
    """Copy a SQLite database that may be in use. The copy has one consistent state."""
    _require_database(source)
    try:
        with closing(sqlite3.connect(source)) as live, closing(sqlite3.connect(target)) as copy:
            live.backup(copy)
            (found,) = copy.execute("PRAGMA integrity_check").fetchone()
    except sqlite3.OperationalError as error:  # for example, the disk is full
        raise UserError(f"cannot copy {source} to {target}: {error}") from error
    except sqlite3.Error as error:
        raise UserError(f"cannot copy {source}: {error}; expected the SuperLink's --database") from error
    target.chmod(0o600)
    if found != "ok":
        raise UserError(f"{source} is damaged: {found}")


def _require_database(path: Path) -> None:
    if not path.is_file():
        raise UserError(f"{path} does not exist; expected the SuperLink's --database")


def copy_run(source: Path, target: Path) -> None:
    """Copy a run folder that may be in use, so that the copy can be resumed.

    The summary is copied first. If it exists, the run is finished: its checkpoints, rows and model no longer change.
    The checkpoints are copied before the rows. A run writes a checkpoint after the rows of its rounds, so the copy has
    all of these rows.
    """
    run, target_run = RunFolder(source), RunFolder(target)
    target.mkdir(mode=0o700)
    with suppress(FileNotFoundError):
        shutil.copy2(run.summary_path, target_run.summary_path)
    _copy_checkpoints(run.checkpoint_path, target_run.checkpoint_path)
    if run.audit_path.exists():
        with ChainedLog(run.audit_path).locked():
            shutil.copy2(run.audit_path, target_run.audit_path)
            head = head_path(run.audit_path)
            with suppress(FileNotFoundError):  # not written yet, if the server was killed after the first line
                shutil.copy2(head, target / head.name)
    for path in _visible_files(source):
        copy = target / path.relative_to(source)
        if not copy.exists():
            copy.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with suppress(FileNotFoundError):  # the run removes files that it no longer needs
                shutil.copy2(path, copy)


def _copy_checkpoints(source: Path, target: Path) -> None:
    """Copy the checkpoints. The run may remove old ones meanwhile, but never the newest."""
    for _ in range(_ATTEMPTS):
        listed = sorted(source.glob("[!.]*")) if source.is_dir() else []
        copied = 0
        for path in listed:
            target.mkdir(mode=0o700, exist_ok=True)
            with suppress(FileNotFoundError):
                shutil.copy2(path, target / path.name)
                copied += 1
        if copied or not listed:
            return
    raise UserError(f"the checkpoints in {source} change too quickly to be copied; try again")


def _visible_files(source: Path) -> Iterator[Path]:
    """List the files of a run folder, without locks and drafts, which have names that begin with a dot."""
    return (
        path
        for path in sorted(source.rglob("*"))
        if path.is_file() and not any(part.startswith(".") for part in path.relative_to(source).parts)
    )


def _check_backup(folder: Path) -> Backup:
    """Read the backup as a resumed run would, and check its audit log."""
    run = RunFolder(folder / "run")
    if run.audit_path.exists() and (problem := read_chain(run.audit_path).problem):
        raise UserError(f"the audit log of the run was changed: {problem}")
    checkpoint = run.load_checkpoint()
    return Backup(folder, None if checkpoint is None else checkpoint.round, run.finished)
