"""What a benchmark ran on, for whoever reads its table later."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import numpy
import torch

from fedskew import __version__


def machine(device: torch.device) -> dict[str, str | int]:
    """The hardware."""
    found: dict[str, str | int] = {"device": device.type, "cpu": _cpu(), "cores": usable_cores()}
    if device.type == "cuda":
        card = torch.cuda.get_device_properties(device)
        found |= {"gpu": card.name, "gpu_memory_bytes": card.total_memory}
    return found


def versions() -> dict[str, str]:
    """The software."""
    found = {
        "fedskew": __version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "numpy": str(numpy.__version__),
        "system": platform.platform(),
    }
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    return found


def usable_cores() -> int:
    """Those that this process may use, which in a container are fewer than there are."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
