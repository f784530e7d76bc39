"""Jobs on Ray clusters of this machine, in processes of their own: Ray leaves threads and warnings behind."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import pytest

from fedskew.cli import main
from fedskew.lab.sweep.records import RecordsFile

pytest.importorskip("ray", reason="Ray is not installed: pip install 'fedskew[ray]'")
pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="finds Ray's processes in /proc")

TOKEN = "the-token-of-this-test-cluster"
GRID = """
data: digits
partition: {rule: dirichlet, clients: 4, beta: 0.5}
model: dnn
rounds: 8
local_epochs: 1
checkpoint_every: 2
device: cpu
grid:
  lr: [0.01, 0.02]
"""
HELD = '''
import os, time
from dataclasses import dataclass

import torch
import fedskew as fs


@fs.method("held")
@dataclass(frozen=True)
class Held(fs.ServerRule):
    """FedAvg. After two rounds, it waits until the file that HOLD names is gone."""

    def server_state(self, params):
        return {"rounds": torch.zeros(())}

    def aggregate(self, sent, updates, state):
        while state["rounds"] >= 2 and os.path.exists(os.environ["HOLD"]):
            time.sleep(0.05)
        return updates.mean(), {"rounds": state["rounds"] + 1}


@fs.method("dying")
@dataclass(frozen=True)
class Dying(fs.ServerRule):
    """Its process dies in the first round, as if memory ran out."""

    def aggregate(self, sent, updates, state):
        os._exit(1)
'''


@dataclass(frozen=True)
class Cluster:
    """A cluster with a token, of two nodes with one core each."""

    address: str
    environment: dict[str, str]
    second: int
    """The process id of the second node's raylet."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    home = tmp_path_factory.mktemp("home")
    environment = {
        **os.environ,
        "HOME": str(home),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join((str(home), str(Path(__file__).parents[3]))),
        "HOLD": str(home / "hold"),
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": TOKEN,
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_health_check_period_ms": "500",  # a node counts as dead after 10 checks without an answer
        "RAY_health_check_failure_threshold": "10",
    }
    (home / "held.py").write_text(HELD)
    (home / "hold").touch()
    address = f"127.0.0.1:{_free_port()}"
    short = tempfile.mkdtemp(prefix="ray", dir="/tmp")  # the paths of Ray's sockets must be short
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, short, ignore_errors=True)
        log = stack.enter_context((home / "ray.log").open("w"))
        port = address.rpartition(":")[2]
        ports = (f"--port={port}", f"--ray-client-server-port={_free_port()}")
        head = _start_ray(environment, log, "--head", "--include-dashboard=false", f"--temp-dir={short}", *ports)
        stack.callback(_end_session, head)
        _wait_for(lambda: _accepts(address), head)
        node = _start_ray(environment, log, f"--address={address}")
        stack.callback(_end_session, node)
        _wait_for(lambda: bool(_children(head.pid, "raylet") and _children(node.pid, "raylet")), node)
        yield Cluster(address, environment, *_children(node.pid, "raylet"))


