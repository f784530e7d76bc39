"""Workers that a trial's fork server starts: real processes that share what they import."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from in_process import small_data

from fedskew.flower import client_app
from fedskew.flower.frames import receive_frame, send_frame
from fedskew.flower.socket_paths import FORK_SERVER, fork_server_path, socket_path

PATIENCE = 120.0


@dataclass
class ForkServer:
    """A fork server, and a process in place of the SuperExec that its workers end with."""

    server: subprocess.Popen[bytes]
    guardian: subprocess.Popen[bytes]
    site: Path


@pytest.fixture
def forks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ForkServer]:
    small_data(tmp_path)
    site = tmp_path / "site.yaml"
    site.write_text("name: a\ndata: digits.npz\ndevice: cpu\nthreads: 1\n")
    path = fork_server_path(tmp_path)
    path.unlink(missing_ok=True)
    monkeypatch.setenv(FORK_SERVER, str(path))
    guardian = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
    server = subprocess.Popen([sys.executable, "-m", "fedskew.flower.fork_server", str(site)])
    try:
        _until(path.exists, server)
        yield ForkServer(server, guardian, site)
    finally:
        for process in (guardian, server):
            process.kill()
            process.wait()
        path.unlink(missing_ok=True)


def _until(condition: object, process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():  # type: ignore[operator]
        assert process.poll() is None
        assert time.monotonic() < end
        time.sleep(0.05)


def _children(process: int) -> list[int]:
    listed = Path(f"/proc/{process}/task/{process}/children").read_text()
    return [int(child) for child in listed.split()]


def test_a_forked_worker_answers_and_writes_where_the_clientapp_writes(
    forks: ForkServer, capfd: pytest.CaptureFixture[str]
) -> None:
    assert client_app._start_worker(forks.site, forks.guardian.pid) is None
    place = socket_path(forks.site, forks.guardian.pid)
    _until(place.exists, forks.server)
    (worker,) = _children(forks.server.pid)
    assert os.getsid(worker) == worker

    connection = client_app._try_to_connect(place)
    assert connection is not None
    with connection:
        send_frame(connection, {"kind": "dance", "terms": {}, "paths": []})
        assert "expected one of hello" in receive_frame(connection)[0]["refused"]
    assert "fedskew: warning: the server's request is refused" in capfd.readouterr().err

    forks.guardian.kill()
    forks.guardian.wait()
    _until(lambda: not place.exists() and not _children(forks.server.pid), forks.server)


def test_without_a_fork_server_the_worker_is_a_program(forks: ForkServer) -> None:
    forks.server.kill()
    forks.server.wait()
    worker = client_app._start_worker(forks.site, forks.guardian.pid)
    assert worker is not None
    worker.kill()
    worker.wait()
