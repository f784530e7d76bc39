"""NVIDIA's Multi-Process Service, with a program in place of its control program that notes what it is told."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fedskew import gpu_sharing, workers
from fedskew.gpu_sharing import start_gpu_sharing
from fedskew.workers import WorkerPool

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the service exists on Linux only")

VARIABLE = "CUDA_MPS_PIPE_DIRECTORY"


@pytest.fixture
def notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the control program is told, one line each."""
    found = tmp_path / "notes"
    found.touch()
    _install(tmp_path / "bin", f'if [ "$1" = -d ]; then echo start; else cat; fi >> "{found}"')
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(gpu_sharing, "_SYSTEM_FOLDER", tmp_path / "none")
    return found


def _install(folder: Path, script: str) -> None:
    folder.mkdir(exist_ok=True)
    program = folder / "nvidia-cuda-mps-control"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)


def test_it_starts_and_stops_a_service_in_a_folder_of_its_own(notes: Path) -> None:
    sharing = start_gpu_sharing()
    assert sharing is not None
    folder = Path(sharing.variables[VARIABLE])
    assert folder.is_dir()
    assert notes.read_text() == "start\n"
    sharing.stop()
    assert notes.read_text() == "start\nquit\n"
    assert not folder.exists()


def test_the_service_stops_when_the_process_is_killed(notes: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "told")  # reading it waits for the writer
    _install(tmp_path / "bin", f'[ "$1" = -d ] || cat > "{tmp_path / "told"}"')
    script = (
        "import signal; from pathlib import Path; from fedskew import gpu_sharing\n"
        f"gpu_sharing._SYSTEM_FOLDER = Path({str(notes.parent / 'none')!r})\n"
        "sharing = gpu_sharing.start_gpu_sharing(); print(sharing is not None, flush=True); signal.pause()"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"True\n"
        process.send_signal(signal.SIGKILL)
    assert (tmp_path / "told").read_text() == "quit\n"


def test_a_running_service_is_used_as_it_is(notes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "/elsewhere")
    assert start_gpu_sharing() is None
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setattr(gpu_sharing, "_SYSTEM_FOLDER", notes.parent)
    assert start_gpu_sharing() is None
    assert notes.read_text() == ""


def test_a_service_that_does_not_start_is_done_without(notes: Path, tmp_path: Path) -> None:
    _install(tmp_path / "bin", "exit 1")
    assert start_gpu_sharing() is None


@pytest.mark.parametrize(("gpus", "size", "told"), [(1, 2, "start\nquit\n"), (1, 1, ""), (0, 2, ""), (2, 2, "")])
def test_a_pool_of_several_workers_on_one_gpu_starts_it(
    notes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpus: int, size: int, told: str
) -> None:
    monkeypatch.setattr(workers, "_gpus", lambda: gpus)
    with WorkerPool("json:dumps", size, tmp_path / "logs") as pool:
        pool._worker(0)
        pool._worker(size - 1)
    assert notes.read_text() == told
