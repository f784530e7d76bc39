"""Save and load a run's checkpoints and the states of its clients, so that an interrupted run can continue.

`checkpoint/` has one safetensors file per checkpoint, with the tensors of a `RunState`. Its JSON part has the format
version, the hash of the run's configuration, the round, the state's `meta`, and which client states belong to the
checkpoint. The two newest checkpoints are kept.

`clients/MODEL.client-3.round-17.safetensors` holds one client's state after one round. Every round writes new files,
and no file is ever changed. A checkpoint is written after the client states of its round. A replaced state is removed
once no checkpoint names it. So if the process is killed at any moment, every checkpoint still finds its client states.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple
from urllib.parse import quote, unquote

from torch import Tensor

from fedskew.errors import UserError, other_format
from fedskew.experiment.round.state import ClientStates, Versions
from fedskew.experiment.storage.files import (
    Unreadable,
    in_parallel,
    read_tensors,
    reporting_os_errors,
    write_tensor_files,
    write_tensors,
)
from fedskew.methods.parts import Tensors

_KEPT_CHECKPOINTS = 2
_FORMAT = 2
"""The version of the checkpoint's format. A file of another version is an error. If it were skipped, the run would
start over."""
_STATE_NAME = re.compile(r"(.+)\.client-(\d+)\.round-(\d+)\.safetensors")


class _StateFile(NamedTuple):
    """The file of one client's state after one round."""

    model: str
    client: int
    round: int

    @property
    def name(self) -> str:
        return f"{quote(self.model, safe='')}.client-{self.client}.round-{self.round}.safetensors"


class ClientFiles:
    """The folder of one run's client states."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._run = ""
        """The hash of the run's configuration."""
        self._lock = Lock()  # a thread removes replaced states while the next round writes new ones
        self._replaced: list[tuple[int, _StateFile]] = []
        """Files of replaced states, each with the round that replaced it."""

    def first_missing(self, versions: Versions) -> str | None:
        """Return the name of the first state file in `versions` that does not exist. None if all exist."""
        found = set(self._list_files())
        needed = (
            _StateFile(model, client, round) for model, states in versions.items() for client, round in states.items()
        )
        return next((file.name for file in needed if file not in found), None)

    def resume(self, versions: Versions, run: str) -> StatesOnDisk:
        """Return the states in `versions`. Remove the files of later states, which an interrupted run left behind."""
        self._run, self._replaced = run, []
        for file in self._list_files():
            current = versions.get(file.model, {}).get(file.client, -1)
            if file.round > current:
                self._remove(file)
            elif file.round < current:
                self._replaced.append((current, file))
        return StatesOnDisk(self, versions)

    def read(self, model: str, client: int, round: int) -> Tensors:
        """Read a state that the run needs in order to continue."""
        advice = (
            "delete that file and run again: the run continues from the newest checkpoint that does not need it, "
            "or starts over if every checkpoint needs it"
        )
        return self._read_file(_StateFile(model, client, round), advice)

    def read_newest(self, model: str, client: int, run: str) -> Tensors | None:
        """Read the state that a client of a finished run keeps for a model. None if it keeps none."""
        self._run = run
        rounds = [file.round for file in self._list_files() if (file.model, file.client) == (model, client)]
        advice = "restore that file from a backup, or repeat the run in another folder"
        return self._read_file(_StateFile(model, client, max(rounds)), advice) if rounds else None

    def _read_file(self, file: _StateFile, advice: str) -> Tensors:
        """Read a state. `advice` tells the user what to do if its file is damaged."""
        path = self._path / file.name
        try:
            with reporting_os_errors("read", path):
                tensors, identity = read_tensors(path)
            if identity != self._identity(file):
                raise Unreadable("it belongs to another run, client or round")
        except Unreadable as error:
            raise UserError(f"cannot use {path}: {error}; {advice}") from error
        return tensors

    def write(self, model: str, round: int, states: Mapping[int, Tensors], before: Mapping[int, int]) -> None:
        """Write the clients' states after `round`. `before` has the round of each client's previous state."""
        with reporting_os_errors("write", self._path):
            self._path.mkdir(exist_ok=True)
        files = {_StateFile(model, client, round): state for client, state in states.items()}
        write_tensor_files({self._path / file.name: (state, self._identity(file)) for file, state in files.items()})
        replaced = [(round, _StateFile(model, client, before[client])) for client in states if client in before]
        with self._lock:
            self._replaced += replaced

    def remove_replaced(self, oldest: int) -> None:
        """Remove the states that were replaced in round `oldest` or earlier.

        `oldest` is the round of the oldest checkpoint, so no checkpoint names these states any more.
        """
        with self._lock:
            unneeded = [file for replaced_in, file in self._replaced if replaced_in <= oldest]
            self._replaced = [(replaced_in, file) for replaced_in, file in self._replaced if replaced_in > oldest]
        for file in unneeded:
            self._remove(file)

    def _identity(self, file: _StateFile) -> dict[str, object]:
        return {"run": self._run, **file._asdict()}

    def _list_files(self) -> list[_StateFile]:
        with reporting_os_errors("read", self._path):
            names = [path.name for path in self._path.iterdir()] if self._path.is_dir() else []
        matches = (_STATE_NAME.fullmatch(name) for name in names)
        return [_StateFile(unquote(match[1]), int(match[2]), int(match[3])) for match in matches if match]

    def _remove(self, file: _StateFile) -> None:
        path = self._path / file.name
        with reporting_os_errors("write", path):
            path.unlink(missing_ok=True)


