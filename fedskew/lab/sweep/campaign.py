"""Run the jobs whose records are missing or too short, and save each record as soon as its run ends."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fedskew.lab.sweep.job import Job, SweepSettings, merge_jobs
from fedskew.lab.sweep.pool import JobPool, Watcher
from fedskew.lab.sweep.ray_pool import run_jobs_on_ray
from fedskew.lab.sweep.records import Outcome, Records, RecordsFile, is_enough
from fedskew.workers import default_workers


@dataclass
class Campaign:
    """Runs the jobs that are not done yet, and saves their records."""

    record_file: Callable[[Job], RecordsFile]
    """Returns the file for a job's record."""
    known: Records
    """Records of earlier runs, and of this campaign's runs as they end. Runs on validation data are not included."""
    folder: Path
    """Folder for logs and, if `with_folders`, run folders."""
    with_folders: bool = True
    """Whether each run has a folder, from which it can be resumed."""
    workers: int | None = None
    """Worker processes. If None, as many as suit the machine."""
    time_limit: float | None = None
    """Seconds from the creation of the campaign until its runs stop. A run stops at the end of a round. A worker that
    needs more than `GRACE` seconds (in `pool.py`) for that is killed. Runs with folders can be resumed."""
    command: str = ""
    """The command that started the campaign, for the records."""
    ray: str | None = None
    """Address of a Ray cluster to run on instead of this machine."""
    failures: dict[str, str] = field(default_factory=dict)
    """Why runs failed, by label."""
    stopped: list[str] = field(default_factory=list)
    """The labels of the runs that the time limit stopped, or kept from starting."""
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    """Outcomes of this campaign's runs, by the identity of the job."""

    def __post_init__(self) -> None:
        self._deadline = None if self.time_limit is None else time.time() + self.time_limit
        self._pool: JobPool | None = None

    def todo(self, jobs: Iterable[Job]) -> list[Job]:
        """List the jobs without a sufficient record. `merge_jobs` joins those that one run can serve."""
        return merge_jobs(job for job in jobs if not self.is_done(job))

    def is_done(self, job: Job) -> bool:
        """Whether the job has a sufficient record. A job on validation data never has one."""
        done = self.known.get(job) if job.validation is None else None
        return done is not None and is_enough(done, job)

    def run(self, jobs: Sequence[Job], watcher: Watcher) -> None:
        """Run the jobs that are not done. `failures` and `stopped` list the jobs that did not finish."""
        todo = self.todo(jobs)
        if not todo:
            return
        folder = str(self.folder.absolute()) if self.with_folders else None
        settings = SweepSettings(folder, self._deadline, command=self.command)
        saver = _RecordSaver(self, watcher)
        if self.ray is not None:
            run_jobs_on_ray(todo, settings, self.ray, saver)
            return
        if self._pool is None:
            workers = self.workers or default_workers(todo[0].config.device, len(todo))
            self._pool = JobPool(workers, self.folder / "logs")
        self._pool.run(todo, settings, saver)

    def close(self) -> None:
        """End the worker processes, which stay between calls of `run`."""
        if self._pool is not None:
            self._pool.close()

    def save_outcome(self, job: Job, outcome: Outcome) -> None:
        self.outcomes[job.identity] = outcome
        if outcome.record is not None and job.validation is None:
            self.record_file(job).append(outcome.record)
            self.known.add(outcome.record)
        if outcome.status == "failed":
            self.failures[job.label] = outcome.reason
        elif outcome.status == "stopped":
            self.stopped.append(job.label)


class _RecordSaver(Watcher):
    """Saves the record of each run that ends, and passes all events on to another watcher."""

    def __init__(self, campaign: Campaign, watcher: Watcher) -> None:
        self._campaign, self._watcher = campaign, watcher

    def on_progress(self, job: Job, done: int, total: int, accuracy: float | None) -> None:
        self._watcher.on_progress(job, done, total, accuracy)

    def on_outcome(self, job: Job, outcome: Outcome) -> None:
        self._campaign.save_outcome(job, outcome)
        self._watcher.on_outcome(job, outcome)

    def on_notice(self, line: str) -> None:
        self._watcher.on_notice(line)
