"""Worker processes: one that fails or dies ends nobody else's run."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fedskew.lab.sweep.job import Job, SweepSettings
from fedskew.lab.sweep.pool import JobPool, Watcher
from fedskew.lab.sweep.records import Outcome
from fedskew.workers import WorkerProcess


def run_jobs(jobs: Sequence[Job], settings: SweepSettings, workers: int, watcher: Watcher, logs: Path) -> None:
    with closing(JobPool(workers, logs)) as pool:
        pool.run(jobs, settings, watcher)


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("logs")


@pytest.fixture(scope="module")
def pool(logs: Path) -> Iterator[JobPool]:
    """Two processes for all tests that do not need new ones: each of them imports torch first."""
    with closing(JobPool(2, logs)) as pool:
        yield pool


class Noting(Watcher):
    def __init__(self) -> None:
        self.ended: dict[str, Outcome] = {}
        self.progress: set[str] = set()

    def on_progress(self, job: Job, done: int, total: int, accuracy: float | None) -> None:
        self.progress.add(job.label)
        assert 0 <= done <= total

    def on_outcome(self, job: Job, outcome: Outcome) -> None:
        self.ended[job.label] = outcome


def test_jobs_of_two_processes_end_like_those_of_one(tiny_job, pool: JobPool, logs: Path, tmp_path: Path) -> None:
    jobs = [tiny_job("a"), tiny_job("bad", model="mobilenetv3"), tiny_job("b", seed=1)]
    apart, together = Noting(), Noting()
    pool.run(jobs, SweepSettings(str(tmp_path / "runs")), apart)
    run_jobs(jobs, SweepSettings(), 1, together, tmp_path / "logs")
    for watcher in (apart, together):
        assert {label: outcome.status for label, outcome in watcher.ended.items()} == {
            "a": "finished", "bad": "failed", "b": "finished",
        }  # fmt: skip
        assert {"a", "b"} <= watcher.progress
    for label in "ab":
        one, other = apart.ended[label].record, together.ended[label].record
        assert one is not None
        assert other is not None
        assert one.curve == other.curve
    assert len(list((tmp_path / "runs").iterdir())) == 2
    assert {path.name for path in logs.iterdir()} == {"worker-0.log", "worker-1.log"}


@pytest.mark.slow
def test_two_processes_may_begin_with_the_same_trained_model(tiny_job, tmp_path: Path) -> None:
    start = tiny_job(rounds=2).config
    jobs = [replace(tiny_job(method, method=method, rounds=1), start=start) for method in ("fedavg", "fedprox")]
    watcher = Noting()
    run_jobs(jobs, SweepSettings(str(tmp_path / "runs")), 2, watcher, tmp_path / "logs")
    begun = [outcome.record.curve[0] for outcome in watcher.ended.values() if outcome.record is not None]
    assert len(begun) == 2
    assert begun[0] == begun[1]


def test_a_worker_that_dies_fails_its_job_and_is_replaced(tiny_job, pool: JobPool, monkeypatch) -> None:
    killed: list[int] = []
    give = WorkerProcess.send

    def give_and_kill(self: WorkerProcess, request: dict[str, Any]) -> None:
        give(self, request)
        if request["job"]["label"] == "doomed":
            killed.append(self.pid)
            os.kill(self.pid, 9)

    monkeypatch.setattr(WorkerProcess, "send", give_and_kill)
    watcher = Noting()
    pool.run([tiny_job("doomed"), tiny_job("a", seed=1), tiny_job("b", seed=2)], SweepSettings(), watcher)
    assert len(killed) == 1
    assert watcher.ended["doomed"].status == "failed"
    assert "killed by signal 9" in watcher.ended["doomed"].reason
    assert {watcher.ended[label].status for label in "ab"} == {"finished"}


@pytest.mark.slow
def test_a_worker_whose_gpu_answers_no_more_gets_no_other_job(tiny_job, tmp_path: Path, monkeypatch) -> None:
    processes: dict[str, int] = {}
    give, said = WorkerProcess.send, WorkerProcess.messages

    def noted(self: WorkerProcess, request: dict[str, Any]) -> None:
        processes[request["job"]["label"]] = self.pid
        give(self, request)

    def as_if_spent(self: WorkerProcess) -> Iterator[dict[str, Any]]:
        for line in said(self):
            assert line.get("broken", False) is False
            yield line | {"broken": True} if "broken" in line else line

    monkeypatch.setattr(WorkerProcess, "send", noted)
    monkeypatch.setattr(WorkerProcess, "messages", as_if_spent)
    watcher = Noting()
    run_jobs([tiny_job(str(seed), seed=seed) for seed in range(3)], SweepSettings(), 2, watcher, tmp_path / "logs")
    assert [outcome.status for outcome in watcher.ended.values()] == ["finished"] * 3
    assert len(set(processes.values())) == 3


def test_after_the_deadline_everything_is_stopped(tiny_job, tmp_path: Path) -> None:
    watcher = Noting()
    jobs = [tiny_job(str(seed), seed=seed) for seed in range(3)]
    run_jobs(jobs, SweepSettings(deadline=time.time() - 1000), 2, watcher, tmp_path / "logs")
    assert [outcome.status for outcome in watcher.ended.values()] == ["stopped"] * 3


@pytest.mark.parametrize("workers", [1, 2])
def test_no_jobs_are_no_trouble(workers: int, tmp_path: Path) -> None:
    run_jobs([], SweepSettings(), workers, Noting(), tmp_path)


def test_processes_stay_for_the_jobs_of_later_calls(tiny_job, pool: JobPool, monkeypatch) -> None:
    used: list[int] = []
    give = WorkerProcess.send

    def noted(self: WorkerProcess, request: dict[str, Any]) -> None:
        used.append(self.pid)
        give(self, request)

    monkeypatch.setattr(WorkerProcess, "send", noted)
    watcher = Noting()
    for number in range(3):
        pool.run([tiny_job(f"{number}{seed}", seed=seed) for seed in range(2)], SweepSettings(), watcher)
    assert len(watcher.ended) == len(used) == 6
    assert len(set(used)) == 2
