"""Worker processes. Each answers one request at a time. Requests and answers are lines of JSON.

A worker is started as `python -m fedskew.workers package.module:function FOLDER...`, with the folders from which the
parent imports modules. It is never a fork, because a process that has used a GPU cannot be forked. A crash ends only
one worker. A worker imports the function once. Data and compiled programs that the function keeps in memory can be used
for all later requests. Unlike with `multiprocessing`, a user's script needs no `if __name__ == "__main__"`.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Self, TextIO

from fedskew.errors import UserError
from fedskew.gpu_sharing import GpuSharing, start_gpu_sharing
from fedskew.platforms import python_module, usable_cores

Message = dict[str, Any]
Report = Callable[[Message], None]
"""Sends progress to the pool. A report too soon after the last one is dropped."""

_SECONDS_BETWEEN_REPORTS = 0.25
_SECONDS_FOR_EXIT = 5.0
"""How long to wait for the exit of a worker that has closed its output."""
_SECONDS_FOR_OUTPUT = 5.0
"""How long to wait for the rest of a worker's output after the worker has ended."""
_LOG_TAIL = 2000
"""The number of characters at the end of a log that are searched for the cause of a crash."""
GPU_WORKERS = 4
"""Default number of processes per GPU."""


def default_workers(device: str, requests: int) -> int:
    """Return the default number of processes: one per core, or `GPU_WORKERS` per GPU, but at most one per request."""
    gpus = 0 if device == "cpu" else _gpus()
    return max(1, min(requests, GPU_WORKERS * gpus if gpus else usable_cores()))


class PoolWatcher:
    """Receives the events of a pool's requests, which are numbered by position. Its methods do nothing by default."""

    def on_progress(self, request: int, content: Message) -> None:
        """Called when a worker reports progress."""

    def on_answer(self, request: int, answer: Message) -> None:
        """Called when a request is answered."""

    def on_failure(self, request: int, reason: str) -> None:
        """Called when the function raised an error or its process died."""


class WorkerPool:
    """Processes that stay alive between calls of `run`. If one dies, it is replaced, and only its request fails."""

    def __init__(self, function: str, size: int, logs: Path) -> None:
        """`function` is `package.module:name`. It takes a request and a `Report`, and returns the answer."""
        self._function, self._size, self._logs = function, size, logs
        self._received: queue.Queue[tuple[WorkerProcess, Message | None]] = queue.Queue()
        """Messages of all workers. None for a worker that died."""
        self._workers: dict[int, WorkerProcess] = {}
        """The workers by slot, a number from 0 to `size` − 1. A worker starts when its slot gets its first request."""
        self._busy: dict[int, int] = {}
        """The position of each busy worker's request, by the worker's slot."""
        self._gpu_sharing: GpuSharing | None = None

    def run(self, requests: Sequence[Message], watcher: PoolWatcher, give_up_at: float | None = None) -> list[int]:
        """Run all requests, starting them in order.

        At the time `give_up_at`, in seconds since the epoch, busy processes are killed. Return the positions of the
        requests that were not finished by then.
        """
        waiting = deque(range(len(requests)))
        while waiting or self._busy:
            if give_up_at is not None and time.time() > give_up_at:
                return [*self._kill_busy(), *waiting]
            for slot in range(self._size):
                if waiting and slot not in self._busy:
                    self._busy[slot] = waiting.popleft()
                    self._worker(slot).send(requests[self._busy[slot]])
            with contextlib.suppress(queue.Empty):
                self._receive(*self._received.get(timeout=1.0), watcher)
        return []

    def close(self) -> None:
        """End all processes. Those with a request are killed."""
        self._kill_busy()
        for slot in list(self._workers):
            self._workers.pop(slot).dismiss()
        if self._gpu_sharing is not None:
            self._gpu_sharing.stop()
            self._gpu_sharing = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _worker(self, slot: int) -> WorkerProcess:
        """Return the worker in a slot. Start it if there is none."""
        if not self._workers and self._gpu_sharing is None and self._size > 1 and _gpus() == 1:
            self._gpu_sharing = start_gpu_sharing()
        if slot not in self._workers:
            log = self._logs / f"worker-{slot}.log"
            sharing = self._gpu_sharing.variables if self._gpu_sharing else {}
            environment = _environment(slot, self._size) | sharing
            self._workers[slot] = WorkerProcess(self._function, log, environment, self._received)
        return self._workers[slot]

    def _receive(self, worker: WorkerProcess, message: Message | None, watcher: PoolWatcher) -> None:
        """Handle a message of a worker, or its death (None)."""
        slot = next((number for number, known in self._workers.items() if known is worker), None)
        if slot is None:  # a message from a worker that has been killed since
            return
        if message is None:
            reason = worker.cause_of_death()
            self._workers.pop(slot).kill()
            if slot in self._busy:
                watcher.on_failure(self._busy.pop(slot), reason)
        elif "progress" in message:
            watcher.on_progress(self._busy[slot], message["progress"])
        else:
            request = self._busy.pop(slot)
            if message["broken"]:  # the worker can no longer use its GPU
                self._workers.pop(slot).kill()
            if "failed" in message:
                watcher.on_failure(request, message["failed"])
            else:
                watcher.on_answer(request, message["answer"])

    def _kill_busy(self) -> list[int]:
        """Kill the workers that have a request. Return the positions of these requests."""
        killed = list(self._busy.values())
        for slot in list(self._busy):
            self._workers.pop(slot).kill()
        self._busy.clear()
        return killed


