"""Jobs over worker processes on one machine: several share a CPU or a GPU, none waits for another, none ends another.

Runs of small models leave a GPU idle between their steps; several processes fill one another's gaps. With one worker
everything happens in this process.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from fedskew.engine.parallel.pool import usable_cores
from fedskew.lab.sweep.execution import execute
from fedskew.lab.sweep.job import Job, Terms
from fedskew.lab.sweep.records import Outcome
from fedskew.lab.sweep.worker import WorkerProcess

GPU_WORKERS = 4
"""Processes that share a GPU unless the user says otherwise."""
_GRACE = 15.0
"""Seconds that a worker may go on after the deadline, to finish its round."""


class Watcher:
    """Told of everything; does nothing unless overridden."""

    def on_progress(self, job: Job, done: int, total: int, accuracy: float | None) -> None:
        """A run has done so many rounds."""

    def on_outcome(self, job: Job, outcome: Outcome) -> None:
        """A run has ended."""


def usual_workers(device: str, jobs: int) -> int:
    """How many processes suit the machine."""
    gpus = 0 if device == "cpu" or not torch.cuda.is_available() else torch.cuda.device_count()
    return max(1, min(jobs, GPU_WORKERS * gpus if gpus else usable_cores()))


def run_jobs(jobs: Sequence[Job], terms: Terms, workers: int, watcher: Watcher, logs: Path) -> None:
    """Run them all, the first ones first."""
    if workers == 1 or len(jobs) <= 1:
        for job in jobs:
            watcher.on_outcome(job, execute(job, terms, partial(watcher.on_progress, job)))
        return
    with contextlib.closing(_Pool(terms, min(workers, len(jobs)), watcher, logs)) as pool:
        pool.run(jobs)


class _Pool:
    """Workers under way."""

    def __init__(self, terms: Terms, workers: int, watcher: Watcher, logs: Path) -> None:
        self._terms = replace(terms, alone=False)
        self._watcher = watcher
        self._logs = logs
        self._size = workers
        self._selector = selectors.DefaultSelector()
        self._workers: dict[int, WorkerProcess] = {}

    def run(self, jobs: Sequence[Job]) -> None:
        waiting = deque(jobs)
        for place in range(self._size):
            self._start(place, waiting)
        while self._workers:
            if self._is_overdue():
                self._end_all(waiting)
                return
            for key, _ in self._selector.select(timeout=1.0):
                self._hear(key.data, waiting)

    def close(self) -> None:
        for worker in self._workers.values():
            worker.kill()
        self._workers.clear()
        self._selector.close()

    def _start(self, place: int, waiting: deque[Job]) -> None:
        """A process in that place, with something to do; none if nothing waits."""
        if not waiting:
            return
        worker = WorkerProcess(self._logs / f"worker-{place}.log", _environment(place, self._size))
        self._workers[place] = worker
        self._selector.register(worker.stream, selectors.EVENT_READ, place)
        worker.give(waiting.popleft(), self._terms)

    def _hear(self, place: int, waiting: deque[Job]) -> None:
        worker = self._workers[place]
        try:
            for said in worker.said():
                if "outcome" not in said:
                    self._watcher.on_progress(worker.job, said["done"], said["total"], said["accuracy"])
                    continue
                self._watcher.on_outcome(worker.job, Outcome.from_json(said["outcome"]))
                if said["spent"]:
                    self._replace(place, waiting)
                    return
                self._next(place, waiting)
        except EOFError:
            self._watcher.on_outcome(worker.job, Outcome("failed", reason=worker.why_it_died()))
            self._replace(place, waiting)

    def _replace(self, place: int, waiting: deque[Job]) -> None:
        """Start a new process in the place of one that is of no more use."""
        self._remove(place).kill()
        self._start(place, waiting)

    def _next(self, place: int, waiting: deque[Job]) -> None:
        if waiting:
            self._workers[place].give(waiting.popleft(), self._terms)
        else:
            self._remove(place).dismiss()

    def _remove(self, place: int) -> WorkerProcess:
        worker = self._workers.pop(place)
        self._selector.unregister(worker.stream)
        return worker

    def _is_overdue(self) -> bool:
        return self._terms.deadline is not None and time.time() > self._terms.deadline + _GRACE

    def _end_all(self, waiting: deque[Job]) -> None:
        """Some are in a round, or in compiling, that takes longer than the grace."""
        for place in list(self._workers):
            worker = self._remove(place)
            worker.kill()
            waiting.appendleft(worker.job)
        for job in waiting:
            self._watcher.on_outcome(job, Outcome("stopped"))


def _environment(place: int, workers: int) -> dict[str, str]:
    """A share of the cores for each, and of the GPUs where there are several."""
    cores = str(max(1, usable_cores() // workers))
    shares = {name: cores for name in ("OMP_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS") if name not in os.environ}
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if gpus > 1 and "CUDA_VISIBLE_DEVICES" not in os.environ:
        shares["CUDA_VISIBLE_DEVICES"] = str(place % gpus)
    return {"OMP_WAIT_POLICY": "PASSIVE", **shares}
