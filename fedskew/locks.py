"""A file lock, which lets one process at a time use a file or folder that several processes share.

The operating system drops a lock when its process ends, even by a crash. A forked worker does not inherit it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock


@contextlib.contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Let one process at a time enter the `with` block. If the file cannot be locked, no process waits."""
    lock = FileLock(path, thread_local=False, fallback_to_soft=False)
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()
