"""The worker process of a site, which keeps torch, the data and the model in memory.

    python -m fedskew.flower.worker SITE.yaml PID

Flower starts a new ClientApp process for every message. The ClientApps pass their messages to the worker through a
private Unix socket. PID is the process ID of the site's SuperExec, which starts the ClientApps. The worker exits as
soon as the SuperExec or its parent, the SuperNode, exits.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
import traceback
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from fedskew.errors import UserError
from fedskew.flower import audit
from fedskew.flower.app_folder import PACKAGE
from fedskew.flower.chained_log import ChainedLog
from fedskew.flower.contract import ContractMismatch
from fedskew.flower.frames import receive_frame, send_frame
from fedskew.flower.site import Site
from fedskew.flower.site_answers import Answer
from fedskew.flower.site_config import DataUnreadable, load_site
from fedskew.flower.site_state import StateUnusable
from fedskew.flower.socket_paths import socket_path
from fedskew.flower.wire import Facts, Garbled, one_line
from fedskew.platforms import parent_of, wait_for_end

_UNREADABLE = "its configuration or data cannot be read; the reason is in its log"
_MISMATCH = "its data do not meet the federation's contract; the reason is in its log"
_NO_STATE = "its state cannot be read or written; the reason is in its log"
_TRANSFER_SECONDS = 600.0
"""Seconds that a ClientApp may take to send or to receive. A ClientApp that hangs must not block the next ones."""
_SESSION_SECONDS = 3600.0
"""An idle worker waits at least this many seconds for the next step of a session of secure aggregation."""


def main(site: str, superexec: int) -> None:
    """Run `serve` for a site. End the process when the SuperExec or the SuperNode ends."""
    path = socket_path(site, superexec)
    listener, inode = _listen(path)
    threading.Thread(target=_exit_after, args=(superexec, path, inode), daemon=True).start()
    try:
        serve(Path(site), listener)
    finally:
        _remove_socket(path, inode)


def serve(site: Path, listener: socket.socket) -> None:
    """Answer ClientApps. Return when the app's code has changed, or when none connects for `patience` seconds."""
    handler = _RequestHandler(site)
    sys.meta_path.insert(0, handler.finder)
    while True:
        listener.settimeout(handler.patience)
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            return
        connection.settimeout(_TRANSFER_SECONDS)
        with connection:
            try:
                facts, payload = receive_frame(connection)
                if handler.has_other_code(facts.get("paths", [])):
                    listener.close()  # closed before the connection, so that the ClientApp starts another worker
                    return
                send_frame(connection, *handler.answer(facts, payload))
            except (OSError, EOFError, ValueError, RecursionError):  # the ClientApp was killed, or is another program
                continue


class _AppFinder:
    """Finds the package of the app that the site received last.

    Without this finder, the package could be imported from an earlier app, or from the site's own copy in the current
    folder or in PYTHONPATH. These may be old versions.
    """

    def __init__(self) -> None:
        self.paths: list[str] = []
        """The import path of the ClientApp. It begins with the folder of the received app."""

    def find_spec(self, name: str, *_: object) -> ModuleSpec | None:
        return PathFinder.find_spec(name, self.paths) if name == PACKAGE else None


