"""The worker of a site: it keeps data, model and torch in memory while Flower starts a ClientApp per message.

    python -m fedskew.flower.worker SITE.yaml PID

It answers on a private Unix socket, outlives a ClientApp that is killed, and ends with process PID, the one that starts
the ClientApps, and with that one's parent, the SuperNode.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import sys
import threading
import time
import traceback
from pathlib import Path

from fedskew.errors import UserError
from fedskew.flower.frames import receive_frame, send_frame
from fedskew.flower.runtime import socket_path
from fedskew.flower.site import Answer, Site
from fedskew.flower.site_config import load_site
from fedskew.flower.site_state import StateUnusable
from fedskew.flower.wire import Facts, Garbled, one_line

_PATIENCE = 600.0
"""Seconds that a ClientApp may take to send or to receive: one that hangs must not block the next ones."""


def main(path: str, guardian: int) -> None:
    """Serve until the guardian ends."""
    place = socket_path(path, guardian)
    listener, own = _listening(place)
    threading.Thread(target=_end_with, args=(guardian, place, own), daemon=True).start()
    try:
        serve(Path(path), listener)
    finally:
        _leave(place, own)


def serve(path: Path, listener: socket.socket) -> None:
    """Answer one ClientApp after another, until one brings other code of the app, or none comes for `idle` seconds."""
    desk = _Desk(path)
    while True:
        listener.settimeout(desk.idle)
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            return
        connection.settimeout(_PATIENCE)
        with connection:
            try:
                facts, payload = receive_frame(connection)
                if desk.outdated(facts.get("paths", [])):
                    listener.close()  # before the connection: its ClientApp must find nobody here, and start another
                    return
                send_frame(connection, *desk.answer(facts, payload))
            except (OSError, EOFError, ValueError, RecursionError):  # the ClientApp was killed, or is none of ours
                continue


class _Desk:
    """Answers whatever happens; it reads the site again when the configuration or the data changed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read_at: tuple[int, tuple[int, ...]] = -1, ()
        """Versions of the configuration and of the data that the site was made from."""
        self._site: Site | None = None
        self._apps: list[str] = []
        self._problem = ""
        self.idle: float | None = None
        """Seconds to wait for the next ClientApp; None: no limit."""

    def outdated(self, paths: list[str]) -> bool:
        """Whether methods or models were imported from an app that is no longer in use."""
        files = [str(getattr(module, "__file__", None) or "") for module in list(sys.modules.values())]
        left = [path for path in self._apps if path not in paths]
        return any(file.startswith(f"{path}{os.sep}") for path in left for file in files)

    def answer(self, facts: Facts, payload: bytes) -> Answer:
        try:
            new = [path for path in facts.pop("paths", []) if path not in sys.path]
            self._apps += new  # the app's own folder, in which a federation's own methods and models may lie
            sys.path += new
            site = self._current()
        except UserError as error:  # of the site's own files, which it may quote: that stays here
            return self._refusal(str(error), "its configuration or data cannot be read; the site's own log says why")
        except Exception as error:
            return self._failure(error)
        if facts.get("kind") == "hello" and facts.get("refused"):
            self._log(f"the server does not let this site in: {one_line(str(facts['refused']))}")
        try:
            return site.answer(facts, payload)
        except StateUnusable as error:
            return self._refusal(str(error), "its state cannot be read or written; the site's own log says why")
        except (UserError, Garbled) as error:
            return self._refusal(str(error), str(error))
        except Exception as error:
            return self._failure(error)

    def _refusal(self, problem: str, told: str) -> Answer:
        self._log(f"the server's question is refused: {problem}")
        return {"refused": told}, b""

    def _log(self, problem: str) -> None:
        """Write a problem to the site's log once, since a server asks again and again."""
        if problem != self._problem:
            self._problem = problem
            print(f"fedskew: {problem}", file=sys.stderr, flush=True)

    def _failure(self, error: Exception) -> Answer:
        """Report a failure without its text, which may contain data."""
        traceback.print_exc()
        return {"failed": f"{type(error).__name__}; the site's own log says more"}, b""

    def _current(self) -> Site:
        changed = self._path.stat().st_mtime_ns if self._path.exists() else -1
        if self._site is None or (changed, self._site.config.data_version()) != self._read_at:
            self._site = None
            config = load_site(self._path)
            _use_threads(config.threads)
            self.idle = config.idle
            version = config.data_version()
            self._site = Site(config, self._log)
            self._read_at = changed, version
        return self._site


def _use_threads(threads: int | None) -> None:
    if threads is not None:
        import torch

        torch.set_num_threads(threads)


def _listening(path: Path) -> tuple[socket.socket, int]:
    """A listening socket, and its inode. It atomically replaces the socket of a worker that is gone."""
    draft = path.with_suffix(f".{os.getpid()}")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(draft))
    listener.listen()
    number = draft.stat().st_ino
    os.replace(draft, path)
    return listener, number


def _leave(place: Path, own: int) -> None:
    """Remove the socket, unless a successor listens there already."""
    with contextlib.suppress(FileNotFoundError):
        if place.stat().st_ino == own:
            place.unlink()


def _end_with(guardian: int, place: Path, own: int) -> None:
    """End with the guardian or its parent, the SuperNode, however they end, even in the middle of a round."""
    watched = [process for process in (guardian, _parent(guardian)) if process > 1]
    try:
        if hasattr(os, "pidfd_open"):
            select.select([os.pidfd_open(process) for process in watched], [], [])
        else:
            while True:
                for process in watched:
                    os.kill(process, 0)
                time.sleep(1)
    except ProcessLookupError:
        pass
    _leave(place, own)
    os._exit(0)


def _parent(process: int) -> int:
    """The parent process; 0 if the system does not show it."""
    try:
        status = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return 0
    return int(status.rpartition(")")[2].split()[1])


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
