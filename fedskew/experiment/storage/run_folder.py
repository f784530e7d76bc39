"""The folder of a run, with its configuration, rows, checkpoints and result.

    config.yaml         everything needed to repeat the run, except Python objects that were passed to it
    about.json          the federation, the command, the versions, the machine
    label_counts.npy    the federation's label counts, if it has too many clients for about.json
    rounds.jsonl        one row per round
    checkpoint/         the last two checkpoints, from which the run can continue
    clients/            the clients' states, for methods whose clients keep any
    model.safetensors   the final model
    predictions.parquet its predictions on the test set, with `save_predictions`
    summary.json        the result, written last
    audit.jsonl         on Flower: the server's audit log, which begins before the run does
    received/           on Flower: the updates of the round in progress
    status.json         on Flower: how the last attempt to run the federation ended

A run can be killed at any time, because a round's row is written before its checkpoint. To resume, call
`load_checkpoint`, then `truncate_rounds` with the checkpoint's round, and then run the next round. Writing needs a
lock. Reading does not.
"""

from __future__ import annotations

import io
import json
import math
import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import yaml
from torch import Tensor

from fedskew.errors import UserError, other_format
from fedskew.experiment.config import Config, config_hash, differing_keys, load_yaml
from fedskew.experiment.config.values import folder as require_folder
from fedskew.experiment.round.record import RoundRow
from fedskew.experiment.round.state import ClientStates, Versions
from fedskew.experiment.storage.checkpoints import Checkpoint, Checkpoints, ClientFiles
from fedskew.experiment.storage.files import (
    FolderLock,
    Unreadable,
    read_tensors,
    reporting_os_errors,
    sync,
    temporary,
    write_file,
    write_tensors,
)

FORMAT = 1
"""The version of the folder's format, in about.json. Checkpoints have their own.

New keys and files do not change it. It grows if an older fedskew would misread the folder. Folders of fedskew 0.1.0
have format 1 and do not record it.
"""

_SYNC_SECONDS = 1.0
"""The shortest time between two syncs of the rows to disk, because a sync takes longer than a short round."""


