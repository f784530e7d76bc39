"""Run a peer's script as a process of its own, and measure its time, its CPU time and its memory from outside.

CPU time and memory are summed over the process and all its descendants, because some peers train in other processes.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

POLL_SECONDS = 0.25
_PR_SET_CHILD_SUBREAPER = 36
_TICKS = os.sysconf("SC_CLK_TCK")


class ScriptError(Exception):
    """The script gave no result. The message is the last line that it printed."""


@dataclass(frozen=True)
class Measurement:
    """One run of one peer."""

    version: str
    seconds_per_round: float
    """The median over all rounds but the first."""
    cpu_per_round: float
    """CPU seconds, all threads and processes together: the mean over all rounds but the first."""
    start_up: float
    """Seconds from the start of the process to the end of the first round."""
    start_up_cpu: float
    whole_run: float
    """Seconds from the start of the process to its end."""
    host_memory: float
    """Peak MB of the process and its descendants. Shared pages count once."""
    gpu_memory: float | None
    """Peak MB on the GPU, by nvidia-smi, beyond what was in use before."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def measure(command: Sequence[str], environment: Mapping[str, str], timeout: float = 1800.0) -> Measurement:
    """Run a script, and return what was measured. Raise `ScriptError` if it gave no result."""
    with _GpuMemory() as gpu, _adopting_orphans():
        others = _descendants(os.getpid())
        started = time.time()
        process = subprocess.Popen(
            command, env=dict(environment), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        monitor = _Monitor(others)
        try:
            printed, errors = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            _kill(_descendants(process.pid) | {process.pid})
            process.communicate()
            raise ScriptError(f"did not end within {timeout:.0f} s") from None
        finally:
            ended = time.time()
            monitor.stop()
            _kill(_descendants(os.getpid()) - others)
        gpu_memory = gpu.peak
    result = _last_json(printed)
    if process.returncode or result is None:
        raise ScriptError((errors.strip() or printed.strip() or f"exit status {process.returncode}").splitlines()[-1])
    ends = result["ends"]
    cpu = monitor.cpu_seconds_at([ends[0], ends[-1]])
    return Measurement(
        version=result["version"],
        seconds_per_round=result["seconds_per_round"],
        cpu_per_round=(cpu[1] - cpu[0]) / (len(ends) - 1),
        start_up=ends[0] - started,
        start_up_cpu=cpu[0],
        whole_run=ended - started,
        host_memory=monitor.peak_memory,
        gpu_memory=gpu_memory,
    )


def _last_json(printed: str) -> dict[str, Any] | None:
    for line in reversed(printed.splitlines()):
        if line.startswith("{"):
            with suppress(json.JSONDecodeError):
                result: dict[str, Any] = json.loads(line)
                return result
    return None


# -- processes -------------------------------------------------------------------------------------------------


@contextmanager
def _adopting_orphans() -> Iterator[None]:
    """Make this process the parent of its descendants' orphans, such as Ray's daemons, so that they are counted."""
    prctl = ctypes.CDLL(None).prctl
    prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat after the name, beginning with the state."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def _descendants(root: int) -> set[int]:
    """All descendants of a process, without itself."""
    found: set[int] = set()
    ahead = [root]
    while ahead:
        for task in Path(f"/proc/{ahead.pop()}/task").glob("*/children"):
            with suppress(OSError):
                new = {int(child) for child in task.read_text().split()} - found
                found |= new
                ahead += new
    return found


def _kill(pids: set[int]) -> None:
    for pid in pids:
        with suppress(OSError):
            os.kill(pid, signal.SIGKILL)
        with suppress(OSError):
            os.waitpid(pid, 0)


class _Monitor(threading.Thread):
    """Adds up CPU time and memory of this process's descendants, except `others`, several times per second."""

    def __init__(self, others: set[int]) -> None:
        super().__init__(daemon=True)
        self._others, self._stopped = others, threading.Event()
        self._cpu: dict[int, float] = {}
        self._samples: list[tuple[float, float]] = [(time.time(), 0.0)]
        self.peak_memory = 0.0
        self.start()

    def run(self) -> None:
        while not self._stopped.wait(POLL_SECONDS):
            memory = 0.0
            for pid in _descendants(os.getpid()) - self._others:
                with suppress(OSError, ValueError):
                    fields = _stat(pid)
                    self._cpu[pid] = (int(fields[11]) + int(fields[12])) / _TICKS
                    memory += _proportional_set_size(pid)
            self.peak_memory = max(self.peak_memory, memory)
            self._samples.append((time.time(), sum(self._cpu.values())))

    def stop(self) -> None:
        self._stopped.set()
        self.join()

    def cpu_seconds_at(self, times: Sequence[float]) -> list[float]:
        """The CPU seconds up to these times, interpolated."""
        at, seconds = zip(*self._samples, strict=True)
        return [float(value) for value in np.interp(times, at, seconds)]


def _proportional_set_size(pid: int) -> float:
    """Memory of a process in MB, in which a page that several processes share is divided among them."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) / 1024
    return 0.0


# -- GPU -------------------------------------------------------------------------------------------------------


class _GpuMemory:
    """Reads the GPU's memory in use from nvidia-smi, several times per second. Without a GPU, it does nothing."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._readings: list[float] = []

    def __enter__(self) -> _GpuMemory:
        if not shutil.which("nvidia-smi"):
            return self
        query = ["nvidia-smi", "--id=0", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
        before = subprocess.run(query, capture_output=True, text=True, check=False)
        if before.returncode == 0:
            self._readings.append(float(before.stdout))
            self._process = subprocess.Popen(
                [*query, f"--loop-ms={1000 * POLL_SECONDS:.0f}"], stdout=subprocess.PIPE, text=True
            )
            threading.Thread(target=self._read, args=(self._process,), daemon=True).start()
        return self

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            with suppress(ValueError):
                self._readings.append(float(line))

    @property
    def peak(self) -> float | None:
        return max(self._readings) - self._readings[0] if self._readings else None

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
