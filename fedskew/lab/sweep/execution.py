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

from fedskew.engine import usual_engine
from fedskew.errors import UserError
from fedskew.experiment.callbacks import Callback
from fedskew.experiment.config import run_name
from fedskew.experiment.preparation import Prepared, prepare
from fedskew.experiment.round.record import RoundRow
from fedskew.experiment.run import run_prepared
from fedskew.experiment.storage.about import machine, versions
from fedskew.experiment.storage.run_folder import RunFolder
from fedskew.lab.sweep.federations import shared_federation
from fedskew.lab.sweep.job import Job, Terms, identity
from fedskew.lab.sweep.records import Outcome, Record
from fedskew.locks import exclusive

Report = Callable[[int, int, float | None], None]
"""Receives the finished rounds, the total rounds and the last accuracy."""


class OutOfTime(Exception):
    """The sweep's deadline has passed; the run can be resumed if it has a folder."""


def execute(job: Job, terms: Terms, report: Report) -> Outcome:
    """Run a job. An error is its outcome, so that other jobs can go on."""
    watch, prepared, folder = _Watch(terms.deadline, report), None, None
    try:
        watch.check_time()
        prepared = _prepared(job, terms)
        folder = _folder(job, prepared, terms)
        result = run_prepared(prepared, folder, [watch])
        outcome = Outcome("finished", _record(job, prepared, terms, result.history, result.auroc))
        if folder is not None:
            _drop_checkpoints(folder)
        return outcome
    except OutOfTime:
        rows = watch.rows if folder is None else RunFolder(folder).rounds()
        if prepared is None or not any(row.is_evaluated and row.round > 0 for row in rows):
            return Outcome("stopped")
        return Outcome("stopped", _record(job, prepared, terms, rows))
    except UserError as error:
        return Outcome("failed", reason=str(error))
    except Exception as error:  # a bug or a full GPU in one run must not end the others
        place = traceback.extract_tb(error.__traceback__)[-1]
        message = " ".join(f"{type(error).__name__}: {error}".split())[:500]
        return Outcome("failed", reason=f"{message} ({Path(place.filename).name}, line {place.lineno})")
    finally:
        _free_gpu_memory()


def _record(job: Job, prepared: Prepared, terms: Terms, rows: list[RoundRow], auroc: float | None = None) -> Record:
    config, federation = prepared.config, prepared.federation
    circumstances = {
        "split": federation.hash[:12],
        "clients": federation.clients,
        **({} if job.config.model == config.model else {"asked_model": job.config.model}),
        **({} if job.start is None else {"start_rounds": job.start.rounds}),
        "command": terms.command,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": dict(machine(config.device)),
        "versions": dict(versions()),
    }
    return Record.from_rows(job.identity, config, rows, circumstances, auroc)


def _free_gpu_memory() -> None:
    """Free the memory of a run before the next one needs it: CUDA graphs are in reference cycles."""
    gc.collect()
    with contextlib.suppress(RuntimeError):  # after a CUDA error the GPU does not answer
        torch.cuda.empty_cache()


def _prepared(job: Job, terms: Terms) -> Prepared:
    federation = shared_federation(job.config, job.validation)
    model = None if job.start is None else _trained(job, terms)
    prepared = prepare(job.config, federation, model=model)
    if not terms.alone and prepared.config.engine == "auto":
        engine = usual_engine(prepared.model)
        prepared = replace(prepared, config=replace(prepared.config, engine=engine))
    return prepared


_trained_models: dict[str, nn.Module] = {}


def _trained(job: Job, terms: Terms) -> nn.Module:
    """The final model of the run that the job starts from; jobs that start from the same run share it.

    With folders, jobs of other processes share it, too: one process trains it, the others wait and read it.
    """
    assert job.start is not None
    before = replace(job, config=job.start, start=None)
    name = f"{before.identity} {before.config.rounds} {before.validation}"
    if name not in _trained_models:
        _trained_models.clear()
        prepared = _prepared(before, terms)
        watch = _Watch(terms.deadline, lambda *_: None)
        folder = _folder(before, prepared, terms)
        with contextlib.nullcontext() if folder is None else exclusive(folder.parent / f".{folder.name}.lock"):
            _trained_models[name] = run_prepared(prepared, folder, [watch]).model
    return _trained_models[name]


def _folder(job: Job, prepared: Prepared, terms: Terms) -> Path | None:
    """The run folder; runs with the same configuration but other test data or start have their own."""
    if terms.folder is None:
        return None
    apart = "" if job.validation is None else f"validation-{job.validation:g}"
    begun = "" if job.start is None else f"-after-{identity(job.start)}"
    return Path(terms.folder) / apart / f"{run_name(prepared.config)}{begun}"


class _Watch(Callback):
    """Keeps the rows of this process, reports progress, and stops the run when time is up."""

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


def _drop_checkpoints(folder: Path) -> None:
    """Delete what only resuming needs: finished runs of a large sweep would fill the disk."""
    for name in ("checkpoint", "clients"):
        shutil.rmtree(folder / name, ignore_errors=True)