class RoundsFile:
    """The history of a run, with one JSON row per round.

    A row is written when its round is recorded, so it survives if the process is killed. Only the last row can be
    incomplete then. If the power fails, the last rows can be lost. The run then resumes from the newest checkpoint
    whose row exists. The `round` of each row is larger than that of the previous row.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._last_sync = -math.inf

    def read(self) -> tuple[list[RoundRow], str | None]:
        """Read the good rows. Also return a warning if rows were skipped, except for an incomplete last one."""
        good, problem = self._read_good()
        return [row for row, _ in good], problem

    def append(self, row: RoundRow) -> None:
        """Add a row. If the disk is full, the file does not change."""
        line = json.dumps(row.to_json(), allow_nan=False, separators=(",", ":")).encode() + b"\n"
        with reporting_os_errors("write", self.path), self.path.open("ab", buffering=0) as file:
            end = file.seek(0, os.SEEK_END)
            try:
                _write_all(file.fileno(), line)
                if time.monotonic() - self._last_sync >= _SYNC_SECONDS:
                    os.fsync(file.fileno())
                    self._last_sync = time.monotonic()
            except OSError:
                os.ftruncate(file.fileno(), end)
                raise

    def keep(self, through: int | None = None) -> None:
        """Remove the first damaged row and all rows after it, and the rows of rounds after `through`, atomically."""
        good, _ = self._read_good()
        content = b"".join(line + b"\n" for row, line in good if through is None or row.round <= through)
        if content != self._bytes():
            write_file(self.path, content)

    def _bytes(self) -> bytes:
        with reporting_os_errors("read", self.path):
            return self.path.read_bytes() if self.path.exists() else b""

    def _read_good(self) -> tuple[list[tuple[RoundRow, bytes]], str | None]:
        """Read the rows and their lines, up to the first one that is damaged or out of order.

        Also return a warning if there is such a row.
        """
        complete_lines = self._bytes().split(b"\n")[:-1]
        good: list[tuple[RoundRow, bytes]] = []
        for line in complete_lines:
            row = _parse(line)
            if row is None or (good and row.round <= good[-1][0].round):
                dropped = len(complete_lines) - len(good)
                ignored = "row is" if dropped == 1 else f"{dropped} rows are"
                return good, f"{self.path} is damaged in line {len(good) + 1}; its last {ignored} ignored"
            good.append((row, line))
        return good, None


def _parse(line: bytes) -> RoundRow | None:
    try:
        return RoundRow.from_json(json.loads(line))
    except (ValueError, TypeError, KeyError, AttributeError):
        return None


def _write_all(descriptor: int, content: bytes) -> None:
    while content:
        content = content[os.write(descriptor, content) :]


class RunFolder:
    """The folder of one run. To write, use `with RunFolder(path).open(config) as folder:`."""

    def __init__(self, path: str | Path) -> None:
        self.path = require_folder("the run's folder", path)
        self.config_path = self.path / "config.yaml"
        self.about_path = self.path / "about.json"
        self.rounds_path = self.path / "rounds.jsonl"
        self.summary_path = self.path / "summary.json"
        self.model_path = self.path / "model.safetensors"
        self.predictions_path = self.path / "predictions.parquet"
        self.checkpoint_path = self.path / "checkpoint"
        self.clients_path = self.path / "clients"
        self.lock_path = self.path / ".lock"
        self.audit_path = self.path / "audit.jsonl"
        self.label_counts_path = self.path / "label_counts.npy"
        self.warnings: list[str] = []
        """One line for each problem, such as a damaged file that was ignored."""
        self._rounds = RoundsFile(self.rounds_path)
        self._clients = ClientFiles(self.clients_path)
        self._checkpoints = Checkpoints(self.checkpoint_path, self._clients)
        self._lock: FolderLock | None = None
        self._last_round = -1
        self._run = ""
        """The hash of the run's configuration."""

    def open(self, config: Config, how_to_repeat: str = "fedskew run -c config.yaml") -> Self:
        """Create the folder, or open it to resume its run. Refuse a folder with another run, or with files but no run.

        `how_to_repeat` is a command or a description, for a comment in config.yaml.
        """
        self.refuse_foreign()
        with reporting_os_errors("write", self.path):
            self.path.mkdir(parents=True, exist_ok=True)
        lock = FolderLock(self.lock_path)
        try:
            self._resume_or_create(config, how_to_repeat)
        except BaseException:
            lock.release()
            raise
        if lock.warning:
            self._warn(lock.warning)
        self._lock = lock
        return self

    def close(self) -> None:
        """Finish writing and release the lock."""
        try:
            self._checkpoints.wait()
        finally:
            self._checkpoints.close()
            if self._lock is not None:
                self._lock.release()
                self._lock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except UserError:
            if error is None:  # otherwise, the first error is raised
                raise

    @property
    def config(self) -> Config:
        """The configuration in the folder."""
        if not self.config_path.is_file():
            raise UserError(f"{self.path} is not a run folder: it has no config.yaml")
        self._refuse_other_format()
        return load_yaml(self.config_path)

    @property
    def finished(self) -> bool:
        """Whether summary.json marks the run as finished."""
        summary = self.summary()
        return summary is not None and summary.get("status") == "finished"

    def summary(self) -> dict[str, Any] | None:
        """The content of summary.json. None if it does not exist or is damaged."""
        return self._read_json(self.summary_path)

    def about(self) -> dict[str, Any] | None:
        """The content of about.json. None if it does not exist or is damaged."""
        about = self._read_json(self.about_path)
        if about is not None and self.label_counts_path.exists():
            try:
                with reporting_os_errors("read", self.label_counts_path):
                    about["federation"]["label_counts"] = np.load(self.label_counts_path, allow_pickle=False)
            except (ValueError, EOFError, KeyError):
                self._warn(f"{self.label_counts_path} is damaged, so it is ignored")
        return about

    def _refuse_other_format(self) -> None:
        found = (self._read_json(self.about_path) or {}).get("format", FORMAT)
        if found != FORMAT:
            raise other_format(f"the run folder {self.path}", found, FORMAT)

    def _read_json(self, path: Path) -> dict[str, Any] | None:
        with reporting_os_errors("read", path):
            content = path.read_bytes() if path.exists() else b"null"
        try:
            value = json.loads(content)
        except ValueError:
            self._warn(f"{path} is damaged, so it is ignored")
            return None
        return value if isinstance(value, dict) else None

    def write_about(self, about: Mapping[str, Any]) -> None:
        """Write about.json, at the start of the run. If the label counts are an array, they go to a separate file."""
        self._require_open()
        federation = dict(about["federation"])
        counts = federation.get("label_counts")
        if isinstance(counts, np.ndarray):
            content = io.BytesIO()
            np.save(content, counts.astype(np.min_scalar_type(int(counts.max(initial=0)))))
            write_file(self.label_counts_path, content.getvalue())
            del federation["label_counts"]
        write_file(
            self.about_path, json.dumps({"format": FORMAT, **about, "federation": federation}, allow_nan=False) + "\n"
        )

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write the result, after everything else. Its `status: finished` marks the run as finished."""
        self._require_open()
        self._checkpoints.wait()
        if self.rounds_path.exists():
            with reporting_os_errors("write", self.rounds_path):
                sync(self.rounds_path)
        write_file(self.summary_path, json.dumps(summary, indent=2, allow_nan=False) + "\n")

    def withdraw_result(self) -> None:
        """Remove what is written when a run ends, because it continues. The summary goes first."""
        self._require_open()
        with reporting_os_errors("write", self.path):
            for path in (self.summary_path, self.model_path, self.predictions_path):
                path.unlink(missing_ok=True)

    def rounds(self) -> list[RoundRow]:
        """The rows of all rounds so far, in order."""
        rows, problem = self._rounds.read()
        if problem:
            self._warn(problem)
        return rows

    def append_round(self, row: RoundRow) -> None:
        """Add the row of a round, which must be later than all previous ones."""
        self._require_open()
        if row.round <= self._last_round:
            raise ValueError(f"row of round {row.round} after round {self._last_round}")
        self._rounds.append(row)
        self._last_round = row.round

    def truncate_rounds(self, after: int) -> None:
        """Remove the rows of rounds later than `after`, atomically. -1 removes all."""
        self._require_open()
        self._rounds.keep(through=after)
        self._last_round = _last_round(self.rounds())

    def save_model(self, tensors: Mapping[str, Tensor], meta: Mapping[str, Any] | None = None) -> None:
        """Write the final model."""
        self._require_open()
        write_tensors(self.model_path, tensors, meta or {})

    def load_model(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Load the final model, and the metadata saved with it."""
        if not self.model_path.is_file():
            if self.finished:
                raise UserError(
                    f"{self.path} has no model.safetensors, although its run finished; restore the file, or delete the "
                    "folder to run again"
                )
            raise UserError(
                f"{self.path} has no model.safetensors, because its run did not finish; repeat its command to resume it"
            )
        try:
            with reporting_os_errors("read", self.model_path):
                return read_tensors(self.model_path)
        except Unreadable as error:
            raise UserError(
                f"cannot use {self.model_path}: {error}; restore the file, or delete the folder to run again"
            ) from error

    def client_states(self, versions: Versions | None = None) -> ClientStates:
        """Return the client states of a checkpoint, or none for a new run. Later states are removed from the folder."""
        self._require_open()
        return self._clients.resume(versions or {}, self._run)

    def save_checkpoint(
        self,
        round: int,
        tensors: Mapping[str, Tensor],
        meta: Mapping[str, Any],
        clients: Versions | None = None,
        *,
        wait: bool = True,
    ) -> None:
        """Save the state after a round. This checkpoint and the previous one are kept.

        The round must be that of the last row, or 0, which needs no row.
        Without `wait`, the checkpoint is written while the run continues. If that fails, the next checkpoint,
        `write_summary` or `close` raises the error.
        """
        self._require_open()
        if round not in (0, self._last_round) or round < 0:
            raise ValueError(f"checkpoint of round {round} when the last row is of round {self._last_round}")
        self._checkpoints.save(Checkpoint(round, dict(tensors), dict(meta), clients or {}), self._run)
        if wait:
            self._checkpoints.wait()

    def load_checkpoint(self) -> Checkpoint | None:
        """Load the newest intact checkpoint of this run, if there is one. Each skipped checkpoint adds a warning."""
        return self._checkpoints.load_newest(config_hash(self.config), {row.round for row in self.rounds()}, self._warn)

    def require_space(self, needed: int) -> None:
        """Refuse a disk with less than `needed` free bytes, before anything is computed."""
        with reporting_os_errors("write", self.path):
            free = shutil.disk_usage(self.path).free
        if free < needed:
            raise UserError(
                f"{self.path} has {free / 1e6:.0f} MB of free disk; expected at least {needed / 1e6:.0f} MB "
                "for the run's files; free some space or choose another --out"
            )

    def refuse_foreign(self) -> None:
        """Refuse a folder with files but without config.yaml. Files that a run writes before that file are allowed."""
        with reporting_os_errors("read", self.path):
            if not self.path.exists():
                return
            if not self.path.is_dir():
                raise UserError(f"{self.path} is a file; expected a folder for the run; choose another --out")
            audit = {self.audit_path, self.audit_path.with_suffix(".head"), self.path / f".{self.audit_path.name}.lock"}
            ours = {self.lock_path, temporary(self.config_path), *audit}
            entries = set(self.path.iterdir())
        if entries - ours and self.config_path not in entries:
            raise UserError(
                f"{self.path} is not empty and not a run folder (it has no config.yaml); choose another --out"
            )

    def _resume_or_create(self, config: Config, how_to_repeat: str) -> None:
        if self.config_path.exists():
            if differing := differing_keys(self.config, config):
                raise UserError(
                    f"{self.path} holds a run with another configuration (it differs in {', '.join(differing)}); "
                    "choose another --out, or delete that folder"
                )
        else:
            header = f"# To repeat this run: {how_to_repeat}\n"
            text = yaml.safe_dump(config.to_mapping(), sort_keys=False, allow_unicode=True)
            write_file(self.config_path, header + text)
            with reporting_os_errors("write", self.path):
                sync(self.path.parent)
        self._run = config_hash(config)
        self._remove_drafts()
        rows = self.rounds()
        if not self.finished:
            self._rounds.keep()
        self._last_round = _last_round(rows)

    def _remove_drafts(self) -> None:
        """Remove temporary files that a killed process left behind."""
        with reporting_os_errors("write", self.path):
            texts = (self.config_path, self.about_path, self.rounds_path, self.summary_path)
            for path in (*texts, self.label_counts_path, self.model_path, self.predictions_path):
                temporary(path).unlink(missing_ok=True)
            for draft in (*self.checkpoint_path.glob(".round-*.tmp"), *self.clients_path.glob(".*.tmp")):
                draft.unlink()

    def _require_open(self) -> None:
        if self._lock is None:
            raise RuntimeError(f"{self.path} is not open for writing")

    def _warn(self, warning: str) -> None:
        line = " ".join(warning.split())
        if line not in self.warnings:
            self.warnings.append(line)


def _last_round(rows: list[RoundRow]) -> int:
    return rows[-1].round if rows else -1
