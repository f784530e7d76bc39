"""One trial: a run of a candidate on one split, up to some round. A later trial can continue the run from there.

The exception `Paused` ends a trial after the checkpoint of its last round. A later trial resumes the run like any
interrupted run, with the same bits as if it had never stopped. The configuration always has the full number of rounds,
so schedules that depend on that number do not change.
"""

from __future__ import annotations

import contextlib
import gc
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch

from fedskew.choose.field import Candidate
from fedskew.choose.validation import validation_federation
from fedskew.data import Federation
from fedskew.engine import single_process_engine
from fedskew.experiment.callbacks import Callback
from fedskew.experiment.config import Config
from fedskew.experiment.preparation import prepare
from fedskew.experiment.round.record import RoundRow
from fedskew.experiment.run import run_prepared
from fedskew.experiment.shared_federations import shared_federation
from fedskew.experiment.storage.run_folder import RunFolder
from fedskew.results.ranking import METRICS
from fedskew.workers import Message, Report

SERVE = f"{__name__}:serve"
"""The function that a worker process calls for each trial."""

MakeFederation = Callable[[Config], Federation]
"""Makes the federation of a run, for the seed in its configuration."""

RACE_METRICS = {
    name: METRICS[name].measure or "" for name in ("accuracy", "macro-f1", "worst-class", "balanced-accuracy")
}
"""The metrics that a race records at every evaluation and can rank by, each with its attribute of `Evaluation`."""


@dataclass(frozen=True)
class Trial:
    """A candidate to be trained on the split of `seed`, until the round `until`."""

    candidate: Candidate
    seed: int
    until: int

    @property
    def key(self) -> str:
        return f"{self.candidate.key}-s{self.seed}"

    def request(self, base: Config, fraction: float, folder: Path, one_at_a_time: bool) -> Message:
        """Make the message for `serve`. A trial that runs `one_at_a_time` may start worker processes of its own."""
        config = replace(self.candidate.config(base), seed=self.seed)
        return {
            "config": config.to_mapping(),
            "fraction": fraction,
            "until": self.until,
            "folder": str(folder / self.key),
            "one_at_a_time": one_at_a_time,
        }


@dataclass(frozen=True)
class TrialResult:
    """The results of a trial, including the rounds of earlier trials of the same run."""

    rounds: int
    """Number of rounds done."""
    curves: Mapping[str, list[tuple[int, float]]]
    """The evaluated rounds and the value after each, by the name of the metric."""
    seconds: float
    """Wall-clock time of this trial, without earlier trials of the same run."""
    round_seconds: float
    """The median time of a round of this trial, without the first, which is slow.

    If the trial has at most one round, this is the median over all rounds of the run.
    """
    compute: float
    """Local computation per round, as a multiple of a FedAvg round's."""
    bytes: float
    """Traffic per round, in bytes."""
    diverged: int
    """Number of discarded updates in all rounds. They, or the server's step with them, were not finite."""

    def score(self, rank_by: str, rounds: int, last: int) -> float:
        """Return the mean over the last `last` rounds up to round `rounds`, because single rounds fluctuate."""
        values = [value for number, value in self.curves[rank_by] if rounds - last < number <= rounds]
        return fmean(values)

    def to_json(self) -> Message:
        return dict(vars(self))

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> TrialResult:
        curves = {name: [(int(n), float(v)) for n, v in curve] for name, curve in content["curves"].items()}
        return cls(**{**content, "curves": curves})


class Paused(Exception):
    """Raised in a run when it has reached the last round of the trial."""


class _PauseAt(Callback):
    """Reports every round, and pauses the run after round `until`. A run that ends with that round is not paused."""

    def __init__(self, until: int, report: Report) -> None:
        self._until, self._report = until, report
        self.resumed_after = 0
        """The round after which this trial resumed the run, or 0 for a new run."""

    def on_start(self, prepared: Any, state: Any, rounds_ahead: int) -> None:  # noqa: ARG002
        self.resumed_after = state.round
        self._check(state.round, rounds_ahead)

    def on_round(self, row: RoundRow, rounds_ahead: int) -> None:
        self._report({"round": row.round, "until": self._until})
        self._check(row.round, rounds_ahead)

    def _check(self, done: int, rounds_ahead: int) -> None:
        if done >= self._until and rounds_ahead:
            raise Paused


def serve(request: Message, report: Report, make_federation: MakeFederation = shared_federation) -> Message:
    """Run a trial in this process. The test set of its federation is not used."""
    began = time.perf_counter()
    config, folder = Config.from_mapping(request["config"]), Path(request["folder"])
    prepared = prepare(config, validation_federation(make_federation(config), config.seed, request["fraction"]))
    if not request["one_at_a_time"] and prepared.config.engine == "auto":
        prepared = replace(
            prepared, config=replace(prepared.config, engine=single_process_engine(prepared.model, prepared.sample))
        )
    pause = _PauseAt(request["until"], report)
    try:
        with contextlib.suppress(Paused):
            run_prepared(prepared, folder, [pause])
        rows = [row for row in RunFolder(folder).rounds() if row.round]  # row 0 is the initial model
    finally:
        _free_gpu_memory()
    return _summarise(rows, pause.resumed_after, time.perf_counter() - began).to_json()


def _summarise(rows: list[RoundRow], resumed_after: int, seconds: float) -> TrialResult:
    evaluated = [row for row in rows if row.is_evaluated]
    curves = {
        name: [(row.model_round, float(getattr(row.required_evaluation, measure))) for row in evaluated]
        for name, measure in RACE_METRICS.items()
    }
    # The first round after a start takes longer than a typical one.
    typical = [row.seconds for row in rows if row.round > resumed_after + 1] or [row.seconds for row in rows]
    return TrialResult(
        rounds=rows[-1].round,
        curves=curves,
        seconds=seconds,
        round_seconds=median(typical),
        compute=fmean(row.compute for row in rows),
        bytes=fmean(row.bytes_moved for row in rows),
        diverged=sum(len(row.diverged) for row in rows),
    )


def _free_gpu_memory() -> None:
    """Free the memory of a run before the next one needs it. CUDA graphs need `gc`: they are in reference cycles."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return
    gc.collect()
    with contextlib.suppress(RuntimeError):  # after a CUDA error the GPU does not answer
        torch.cuda.empty_cache()


def drop_checkpoints(folder: Path) -> None:
    """Delete the files that are needed only to resume the run."""
    for name in ("checkpoint", "clients"):
        shutil.rmtree(folder / name, ignore_errors=True)