def _environment(slot: int, workers: int) -> dict[str, str]:
    """Return the variables that give a worker its share of the cores and, on a machine with several GPUs, one GPU.

    A variable that is already set is not changed.
    """
    cores = str(max(1, usable_cores() // workers))
    variables = {"OMP_NUM_THREADS": cores, "TORCHINDUCTOR_COMPILE_THREADS": cores}
    variables["OMP_WAIT_POLICY"] = "PASSIVE"  # as in `cli.app.main`: OpenMP's idle threads sleep
    gpus = _gpus()
    if gpus > 1:
        variables["CUDA_VISIBLE_DEVICES"] = str(slot % gpus)
    return {name: value for name, value in variables.items() if name not in os.environ}


def _gpus() -> int:
    """Return the number of NVIDIA GPUs."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


class WorkerProcess:
    """A worker, seen from the pool. A thread puts its messages into a queue, because Windows cannot wait for pipes."""

    def __init__(
        self,
        function: str,
        log: Path,
        environment: Mapping[str, str],
        received: queue.Queue[tuple[WorkerProcess, Message | None]],
    ) -> None:
        self._log, self._received = log, received
        log.parent.mkdir(parents=True, exist_ok=True)
        # The worker also searches the parent's folders, so it finds modules beside a user's script.
        command, inherited = python_module("fedskew.workers", function, *filter(None, sys.path))
        with log.open("w", encoding="utf-8") as errors:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env={**inherited, **environment},
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._requests, self._stream = self._process.stdin, self._process.stdout
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, request: Message) -> None:
        try:
            self._requests.write(json.dumps(request).encode() + b"\n")
            self._requests.flush()
        except OSError:  # the worker died, and its stream will report that
            return

    def messages(self) -> Iterator[Message]:
        """Read messages until the worker ends. An incomplete line, left by a worker that died, is dropped."""
        return (json.loads(line) for line in self._stream if line.endswith(b"\n"))

    def _read(self) -> None:
        for message in self.messages():
            self._received.put((self, message))
        self._received.put((self, None))

    def cause_of_death(self) -> str:
        """Say how a worker that has closed its output ended. Kill it if it does not end in time."""
        try:
            code = self._process.wait(_SECONDS_FOR_EXIT)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        how = f"was killed by signal {-code}" if code < 0 else f"ended with status {code}"
        text = self._log.read_text(encoding="utf-8", errors="replace")[-_LOG_TAIL:].strip()
        last = text.splitlines()[-1] if text else ""
        return f"its process {how}" + (f": {last}" if last else "")

    def dismiss(self) -> None:
        """Let a worker without a request end."""
        try:
            self._requests.close()
        except OSError:
            self._process.kill()
        self._end_reading()

    def kill(self) -> None:
        """End the worker at once."""
        self._process.kill()
        self._end_reading()
        with contextlib.suppress(OSError):  # unsent bytes for a process that is gone
            self._requests.close()

    def _end_reading(self) -> None:
        """Wait for the end of the process, then a few seconds for the rest of its output.

        The process's children may keep the output open for longer.
        """
        self._process.wait()
        self._reader.join(_SECONDS_FOR_OUTPUT)
        if not self._reader.is_alive():
            self._stream.close()


def describe_error(error: Exception) -> str:
    """Describe an error in one line: a user's mistake by its message, any other error with its type, file and line."""
    if isinstance(error, UserError):
        return str(error)
    frame = traceback.extract_tb(error.__traceback__)[-1]
    message = " ".join(f"{type(error).__name__}: {error}".split())[:500]
    return f"{message} ({Path(frame.filename).name}, line {frame.lineno})"


def main() -> None:
    """Answer requests until stdin is closed."""
    messages = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # output of libraries must not mix with the messages
    function, *folders = sys.argv[1:]
    sys.path += [folder for folder in folders if folder not in sys.path]
    try:
        _serve(function, _Requests(sys.stdin.fileno()), messages)
    except (KeyboardInterrupt, BrokenPipeError):
        os._exit(130)  # the parent informs the user, and the files on disk are valid


class _Requests:
    """The lines of stdin, read by a thread.

    If stdin is closed before all requests are answered, the parent is gone, and the process exits at once. An orphan
    would keep the lock of its run folder.
    """

    def __init__(self, stdin: int) -> None:
        # Not `sys.stdin`: Python aborts if a thread still reads from it when the process ends.
        self._stream = open(stdin, encoding="utf-8", closefd=False)  # noqa: SIM115
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._received = self._answered = 0
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self._stream:
            self._received += 1
            self._lines.put(line)
        if self._received > self._answered:
            os._exit(130)
        self._lines.put(None)

    def __iter__(self) -> Iterator[str]:
        while (line := self._lines.get()) is not None:
            yield line
            self._answered += 1


def _serve(function: str, requests: Iterable[str], messages: TextIO) -> None:
    """Answer each request with the function. Write answers and reports of progress to `messages`."""
    module, _, name = function.partition(":")
    answer = getattr(import_module(module), name)
    last_report = 0.0

    def send(content: Message) -> None:
        messages.write(json.dumps(content) + "\n")
        messages.flush()

    def report(content: Message) -> None:
        nonlocal last_report
        if time.monotonic() - last_report > _SECONDS_BETWEEN_REPORTS:
            last_report = time.monotonic()
            send({"progress": content})

    for line in requests:
        try:
            message = {"answer": answer(json.loads(line), report)}
        except Exception as error:  # an error in one request must not end the worker
            message = {"failed": describe_error(error)}
        send(message | {"broken": not _gpu_works()})


def _gpu_works() -> bool:
    """Return whether this process can still use its GPU. After some CUDA errors, it cannot."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return True
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


if __name__ == "__main__":
    main()