class _RequestHandler:
    """Answers every request, perhaps with a refusal. It reads site.yaml and the data again if they have changed.

    Each answer is in the site's audit log before it leaves. If site.yaml cannot be read, there is no audit log, and
    every answer is a refusal or a failure. If the log cannot be written, the answer is a refusal, which is not in it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._versions_read: tuple[int, int] | None = None
        """The configuration's modification time and the data's version when both were last read."""
        self._site: Site | None = None
        self._apps: list[str] = []
        """Folders of received apps, from which methods and models may be imported."""
        self.finder = _AppFinder()
        self._last_problem = ""
        self.idle: float | None = None
        """Seconds to wait for the next ClientApp. None means no limit."""

    @property
    def patience(self) -> float | None:
        """Seconds to wait for the next ClientApp: `idle`, or longer if a session of secure aggregation is open.

        The session's secrets are in memory only. Its next step comes only after the slowest site has trained.
        """
        is_open = self._site is not None and self._site.has_open_session
        return max(self.idle, _SESSION_SECONDS) if self.idle is not None and is_open else self.idle

    def has_other_code(self, paths: list[str]) -> bool:
        """Whether methods or models were imported from an app that is not among these paths."""
        files = [str(getattr(module, "__file__", None) or "") for module in list(sys.modules.values())]
        unused = [path for path in self._apps if path not in paths]
        return any(file.startswith(f"{path}{os.sep}") for path in unused for file in files)

    def answer(self, facts: Facts, payload: bytes) -> Answer:
        app, began = facts.pop("app", None), time.monotonic()
        reply = self._answer(facts, payload)
        if self._site is None:
            return reply
        spent: Facts = {}
        if facts.get("kind") == "train" and not reply[0].keys() & {"refused", "failed"}:
            try:
                spent = {"epsilon": self._site.privacy_spent()}
            except UserError as error:
                self._site.end_session(facts)
                reply = self._refusal(str(error), _NO_STATE)
        entry = audit.describe_request(facts) | audit.describe_reply(*reply) | {"app": app}
        entry |= {"seconds": round(time.monotonic() - began, 3), **spent}
        try:
            ChainedLog(self._site.config.state_folder / audit.NAME).append(entry)
        except UserError as error:  # the text names the site's files, so it must not leave the site
            self._site.end_session(facts)
            return self._refusal(str(error), "its audit log cannot be written; the reason is in its log")
        return reply

    def _answer(self, facts: Facts, payload: bytes) -> Answer:
        try:
            self.finder.paths = facts.pop("paths", [])
            new = [path for path in self.finder.paths if path not in sys.path]
            self._apps += new
            sys.path += new
            site = self._current_site()
        except UserError as error:  # the text may quote the site's files, so it must not leave the site
            return self._refusal(str(error), _UNREADABLE)
        except Exception as error:
            return self._failure(error)
        if facts.get("kind") == "hello" and facts.get("refused"):
            self._log(f"warning: the server does not admit this site: {one_line(str(facts['refused']))}")
        try:
            return site.answer(facts, payload)
        except DataUnreadable as error:
            return self._refusal(str(error), _UNREADABLE)
        except ContractMismatch as error:
            return self._refusal(str(error), _MISMATCH)
        except StateUnusable as error:
            return self._refusal(str(error), _NO_STATE)
        except (UserError, Garbled) as error:
            return self._refusal(str(error), str(error))
        except Exception as error:
            return self._failure(error)

    def _refusal(self, problem: str, reported: str) -> Answer:
        """Log the problem at the site. Return a refusal that tells the server only `reported`."""
        self._log(f"warning: the server's request is refused: {problem}")
        return {"refused": reported}, b""

    def _log(self, problem: str) -> None:
        """Log a problem, unless it was also the last one. So a request that is repeated does not fill the log."""
        if problem != self._last_problem:
            self._last_problem = problem
            print(f"fedskew: {problem}", file=sys.stderr, flush=True)

    def _failure(self, error: Exception) -> Answer:
        """Report a failure to the server. The error's text stays at the site, because it may contain data."""
        traceback.print_exc()
        return {"failed": f"{type(error).__name__}; details are in the site's log"}, b""

    def _current_site(self) -> Site:
        changed = self._path.stat().st_mtime_ns if self._path.exists() else -1
        if self._site is None or (changed, self._site.config.data_version()) != self._versions_read:
            self._site = None
            config = load_site(self._path)
            _use_threads(config.threads)
            self.idle = config.idle
            version = config.data_version()
            self._site = Site(config, self._log)
            self._versions_read = changed, version
        return self._site


def _use_threads(threads: int | None) -> None:
    if threads is not None:
        import torch

        torch.set_num_threads(threads)


def _listen(path: Path) -> tuple[socket.socket, int]:
    """Listen on this path, and replace the socket of a worker that has ended. Return the socket and its inode."""
    draft = path.with_suffix(f".{os.getpid()}")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(draft))
    listener.listen()
    inode = draft.stat().st_ino
    os.replace(draft, path)
    return listener, inode


def _remove_socket(path: Path, inode: int) -> None:
    """Remove the socket, unless another worker already listens on this path."""
    with contextlib.suppress(FileNotFoundError):
        if path.stat().st_ino == inode:
            path.unlink()


def _exit_after(superexec: int, path: Path, inode: int) -> None:
    """End this process when the SuperExec or the SuperNode ends, even in the middle of a round."""
    wait_for_end(superexec, parent_of(superexec))
    _remove_socket(path, inode)
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
