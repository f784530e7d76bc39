"""The package on systems without POSIX, seen from any system, and what `fedskew.platforms` does on this one."""

from __future__ import annotations

import ast
import json
import os
import re
import signal
import site
import subprocess
import sys
from pathlib import Path

import pytest

from fedskew import platforms
from fedskew.errors import UserError

SUPPORT = Path(__file__).parent / "support"
ROOT = Path(__file__).parents[1]

SESSION = """
import json, pkgutil, sys
from pathlib import Path
from importlib import import_module
from importlib.util import find_spec
import fedskew
from fedskew import platforms

names = [module.name for module in pkgutil.walk_packages(fedskew.__path__, "fedskew.")]
if find_spec("triton") is None:  # the GPU kernels, which are never imported without it
    names = [name for name in names if not name.endswith("_programs")]
for name in names:
    if name != "fedskew.__main__":
        import_module(name)

import torch
from fedskew.cli import main
from fedskew.engine.parallel.spawned_worker import SpawnedWorker
from fedskew.experiment.storage.files import write_file
from fedskew.workers import PoolWatcher, WorkerPool

started = []
begin = SpawnedWorker.__init__
SpawnedWorker.__init__ = lambda self, *arguments: started.append(self) or begin(self, *arguments)

torch.set_num_threads(1)  # OMP_NUM_THREADS is the number of worker processes here

def fedskew_command(*arguments):
    sys.argv = ["fedskew", *arguments]
    try:
        return main()
    except SystemExit as end:
        return end.code

class Interrupt(fedskew.Callback):
    def on_round(self, row, rounds_ahead):
        raise KeyboardInterrupt

class Answers(PoolWatcher):
    def __init__(self):
        self.received = {}

    def on_answer(self, request, answer):
        self.received[request] = answer["twice"]

    def on_failure(self, request, reason):
        self.received[request] = reason

answers = Answers()
with WorkerPool("worker_requests:work", 2, Path("logs")) as pool:
    pool.run([{"number": 1}, {"number": 2}, {"fail": "user"}], answers)

for text in ("old", "new"):
    write_file(Path("replaced.txt"), text)
clients = fedskew.federation("digits", fedskew.Dirichlet(4), seed=0)
try:
    fedskew.run(clients, "fedavg", out="runs/one", rounds=2, local_epochs=1, callbacks=[Interrupt()])
except KeyboardInterrupt:
    resumed = fedskew.run(clients, "fedavg", out="runs/one", rounds=2, local_epochs=1)
flags = ["--data", "digits", "--clients", "2", "--rounds", "2", "--local-epochs", "1", "--quiet"]
statuses = {
    "answers": [answers.received[request] for request in range(3)],
    "rounds": [row.round for row in resumed.history],
    "pool": fedskew_command("run", *flags, "--engine", "pool", "--quiet", "--out", "runs/two"),
    "sweep": fedskew_command("sweep", "grid.yaml", "--workers", "1", "--quiet", "--out", "runs/grid"),
    "compare": fedskew_command("compare", "--methods", "fedavg,fedrs", *flags, "--out", "runs/four"),
    "report": fedskew_command("report", "--no-features", "runs/four"),
    "plain": fedskew_command("run", *flags, "--engine", "plain", "--out", "runs/three"),
    "federate init": fedskew_command("federate", "init", "app", "--sites", "north,south", "--data", "digits"),
    "federate run": fedskew_command("federate", "run", "app"),
    "federate up": fedskew_command("federate", "up", "trial", "--sites", "2", "--data", "digits", "--rounds", "1"),
}
system = {"system": platforms.os.name, "can fork": platforms.CAN_FORK}
with open("statuses.json", "w") as file:
    json.dump({**system, **statuses, "modules": len(names), "spawned": len(started)}, file)
"""

NOT_UTF_8 = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0", "PYTHONIOENCODING": "cp1252"}

GRID = """
grid: {lr: [0.01, 0.1]}
data: digits
method: fedavg
rounds: 1
local_epochs: 1
partition: {clients: 2}
"""


def results(folder: Path) -> list[tuple[object, ...]]:
    rows = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    return [(row["round"], row.get("loss"), row["evaluation"]) for row in rows]


def test_without_posix_all_modules_import_and_runs_sweeps_and_reports_work(tmp_path: Path) -> None:
    """What Windows would see: no fork, POSIX module or signal, spawned worker processes, folders that do not open.

    Windows also refuses some file names and to replace a file that is being read, and its text is not UTF-8.
    """
    (tmp_path / "grid.yaml").write_text(GRID)
    path = os.pathsep.join(map(str, (SUPPORT / "windows", SUPPORT, ROOT)))
    (tmp_path / "session.py").write_text(f"if __name__ == '__main__':\n    exec({SESSION!r})\n")
    done = subprocess.run(
        [sys.executable, "session.py"],
        cwd=tmp_path, env={**os.environ, **NOT_UTF_8, "PYTHONPATH": path, "OMP_NUM_THREADS": "2"},
        capture_output=True, encoding="cp1252", check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "statuses.json").read_text())
    assert found.pop("modules") > 300
    assert found.pop("spawned") == 2, "one worker per core"
    ended = {"pool": 0, "plain": 0, "sweep": 0, "compare": 0, "report": 0}
    ended |= {"federate init": 0, "federate run": 2, "federate up": 2}
    answers = {"answers": [2, 4, "a wrong value; expected another"], "rounds": [0, 1, 2]}
    assert found == {"system": "nt", "can fork": False, **answers, **ended}, done.stdout + done.stderr
    for command in ("run", "up"):
        assert f"fedskew federate {command} needs Linux or macOS; on Windows, use" in done.stderr
    assert (tmp_path / "replaced.txt").read_text() == "new"
    assert results(tmp_path / "runs" / "two") == results(tmp_path / "runs" / "three"), "the pool and one process"


