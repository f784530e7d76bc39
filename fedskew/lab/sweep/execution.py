"""Run one job in this process, from preparation to record."""

from __future__ import annotations

import contextlib
import gc
import shutil
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fedskew.engine import single_process_engine
from fedskew.errors import UserError
from fedskew.experiment.callbacks import Callback
from fedskew.experiment.config import run_name
from fedskew.experiment.preparation import Prepared, prepare
from fedskew.experiment.result import Result
from fedskew.experiment.round.record import RoundRow
from fedskew.experiment.run import run_prepared
from fedskew.experiment.shared_federations import shared_federation
from fedskew.experiment.storage.about import machine, versions
from fedskew.experiment.storage.files import wait_until_unlocked
from fedskew.experiment.storage.run_folder import RunFolder
from fedskew.lab.sweep.job import Job, SweepSettings, identity
from fedskew.lab.sweep.records import Outcome, Record
from fedskew.locks import exclusive
from fedskew.metrics.scores import Scores

Report = Callable[[int, int, float | None], None]
"""Receives the finished rounds, the total rounds and the last accuracy."""


class OutOfTime(Exception):
    """Raised when the sweep's deadline has passed. A run with a folder can be resumed."""


def execute(job: Job, settings: SweepSettings, report: Report) -> Outcome:
    """Run a job. An error becomes its outcome, so that other jobs can continue."""
    watch, prepared, folder = _Watch(settings.deadline, report), None, None
    try:
        watch.check_time()
        prepared = _prepare_job(job, settings)
        folder = _folder(job, prepared, settings)
        result = _run(prepared, folder, watch, settings)
        outcome = Outcome("finished", _record(job, prepared, settings, result.history, result.scores))
        if folder is not None:
            _delete_checkpoints(folder)
        return outcome
    except OutOfTime:
        rows = watch.rows if folder is None else RunFolder(folder).rounds()
        if prepared is None or not any(row.is_evaluated and row.round > 0 for row in rows):
            return Outcome("stopped")
        return Outcome("stopped", _record(job, prepared, settings, rows))
    except UserError as error:
        return Outcome("failed", reason=str(error))
    except Exception as error:  # an error in one run must not end the others
        frame = traceback.extract_tb(error.__traceback__)[-1]
        message = " ".join(f"{type(error).__name__}: {error}".split())[:500]
        return Outcome("failed", reason=f"{message} ({Path(frame.filename).name}, line {frame.lineno})")
    finally:
        _free_gpu_memory()


def _run(prepared: Prepared, folder: Path | None, watch: _Watch, settings: SweepSettings) -> Result:
    if folder is not None and folder.exists() and settings.lock_timeout:
        wait_until_unlocked(RunFolder(folder).lock_path, settings.lock_timeout)
    return run_prepared(prepared, folder, [watch])


def _record(
    job: Job, prepared: Prepared, settings: SweepSettings, rows: list[RoundRow], scores: Scores | None = None
) -> Record:
    config, federation = prepared.config, prepared.federation
    circumstances = {
        "split": federation.hash[:12],
        "clients": federation.clients,
        **({} if job.config.model == config.model else {"asked_model": job.config.model}),  # for example, auto
        **({} if job.start is None else {"start_rounds": job.start.rounds}),
        "command": settings.command,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": dict(machine(config.device)),
        "versions": dict(versions()),
    }
    return Record.from_rows(job.identity, config, rows, circumstances, scores)


def _free_gpu_memory() -> None:
    """Free the memory of a run for the next one. CUDA graphs are in reference cycles, which need garbage collection."""
    gc.collect()
    with contextlib.suppress(RuntimeError):  # after a CUDA error, this fails too
        torch.cuda.empty_cache()


def _prepare_job(job: Job, settings: SweepSettings) -> Prepared:
    federation = shared_federation(job.config, job.validation)
    model = None if job.start is None else _train_start_model(job, settings)
    prepared = prepare(job.config, federation, model=model)
    if not settings.is_alone_on_machine and prepared.config.engine == "auto":
        engine = single_process_engine(prepared.model, prepared.sample)
        prepared = replace(prepared, config=replace(prepared.config, engine=engine))
    return prepared


_last_start_model: dict[str, nn.Module] = {}
"""At most one entry: the start model that this process used last, by the name of the job that trains it."""


def _train_start_model(job: Job, settings: SweepSettings) -> nn.Module:
    """Train the model that the job starts from. Jobs that start from the same run share the model.

    With run folders, processes also share it. One process trains it, and the others wait and read it.
    """
    assert job.start is not None
    start_job = replace(job, config=job.start, start=None)
    name = f"{start_job.identity} {start_job.config.rounds} {start_job.validation}"
    if name not in _last_start_model:
        _last_start_model.clear()
        prepared = _prepare_job(start_job, settings)
        watch = _Watch(settings.deadline, lambda *_: None)
        folder = _folder(start_job, prepared, settings)
        with contextlib.nullcontext() if folder is None else exclusive(folder.parent / f".{folder.name}.lock"):
            _last_start_model[name] = _run(prepared, folder, watch, settings).model
    return _last_start_model[name]


def _folder(job: Job, prepared: Prepared, settings: SweepSettings) -> Path | None:
    """The run folder. Its path also depends on the validation data and on the start model."""
    if settings.folder is None:
        return None
    subfolder = "" if job.validation is None else f"validation-{job.validation:g}"
    suffix = "" if job.start is None else f"-after-{identity(job.start)}"
    return Path(settings.folder) / subfolder / f"{run_name(prepared.config)}{suffix}"


class _Watch(Callback):
    """Collects the rows, reports progress, and stops the run when the time is up."""

    def __init__(self, deadline: float | None, report: Report) -> None:
        self.rows: list[RoundRow] = []
        self._deadline, self._report = deadline, report
        self._accuracy: float | None = None

    def check_time(self) -> None:
        if self._deadline is not None and time.time() > self._deadline:
            raise OutOfTime

    def on_start(self, prepared: Prepared, state: Any, rounds_ahead: int) -> None:  # noqa: ARG002
        self._report(state.round, state.round + rounds_ahead, None)

    def on_round(self, row: RoundRow, rounds_ahead: int) -> None:
        self.rows.append(row)
        if row.is_evaluated:
            self._accuracy = row.accuracy
        self._report(row.round, row.round + rounds_ahead, self._accuracy)
        if rounds_ahead:
            self.check_time()


def _delete_checkpoints(folder: Path) -> None:
    """Delete the checkpoint and the clients' states. Those of a large sweep would fill the disk."""
    for name in ("checkpoint", "clients"):
        shutil.rmtree(folder / name, ignore_errors=True)
