"""Serve the live page from a second process, so that drawing does not delay training.

The second process prints the page's address, then serves until its standard input closes. This happens when the run
ends, even if the run crashes.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from fedskew.errors import UserError
from fedskew.live.server import GRACE, LiveServer
from fedskew.platforms import python_module
from fedskew.results.ranking import DEFAULT_METRIC


@contextmanager
def live_page(paths: Sequence[str | Path], rank_by: str = DEFAULT_METRIC) -> Iterator[str]:
    """Serve the page of these folders inside the `with` block, and yield its address."""
    command, environment = python_module(__name__, rank_by, *map(str, paths))
    child = subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # Ctrl-C in the terminal is meant for the run
    )
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        url = child.stdout.readline().strip()
    except BaseException:
        child.kill()
        child.communicate()
        raise
    if not url:
        child.wait()
        raise UserError("the live page could not be served, for the reason above; run without --live")
    try:
        yield url
    finally:
        child.stdin.close()
        try:
            child.wait(GRACE + 5)  # at its end, the server waits up to GRACE seconds for a browser
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        child.stdout.close()


def serve(paths: Sequence[str], rank_by: str) -> None:
    """Serve until standard input closes. This is the program of the second process."""
    try:
        server = LiveServer(paths, rank_by=rank_by)
    except (OSError, UserError) as error:
        print(f"error: {error}", file=sys.stderr)
        return
    server.start()
    print(server.url, flush=True)
    sys.stdin.read()
    server.finish()
    server.close()


if __name__ == "__main__":
    serve(sys.argv[2:], sys.argv[1])
