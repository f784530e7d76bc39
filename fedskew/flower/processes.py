"""The programs of a federation as child processes, each with a log."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TextIO

from fedskew.errors import UserError
from fedskew.platforms import kill_group

_POLL_SECONDS = 0.1
_GRACE_SECONDS = 10.0
"""Seconds that terminated processes have, all together, to end before they are killed."""
_LOG_SECONDS = 1.0
"""Seconds to wait for the rest of a log after its process ended. Children of the process may keep the pipe open."""

QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}
"""Settings with which Flower sends no usage reports and installs nothing."""


def environment(additional: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a child process: the current one, `QUIET`, and `additional`.

    PATH begins with the folder of this Python's commands, so that Flower's programs find each other.
    """
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    return {**os.environ, **QUIET, "PATH": path, **additional}


class Process:
    """A program and its log, whose lines have a timestamp and no colours."""

    def __init__(self, name: str, command: Sequence[str], log: Path, env: Mapping[str, str]) -> None:
        self.name, self.log = name, log
        log.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.log_start = log.stat().st_size if log.exists() else 0
        """Position in the log at which the output of this process begins."""
        full_env = environment(env)
        command = [shutil.which(command[0], path=full_env["PATH"]) or command[0], *command[1:]]
        self._process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=full_env,
            umask=0o077,  # models and keys stay private
            start_new_session=True,  # Ctrl-C reaches only the parent process, which then ends its children in order
        )
        self._writer = threading.Thread(target=self._write_log, args=(open_private(log),), daemon=True)
        self._writer.start()

    def _write_log(self, log: TextIO) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as output, log as file:
            for line in output:
                file.write(log_line(line.decode(errors="replace")))
                file.flush()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def output(self) -> str:
        """All output of this process."""
        self.wait_for_log()
        with self.log.open(encoding="utf-8", errors="replace") as file:
            file.seek(self.log_start)
            return file.read()

    def wait_for_log(self) -> None:
        """If the process has ended, wait for the rest of its log, but at most `_LOG_SECONDS`."""
        if not self.running:
            self._writer.join(_LOG_SECONDS)

    def last_message(self) -> str:
        return last_message(self.output())

    def require_running(self) -> None:
        if not self.running:
            raise UserError(
                f"{self.name} ended with status {self._process.returncode}; its log {self.log} ends: "
                f"{self.last_message()}"
            )

    def terminate(self) -> None:
        if self.running:
            self._process.terminate()

    def wait(self, seconds: float | None = None) -> int | None:
        """Wait for the end, and return the exit status. None if the process is still running after `seconds`."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(seconds)
        return None

    def kill(self) -> None:
        """Kill the process and its process group at once."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill_group(self._process)
        self._process.wait()


def open_private(path: Path) -> TextIO:
    """Open a file for appending. If it is new, only its owner can read it."""
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "a", encoding="utf-8")


def log_line(output: str) -> str:
    """Format a line of a program's output for a log file: add the time and remove colours."""
    return f"{datetime.now(UTC).isoformat(timespec='milliseconds')} {_COLOUR.sub('', output).rstrip()}\n"


_COLOUR = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_TIME = re.compile(r"^\d{4}-\d\d-\d\dT[\d:.]+(\+00:00|Z) ")
_FRAME = "─━│┃╭╮╰╯┌┐└┘┏┓┗┛"
"""The characters with which Flower draws a frame around an error message."""


def last_message(output: str) -> str:
    """Return the last message in a program's output, without times and colours.

    This is the last line or, if that line is the lower edge of a frame, the text inside the frame. If there is no
    output, the result says so.
    """
    lines = [_TIME.sub("", line).strip() for line in _COLOUR.sub("", output).splitlines()]
    lines = [line for line in lines if line]
    if not lines or lines[-1].strip(_FRAME + " "):
        return lines[-1] if lines else "it wrote nothing"
    inside: list[str] = []
    for line in reversed(lines[:-1]):
        if not line.startswith(("│", "┃")):
            break
        inside.insert(0, line.strip(_FRAME + " "))
    return " ".join(text for text in inside if text)


def terminate_all(processes: Sequence[Process]) -> None:
    """Send SIGTERM to all processes, in reverse order, and wait at most `_GRACE_SECONDS` for all of them.

    Then kill their process groups, so that neither they nor their children stay behind.
    """
    for process in reversed(processes):
        process.terminate()
    end = time.monotonic() + _GRACE_SECONDS
    for process in reversed(processes):
        process.wait(max(0.0, end - time.monotonic()))
        process.kill()


def free_ports(number: int) -> list[int]:
    """Find `number` free ports of this machine."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(number)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def await_tls(process: Process, port: int, authority: Path, seconds: float) -> None:
    """Wait until the process answers on this port with a certificate of this authority."""
    context = ssl.create_default_context(cafile=str(authority))
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        process.require_running()
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1) as plain:  # noqa: SIM117
            with context.wrap_socket(plain, server_hostname="localhost"):
                return
        time.sleep(_POLL_SECONDS)
    raise UserError(
        f"{process.name} does not answer on port {port} with a certificate of {authority} after {seconds:g} s; its log "
        f"is {process.log}"
    )
