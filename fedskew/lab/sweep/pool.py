"""Run jobs in worker processes that share the CPU or GPU of one machine.

A run of a small model leaves the GPU idle between its steps, so several processes use it better. With one worker, jobs
run in this process.
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
    """Receives progress and outcomes. The base class ignores them."""

    def on_progress(self, job: Job, done: int, total: int, accuracy: float | None) -> None:
        """Called when a run has finished `done` of `total` rounds."""

    def on_outcome(self, job: Job, outcome: Outcome) -> None:
        """Called when a run has ended."""


def default_workers(device: str, jobs: int) -> int:
    """The default number of processes on this machine."""
    gpus = 0 if device == "cpu" or not torch.cuda.is_available() else torch.cuda.device_count()
    return max(1, min(jobs, GPU_WORKERS * gpus if gpus else usable_cores()))


def run_jobs(jobs: Sequence[Job], terms: Terms, workers: int, watcher: Watcher, logs: Path) -> None:
    """Run all jobs. They start in order."""
    if workers == 1 or len(jobs) <= 1:
        for job in jobs:
            watcher.on_outcome(job, execute(job, terms, partial(watcher.on_progress, job)))
        return
    with contextlib.closing(_Pool(jobs, terms, min(workers, len(jobs)), watcher, logs)) as pool:
        pool.run()


class _Pool:
    """Worker processes with one job each. If a process dies, only its job fails, and another process replaces it."""

    def __init__(self, jobs: Sequence[Job], terms: Terms, workers: int, watcher: Watcher, logs: Path) -> None:
        self._waiting = deque(jobs)
        self._terms = replace(terms, alone=False)
        self._watcher = watcher
        self._logs = logs
        self._size = workers
        self._selector = selectors.DefaultSelector()
        self._workers: dict[int, WorkerProcess] = {}

    def run(self) -> None:
        for number in range(self._size):
            self._start(number)
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

    def _start(self, number: int) -> None:
        """Start a worker under this number if a job is waiting."""
        if self._waiting:
            worker = WorkerProcess(self._logs / f"worker-{number}.log", _environment(number, self._size))
            self._workers[number] = worker
            self._selector.register(worker.stream, selectors.EVENT_READ, number)
            worker.send(self._waiting.popleft(), self._terms)

    def _receive(self, number: int) -> None:
        worker = self._workers[number]
        try:
            for report in worker.reports():
                if "outcome" not in report:
                    self._watcher.on_progress(worker.job, report["done"], report["total"], report["accuracy"])
                    continue
                self._watcher.on_outcome(worker.job, Outcome.from_json(report["outcome"]))
                if report["broken"]:
                    self._replace(number)
                elif self._waiting:
                    worker.send(self._waiting.popleft(), self._terms)
                else:
                    self._remove(number).dismiss()
        except EOFError:
            self._watcher.on_outcome(worker.job, Outcome("failed", reason=worker.cause_of_death()))
            self._replace(number)

    def _replace(self, number: int) -> None:
        self._remove(number).kill()
        self._start(number)

    def _remove(self, number: int) -> WorkerProcess:
        worker = self._workers.pop(number)
        self._selector.unregister(worker.stream)
        return worker

    def _stop_all(self) -> None:
        """Kill the workers that are still busy after the grace period."""
        for number in list(self._workers):
            worker = self._remove(number)
            worker.kill()
            self._waiting.appendleft(worker.job)
        for job in self._waiting:
            self._watcher.on_outcome(job, Outcome("stopped"))


def _environment(number: int, workers: int) -> dict[str, str]:
    """Give a worker a share of the cores and, if there are several GPUs, one of them."""
    cores = str(max(1, usable_cores() // workers))
    shares = {name: cores for name in ("OMP_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS") if name not in os.environ}
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if gpus > 1 and "CUDA_VISIBLE_DEVICES" not in os.environ:
        shares["CUDA_VISIBLE_DEVICES"] = str(number % gpus)
    return {"OMP_WAIT_POLICY": "PASSIVE", **shares}
