"""Client states in a run's folder: `clients/MODEL.client-3.round-17.safetensors`, one file per client and round.

A file is never changed. A round writes new files, and then its checkpoint, which names the states that belong to it.
A state that a newer one has replaced is removed once no kept checkpoint names it. So a kill at any moment leaves every
kept checkpoint with the states of its own round.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import Lock
from typing import NamedTuple
from urllib.parse import quote, unquote

from fedskew.errors import UserError
from fedskew.experiment.round.state import ClientStates, Versions
from fedskew.experiment.storage.atomic import at_once, reporting_os_errors
from fedskew.experiment.storage.tensors import Unreadable, read_tensors, write_files
from fedskew.methods.parts import Tensors

_NAME = re.compile(r"(.+)\.client-(\d+)\.round-(\d+)\.safetensors")


class _File(NamedTuple):
    """The state that a file holds."""

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
        self._lock = Lock()  # a thread drops replaced states while the next round writes new ones
        self._replaced: list[tuple[int, _File]] = []
        """Files that a newer state has replaced, each with the round that replaced it."""

    def missing(self, versions: Versions) -> str | None:
        """The name of a file that should exist and does not."""
        found = set(self._found())
        named = (_File(model, client, round) for model, states in versions.items() for client, round in states.items())
        return next((file.name for file in named if file not in found), None)

    def resume(self, versions: Versions, run: str) -> FiledStates:
        """The states with these versions. Later ones, from an abandoned timeline, are removed."""
        self._run, self._replaced = run, []
        for file in self._found():
            current = versions.get(file.model, {}).get(file.client, -1)
            if file.round > current:
                self._remove(file)
            elif file.round < current:
                self._replaced.append((current, file))
        return FiledStates(self, versions)

    def read(self, model: str, client: int, round: int) -> Tensors:
        file = _File(model, client, round)
        path = self._path / file.name
        try:
            with reporting_os_errors("read", path):
                tensors, identity = read_tensors(path)
            if identity != self._identity(file):
                raise Unreadable("it belongs to another run")
        except Unreadable as error:
            raise UserError(
                f"cannot use {path}: {error}; delete that file to go on from an older checkpoint, or to start again"
            ) from error
        return tensors

    def write(self, model: str, round: int, states: Mapping[int, Tensors], before: Mapping[int, int]) -> None:
        """Write the states of a round; `before` are the rounds of those that they replace."""
        with reporting_os_errors("write", self._path):
            self._path.mkdir(exist_ok=True)
        files = {_File(model, client, round): state for client, state in states.items()}
        write_files({self._path / file.name: (state, self._identity(file)) for file, state in files.items()})
        replaced = [(round, _File(model, client, before[client])) for client in states if client in before]
        with self._lock:
            self._replaced += replaced

    def drop_replaced(self, oldest: int) -> None:
        """Remove states that no checkpoint from round `oldest` on names."""
        with self._lock:
            idle = [file for number, file in self._replaced if number <= oldest]
            self._replaced = [(number, file) for number, file in self._replaced if number > oldest]
        for file in idle:
            self._remove(file)

    def _identity(self, file: _File) -> dict[str, object]:
        return {"run": self._run, **file._asdict()}

    def _found(self) -> list[_File]:
        with reporting_os_errors("read", self._path):
            names = [path.name for path in self._path.iterdir()] if self._path.is_dir() else []
        matches = (_NAME.fullmatch(name) for name in names)
        return [_File(unquote(match[1]), int(match[2]), int(match[3])) for match in matches if match]

    def _remove(self, file: _File) -> None:
        path = self._path / file.name
        with reporting_os_errors("write", path):
            path.unlink(missing_ok=True)


class FiledStates:
    """States on disk; only their rounds are in memory."""

    def __init__(self, files: ClientFiles, versions: Versions) -> None:
        self._files = files
        self.versions = versions

    def read(self, model: str, clients: Sequence[int]) -> list[Tensors]:
        numbers = self.versions.get(model, {})
        kept = [client for client in clients if client in numbers]
        states = at_once(lambda client: self._files.read(model, client, numbers[client]), kept)
        found = dict(zip(kept, states, strict=True))
        return [found.get(client, {}) for client in clients]

    def updated(self, model: str, round: int, states: Mapping[int, Tensors]) -> ClientStates:
        self._files.write(model, round, states, self.versions.get(model, {}))
        rounds = {**self.versions.get(model, {}), **dict.fromkeys(states, round)}
        return FiledStates(self._files, {**self.versions, model: rounds})
