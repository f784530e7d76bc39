"""Worker processes: they answer, report, fail one request at a time, and outlive a user's script without a guard."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import worker_requests

from fedskew.workers import Message, PoolWatcher, WorkerPool, _environment, _gpu_works

WORK = "worker_requests:work"


class Noted(PoolWatcher):
    def __init__(self) -> None:
        self.answers: dict[int, Message] = {}
        self.failures: dict[int, str] = {}
        self.progress: dict[int, Message] = {}

    def on_progress(self, request: int, content: Message) -> None:
        self.progress[request] = content

    def on_answer(self, request: int, answer: Message) -> None:
        self.answers[request] = answer

    def on_failure(self, request: int, reason: str) -> None:
        self.failures[request] = reason


def python_path() -> str:
    return os.pathsep.join((str(Path(worker_requests.__file__).parent), os.environ.get("PYTHONPATH", "")))


@pytest.fixture
def pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("PYTHONPATH", python_path())
    with WorkerPool(WORK, 2, tmp_path / "logs") as made:
        yield made


def test_requests_are_answered_and_failures_end_only_themselves(pool: WorkerPool) -> None:
    requests: list[Message] = [{"number": n} for n in range(4)]
    requests += [{"fail": "user"}, {"fail": "bug"}, {"fail": "die"}, {"number": 7}]
    noted = Noted()
    assert pool.run(requests, noted) == []
    assert {n: answer["twice"] for n, answer in noted.answers.items()} == {0: 0, 1: 2, 2: 4, 3: 6, 7: 14}
    assert noted.failures[4] == "a wrong value; expected another"
    assert noted.failures[5].startswith("KeyError: 'missing' (worker_requests.py, line ")
    assert "killed by signal 9" in noted.failures[6]
    assert noted.progress[0] == {"seen": {"number": 0}}


def test_a_worker_that_ends_itself_is_not_said_to_have_been_killed(tmp_path: Path) -> None:
    noted = Noted()
    with WorkerPool("no_such_module:work", 1, tmp_path) as pool:
        pool.run([{}], noted)
    assert noted.failures[0] == (
        "its process ended with status 1: ModuleNotFoundError: No module named 'no_such_module'"
    )


def test_workers_keep_the_variables_that_the_user_has_set(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("OMP_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS", "OMP_WAIT_POLICY")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    assert set(names) <= _environment(0, 2).keys()
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    assert "OMP_WAIT_POLICY" not in _environment(0, 2)


def test_a_file_in_the_current_folder_does_not_replace_a_standard_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "random.py").write_text("raise ValueError('this is the user's own file')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(worker_requests.__file__).parent))
    noted = Noted()
    with WorkerPool(WORK, 1, tmp_path / "logs") as pool:
        pool.run([{"number": 1}], noted)
    assert noted.answers[0]["twice"] == 2


def test_modules_beside_a_script_in_another_folder_are_found(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("def work(request, report): return {'twice': 2 * request['number']}")
    (tmp_path / "script.py").write_text(
        "from pathlib import Path; from fedskew.workers import PoolWatcher, WorkerPool\n"
        "class Print(PoolWatcher):\n"
        "    def on_answer(self, request, answer): print(answer['twice'])\n"
        f"with WorkerPool('beside:work', 1, Path({str(tmp_path)!r})) as pool: pool.run([{{'number': 4}}], Print())\n"
    )
    done = subprocess.run([sys.executable, tmp_path / "script.py"], capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("8\n", 0), done.stderr


def test_processes_stay_between_calls(pool: WorkerPool) -> None:
    used = set()
    for _ in range(3):
        noted = Noted()
        pool.run([{"seconds": 0.1}] * 4, noted)
        used |= {answer["pid"] for answer in noted.answers.values()}
    assert 1 <= len(used) <= 2


def test_requests_without_an_answer_in_time_are_given_up(pool: WorkerPool) -> None:
    noted = Noted()
    left = pool.run([{"seconds": 600}, {"seconds": 600}, {}], noted, give_up_at=time.time() + 1)
    assert left == [0, 1, 2]
    assert pool.run([{"number": 3}], noted) == []
    assert noted.answers[0]["twice"] == 6


def test_a_worker_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from fedskew.workers import PoolWatcher, WorkerPool\n"
        f"pool = WorkerPool({WORK!r}, 1, Path({str(tmp_path)!r}))\n"
        "class Print(PoolWatcher):\n"
        "    def on_answer(self, request, answer): print(answer['pid'], flush=True)\n"
        "pool.run([{}, {'seconds': 600}], Print())\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": python_path()},
    )  # fmt: skip
    assert parent.stdout is not None
    worker = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 60
    while Path(f"/proc/{worker}/stat").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(f"/proc/{worker}/stat").exists()


def test_a_worker_whose_parent_is_gone_before_it_has_started_does_no_work(tmp_path: Path) -> None:
    (tmp_path / "slow_module.py").write_text(
        "import time; from pathlib import Path; time.sleep(1)\n"
        "def work(request, report): Path(request['file']).write_text('done'); return {}\n"
    )
    worker = subprocess.Popen(
        [sys.executable, "-m", "fedskew.workers", "slow_module:work"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(tmp_path), python_path()))},
    )  # fmt: skip
    worker.communicate(json.dumps({"file": str(tmp_path / "result")}).encode() + b"\n")
    assert worker.returncode == 130
    assert not (tmp_path / "result").exists()


def test_a_process_whose_gpu_gives_errors_is_spent(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _gpu_works(), "no GPU in use"

    def broken() -> None:
        raise RuntimeError("CUDA error: device-side assert triggered")

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    assert _gpu_works()
    monkeypatch.setattr(torch.cuda, "synchronize", broken)
    assert not _gpu_works()