def test_a_wrong_token_is_one_line(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "grid.yaml").write_text(GRID)
    environment = {**cluster.environment, "RAY_AUTH_TOKEN": "another-token"}
    with _sweep(tmp_path, cluster.address, environment) as sweep:
        output, errors = sweep.communicate()
    assert sweep.returncode == 2
    (line,) = (output + errors).splitlines()
    assert f"the Ray cluster at '{cluster.address}' refused the token of RAY_AUTH_TOKEN; set RAY_AUTH_TOKEN to" in line
    assert "another-token" not in line


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("unshare") or os.geteuid() != 0, reason="hides a folder by a mount, as root")
def test_without_a_shared_folder_the_nodes_and_what_a_restart_means_are_named(cluster: Cluster, tmp_path: Path) -> None:
    hidden = tmp_path / "out"
    hidden.mkdir()
    mount = f"mount -t tmpfs none '{hidden}' && exec \"$@\""
    (tmp_path / "grid.yaml").write_text("method: held:Dying" + GRID.replace("0.01, 0.02", "0.01"))
    with contextlib.ExitStack() as stack:
        log = stack.enter_context((tmp_path / "node.log").open("w"))
        prefix = ("unshare", "-m", "sh", "-c", mount, "sh")
        node = _start_ray(cluster.environment, log, f"--address={cluster.address}", prefix=prefix)
        stack.callback(_wait_for_nodes, cluster, 2)  # later tests expect the cluster as it was
        stack.callback(_end_session, node)
        _wait_for_nodes(cluster, 3)
        sweep = stack.enter_context(_sweep(tmp_path, cluster.address, cluster.environment, "--out", str(hidden)))
        _, errors = sweep.communicate()
    assert sweep.returncode == 1, errors
    assert f"{hidden} was not found on node" in errors
    assert "choose a shared folder with --out" in errors
    assert "the run starts over on a node that works, or resumes if that node has its checkpoint (restart 1" in errors


@pytest.mark.slow
def test_a_job_that_dies_everywhere_fails_after_three_moves(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "grid.yaml").write_text("method: held:Dying" + GRID.replace("0.01, 0.02", "0.01"))
    with _sweep(tmp_path, cluster.address, cluster.environment) as sweep:
        errors = _read_until(sweep, "(restart 4")
        if "(restart 4" in errors:
            sweep.kill()
    assert sweep.returncode == 1, errors
    assert errors.count("the run resumes from its last checkpoint on a node that works") == 3
    assert "its process died (WorkerCrashedError), after 3 restarts" in errors


def test_the_job_of_a_dead_node_resumes_elsewhere(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "grid.yaml").write_text("method: held:Held" + GRID)
    environment = {key: value for key, value in cluster.environment.items() if key != "RAY_AUTH_MODE"}
    with _sweep(tmp_path, cluster.address, environment, "--out", "there") as sweep:
        worker, folder = _freeze_job(tmp_path / "there", cluster.second, sweep)
        begun = (folder / "about.json").read_text()
        os.kill(cluster.second, signal.SIGKILL)
        errors = _read_until(sweep, "on a node that works")
        Path(environment["HOLD"]).unlink()
        os.kill(worker, signal.SIGKILL)  # until now it locks the folder, as on a machine that lost its network
        output, rest = sweep.communicate()
    assert sweep.returncode == 0, errors + rest
    assert "died; the run resumes from its last checkpoint on a node that works (restart 1 of at most 3)" in errors
    assert "raylet" not in output
    assert (folder / "about.json").read_text() == begun  # a run that starts over would write it again
    assert not list((tmp_path / "there").glob(".ray-*"))

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOLD", environment["HOLD"])
    monkeypatch.syspath_prepend(environment["HOME"])
    assert main(["sweep", "grid.yaml", "--quiet", "--out", "here", "--workers=1"]) == 0
    there, here = (RecordsFile(tmp_path / out / "runs.jsonl").read() for out in ("there", "here"))
    curves = [{record.config.lr: record.curve for record in records} for records in (there, here)]
    assert curves[0] == curves[1]


@pytest.mark.slow
def test_a_sweep_on_a_local_cluster_ends_like_one_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "grid.yaml").write_text(GRID.replace("lr: [0.01, 0.02]", "model: [dnn, mobilenetv3]"))
    with _sweep(tmp_path, "local", {**os.environ, "HOME": str(tmp_path)}, "--out", "there") as sweep:
        _, errors = sweep.communicate()
    assert sweep.returncode == 1, errors
    assert "failed: model mobilenetv3" in errors
    monkeypatch.chdir(tmp_path)
    assert main(["sweep", "grid.yaml", "--quiet", "--out", "here", "--workers=1"]) == 1
    (there,), (here,) = (RecordsFile(tmp_path / out / "runs.jsonl").read() for out in ("there", "here"))
    assert there.curve == here.curve


