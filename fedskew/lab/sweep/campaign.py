"""Jobs with a memory: what has a record is not run again, what comes out is kept at once."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fedskew.lab.sweep.job import Job, Terms, each_once
from fedskew.lab.sweep.pool import Watcher, run_jobs, usual_workers
from fedskew.lab.sweep.ray_pool import run_jobs_on_ray
from fedskew.lab.sweep.records import Outcome, Record, Records, RecordsFile


@dataclass
class Campaign:
    """Runs jobs that are not done yet and keeps their records."""

    file_of: Callable[[Job], RecordsFile]
    """Where a job's record is kept."""
    known: Records
    """What was done before."""
    folder: Path
    """For logs and, if `with_folders`, the runs' own folders."""
    with_folders: bool = True
    workers: int | None = None
    """None: what suits the machine."""
    time_limit: float | None = None
    """Seconds, counted from now, after which runs stop, to be continued by the same command."""
    command: str = ""
    ray: str | None = None
    """The address of a Ray cluster to run on, instead of this machine."""
    failures: dict[str, str] = field(default_factory=dict)
    """By label, the reason."""
    stopped: list[str] = field(default_factory=list)
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    """Of everything that was run, by the experiment's identity."""

    def __post_init__(self) -> None:
        self._deadline = None if self.time_limit is None else time.time() + self.time_limit

    def todo(self, jobs: Iterable[Job]) -> list[Job]:
        """Those without a record of as many rounds as they ask for, each experiment once."""
        return each_once(job for job in jobs if not self._is_done(job))

    def _is_done(self, job: Job) -> bool:
        done = self.known.get(job) if job.validation is None else None
        return done is not None and is_enough(done, job)

    def run(self, jobs: Sequence[Job], watcher: Watcher) -> None:
        """Run what is to do; `failures` and `stopped` say what did not come to its end."""
        todo = self.todo(jobs)
        if not todo:
            return
        folder = str(self.folder.absolute()) if self.with_folders else None
        terms = Terms(folder, self._deadline, command=self.command)
        keeping = _Keeping(self, watcher)
        if self.ray is not None:
            run_jobs_on_ray(todo, terms, self.ray, keeping)
            return
        workers = usual_workers(todo[0].config.device, len(todo)) if self.workers is None else self.workers
        run_jobs(todo, terms, workers, keeping, self.folder / "logs")

    def take(self, job: Job, outcome: Outcome) -> None:
        self.outcomes[job.identity] = outcome
        if outcome.record is not None and job.validation is None:
            self.file_of(job).append(outcome.record)
            self.known.add(outcome.record)
        if outcome.status == "failed":
            self.failures[job.label] = outcome.reason
        elif outcome.status == "stopped":
            self.stopped.append(job.label)


def is_enough(record: Record, job: Job) -> bool:
    """Whether it has as many rounds as the job wants, and its beginning had."""
    return record.rounds >= job.config.rounds and (job.start is None or record.start_rounds >= job.start.rounds)


class _Keeping(Watcher):
    def __init__(self, campaign: Campaign, watcher: Watcher) -> None:
        self._campaign, self._watcher = campaign, watcher

    def on_progress(self, job: Job, done: int, total: int, accuracy: float | None) -> None:
        self._watcher.on_progress(job, done, total, accuracy)

    def on_outcome(self, job: Job, outcome: Outcome) -> None:
        self._campaign.take(job, outcome)
        self._watcher.on_outcome(job, outcome)
