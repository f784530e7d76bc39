"""The memory of a federation's sites, sampled while it runs. Pages that processes share are divided among them."""

from __future__ import annotations

import contextlib
import re
import statistics
import threading
from pathlib import Path

from faults import children, find_worker

from fedskew.flower.local_federation import LocalFederation

_SECONDS = 5.0
_PSS = re.compile(r"^Pss:\s+(\d+) kB", re.MULTILINE)


class MemorySampler:
    """Samples the memory of one site after another."""

    def __init__(self, local: LocalFederation) -> None:
        self._local = local
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._idle: list[float] = []
        self._workers: list[float] = []
        self._available = [available()]

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    def summary(self) -> dict[str, float | None]:
        """Megabytes of a site without work, of its worker, and the least memory that was available on the machine."""
        return {
            "site": _median(self._idle),
            "largest_site": max(self._idle, default=None),
            "worker": _median(self._workers),
            "largest_worker": max(self._workers, default=None),
            "least_available": min(self._available),
        }

    def _run(self) -> None:
        number = 0
        while not self._stop.wait(_SECONDS):
            site = self._local.sites[number % len(self._local.sites)]
            number += 1
            self._available.append(available())
            node = self._local.nodes.get(site)
            superexecs = children(node.pid) if node is not None and node.running else []
            if node is None or len(superexecs) != 1 or children(superexecs[0]):
                continue  # it starts, ended, or runs a ClientApp
            megabytes = [pss(node.pid), pss(superexecs[0])]
            if None not in megabytes:
                self._idle.append(sum(m for m in megabytes if m is not None))
            worker = find_worker(self._local.site_file(site), node.pid)
            if worker is not None and (used := pss(worker)) is not None:
                self._workers.append(used)


def pss(process: int) -> float | None:
    """Megabytes of a process. None if it has ended."""
    with contextlib.suppress(OSError):
        if match := _PSS.search(Path(f"/proc/{process}/smaps_rollup").read_text()):
            return int(match[1]) / 1024
    return None


def available() -> float:
    """Megabytes of memory that the machine has left."""
    found = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    assert found is not None
    return int(found[1]) / 1024


def _median(values: list[float]) -> float | None:
    return statistics.median(values) if values else None
