"""Measure contenders in turn, so that a machine that slows down or warms up does so for all of them."""

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


class PeakMemory:
    """Peak memory, on the GPU or of this process and its workers, beyond what was in use at creation."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self._before = torch.cuda.memory_allocated(device)
        else:
            _return_unused()
            with contextlib.suppress(OSError):
                (_SELF / "clear_refs").write_text(_RESET_PEAK)
            self._before = (_kibibytes(_SELF / "status", "VmRSS") or 0) + _worker_memory()

    def begin_again(self) -> None:
        """Restart the measurement on a GPU: compiling and autotuning take memory that does not count."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)

    def taken(self) -> int | None:
        """Bytes; None if the system does not report it."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device) - self._before
        peak = _kibibytes(_SELF / "status", "VmHWM")
        return None if peak is None else max(0, peak + _worker_memory() - self._before)


def _kibibytes(file: Path, key: str) -> int | None:
    """An entry of a file in /proc, in bytes."""
    try:
        lines = file.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(key + ":")), None)


def _return_unused() -> None:
    """Return freed memory to the system; otherwise its reuse would not be measured."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _worker_memory() -> int:
    """Private memory of child processes, without pages shared with this process."""
    total = 0
    for task in _SELF.glob("task/*/children"):
        with contextlib.suppress(OSError):
            for child in task.read_text(encoding="ascii").split():
                total += _kibibytes(Path("/proc") / child / "smaps_rollup", "Private_Dirty") or 0
    return total


_ENOUGH = 3
"""Repetitions that suffice for a median if time is up."""


@dataclass(frozen=True)
class Ready:
    """A contender that is ready to be timed."""

    call: Callable[[], None]
    samples: Callable[[], int]
    """Samples trained on per call; known after the first call."""
    name: Callable[[], str]
    """`loop`, `limit` or the engine's name; known after the first call, when `auto` has chosen."""
    close: Callable[[], None] = lambda: None
    threads: int | None = None
    """CPU threads; None: PyTorch's default."""
    notices: Sequence[str] = ()
    """Where an engine deviated from the request."""


@dataclass(frozen=True)
class Contender:
    """A contender for a case."""

    case: Case
    level: Level
    label: str
    """The name that users see."""
    make: Callable[[], Ready]
    asked: str = ""
    """The requested engine."""


@dataclass(frozen=True)
class Patience:
    """How long to measure."""

    repetitions: int
    seconds: float
    """Minimum duration of a repetition."""
    warm_up: int = 2
    """Calls before the first timed one."""


class Stopwatch:
    """Times contenders on one device."""

    def __init__(self, device: torch.device, patience: Patience, is_late: Callable[[], bool] = lambda: False) -> None:
        self._device, self._patience, self._is_late = device, patience, is_late
        self._threads = torch.get_num_threads()
        self.failures: list[Failure] = []
        self.notices: list[str] = []

    def measure(self, contenders: Sequence[Contender], tell: Callable[[str], None]) -> list[Measurement]:
        """Time the contenders in turn, several times; note those that fail."""
        try:
            with contextlib.ExitStack() as closing:
                return self._measured(contenders, tell, closing)
        finally:
            self._clean_up()

    def _measured(
        self, contenders: Sequence[Contender], tell: Callable[[str], None], closing: contextlib.ExitStack
    ) -> list[Measurement]:
        warm = [w for contender in contenders if (w := self._warm_up(contender, tell, closing))]
        times: list[list[float]] = [[] for _ in warm]
        for repetition in range(self._patience.repetitions if warm else 0):
            if repetition >= _ENOUGH and self._is_late():
                break
            tell(f"repetition {repetition + 1} of {self._patience.repetitions}")
            for each, collected in zip(warm, times, strict=True):
                collected.append(self._seconds(each.ready, each.calls))
        return [each.measurement(tuple(t)) for each, t in zip(warm, times, strict=True)]

    def _warm_up(
        self, contender: Contender, tell: Callable[[str], None], closing: contextlib.ExitStack
    ) -> _Warm | None:
        """Create a contender and run it until everything is compiled and captured; None if that fails."""
        if self._is_late():
            self.failures.append(Failure(contender.label, "left out: time was up"))
            return None
        tell(contender.label)
        contender.case.load()
        memory = PeakMemory(self._device)
        try:
            ready = contender.make()
            closing.callback(ready.close)
            with self._using_threads_of(ready):
                for _ in range(self._patience.warm_up):
                    ready.call()
                memory.begin_again()
                once = self._seconds(ready, 1)
        except (RuntimeError, UserError) as error:  # does not fit or compile; the others go on
            self.failures.append(Failure.from_error(contender.label, error))
            self._free_memory()
            return None
        self.notices += [f"{contender.label}: {line}" for line in ready.notices]
        calls = max(1, round(self._patience.seconds / max(once, 1e-9)))
        return _Warm(contender, ready, calls, memory.taken())

    def _seconds(self, ready: Ready, calls: int) -> float:
        """Mean seconds per call."""
        with self._using_threads_of(ready):
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
    def _using_threads_of(self, ready: Ready) -> Iterator[None]:
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
class _Warm:
    contender: Contender
    ready: Ready
    calls: int
    """Calls per repetition."""
    memory: int | None

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
            asked=self.contender.asked,
        )
