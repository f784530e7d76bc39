"""File locks, which allow one writer per run folder and one process at a time in shared sections.

The operating system drops a lock when its process ends, even by a crash. A forked worker does not inherit it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from fedskew.errors import UserError

_UNSUPPORTED = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP}


class FolderLock:
    """Keeps other writers out of a folder until it is released or its process ends."""

    def __init__(self, path: Path) -> None:
        self.warning: str | None = None
        self._lock = FileLock(path, thread_local=False, fallback_to_soft=False)
        try:
            self._lock.acquire(timeout=0)
        except Timeout as error:
            raise UserError(
                f"{path.parent} is being written by another process{_holder(path)}; "
                "wait for it to end or choose another --out"
            ) from error
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise UserError(f"cannot lock {path}: {error.strerror or error}") from error
            self.warning = f"the file system of {path.parent} has no locks: do not start the same run twice"
        else:
            with contextlib.suppress(OSError):  # the lock works without this note for users
                path.write_text(f"{os.getpid()} on {socket.gethostname()}\n", encoding="utf-8")

    def release(self) -> None:
        self._lock.release()


def _holder(path: Path) -> str:
    try:
        note = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        note = ""
    return f" ({note})" if note else ""


@contextlib.contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Let one process at a time enter. If the file system has no locks, all enter at once."""
    lock = FileLock(path, thread_local=False, fallback_to_soft=False)
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()
