"""How much memory is free, and how much memory one client's step takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

_SHARE = {"cpu": 0.5, "cuda": 0.8}
"""The share of the free memory that slots may take: evaluation and the server need some, too."""


def spare_bytes(device: torch.device) -> int | None:
    """Bytes that the slots may take; None if unknown."""
    free = _free_cuda_bytes(device) if device.type == "cuda" else _free_host_bytes()
    return None if free is None else int(free * _SHARE[device.type])


def _free_cuda_bytes(device: torch.device) -> int:
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def _free_host_bytes() -> int | None:
    free = [bytes_ for bytes_ in (_available_bytes(), _bytes_left_to_container()) if bytes_ is not None]
    return min(free, default=None)


def _available_bytes() -> int | None:
    lines = _read(Path("/proc/meminfo")).splitlines()
    entries = dict(line.split(":", 1) for line in lines)
    return int(entries["MemAvailable"].split()[0]) * 1024 if "MemAvailable" in entries else None


def _bytes_left_to_container(group: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Bytes left under a container's limit; None if there is no limit."""
    limit, used = (_read(group / name).strip() for name in ("memory.max", "memory.current"))
    return int(limit) - int(used) if limit.isdigit() and used.isdigit() else None


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def bytes_taken(function: Callable[[], object], device: torch.device) -> int:
    """The peak memory of a call of `function`.

    It is measured on a GPU. On a CPU it is estimated as twice what autograd saves for the backward pass, because
    gradients take about as much.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        function()
        torch.cuda.synchronize(device)
        return max(0, torch.cuda.max_memory_allocated(device) - before)
    with _saved_by_autograd() as kept:
        function()
    return 2 * sum(kept.values())


@contextmanager
def _saved_by_autograd() -> Iterator[dict[int, int]]:
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield kept