class StatesOnDisk:
    """Client states on disk. Memory holds only the round after which each of them was written."""

    def __init__(self, files: ClientFiles, versions: Versions) -> None:
        self._files = files
        self.versions = versions

    def read(self, model: str, clients: Sequence[int]) -> list[Tensors]:
        rounds = self.versions.get(model, {})
        kept = [client for client in clients if client in rounds]
        states = in_parallel(lambda client: self._files.read(model, client, rounds[client]), kept)
        found = dict(zip(kept, states, strict=True))
        return [found.get(client, {}) for client in clients]

    def write(self, model: str, round: int, states: Mapping[int, Tensors]) -> ClientStates:
        self._files.write(model, round, states, self.versions.get(model, {}))
        rounds = {**self.versions.get(model, {}), **dict.fromkeys(states, round)}
        return StatesOnDisk(self._files, {**self.versions, model: rounds})


class Checkpoint(NamedTuple):
    """A run's state after a round."""

    round: int
    tensors: dict[str, Tensor]
    meta: dict[str, Any]
    clients: Versions
    """The client states that were current at the checkpoint's round."""


class Checkpoints:
    """The checkpoints in one folder. A thread writes them while the run continues."""

    def __init__(self, path: Path, clients: ClientFiles) -> None:
        self._path, self._clients = path, clients
        self._thread: ThreadPoolExecutor | None = None
        self._writing: Future[None] | None = None

    def save(self, checkpoint: Checkpoint, run: str) -> None:
        """Start writing a checkpoint. If that fails, the next call of `save` or `wait` raises the error."""
        self.wait()
        with reporting_os_errors("write", self._path):
            self._path.mkdir(exist_ok=True)
        round, tensors, meta, clients = checkpoint
        copies = {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}
        identity = {"format": _FORMAT, "run": run, "round": round, "meta": dict(meta), "clients": clients}

        def write() -> None:
            write_tensors(self._path / f"round-{round:06d}.safetensors", copies, identity)
            oldest = self._remove_unneeded(round)
            if clients:
                self._clients.remove_replaced(oldest)

        self._thread = self._thread or ThreadPoolExecutor(1)
        self._writing = self._thread.submit(write)

    def wait(self) -> None:
        """Wait until the last checkpoint is written."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def close(self) -> None:
        """Wait until the last checkpoint is written, and end the thread."""
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None

    def load_newest(self, run: str, logged: Collection[int], warn: Callable[[str], None]) -> Checkpoint | None:
        """Load the newest usable checkpoint of this run, and warn about each newer one that is skipped.

        `logged` are the rounds with a row in rounds.jsonl. A checkpoint of any other round, except round 0, is skipped.
        """
        for round, path in sorted(self._list_files().items(), reverse=True):
            try:
                return self._read(path, round, run, logged)
            except Unreadable as error:
                warn(f"checkpoint {path} is skipped: {error}")
        return None

    def _read(self, path: Path, round: int, run: str, logged: Collection[int]) -> Checkpoint:
        """Read a checkpoint. Raise `Unreadable` if the run cannot continue from it."""
        with reporting_os_errors("read", path):
            tensors, identity = read_tensors(path)
        if identity.get("format") != _FORMAT:
            raise other_format(
                f"checkpoint {path}", identity.get("format"), _FORMAT, f"delete {path.parent} to start the run again"
            )
        if identity.get("run") != run or identity.get("round") != round:
            raise Unreadable("it belongs to another run or round")
        if round > 0 and round not in logged:
            raise Unreadable(f"rounds.jsonl has no row of round {round}")
        clients = _parse_versions(identity["clients"])
        if missing := self._clients.first_missing(clients):
            raise Unreadable(f"clients/{missing} is missing")
        return Checkpoint(round, tensors, identity["meta"], clients)

    def _remove_unneeded(self, saved: int) -> int:
        """Keep the checkpoint of round `saved`, which was just written, and the one before it. Remove all others.

        Checkpoints of later rounds were left behind by an interrupted run. Return the oldest kept round.
        """
        found = self._list_files()
        kept = sorted(round for round in found if round <= saved)[-_KEPT_CHECKPOINTS:]
        with reporting_os_errors("write", self._path):
            for round in found.keys() - set(kept):
                found[round].unlink()
        return kept[0]

    def _list_files(self) -> dict[int, Path]:
        """Return the checkpoint files by round."""
        with reporting_os_errors("read", self._path):
            paths = list(self._path.iterdir()) if self._path.is_dir() else []
        matches = ((re.fullmatch(r"round-(\d{6,})\.safetensors", path.name), path) for path in paths)
        return {int(match[1]): path for match, path in matches if match}


def _parse_versions(content: Mapping[str, Mapping[str, int]]) -> Versions:
    """Turn the client ids, which are text in JSON, into integers."""
    return {model: {int(client): round for client, round in states.items()} for model, states in content.items()}
