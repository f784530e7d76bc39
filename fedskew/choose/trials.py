"""Run the trials of a race, and keep their results on disk, so that no finished trial runs again."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from fedskew.choose.field import Candidate
from fedskew.choose.trial import SERVE, MakeFederation, Trial, TrialResult, drop_checkpoints, serve
from fedskew.errors import UserError
from fedskew.experiment.config import Config
from fedskew.experiment.storage.files import reporting_os_errors
from fedskew.results.race import RaceRecord
from fedskew.workers import Message, PoolWatcher, WorkerPool, describe_error

RUNS = ".runs"
"""The folder of the runs. Its name hides them from `fedskew report`, because they are evaluated on validation data."""
TRIALS = "trials.jsonl"


class RaceWatcher:
    """Receives the progress of a race. Its methods do nothing by default."""

    def on_notice(self, line: str) -> None:
        """Called with a line that the user should see."""

    def on_trials(self, heading: str, trials: Sequence[Trial]) -> None:
        """Called before these trials begin."""

    def on_known_trial(self, trial: Trial, measured: TrialResult) -> None:
        """Called after `on_trials`, for each trial that is not run because it already has a result."""

    def on_round(self, trial: Trial, round: int) -> None:
        """Called when a trial has finished a round."""

    def on_trial(self, trial: Trial, measured: TrialResult | None) -> None:
        """Called when a trial has ended. `measured` is None if it failed."""

    def on_standings(self, race: RaceRecord) -> None:
        """Called when a rung is complete, with the record so far."""


class Trials:
    """Runs trials, and keeps their results. A trial that has a result is not run again."""

    def __init__(
        self,
        base: Config,
        fraction: float,
        folder: Path,
        workers: int,
        watcher: RaceWatcher,
        make_federation: MakeFederation,
    ) -> None:
        """With one worker, trials run in this process, on the federations that `make_federation` makes.

        With more workers, trials run in worker processes, which make their federations from the configuration.
        `fraction` is the share of the training data that is held out for validation.
        """
        self._base, self._fraction, self._folder, self._watcher = base, fraction, folder, watcher
        self._make_federation = make_federation
        self._workers = workers
        self._pool = WorkerPool(SERVE, workers, folder / "logs") if workers > 1 else None
        self._file = folder / TRIALS
        self.failures: dict[str, str] = {}
        """Why a method cannot run here, by method."""
        self._measured = self._read()
        self._earlier = frozenset(self._measured)
        """The trials of earlier sessions, also of other races in this folder."""
        self._used: set[tuple[str, int]] = set()
        """The trials that this race has needed so far."""

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()

    @property
    def earlier_seconds(self) -> float:
        """Estimated wall-clock time of this race's trials in earlier sessions, as if all workers had always been busy.

        Trials that other races left in the folder count only if this race uses them.
        """
        return math.fsum(self._measured[trial].seconds for trial in self._used & self._earlier) / self._workers

    @property
    def rounds(self) -> int:
        """The rounds of all runs that this race has used so far."""
        last: dict[str, int] = {}
        for key, until in self._used & self._measured.keys():
            last[key] = max(until, last.get(key, 0))
        return sum(last.values())

    def get(self, candidate: Candidate, seed: int, until: int) -> TrialResult:
        trial = Trial(candidate, seed, until)
        return self._measured[trial.key, trial.until]

    def run(self, heading: str, trials: Sequence[Trial]) -> None:
        """Run the trials that have no result yet. A method whose trial fails is listed in `failures`."""
        self._used.update((trial.key, trial.until) for trial in trials)
        todo = [trial for trial in trials if (trial.key, trial.until) not in self._measured]
        self._watcher.on_trials(heading, todo)
        for trial in trials:
            if (known := self._measured.get((trial.key, trial.until))) is not None:
                self._watcher.on_known_trial(trial, known)
        requests = [t.request(self._base, self._fraction, self._folder / RUNS, self._pool is None) for t in todo]
        events = _TrialEvents(self, todo)
        if self._pool is not None:
            self._pool.run(requests, events)
            return
        for number, request in enumerate(requests):
            try:
                answer = serve(request, partial(events.on_progress, number), self._make_federation)
            except Exception as error:  # one method that fails must not end the race
                events.on_failure(number, describe_error(error))
            else:
                events.on_answer(number, answer)

    def drop(self, candidates: Sequence[Candidate], seeds: Sequence[int]) -> None:
        """Free the disk space of runs that will not continue."""
        for candidate in candidates:
            for seed in seeds:
                drop_checkpoints(self._folder / RUNS / Trial(candidate, seed, 0).key)

    def keep(self, trial: Trial, answer: Message) -> None:
        self._measured[trial.key, trial.until] = measured = TrialResult.from_json(answer)
        line = json.dumps({"key": trial.key, "until": trial.until, "measured": answer}, separators=(",", ":"))
        with reporting_os_errors("write", self._file), self._file.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
        self._watcher.on_trial(trial, measured)

    def fail(self, trial: Trial, reason: str) -> None:
        if trial.candidate.is_baseline:
            raise UserError(f"FedAvg cannot run here: {reason}")
        if trial.candidate.method not in self.failures:
            self._watcher.on_notice(f"{trial.candidate.method} is left out: {reason}")
        self.failures[trial.candidate.method] = reason
        self._watcher.on_trial(trial, None)

    def progress(self, trial: Trial, round: int) -> None:
        self._watcher.on_round(trial, round)

    def _read(self) -> dict[tuple[str, int], TrialResult]:
        """Read the results of earlier sessions. If a session was killed, its last line may be incomplete."""
        if not self._file.is_file():
            return {}
        with reporting_os_errors("read", self._file):
            content = self._file.read_bytes()
        found = {}
        for line in content.splitlines():
            with contextlib.suppress(ValueError, KeyError, TypeError):
                entry = json.loads(line)
                found[entry["key"], entry["until"]] = TrialResult.from_json(entry["measured"])
        if content and not content.endswith(b"\n"):
            with self._file.open("a", encoding="utf-8") as file:
                file.write("\n")
        return found


class _TrialEvents(PoolWatcher):
    """Passes the events of a worker pool, which numbers its requests, to `Trials`."""

    def __init__(self, trials: Trials, todo: Sequence[Trial]) -> None:
        self._trials, self._todo = trials, todo

    def on_progress(self, request: int, content: Message) -> None:
        self._trials.progress(self._todo[request], content["round"])

    def on_answer(self, request: int, answer: Message) -> None:
        self._trials.keep(self._todo[request], answer)

    def on_failure(self, request: int, reason: str) -> None:
        self._trials.fail(self._todo[request], reason)
