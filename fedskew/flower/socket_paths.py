"""The Unix sockets of a site's worker and of a trial's fork server, in a folder that only their user can enter."""

from __future__ import annotations

import hashlib
import os
import stat
import sys
import tempfile
from pathlib import Path

from fedskew.errors import UserError

FORK_SERVER = "FEDSKEW_FORK_SERVER"
"""Environment variable with the socket of the fork server, if there is one."""
_MOST_BYTES = 107 if sys.platform == "linux" else 103
"""The system's limit on the length of a socket's path."""


def socket_path(site: str | Path, superexec: int) -> Path:
    """The socket of a site's worker.

    `superexec` is the process ID of the site's SuperExec.
    """
    digest = hashlib.sha256(os.fsencode(Path(site).resolve())).hexdigest()[:16]
    return _path(f"{digest}-{superexec}.sock")


def fork_server_path(trial: Path) -> Path:
    """The socket of a trial's fork server."""
    digest = hashlib.sha256(os.fsencode(trial.resolve())).hexdigest()[:16]
    return _path(f"{digest}-forks.sock")


def _path(name: str) -> Path:
    path = _private_folder() / name
    if len(os.fsencode(path)) > _MOST_BYTES:
        raise UserError(
            f"{path} is longer than {_MOST_BYTES} bytes, the system's limit for the path of a socket; "
            "set XDG_RUNTIME_DIR to a folder of yours with a shorter path"
        )
    return path


def _private_folder() -> Path:
    base = Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir())
    folder = base / f"fedskew-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError as error:
        raise UserError(f"cannot make {folder}: {error.strerror}; set XDG_RUNTIME_DIR to a folder of yours") from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise UserError(f"{folder} is not a folder that only you can enter; remove it, or set XDG_RUNTIME_DIR")
    return folder
