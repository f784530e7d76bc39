"""Time contenders, such as an engine and the plain loop. They take turns, so a busy machine slows them down equally."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from fedskew.errors import UserError
from fedskew.lab.benchmark.cases import Case
from fedskew.lab.benchmark.results import Failure, Level, Measurement

_SELF = Path("/proc/self")
_RESET_PEAK = "5"
"""Written to `/proc/self/clear_refs`, this resets the peak memory of the process."""


class PeakMemory:
    """Measures by how much the peak memory exceeds the memory at the start of the measurement.

    On a CPU, the memory that worker processes have at the end is added to the peak of this process.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self._before = torch.cuda.memory_allocated(device)
        else:
            _return_freed_memory()
            with contextlib.suppress(OSError):
                (_SELF / "clear_refs").write_text(_RESET_PEAK)
            self._before = (_read_proc(_SELF / "status", "VmRSS") or 0) + _worker_memory()

    def restart(self) -> None:
        """Restart the measurement on a GPU, to leave out the memory for compiling and autotuning."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)

    def increase(self) -> int | None:
        """The increase in bytes. None if the system does not report it."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device) - self._before
        peak = _read_proc(_SELF / "status", "VmHWM")
        return None if peak is None else max(0, peak + _worker_memory() - self._before)


def _read_proc(file: Path, key: str) -> int | None:
    """Read a size from a file in /proc. The file has KiB; the result is in bytes."""
    try:
        lines = file.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(key + ":")), None)


def _return_freed_memory() -> None:
    """Return freed memory to the system. If the process reused it, the measured increase would be too small."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _worker_memory() -> int:
    """The memory that child processes share with no other process."""
    total = 0
    for task in _SELF.glob("task/*/children"):
        with contextlib.suppress(OSError):
            for child in task.read_text(encoding="ascii").split():
                total += _read_proc(Path("/proc") / child / "smaps_rollup", "Private_Dirty") or 0
    return total


_MIN_REPETITIONS = 3
"""The number of repetitions that are measured even if the time is up."""


@dataclass(frozen=True)
class Ready:
    """A contender that is ready to be timed."""

    call: Callable[[], None]
    samples: Callable[[], int]
    """Samples trained on per call. Only known after the first call."""
    name: Callable[[], str]
    """The contender's name in the results. Only known after the first call, when `auto` has chosen an engine."""
    close: Callable[[], None] = lambda: None
    threads: int | None = None
    """CPU threads. None for PyTorch's default."""
    notices: Sequence[str] = ()
    """Notices of the engine."""


@dataclass(frozen=True)
class Contender:
    """Something to time on a case, such as an engine or the plain loop."""

    case: Case
    level: Level
    label: str
    """The name in progress lines, failures and notices."""
    make: Callable[[], Ready]
    requested_engine: str = ""
    """The engine that was requested, such as `auto`. Empty for a contender that is not an engine."""


@dataclass(frozen=True)
class TimingLength:
    """How long to measure."""

    repetitions: int
    seconds: float
    """Approximate duration of a repetition. A longer call is a repetition by itself."""
    warm_up: int = 2
    """Calls before the first timed one."""


class ContenderTimer:
    """Times contenders on one device. `is_late` says whether the time is up."""

    def __init__(self, device: torch.device, length: TimingLength, is_late: Callable[[], bool] = lambda: False) -> None:
        self._device, self._length, self._is_late = device, length, is_late
        self._threads = torch.get_num_threads()
        self.failures: list[Failure] = []
        self.notices: list[str] = []

    def measure(self, contenders: Sequence[Contender], show: Callable[[str], None]) -> list[Measurement]:
        """Time the contenders in turn. `failures` lists those whose warm-up fails or would begin too late."""
        try:
            with contextlib.ExitStack() as closing:
                return self._warm_up_and_time(contenders, show, closing)
        finally:
            self._clean_up()

    def _warm_up_and_time(
        self, contenders: Sequence[Contender], show: Callable[[str], None], closing: contextlib.ExitStack
    ) -> list[Measurement]:
        warm = [w for contender in contenders if (w := self._warm_up(contender, show, closing))]
        times: list[list[float]] = [[] for _ in warm]
        for repetition in range(self._length.repetitions if warm else 0):
            if repetition >= _MIN_REPETITIONS and self._is_late():
                break
            show(f"repetition {repetition + 1} of {self._length.repetitions}")
            for each, collected in zip(warm, times, strict=True):
                collected.append(self._seconds(each.ready, each.calls))
        return [each.measurement(tuple(t)) for each, t in zip(warm, times, strict=True)]

    def _warm_up(
        self, contender: Contender, show: Callable[[str], None], closing: contextlib.ExitStack
    ) -> _WarmContender | None:
        """Create a contender and run it until everything is compiled and captured.

        Return None if that fails, or if the time is up.
        """
        if self._is_late():
            self.failures.append(Failure(contender.label, "time was up"))
            return None
        show(contender.label)
        contender.case.load()
        memory = PeakMemory(self._device)
        try:
            ready = contender.make()
            closing.callback(ready.close)
            with self._with_threads(ready):
                for _ in range(self._length.warm_up):
                    ready.call()
                memory.restart()
                seconds = self._seconds(ready, 1)
        except (RuntimeError, UserError) as error:  # too little memory, for example; continue with the others
            self.failures.append(Failure.from_error(contender.label, error))
            self._free_memory()
            return None
        self.notices += [f"{contender.label}: {line}" for line in ready.notices]
        calls = max(1, round(self._length.seconds / max(seconds, 1e-9)))
        return _WarmContender(contender, ready, calls, memory.increase())

    def _seconds(self, ready: Ready, calls: int) -> float:
        """Mean seconds per call."""
        with self._with_threads(ready):
            self._wait()
            start = time.perf_counter()
            for _ in range(calls):
                ready.call()
            self._wait()
            return (time.perf_counter() - start) / calls

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    @contextlib.contextmanager
    def _with_threads(self, ready: Ready) -> Iterator[None]:
        torch.set_num_threads(ready.threads or self._threads)
        try:
            yield
        finally:
            torch.set_num_threads(self._threads)

    def _clean_up(self) -> None:
        if "torch._dynamo" in sys.modules:
            torch.compiler.reset()
        self._free_memory()

    def _free_memory(self) -> None:
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()


@dataclass(frozen=True)
class _WarmContender:
    """A contender after its warm-up."""

    contender: Contender
    ready: Ready
    calls: int
    """Calls per repetition."""
    memory: int | None
    """Increase of the peak memory in bytes. None if the system does not report it."""

    def measurement(self, seconds: tuple[float, ...]) -> Measurement:
        case = self.contender.case
        return Measurement(
            level=self.contender.level,
            contender=self.ready.name(),
            model=case.model,
            clients=case.clients,
            federation=case.federation_size,
            batch_size=case.setting.batch_size,
            method=case.method,
            precision=case.precision,
            sizes=case.sizes,
            samples=self.ready.samples(),
            seconds=seconds,
            memory=self.memory,
            asked=self.contender.requested_engine,
        )
