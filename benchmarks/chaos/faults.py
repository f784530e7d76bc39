"""Faults for the processes and links of a federation, drawn from a seed.

Each fault hits one process or link: the SuperNode or the worker of a site, the ServerApp, the SuperLink, or the link
between a site and the SuperLink. The order of the faults follows from the seed. What they meet depends on the machine.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from links import Links

from fedskew.flower.guardian import marked_processes
from fedskew.flower.local_federation import LocalFederation
from fedskew.flower.socket_paths import socket_path

WEIGHTS = {
    ("SuperNode", "kill"): 16,
    ("SuperNode", "restart"): 16,
    ("SuperNode", "pause"): 24,
    ("worker", "kill"): 28,
    ("worker", "pause"): 24,
    ("link", "slow"): 36,
    ("link", "broken"): 28,
    ("ServerApp", "kill"): 1,
    ("ServerApp", "pause"): 4,
    ("SuperLink", "kill"): 1,
    ("SuperLink", "restart"): 1,
    ("SuperLink", "pause"): 4,
}
"""How often each fault is drawn. Faults of the server hit all sites at once, so they are rarer. A ServerApp that was
killed costs a minute, because Flower notices it only then."""
_LONGEST_DELAY = 0.3
"""Seconds by which a slow link delays each chunk of bytes, at most."""


@dataclass(frozen=True)
class Fault:
    """One fault of the schedule."""

    wait: float
    """Seconds since the fault before it."""
    target: str
    kind: str
    site: str
    """The site that it hits. Faults of the server ignore it."""
    seconds: float
    """How long a pause, a slow link or a broken link lasts."""
    strength: float
    """Between 0 and 1. The delay of a slow link grows with it."""


def draw_faults(sites: Sequence[str], seed: int, shortest: float, longest: float) -> Callable[[], Fault]:
    """Return a function that draws one fault after another, `shortest` to `longest` seconds apart."""
    source = random.Random(seed)
    kinds, weights = list(WEIGHTS), list(WEIGHTS.values())

    def draw() -> Fault:
        wait = source.uniform(shortest, longest)
        (target, kind) = source.choices(kinds, weights)[0]
        return Fault(wait, target, kind, source.choice(list(sites)), source.uniform(1, 15), source.random())

    return draw


class Injector:
    """Injects faults into a running federation and writes each of them to a log."""

    def __init__(self, local: LocalFederation, links: Links, log: Path) -> None:
        self._local, self._links, self._log = local, links, log
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._ends: list[tuple[float, Callable[[], None]]] = []
        """When which pause or link fault ends."""
        self.counts: Counter[str] = Counter()
        """Number of faults that hit something, by target and kind."""
        self.missed = 0
        """Number of faults whose target did not run at that time."""

    def start(self, draw: Callable[[], Fault]) -> None:
        self._thread = threading.Thread(target=self._run, args=(draw,), daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the faults, and mend what is paused or slow."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        for _, mend in self._ends:
            mend()

    def _run(self, draw: Callable[[], Fault]) -> None:
        while True:
            fault = draw()
            until = time.monotonic() + fault.wait
            while (left := until - time.monotonic()) > 0:
                self._end_due_faults()
                if self._stop.wait(min(left, 0.2)):
                    return
            self.inject(fault)

    def _end_due_faults(self) -> None:
        due = [mend for end, mend in self._ends if end <= time.monotonic()]
        self._ends = [(end, mend) for end, mend in self._ends if end > time.monotonic()]
        for mend in due:
            mend()

    def inject(self, fault: Fault) -> bool:
        """Inject one fault. Return whether its target existed."""
        process = None if fault.target == "link" else self.find(fault.target, fault.site)
        hit = fault.target == "link" or process is not None
        if fault.target == "link":
            self._disturb_link(fault)
        elif process is not None:
            hit = self._signal(process, fault)
        self.counts[f"{fault.target} {fault.kind}"] += hit
        self.missed += not hit
        self._write(fault, process, hit)
        return hit

    def find(self, target: str, site: str) -> int | None:
        """Find the process of a target. None if it does not run."""
        if target == "SuperLink":
            superlink = self._local.superlink
            return superlink.pid if superlink is not None and superlink.running else None
        if target == "ServerApp":
            found = [p for p in marked_processes(str(self._local.folder)) if b"flwr-serverapp" in _command(p)]
            return found[0] if found else None
        node = self._local.nodes.get(site)
        if node is None or not node.running:
            return None
        return node.pid if target == "SuperNode" else find_worker(self._local.site_file(site), node.pid)

    def _signal(self, process: int, fault: Fault) -> bool:
        number = {"kill": signal.SIGKILL, "restart": signal.SIGTERM, "pause": signal.SIGSTOP}[fault.kind]
        if not _send(process, number):
            return False
        if fault.kind == "pause":
            self._ends.append((time.monotonic() + fault.seconds, lambda: _send(process, signal.SIGCONT) and None))
        return True

    def _disturb_link(self, fault: Fault) -> None:
        link = self._links.by_site[fault.site]
        if fault.kind == "slow":
            link.slow_down(_LONGEST_DELAY * fault.strength)
        else:
            link.break_off()
        self._ends.append((time.monotonic() + fault.seconds, link.mend))

    def _write(self, fault: Fault, process: int | None, hit: bool) -> None:
        entry = {"time": datetime.now(UTC).isoformat(timespec="milliseconds"), **asdict(fault)}
        with self._log.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry | {"process": process, "hit": hit}) + "\n")


def find_worker(site: Path, supernode: int) -> int | None:
    """Find the worker of a site. The name to which it bound its socket ends with the number of its process."""
    for superexec in children(supernode):
        stem = socket_path(site, superexec).with_suffix("")
        pattern = re.escape(str(stem)) + r"\.(\d+)$"
        for line in Path("/proc/net/unix").read_text().splitlines():
            if match := re.search(pattern, line):
                return int(match[1])
    return None


def children(process: int) -> list[int]:
    with contextlib.suppress(OSError):
        return [int(c) for c in Path(f"/proc/{process}/task/{process}/children").read_text().split()]
    return []


def _command(process: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process}/cmdline").read_bytes()
    return b""


def _send(process: int, number: signal.Signals) -> bool:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, number)
        return True
    return False