def test_no_cluster_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "grid.yaml").write_text(GRID)
    with _sweep(tmp_path, "127.0.0.1:1", dict(os.environ)) as sweep:
        _, errors = sweep.communicate()
    assert sweep.returncode == 2
    assert "no Ray cluster at '127.0.0.1:1'" in errors.splitlines()[-1]


def _start_ray(
    environment: dict[str, str], log: TextIO, *arguments: str, prefix: Sequence[str] = ()
) -> subprocess.Popen[bytes]:
    """Start a node with one core. Its processes form a session."""
    python = Path(environment["HOME"]) / "python"  # Ray does not start if the path of Python has a space
    if not python.exists():
        python.symlink_to(sys.prefix)
    ray = (str(python / "bin" / Path(sys.executable).name), "-m", "ray.scripts.scripts")
    small = ("--num-cpus=1", "--object-store-memory=80000000", "--min-worker-port=0", "--max-worker-port=0")
    command = [*prefix, *ray, "start", "--block", *small, *arguments]
    return subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)


@contextlib.contextmanager
def _sweep(folder: Path, address: str, environment: dict[str, str], *arguments: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "fedskew", "sweep", "grid.yaml", "--quiet", "--ray", address, *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, cwd=folder, env=environment, text=True, **pipes) as process:
        yield process


def _freeze_job(sweep_folder: Path, raylet: int, sweep: subprocess.Popen[str]) -> tuple[int, Path]:
    """Stop the process that runs a job of this raylet, once the job has a checkpoint."""
    found: list[tuple[int, Path]] = []

    def freeze() -> bool:
        for lock in sweep_folder.glob("*/.lock"):
            worker = int((lock.read_text() or "0").split()[0])
            if list(lock.parent.glob("checkpoint/round-*")) and worker in _children(raylet):
                os.kill(worker, signal.SIGSTOP)
                found.append((worker, lock.parent))
        return bool(found)

    _wait_for(freeze, sweep)
    return found[0]


def _read_until(process: subprocess.Popen[str], text: str) -> str:
    assert process.stderr is not None
    lines = ""
    while text not in lines and (line := process.stderr.readline()):
        lines += line
    return lines


def _wait_for_nodes(cluster: Cluster, count: int) -> None:
    """Wait until the cluster has this many nodes that are alive. A raylet that runs may not have joined it yet."""
    script = (
        "import ray, time\n"
        f"ray.init(address={cluster.address!r}, log_to_driver=False, logging_level='error')\n"
        f"while sum(node['Alive'] for node in ray.nodes()) != {count}: time.sleep(0.1)"
    )
    subprocess.run([sys.executable, "-c", script], env=cluster.environment, check=True, stdout=subprocess.DEVNULL)


def _wait_for(condition: Callable[[], bool], process: subprocess.Popen[bytes] | subprocess.Popen[str]) -> None:
    while not condition():
        assert process.poll() is None, "the process ended too early"
        time.sleep(0.02)


def _children(parent: int, name: str = "") -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            pid, _, rest = stat.read_text().partition(" (")
            command, _, fields = rest.rpartition(") ")
            if int(fields.split()[1]) == parent and name in command:
                found.append(int(pid))
    return found


def _end_session(leader: subprocess.Popen[bytes]) -> None:
    """End a node: all processes of its session, which Ray puts in several process groups."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            pid, _, rest = stat.read_text().partition(" (")
            if int(rest.rpartition(") ")[2].split()[3]) == leader.pid:
                os.kill(int(pid), signal.SIGKILL)
    leader.wait()


def _accepts(address: str) -> bool:
    host, _, port = address.partition(":")
    with contextlib.suppress(OSError):
        socket.create_connection((host, int(port)), 1).close()
        return True
    return False


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
