"""A forked worker process. It trains the clients that it receives, until its parent closes the connection or ends."""

from __future__ import annotations

import os
import select
import signal
import socket
import threading
import traceback
from typing import NoReturn

import torch

from fedskew.engine.contract import Engine
from fedskew.engine.parallel.messages import Facts, receive, send
from fedskew.engine.parallel.round_messages import result_tensors, unpack_work
from fedskew.errors import UserError
from fedskew.methods.parts import Part, Tensors


def serve(connection: socket.socket, engine: Engine, parts: tuple[Part, ...]) -> NoReturn:
    """Answer each message with the result of its training. The process exits here and never returns to its caller."""
    status = 1
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes, and the parent handles it
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        torch.set_num_threads(1)
        threading.Thread(target=_end_with_parent, args=(connection.fileno(),), daemon=True).start()
        while (message := receive(connection)) is not None:
            send(connection, *answer(engine, parts, *message))
        status = 0
    finally:
        os._exit(status)


def _end_with_parent(connection: int) -> None:
    """Exit when the parent's end of the connection is closed, even in the middle of a round."""
    watch = select.poll()
    watch.register(connection, 0)  # no event is requested, but a hang-up is always reported
    watch.poll()
    os._exit(1)


def answer(engine: Engine, parts: tuple[Part, ...], facts: Facts, tensors: Tensors) -> tuple[Facts, Tensors]:
    """Train the clients of a message. Return the result, or the error as text."""
    try:
        result = engine.train(unpack_work(parts, facts, tensors))
    except UserError as error:
        return {"refused": str(error)}, {}
    except Exception:
        return {"failed": traceback.format_exc()}, {}
    notices, engine.notices[:] = list(engine.notices), []
    return {"notices": notices}, result_tensors(result)
