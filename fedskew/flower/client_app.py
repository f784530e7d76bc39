"""The ClientApp. It passes messages to the site's worker (`worker.py`), and passes the worker's replies back.

Flower's SuperExec starts a new process for every message. To start quickly, this module neither imports torch nor reads
tensors or data.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from fedskew.errors import UserError
from fedskew.flower.audit import describe_request, site_log
from fedskew.flower.frames import receive_frame, send_frame
from fedskew.flower.socket_paths import FORK_SERVER, socket_path
from fedskew.flower.wire import Facts, from_records, to_records

app = ClientApp()

app_hash: str | None = None
"""Hash of the app that this process runs, for the audit log. `node.py` sets it. None if Flower's own SuperNode started
the process, or if the app's archive is damaged."""
_START_SECONDS = 120.0
"""Seconds in which a worker must start."""
_FIRST_WAIT, _LONGEST_WAIT = 0.01, 0.2
"""The first and the longest wait between attempts to connect to a worker that is starting, in seconds."""


def answer(message: Message, context: Context) -> Message:
    """Return the worker's reply to a message."""
    site = context.node_config.get("site")
    if not isinstance(site, str):
        raise RuntimeError("this SuperNode has no site; expected --node-config 'site=\"/path/to/site.yaml\"'")
    facts, payload = from_records(message.content)
    reply, tensors = _request(Path(site), facts | {"paths": sys.path, "app": app_hash}, payload)
    return Message(to_records(reply, tensors), reply_to=message)


app.query()(answer)
app.train()(answer)
app.evaluate()(answer)


def _request(site: Path, facts: Facts, payload: bytes) -> tuple[Facts, bytes]:
    """Return the worker's reply. Try a second time if the worker crashes, or ends because the app's code changed.

    Flower sends the text of an error to the server, so the text must not name the site's files.
    """
    for _ in range(2):
        with contextlib.suppress(OSError, EOFError), _connect_to_worker(site) as connection:
            send_frame(connection, facts, payload)
            return receive_frame(connection)
    problem = "the site's worker ended twice before it replied, perhaps because memory ran out"
    with contextlib.suppress(UserError):
        site_log(site).append(describe_request(facts) | {"event": "failed", "reason": problem, "app": app_hash})
    raise RuntimeError(problem)


def _connect_to_worker(site: Path) -> socket.socket:
    """Connect to the site's worker. Start the worker if none runs."""
    superexec = os.getppid()  # the SuperExec started this process
    path = socket_path(site, superexec)
    connection = _try_to_connect(path)
    if connection is not None:
        return connection
    worker = _start_worker(site, superexec)
    deadline, wait = time.monotonic() + _START_SECONDS, _FIRST_WAIT
    while (worker is None or worker.poll() is None) and time.monotonic() < deadline:
        connection = _try_to_connect(path)
        if connection is not None:
            return connection
        time.sleep(wait)
        wait = min(2 * wait, _LONGEST_WAIT)
    raise RuntimeError("the site's worker did not start; the SuperNode's log may say why")


def _start_worker(site: Path, superexec: int) -> subprocess.Popen[bytes] | None:
    """Start the site's worker and return its process. If a fork server (`fork_server.py`) starts it, return None."""
    with contextlib.suppress(KeyError, OSError):  # there is no fork server, or it does not answer
        _fork_worker(os.environ[FORK_SERVER], site, superexec)
        return None
    # The worker has a process session of its own, so that signals to this process or its group do not reach it.
    command = [sys.executable, "-m", "fedskew.flower.worker", str(site), str(superexec)]
    return subprocess.Popen(command, start_new_session=True, stdin=subprocess.DEVNULL)


def _fork_worker(server: str, site: Path, superexec: int) -> None:
    """Let the fork server start a worker that writes to the standard output and error of this process."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.connect(server)
        socket.send_fds(connection, [b"\0"], [1, 2])
        send_frame(connection, {"site": str(site), "superexec": superexec})


def _try_to_connect(path: Path) -> socket.socket | None:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(str(path))
    except (FileNotFoundError, ConnectionRefusedError):
        connection.close()
        return None
    return connection
