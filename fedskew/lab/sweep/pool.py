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
from pathlib import Path

import torch

from fedskew.engine.parallel.pool import usable_cores
from fedskew.lab.sweep.bundles import Bundle, bundled
from fedskew.lab.sweep.job import Job, Outcome, Terms
from fedskew.lab.sweep.joint_execution import execute_together
from fedskew.lab.sweep.worker_process import WorkerProcess

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


def run_jobs(
    jobs: Sequence[Job], terms: Terms, workers: int, watcher: Watcher, logs: Path, together: int | None = None
) -> None:
    """Run them all, the first ones first; at most `together` of a kind as one (`bundles`)."""
    bundles = bundled(jobs, workers, together)
    if workers == 1 or len(bundles) <= 1:
        for bundle in bundles:
            _run_here(bundle, terms, watcher)
        return
    with contextlib.closing(_Pool(terms, min(workers, len(bundles)), watcher, logs)) as pool:
        pool.run(bundles)


def _run_here(bundle: Bundle, terms: Terms, watcher: Watcher) -> None:
    def tell(place: int, done: int, total: int, accuracy: float | None) -> None:
        watcher.on_progress(bundle[place], done, total, accuracy)

    for place, outcome in execute_together(bundle, terms, tell):
        watcher.on_outcome(bundle[place], outcome)


class _Pool:
    """Workers under way."""

    def __init__(self, terms: Terms, workers: int, watcher: Watcher, logs: Path) -> None:
        self._terms = replace(terms, alone=False)
        self._watcher = watcher
        self._logs = logs
        self._size = workers
        self._selector = selectors.DefaultSelector()
        self._workers: dict[int, WorkerProcess] = {}

    def run(self, bundles: Sequence[Bundle]) -> None:
        waiting = deque(bundles)
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

    def _start(self, place: int, waiting: deque[Bundle]) -> None:
        """A process in that place, with something to do; none if nothing waits."""
        if not waiting:
            return
        worker = WorkerProcess(self._logs / f"worker-{place}.log", _environment(place, self._size))
        self._workers[place] = worker
        self._selector.register(worker.stream, selectors.EVENT_READ, place)
        worker.give(waiting.popleft(), self._terms)

    def _hear(self, place: int, waiting: deque[Bundle]) -> None:
        worker = self._workers[place]
        try:
            for said in worker.said():
                if "outcome" not in said:
                    about = worker.jobs[said["place"]]
                    self._watcher.on_progress(about, said["done"], said["total"], said["accuracy"])
                    continue
                self._watcher.on_outcome(worker.jobs.pop(said["place"]), Outcome.from_json(said["outcome"]))
                if said["spent"]:
                    self._replace(place, waiting)
                    return
                if not worker.jobs:
                    self._next(place, waiting)
        except EOFError:
            if len(worker.jobs) == 1:
                (job,) = worker.jobs.values()
                worker.jobs.clear()
                self._watcher.on_outcome(job, Outcome("failed", reason=worker.why_it_died()))
            self._replace(place, waiting)

    def _replace(self, place: int, waiting: deque[Bundle]) -> None:
        """A new process in the place of one that is of no more use; of several runs that it leaves behind, nobody
        knows which was the cause, so each is run again by itself."""
        worker = self._remove(place)
        worker.kill()
        waiting.extendleft([job] for job in reversed(worker.jobs.values()))
        self._start(place, waiting)

    def _next(self, place: int, waiting: deque[Bundle]) -> None:
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

    def _end_all(self, waiting: deque[Bundle]) -> None:
        """Some are in a round, or in compiling, that takes longer than the grace."""
        for place in list(self._workers):
            worker = self._remove(place)
            worker.kill()
            waiting.appendleft(list(worker.jobs.values()))
        for bundle in waiting:
            for job in bundle:
                self._watcher.on_outcome(job, Outcome("stopped"))


def _environment(place: int, workers: int) -> dict[str, str]:
    """A share of the cores for each, and of the GPUs where there are several."""
    cores = str(max(1, usable_cores() // workers))
    shares = {name: cores for name in ("OMP_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS") if name not in os.environ}
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if gpus > 1 and "CUDA_VISIBLE_DEVICES" not in os.environ:
        shares["CUDA_VISIBLE_DEVICES"] = str(place % gpus)
    return {"OMP_WAIT_POLICY": "PASSIVE", **shares}
