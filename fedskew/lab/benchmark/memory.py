"""How much memory something takes at most: on the GPU, or of this process and its workers."""

from __future__ import annotations

import contextlib
import ctypes
from pathlib import Path

import torch

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
