"""Run jobs in worker processes that share the CPU or GPU of one machine.

Runs of small models leave a GPU idle between their steps; several processes fill one another's gaps. With one worker,
jobs run in this process.
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
"""Default number of processes per GPU."""
_GRACE = 15.0
"""Seconds after the deadline in which a worker may finish its round."""


class Watcher:
    """Receives progress and outcomes; does nothing unless overridden."""

    def on_progress(self, job: Job, done: int, total: int, accuracy: float | None) -> None:
        """A run has finished `done` of `total` rounds."""

    def on_outcome(self, job: Job, outcome: Outcome) -> None:
        """A run has ended."""


def usual_workers(device: str, jobs: int) -> int:
    """The number of processes that suits the machine."""
    gpus = 0 if device == "cpu" or not torch.cuda.is_available() else torch.cuda.device_count()
    return max(1, min(jobs, GPU_WORKERS * gpus if gpus else usable_cores()))


def run_jobs(jobs: Sequence[Job], terms: Terms, workers: int, watcher: Watcher, logs: Path) -> None:
    """Run all jobs, starting them in order."""
    if workers == 1 or len(jobs) <= 1:
        for job in jobs:
            watcher.on_outcome(job, execute(job, terms, partial(watcher.on_progress, job)))
        return
    with contextlib.closing(_Pool(jobs, terms, min(workers, len(jobs)), watcher, logs)) as pool:
        pool.run()


class _Pool:
    """Worker processes, each with one job at a time. A process that dies is replaced; only its job fails."""

    def __init__(self, jobs: Sequence[Job], terms: Terms, workers: int, watcher: Watcher, logs: Path) -> None:
        self._waiting = deque(jobs)
        self._terms = replace(terms, alone=False)
        self._watcher = watcher
        self._logs = logs
        self._size = workers
        self._selector = selectors.DefaultSelector()
        self._workers: dict[int, WorkerProcess] = {}

    def run(self) -> None:
        for place in range(self._size):
            self._start(place)
        while self._workers:
            if self._terms.deadline is not None and time.time() > self._terms.deadline + _GRACE:
                self._stop_all()
                return
            for key, _ in self._selector.select(timeout=1.0):
                self._receive(key.data)

    def close(self) -> None:
        for worker in self._workers.values():
            worker.kill()
        self._workers.clear()
        self._selector.close()

    def _start(self, place: int) -> None:
        """Start a process in this place, unless no job is waiting."""
        if self._waiting:
            worker = WorkerProcess(self._logs / f"worker-{place}.log", _environment(place, self._size))
            self._workers[place] = worker
            self._selector.register(worker.stream, selectors.EVENT_READ, place)
            worker.send(self._waiting.popleft(), self._terms)

    def _receive(self, place: int) -> None:
        worker = self._workers[place]
        try:
            for report in worker.reports():
                if "outcome" not in report:
                    self._watcher.on_progress(worker.job, report["done"], report["total"], report["accuracy"])
                    continue
                self._watcher.on_outcome(worker.job, Outcome.from_json(report["outcome"]))
                if report["broken"]:
                    self._replace(place)
                elif self._waiting:
                    worker.send(self._waiting.popleft(), self._terms)
                else:
                    self._remove(place).dismiss()
        except EOFError:
            self._watcher.on_outcome(worker.job, Outcome("failed", reason=worker.cause_of_death()))
            self._replace(place)

    def _replace(self, place: int) -> None:
        self._remove(place).kill()
        self._start(place)

    def _remove(self, place: int) -> WorkerProcess:
        worker = self._workers.pop(place)
        self._selector.unregister(worker.stream)
        return worker

    def _stop_all(self) -> None:
        """Stop workers whose round, or compilation, takes longer than the grace period."""
        for place in list(self._workers):
            worker = self._remove(place)
            worker.kill()
            self._waiting.appendleft(worker.job)
        for job in self._waiting:
            self._watcher.on_outcome(job, Outcome("stopped"))


def _environment(place: int, workers: int) -> dict[str, str]:
    """Each worker gets a share of the cores and, on a machine with several GPUs, one GPU."""
    cores = str(max(1, usable_cores() // workers))
    shares = {name: cores for name in ("OMP_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS") if name not in os.environ}
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if gpus > 1 and "CUDA_VISIBLE_DEVICES" not in os.environ:
        shares["CUDA_VISIBLE_DEVICES"] = str(place % gpus)
    return {"OMP_WAIT_POLICY": "PASSIVE", **shares}