# -- on this system ---------------------------------------------------------------------------------------


def test_a_process_is_alive_until_it_is_killed() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, start_new_session=True)
    assert platforms.is_alive(child.pid)
    assert platforms.is_alive(1), "another user's"
    platforms.kill_group(child)
    assert child.wait() != 0
    assert not platforms.is_alive(child.pid)
    assert child.stdin is not None
    child.stdin.close()


def test_a_child_s_cpu_time_and_this_process_s_memory_are_measured() -> None:
    child = subprocess.Popen([sys.executable, "-c", "sum(range(10**6)); raise SystemExit(3)"])
    assert platforms.wait_and_measure(child) > 0
    assert child.returncode == 3
    assert platforms.peak_memory() > 1 << 20


def test_cores_are_limited_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    cores = platforms.usable_cores()
    assert cores >= 1
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert platforms.usable_cores() == 1
    monkeypatch.setenv("OMP_NUM_THREADS", str(cores + 7))
    assert platforms.usable_cores() == cores


def test_a_system_without_fork_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    platforms.require_posix("this")
    monkeypatch.delattr(os, "fork")
    with pytest.raises(UserError, match=r"^this needs Linux or macOS; on Windows, use the Windows Subsystem for Linux"):
        platforms.require_posix("this")


# -- where POSIX is used ----------------------------------------------------------------------------------

POSIX_NAMES = re.compile(
    r"\b(fcntl|pwd|grp|resource|termios|os\.(fork|killpg|setsid|getuid|wait4|sched_getaffinity|pread|sysconf|memfd_create)"
    r"|signal\.(SIGKILL|SIGHUP|SIGQUIT|SIGCHLD|SIGUSR1|pthread_sigmask)|AF_UNIX|select\.poll|preexec_fn)\b"
)
ALLOWED = {
    "platforms.py": "the portable ways",
    "engine/parallel/messages.py": "shared memory, with PortableParcel beside it",
    "engine/parallel/pool.py": "forked workers, with SpawnedWorker beside them",
    "engine/parallel/pool_worker.py": "a forked worker",
    "flower/client_app.py": "a site's processes, which do not run on Windows",
    "flower/fork_server.py": "a trial's processes, which do not run on Windows",
    "flower/socket_paths.py": "a site's Unix sockets",
    "flower/worker.py": "a site's Unix sockets",
}


def test_only_a_few_modules_name_what_windows_lacks() -> None:
    package = ROOT / "fedskew"
    found = {}
    for path in package.rglob("*.py"):
        source = path.read_text(encoding="utf-8")
        if POSIX_NAMES.search(source):  # perhaps in a comment only
            names = {ast.unparse(node) for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute)}
            names |= set(re.findall(r"^ *(?:import|from) (\w+)", source, re.MULTILINE))
            found[path.relative_to(package).as_posix()] = sorted(filter(POSIX_NAMES.search, names))
    assert {name for name, used in found.items() if used} == ALLOWED.keys(), found


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_a_process_learns_that_its_parent_was_killed() -> None:
    """Even if the killed parent is a zombie, because nobody has waited for it."""
    child = "import os; from fedskew.platforms import wait_for_end; print(os.getpid(), flush=True); wait_for_end({}); "
    start = (
        "import os, subprocess, sys; "
        f"command = {child!r}.format(os.getpid()) + \"print('ended', flush=True)\"; "
        "subprocess.run([sys.executable, '-c', command])"
    )
    with subprocess.Popen([sys.executable, "-c", start], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        process = int(parent.stdout.readline())
        assert platforms.parent_of(process) == parent.pid
        os.kill(parent.pid, signal.SIGKILL)
        assert parent.stdout.readline() == "ended\n"
    platforms.wait_for_end(parent.pid)  # it is gone, so this returns at once


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_a_process_whose_name_is_not_text_has_a_parent() -> None:
    """Linux cuts names after 15 bytes, perhaps in the middle of a character."""
    code = "open('/proc/self/comm', 'wb').write(b'a) 1 \\xc3'); print('named', flush=True); input()"
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "named\n"
        assert platforms.parent_of(child.pid) == os.getpid()
        child.kill()


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="only Linux says when a process began")
def test_a_process_has_a_mark_until_it_ends() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        marks = [platforms.start_mark(process) for process in (os.getpid(), other.pid)]
        assert None not in marks
        assert len(set(marks)) == 2
        assert marks == [platforms.start_mark(process) for process in (os.getpid(), other.pid)]
        other.kill()
    assert platforms.start_mark(other.pid) is None


def test_the_folder_of_installed_packages_does_not_precede_pythons_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    package = str(Path(platforms.__file__).parent.parent)
    monkeypatch.setenv("PYTHONPATH", "mine")
    monkeypatch.setattr(site, "getsitepackages", list)
    assert platforms.python_module("fedskew")[1]["PYTHONPATH"] == os.pathsep.join([package, "mine"])
    monkeypatch.setattr(site, "getsitepackages", lambda: [package])
    assert platforms.python_module("fedskew")[1]["PYTHONPATH"] == "mine"
