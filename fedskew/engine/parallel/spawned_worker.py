"""Worker processes for systems on which processes are not forked, such as macOS and Windows.

A worker is a new Python process, which receives copies of the engine and of the method's parts when it starts. The
classes of the model and of the parts must therefore be defined in a module, not inside a function. As always with the
start method `spawn`, a script that trains must guard its code with `if __name__ == "__main__":`.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from multiprocessing.connection import Connection

import torch

from fedskew.engine.contract import Engine
from fedskew.engine.parallel.messages import Facts, PortableParcel, receive_bytes
from fedskew.engine.parallel.pool_worker import answer
from fedskew.errors import UserError
from fedskew.methods.parts import Part, Tensors


class SpawnedWorker:
    """The parent's side of one spawned process."""

    def __init__(self, engine: Engine, parts: tuple[Part, ...]) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, far_end = context.Pipe()
        self._process = context.Process(target=serve, args=(far_end, engine, parts), daemon=True)
        try:
            self._process.start()
        except OSError:
            raise
        except Exception as error:  # its type depends on Python's version and on the object
            if getattr(multiprocessing.current_process(), "_inheriting", False):  # a new process that runs the script
                raise UserError(
                    "a worker process of the pool engine runs this script again; "
                    'expected the code that trains inside `if __name__ == "__main__":`'
                ) from None
            raise UserError(
                f"the pool engine cannot send the model or the method to a worker process ({error}); "
                "define it in a module, or choose --engine plain or stacked"
            ) from error
        finally:
            far_end.close()
        self.pid = self._process.pid

    def send(self, parcel: PortableParcel, facts: Facts) -> None:
        """Send work. If the worker is dead, `reply` returns None."""
        try:
            parcel.send(self._connection, facts)
        except OSError:
            return

    def reply(self) -> tuple[Facts, Tensors] | None:
        """Wait for the reply. Return None if the worker died."""
        return receive_bytes(self._connection)

    def end(self) -> str:
        """End the process and describe how it ended."""
        self._connection.close()
        self._process.kill()
        self._process.join()
        code = self._process.exitcode or 0
        return f"signal {-code}" if code < 0 else f"exit status {code}"


def serve(connection: Connection, engine: Engine, parts: tuple[Part, ...]) -> None:
    """Answer each message with the result of its training, until the parent closes the connection or ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes, and the parent handles it
    torch.set_num_threads(1)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    while (message := receive_bytes(connection)) is not None:
        facts, tensors = answer(engine, parts, *message)
        PortableParcel(tensors).send(connection, facts)


def _end_with_parent() -> None:
    """Exit when the parent ends, even in the middle of a round."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
