"""One writer per folder."""

from __future__ import annotations

import errno
import fcntl
import os
import weakref
from pathlib import Path

from fedskew.errors import UserError
from fedskew.experiment.storage.atomic import reporting_os_errors

_UNSUPPORTED = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP}


class FolderLock:
    """Held until it is released or its process ends, however it ends."""

    def __init__(self, path: Path) -> None:
        with reporting_os_errors("write", path):
            self._descriptor: int | None = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        self.warning: str | None = None
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self.release()
            raise UserError(
                f"{path.parent} is being written by another process; wait for it to end or choose another --out"
            ) from error
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                self.release()
                raise UserError(f"cannot lock {path}: {error.strerror or error}") from error
            self.warning = f"the file system of {path.parent} has no locks: do not start the same run twice"
        _held.add(self)

    def release(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


_held: weakref.WeakSet[FolderLock] = weakref.WeakSet()


def _leave_to_parent() -> None:
    """A forked worker must not keep the lock when its parent is killed: the next attempt would find it taken."""
    for lock in list(_held):
        lock.release()


os.register_at_fork(after_in_child=_leave_to_parent)
