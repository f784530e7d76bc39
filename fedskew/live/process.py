"""The live page beside a run: a process of its own, so that drawing never holds up training.

It tells its address in one line, then serves until its standard input ends, which happens when the run ends, however
it ends.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from fedskew.errors import UserError
from fedskew.live.server import GRACE, LiveServer

_PROGRAM = "import sys; from fedskew.live.process import serve; serve(sys.argv[1:])"


@contextmanager
def live_page(paths: Sequence[str | Path]) -> Iterator[str]:
    """Serve the page of these folders meanwhile; its address."""
    child = subprocess.Popen(
        [sys.executable, "-c", _PROGRAM, *map(str, paths)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdin is not None
    assert child.stdout is not None
    url = child.stdout.readline().strip()
    if not url:
        child.wait()
        raise UserError("the live page could not be served; see the message above, or leave out --live")
    try:
        yield url
    finally:
        child.stdin.close()
        try:
            child.wait(GRACE + 5)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        child.stdout.close()


def serve(paths: Sequence[str]) -> None:
    """What the process does."""
    try:
        server = LiveServer(paths)
    except (OSError, UserError) as error:
        print(f"error: {error}", file=sys.stderr)
        return
    server.start()
    print(server.url, flush=True)
    try:
        sys.stdin.read()
    except KeyboardInterrupt:  # the terminal's ^C is the run's alone; its end is ours
        sys.stdin.read()
    server.let_go()
    server.close()
