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
from fedskew.experiment.about import machine, versions
from fedskew.experiment.config import run_name
from fedskew.experiment.preparation import Prepared, prepare
from fedskew.experiment.rounds_file import Row
from fedskew.experiment.run import Callback, run_prepared
from fedskew.experiment.run_folder import RunFolder
from fedskew.sweep.federations import shared_federation
from fedskew.sweep.identity import identity
from fedskew.sweep.job import Job, Outcome, Terms
from fedskew.sweep.record import Record

Tell = Callable[[int, int, float | None], None]
"""Takes the rounds done, the rounds in all and the last accuracy."""


class OutOfTime(Exception):
    """The sweep's deadline has come; the run's folder, if it has one, can be continued."""


def execute(job: Job, terms: Terms, tell: Tell) -> Outcome:
    """Run a job; whatever goes wrong is its outcome, so that others can go on."""
    watch = _Watch(terms.deadline, tell)
    prepared: Prepared | None = None
    try:
        watch.check_time()
        prepared = _prepared(job, terms)
        folder = _folder(job, prepared, terms)
        result = run_prepared(prepared, folder, [watch])
        outcome = Outcome("finished", _record(job, prepared, result.history, terms))
        if folder is not None:
            _drop_what_only_resuming_needs(folder)
        return outcome
    except OutOfTime:
        return Outcome("stopped", _partial(job, prepared, watch.rows, terms))
    except UserError as error:
        return Outcome("failed", reason=str(error))
    except Exception as error:  # a bug or a full GPU in one run must not end the others
        place = traceback.extract_tb(error.__traceback__)[-1]
        said = " ".join(f"{type(error).__name__}: {error}".split())[:500]
        return Outcome("failed", reason=f"{said} ({Path(place.filename).name}, line {place.lineno})")
    finally:
        _free()


def _free() -> None:
    """What the run held of a GPU, before others need it: its graphs are in cycles."""
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
    """The final model of the run that the job begins with; several jobs of this process may begin with it."""
    assert job.start is not None
    before = replace(job, config=job.start, start=None)
    name = f"{before.identity} {before.config.rounds} {before.validation}"
    if name not in _trained_models:
        _trained_models.clear()
        prepared = _prepared(before, terms)
        watch = _Watch(terms.deadline, lambda *_: None)
        _trained_models[name] = run_prepared(prepared, _folder(before, prepared, terms), [watch]).model
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
        self.rows: list[Row] = []
        self._deadline, self._tell = deadline, tell
        self._accuracy: float | None = None

    def check_time(self) -> None:
        if self._deadline is not None and time.time() > self._deadline:
            raise OutOfTime

    def on_start(self, prepared: Prepared, state: Any, rounds_ahead: int) -> None:  # noqa: ARG002
        self._tell(state.round, state.round + rounds_ahead, None)

    def on_round(self, row: Row, rounds_ahead: int) -> None:
        self.rows.append(row)
        if "evaluation" in row and row["model"] == "global":
            self._accuracy = row["evaluation"]["accuracy"]
        self._tell(row["round"], row["round"] + rounds_ahead, self._accuracy)
        if rounds_ahead:
            self.check_time()


def _partial(job: Job, prepared: Prepared | None, rows: list[Row], terms: Terms) -> Record | None:
    """What a stopped run knows by now: of all its rounds, if they are on disk."""
    if prepared is None:
        return None
    folder = _folder(job, prepared, terms)
    known = rows if folder is None else RunFolder(folder).rounds()
    reached = any("evaluation" in row and row["round"] > 0 and row.get("model") == "global" for row in known)
    return _record(job, prepared, known, terms) if reached else None


def _record(job: Job, prepared: Prepared, rows: list[Row], terms: Terms) -> Record:
    config = prepared.config
    circumstances = {
        "split": prepared.federation.hash[:12],
        "clients": prepared.federation.clients,
        **({} if job.config.model == config.model else {"asked_model": job.config.model}),
        **({} if job.start is None else {"start_rounds": job.start.rounds}),
        "command": terms.command,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": dict(machine(config.device)),
        "versions": dict(versions()),
    }
    return Record.of(job.identity, config, rows, circumstances)


def _drop_what_only_resuming_needs(folder: Path) -> None:
    """Many finished runs of a sweep would fill the disk with checkpoints and client states."""
    for name in ("checkpoint", "clients"):
        shutil.rmtree(folder / name, ignore_errors=True)
