"""Count the modules of fedskew that a run enters, which a reader must open to follow it.

    python tools/modules_entered.py            # counts, and the modules of a steady round
    python tools/modules_entered.py --json     # all lists

A module is entered when one of its functions is called; importing it does not count. A switch is a call
into another module of fedskew than the call before. The steady round is the second of three.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

import fedskew as fs
from fedskew.cli import main as fedskew

PACKAGE = str(Path(fs.__file__).parent)
RUN = {"method": "fedvls", "data": "digits", "rounds": 3, "local_epochs": 1}


@dataclass
class Trace:
    """The modules that were entered, in order, and the positions at which a callback's `on_round` was called."""

    entered: list[str] = field(default_factory=list)
    reports: list[int] = field(default_factory=list)

    def round(self, number: int) -> list[str]:
        """The modules entered in this round. The last callback's call ends a round."""
        callbacks = len(self.reports) // int(RUN["rounds"])
        ends = [0, *self.reports[callbacks - 1 :: callbacks]]
        return self.entered[ends[number - 1] : ends[number]]


@contextlib.contextmanager
def traced() -> Iterator[Trace]:
    """Record the calls of all threads of this process."""
    trace, names, here = Trace(), {}, threading.local()

    def on_event(frame: FrameType, event: str, _: Any) -> None:
        if event not in ("call", "return"):
            return
        code = frame.f_code
        if code.co_name == "<module>":  # an import is no step of the run, nor is anything it calls
            here.imports = getattr(here, "imports", 0) + (1 if event == "call" else -1)
        elif event == "call" and not getattr(here, "imports", 0):
            if code.co_name == "on_round":
                trace.reports.append(len(trace.entered))
            if code.co_filename.startswith(PACKAGE):
                name = names.get(code.co_filename) or names.setdefault(code.co_filename, module_name(code.co_filename))
                trace.entered.append(name)

    threading.setprofile(on_event)
    sys.setprofile(on_event)
    try:
        yield trace
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def module_name(file: str) -> str:
    parts = Path(file).relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts) or "fedskew"


def trace_command() -> Trace:
    """Trace `fedskew run`, with progress and a run folder."""
    flags = [word for key, value in RUN.items() for word in (f"--{key.replace('_', '-')}", str(value))]
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        command = ["run", *flags, "--device", "cpu", "--out", f"{folder}/run"]
        with contextlib.redirect_stderr(io.StringIO()), traced() as trace:
            status = fedskew(command)
    if status != 0:
        raise SystemExit(f"fedskew {' '.join(command)} ended with status {status}")
    return trace


def trace_python() -> Trace:
    """Trace the same run through `fs.run`."""

    class Listener(fs.Callback):
        def on_round(self, row: Any, rounds_ahead: int) -> None:
            pass

    with tempfile.TemporaryDirectory() as folder, traced() as trace:
        federation = fs.federation(str(RUN["data"]), fs.Dirichlet(clients=20), seed=0)
        fs.run(
            federation, str(RUN["method"]), rounds=RUN["rounds"], local_epochs=RUN["local_epochs"], device="cpu",
            out=f"{folder}/run", callbacks=[Listener()],
        )  # fmt: skip
    return trace


def account(entered: list[str]) -> dict[str, Any]:
    """Count the modules and the switches between them."""
    switches = sum(1 for before, after in pairwise(entered) if before != after)
    return {"modules": len(set(entered)), "switches": switches, "calls": dict(Counter(entered).most_common())}


def measure() -> dict[str, dict[str, Any]]:
    """Count for a whole run and for its second round, from the command line and from Python."""
    command, python = trace_command(), trace_python()
    return {
        "fedskew run": account(command.entered),
        "fedskew run, round 2": account(command.round(2)),
        "fs.run": account(python.entered),
        "fs.run, round 2": account(python.round(2)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print the calls into every module")
    given = parser.parse_args()
    accounts = measure()
    if given.json:
        print(json.dumps(accounts, indent=1))
        return
    for name, counted in accounts.items():
        print(f"{name}: {counted['modules']} modules, {counted['switches']} switches")
        print("".join(f"    {calls:6} {module}\n" for module, calls in sorted(counted["calls"].items())))


if __name__ == "__main__":
    main()
