"""NVIDIA's Multi-Process Service (MPS), which lets several processes compute on a GPU at the same time.

Without it, processes take turns on the GPU, and a process that trains a small model leaves most of the GPU idle.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

_CONTROL = "nvidia-cuda-mps-control"
_FOLDER_VARIABLE = "CUDA_MPS_PIPE_DIRECTORY"
"""The environment variable by which processes find the service."""
_SYSTEM_FOLDER = Path("/tmp/nvidia-mps")
"""The folder in which processes look for the service if the variable is not set."""
_SECONDS_TO_START = 10.0
_SECONDS_TO_STOP = 10.0
_GUARD = f"""
{_CONTROL} -d < /dev/null > /dev/null 2>&1 || exit 1
echo started
read -r _
echo quit | {_CONTROL} > /dev/null 2>&1
rm -rf "${_FOLDER_VARIABLE}"
"""
"""A shell script that starts the service, and stops it when stdin is closed. A killed parent also closes stdin."""


class GpuSharing:
    """An MPS service that this process started. Processes with its `variables` in their environment use it."""

    def __init__(self, guard: subprocess.Popen[bytes], folder: Path) -> None:
        self._guard = guard
        self.variables = _variables(folder)

    def stop(self) -> None:
        """Stop the service. All processes that used it must have ended."""
        _close(self._guard)


def start_gpu_sharing() -> GpuSharing | None:
    """Start the service. Return None if it is not installed, does not start, or may already be running."""
    may_be_running = _FOLDER_VARIABLE in os.environ or _SYSTEM_FOLDER.exists()
    if sys.platform != "linux" or shutil.which(_CONTROL) is None or may_be_running:
        return None
    folder = Path(tempfile.mkdtemp(prefix="fedskew-mps-"))
    guard = subprocess.Popen(
        ["sh", "-c", _GUARD],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, **_variables(folder)},
        start_new_session=True,  # Ctrl-C must not end it before the processes that use it
    )
    assert guard.stdout is not None
    ready, _, _ = select.select([guard.stdout], [], [], _SECONDS_TO_START)
    if ready and guard.stdout.readline() == b"started\n":
        return GpuSharing(guard, folder)
    _close(guard)
    shutil.rmtree(folder, ignore_errors=True)
    return None


def _variables(folder: Path) -> dict[str, str]:
    return {_FOLDER_VARIABLE: str(folder), "CUDA_MPS_LOG_DIRECTORY": str(folder)}


def _close(guard: subprocess.Popen[bytes]) -> None:
    assert guard.stdin is not None
    assert guard.stdout is not None
    guard.stdin.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        guard.wait(_SECONDS_TO_STOP)
    guard.stdout.close()
