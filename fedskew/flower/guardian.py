"""End the processes of a trial that was killed. A trial is a federation on one machine.

    python -m fedskew.flower.guardian MARK      # waits until its standard input is closed

The processes that a trial starts have a mark in their environment. Their descendants inherit it, even those that Flower
detaches. The guardian's standard input is a pipe from the trial's main process. When that process ends, the guardian
kills all processes that have the mark.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from fedskew.platforms import kill

MARK_VARIABLE = "FEDSKEW_TRIAL"
"""The environment variable that holds the mark."""
_MAX_PASSES = 20
"""Maximum number of passes. Each pass kills all processes with the mark."""
_PAUSE_SECONDS = 0.1


def start_guardian(mark: str) -> subprocess.Popen[bytes]:
    """Start a guardian of the processes with this mark. It kills them when its standard input is closed."""
    command = [sys.executable, "-m", "fedskew.flower.guardian", mark]
    without_mark = {name: value for name, value in os.environ.items() if name != MARK_VARIABLE}
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, env=without_mark, start_new_session=True
    )


def marked_processes(mark: str) -> list[int]:
    """List the processes with this mark. Empty except on Linux, where /proc shows the environments of processes."""
    assignment = os.fsencode(f"{MARK_VARIABLE}={mark}")
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if int(entry.name) != os.getpid() and assignment in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    return found


def end_marked_processes(mark: str) -> None:
    """Kill the processes with this mark, and those that they start meanwhile."""
    for _ in range(_MAX_PASSES):
        marked = marked_processes(mark)
        if not marked:
            return
        for process in marked:
            with suppress(ProcessLookupError, PermissionError):
                kill(process)
        time.sleep(_PAUSE_SECONDS)


if __name__ == "__main__":
    sys.stdin.buffer.read()
    end_marked_processes(sys.argv[1])
