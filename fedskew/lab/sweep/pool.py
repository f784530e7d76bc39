"""Run jobs in worker processes that share the CPU or GPU of one machine.

A run of a small model leaves the GPU idle between its steps, so several processes use it better. With one worker, or
for a single job before any worker has started, jobs run in this process.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from fedskew.lab.sweep.execution import execute
from fedskew.lab.sweep.job import Job, SweepSettings
from fedskew.lab.sweep.records import Outcome
from fedskew.workers import Message, PoolWatcher, Report, WorkerPool

SERVE = f"{__name__}:serve"
"""The function that a worker process calls for each job."""
GRACE = 15.0
"""Seconds after the deadline in which a worker may finish its round. Then it is killed."""


class Watcher:
    """Receives progress and outcomes. The base class ignores them."""

    def on_progress(self, job: Job, done: int, total: int, accuracy: float | None) -> None:
        """Called when a run has finished `done` of `total` rounds."""

    def on_outcome(self, job: Job, outcome: Outcome) -> None:
        """Called once per job: when its run has ended, or when the time is up before it started."""

    def on_notice(self, line: str) -> None:
        """Called with a line for the user."""


class JobPool:
    """Runs jobs. Its processes start when `run` first needs them, and stay for later calls."""

    def __init__(self, workers: int, logs: Path) -> None:
        self._workers, self._logs = workers, logs
        self._pool: WorkerPool | None = None

    def run(self, jobs: Sequence[Job], settings: SweepSettings, watcher: Watcher) -> None:
        """Run the jobs, starting them in order. After the deadline, the rest are reported as stopped."""
        if self._workers == 1 or (len(jobs) <= 1 and self._pool is None):
            for job in jobs:
                watcher.on_outcome(job, execute(job, settings, partial(watcher.on_progress, job)))
            return
        if self._pool is None:
            self._pool = WorkerPool(SERVE, min(self._workers, len(jobs)), self._logs)
        shared = replace(settings, is_alone_on_machine=False).to_json()
        requests = [{"job": job.to_json(), "settings": shared} for job in jobs]
        give_up_at = None if settings.deadline is None else settings.deadline + GRACE
        for stopped in self._pool.run(requests, _JobWatcher(jobs, watcher), give_up_at):
            watcher.on_outcome(jobs[stopped], Outcome("stopped"))

    def close(self) -> None:
        """End the processes."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None


class _JobWatcher(PoolWatcher):
    """Passes the events of a worker pool, which numbers its requests, to a watcher of jobs."""

    def __init__(self, jobs: Sequence[Job], watcher: Watcher) -> None:
        self._jobs, self._watcher = jobs, watcher

    def on_progress(self, request: int, content: Message) -> None:
        self._watcher.on_progress(self._jobs[request], **content)

    def on_answer(self, request: int, answer: Message) -> None:
        self._watcher.on_outcome(self._jobs[request], Outcome.from_json(answer))

    def on_failure(self, request: int, reason: str) -> None:
        self._watcher.on_outcome(self._jobs[request], Outcome("failed", reason=reason))


def serve(request: Message, report: Report) -> Message:
    """Run a job in a worker process."""

    def report_progress(done: int, total: int, accuracy: float | None) -> None:
        report({"done": done, "total": total, "accuracy": accuracy})

    return execute(Job.from_json(request["job"]), SweepSettings(**request["settings"]), report_progress).to_json()
