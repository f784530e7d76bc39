"""One job from start to record, in this process."""

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

from fedskew.engine.auto import usual_engine
from fedskew.errors import UserError
from fedskew.experiment.callbacks import Callback
from fedskew.experiment.config import run_name
from fedskew.experiment.preparation import Prepared, prepare
from fedskew.experiment.result import Result
from fedskew.experiment.round.row import RoundRow
from fedskew.experiment.run import run_prepared
from fedskew.experiment.storage.about import machine, versions
from fedskew.experiment.storage.run_folder import RunFolder
from fedskew.lab.sweep.federations import shared_federation
from fedskew.lab.sweep.job import Job, Terms, identity
from fedskew.lab.sweep.records import Outcome, Record
from fedskew.locks import exclusive

Tell = Callable[[int, int, float | None], None]
"""Takes the rounds done, the rounds in all and the last accuracy."""


class OutOfTime(Exception):
    """The sweep's deadline has come; the run's folder, if it has one, can be continued."""


def execute(job: Job, terms: Terms, tell: Tell) -> Outcome:
    """Run a job; whatever goes wrong is its outcome, so that others can go on."""
    attempt = Attempt(job, terms, tell)
    try:
        return attempt.outcome(run_prepared(attempt.prepare(), attempt.folder, [attempt.watch]))
    except Exception as error:  # a bug or a full GPU in one run must not end the others
        return attempt.outcome(error)
    finally:
        free()


class Attempt:
    """A job under way."""

    def __init__(self, job: Job, terms: Terms, tell: Tell) -> None:
        self._job, self._terms = job, terms
        self._prepared: Prepared | None = None
        self.watch = _Watch(terms.deadline, tell)

    def prepare(self) -> Prepared:
        """The run, ready to start, if there is time for it."""
        self.watch.check_time()
        self._prepared = _prepared(self._job, self._terms)
        return self._prepared

    @property
    def folder(self) -> Path | None:
        return None if self._prepared is None else _folder(self._job, self._prepared, self._terms)

    def outcome(self, ended: Result | Exception) -> Outcome:
        """What came of it, from a result or from what went wrong."""
        try:
            if isinstance(ended, Result):
                return self._finished(ended)
        except Exception as error:
            ended = error
        if isinstance(ended, OutOfTime):
            return Outcome("stopped", self._partial())
        if isinstance(ended, UserError):
            return Outcome("failed", reason=str(ended))
        place = traceback.extract_tb(ended.__traceback__)[-1]
        said = " ".join(f"{type(ended).__name__}: {ended}".split())[:500]
        return Outcome("failed", reason=f"{said} ({Path(place.filename).name}, line {place.lineno})")

    def _finished(self, result: Result) -> Outcome:
        outcome = Outcome("finished", self._record(result.history))
        if self.folder is not None:
            _drop_what_only_resuming_needs(self.folder)
        return outcome

    def _partial(self) -> Record | None:
        """What a stopped run knows by now: of all its rounds, if they are on disk."""
        if self._prepared is None:
            return None
        known = self.watch.rows if self.folder is None else RunFolder(self.folder).rounds()
        reached = any(row.is_evaluated and row.round > 0 for row in known)
        return self._record(known) if reached else None

    def _record(self, rows: list[RoundRow]) -> Record:
        assert self._prepared is not None
        job, config, federation = self._job, self._prepared.config, self._prepared.federation
        circumstances = {
            "split": federation.hash[:12],
            "clients": federation.clients,
            **({} if job.config.model == config.model else {"asked_model": job.config.model}),
            **({} if job.start is None else {"start_rounds": job.start.rounds}),
            "command": self._terms.command,
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": dict(machine(config.device)),
            "versions": dict(versions()),
        }
        return Record.of(job.identity, config, rows, circumstances)


def free() -> None:
    """What a run held of a GPU, before others need it: its graphs are in cycles."""
    gc.collect()
    with contextlib.suppress(RuntimeError):  # a GPU on which something went wrong answers no more
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
    """The final model of the run that the job begins with; several jobs of this process may begin with it.

    With folders, so may jobs of other processes: one of them trains it, the others wait for it and read it.
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
    """Apart from those of runs that have the same configuration and yet other data or another beginning."""
    if terms.folder is None:
        return None
    apart = "" if job.validation is None else f"validation-{job.validation:g}"
    begun = "" if job.start is None else f"-after-{identity(job.start)}"
    return Path(terms.folder) / apart / f"{run_name(prepared.config)}{begun}"


class _Watch(Callback):
    """Keeps the rows of this process, tells how the run does, and stops it when time is up."""

    def __init__(self, deadline: float | None, tell: Tell) -> None:
        self.rows: list[RoundRow] = []
        self._deadline, self._tell = deadline, tell
        self._accuracy: float | None = None

    def check_time(self) -> None:
        if self._deadline is not None and time.time() > self._deadline:
            raise OutOfTime

    def on_start(self, prepared: Prepared, state: Any, rounds_ahead: int) -> None:  # noqa: ARG002
        self._tell(state.round, state.round + rounds_ahead, None)

    def on_round(self, row: RoundRow, rounds_ahead: int) -> None:
        self.rows.append(row)
        if row.is_evaluated:
            self._accuracy = row.accuracy
        self._tell(row.round, row.round + rounds_ahead, self._accuracy)
        if rounds_ahead:
            self.check_time()


def _drop_what_only_resuming_needs(folder: Path) -> None:
    """Many finished runs of a sweep would fill the disk with checkpoints and client states."""
    for name in ("checkpoint", "clients"):
        shutil.rmtree(folder / name, ignore_errors=True)
