"""Checkpoints: the states from which a run can go on, as safetensors files in `checkpoint/`.

A file holds the tensors of a `RunState`, and as JSON its format version, the run it belongs to, its round, the state's
`meta`, and which client states belong to it. The last two are kept.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from fedskew.experiment.round.state import Versions
from fedskew.experiment.storage.atomic import reporting_os_errors
from fedskew.experiment.storage.client_files import ClientFiles
from fedskew.experiment.storage.tensors import Unreadable, read_tensors, write_tensors

_KEPT = 2
_FORMAT = 2


class Checkpoint(NamedTuple):
    """The state after a round."""

    round: int
    tensors: dict[str, Tensor]
    meta: dict[str, Any]
    clients: Versions
    """The client states that belong to it."""


class Checkpoints:
    """The checkpoints in one folder. They are written by a thread, while the run goes on."""

    def __init__(self, path: Path, clients: ClientFiles) -> None:
        self._path, self._clients = path, clients
        self._thread: ThreadPoolExecutor | None = None
        self._writing: Future[None] | None = None

    def save(self, checkpoint: Checkpoint, run: str) -> None:
        """Begin to write a checkpoint. An error is raised by the next call of `save` or `wait`."""
        self.wait()
        with reporting_os_errors("write", self._path):
            self._path.mkdir(exist_ok=True)
        number, tensors, meta, clients = checkpoint
        held = {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}
        identity = {"format": _FORMAT, "run": run, "round": number, "meta": dict(meta), "clients": clients}

        def write() -> None:
            write_tensors(self._path / f"round-{number:06d}.safetensors", held, identity)
            oldest = self._drop_others(number)
            if clients:
                self._clients.drop_replaced(oldest)

        self._thread = self._thread or ThreadPoolExecutor(1)
        self._writing = self._thread.submit(write)

    def wait(self) -> None:
        """Wait until the last checkpoint is written."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def close(self) -> None:
        """End the thread when its checkpoint is written."""
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None

    def newest(self, run: str, rounds: Collection[int], warn: Callable[[str], None]) -> Checkpoint | None:
        """The newest checkpoint of this run that is whole and has its row among `rounds`."""
        for number, path in sorted(self._found().items(), reverse=True):
            try:
                return self._read(path, number, run, rounds)
            except Unreadable as error:
                warn(f"checkpoint {path} is skipped: {error}")
        return None

    def _read(self, path: Path, number: int, run: str, rounds: Collection[int]) -> Checkpoint:
        with reporting_os_errors("read", path):
            tensors, identity = read_tensors(path)
        if identity.get("format") != _FORMAT:
            raise Unreadable("another version of fedskew wrote it")
        if identity.get("run") != run or identity.get("round") != number:
            raise Unreadable("it belongs to another run")
        if number > 0 and number not in rounds:
            raise Unreadable(f"rounds.jsonl has no row of round {number}")
        clients = _numbered(identity["clients"])
        if missing := self._clients.missing(clients):
            raise Unreadable(f"clients/{missing} is missing")
        return Checkpoint(number, tensors, identity["meta"], clients)

    def _drop_others(self, newest: int) -> int:
        """Keep the last two up to `newest` and return the oldest of them. Later ones are from an abandoned timeline."""
        found = self._found()
        kept = sorted(number for number in found if number <= newest)[-_KEPT:]
        with reporting_os_errors("write", self._path):
            for number in found.keys() - set(kept):
                found[number].unlink()
        return kept[0]

    def _found(self) -> dict[int, Path]:
        with reporting_os_errors("read", self._path):
            paths = list(self._path.iterdir()) if self._path.is_dir() else []
        matches = ((re.fullmatch(r"round-(\d{6,})\.safetensors", path.name), path) for path in paths)
        return {int(match[1]): path for match, path in matches if match}


def _numbered(content: Mapping[str, Mapping[str, int]]) -> Versions:
    """JSON turned the clients' numbers into text."""
    return {model: {int(client): number for client, number in states.items()} for model, states in content.items()}
