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
    """From its making on: what was taken beyond what there was, at the worst moment."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self._before = torch.cuda.memory_allocated(device)
        else:
            _return_unused()
            with contextlib.suppress(OSError):
                (_SELF / "clear_refs").write_text(_RESET_PEAK)
            self._before = (_kibibytes(_SELF / "status", "VmRSS") or 0) + _of_workers()

    def begin_again(self) -> None:
        """Forget the worst moment so far: on a GPU, compiling and trying out kernels take memory of their own, the
        more the less the process did before. A CPU's is too coarse to show it."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)

    def taken(self) -> int | None:
        """Bytes; None where the system does not tell."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device) - self._before
        peak = _kibibytes(_SELF / "status", "VmHWM")
        return None if peak is None else max(0, peak + _of_workers() - self._before)


def _kibibytes(file: Path, key: str) -> int | None:
    """An entry of a file of /proc, in bytes."""
    try:
        lines = file.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(key + ":")), None)


def _return_unused() -> None:
    """Give the system what was freed before, or else it would be used again without being seen."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _of_workers() -> int:
    """What child processes hold of their own, without the pages that they share with this one."""
    total = 0
    for task in _SELF.glob("task/*/children"):
        with contextlib.suppress(OSError):
            for child in task.read_text(encoding="ascii").split():
                total += _kibibytes(Path("/proc") / child / "smaps_rollup", "Private_Dirty") or 0
    return total


_ENOUGH = 3
"""Repetitions of which a median can be taken, should the time be used up."""


@dataclass(frozen=True)
class Ready:
    """A contender that can be timed."""

    call: Callable[[], None]
    samples: Callable[[], int]
    """Trained on in one call; known after the first."""
    name: Callable[[], str]
    """`loop`, `limit`, or the engine that does the work; known after the first call, too, for `auto` chooses then."""
    close: Callable[[], None] = lambda: None
    threads: int | None = None
    """On a CPU; none: as many as PyTorch takes by itself."""
    notices: Sequence[str] = ()
    """What an engine had to do differently from what was asked."""


@dataclass(frozen=True)
class Contender:
    """Something to be timed on a case."""

    case: Case
    level: Level
    label: str
    """What the user reads while it is made."""
    make: Callable[[], Ready]
    asked: str = ""
    """The engine that was asked for."""


@dataclass(frozen=True)
class Patience:
    """How long to measure."""

    repetitions: int
    seconds: float
    """At least, of each repetition of each contender."""
    warm_up: int = 2
    """Calls before the first that counts."""


class Stopwatch:
    """Times contenders on one device."""

    def __init__(self, device: torch.device, patience: Patience, is_late: Callable[[], bool] = lambda: False) -> None:
        self._device, self._patience, self._is_late = device, patience, is_late
        self._threads = torch.get_num_threads()
        self.failures: list[Failure] = []
        self.notices: list[str] = []

    def measure(self, contenders: Sequence[Contender], tell: Callable[[str], None]) -> list[Measurement]:
        """Each contender several times, one after another, round and round; those that fail are noted."""
        try:
            with contextlib.ExitStack() as closing:
                return self._measured(contenders, tell, closing)
        finally:
            self._clean_up()

    def _measured(
        self, contenders: Sequence[Contender], tell: Callable[[str], None], closing: contextlib.ExitStack
    ) -> list[Measurement]:
        warm = [w for contender in contenders if (w := self._warmed(contender, tell, closing))]
        times: list[list[float]] = [[] for _ in warm]
        for repetition in range(self._patience.repetitions if warm else 0):
            if repetition >= _ENOUGH and self._is_late():
                break
            tell(f"repetition {repetition + 1} of {self._patience.repetitions}")
            for each, collected in zip(warm, times, strict=True):
                collected.append(self._seconds(each.ready, each.calls))
        return [each.measurement(tuple(t)) for each, t in zip(warm, times, strict=True)]

    def _warmed(self, contender: Contender, tell: Callable[[str], None], closing: contextlib.ExitStack) -> _Warm | None:
        """Made and run until what is compiled, captured or tried out is so; None if it cannot be."""
        if self._is_late():
            self.failures.append(Failure(contender.label, "left out: the time was used up"))
            return None
        tell(contender.label)
        contender.case.load()
        memory = PeakMemory(self._device)
        try:
            ready = contender.make()
            closing.callback(ready.close)
            with self._threads_of(ready):
                for _ in range(self._patience.warm_up):
                    ready.call()
                memory.begin_again()
                once = self._seconds(ready, 1)
        except (RuntimeError, UserError) as error:  # does not fit or compile: the others are measured all the same
            self.failures.append(Failure.of(contender.label, error))
            self._free_memory()
            return None
        self.notices += [f"{contender.label}: {line}" for line in ready.notices]
        calls = max(1, round(self._patience.seconds / max(once, 1e-9)))
        return _Warm(contender, ready, calls, memory.taken())

    def _seconds(self, ready: Ready, calls: int) -> float:
        """Of one call, on average."""
        with self._threads_of(ready):
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
    def _threads_of(self, ready: Ready) -> Iterator[None]:
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
    """In each repetition."""
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
