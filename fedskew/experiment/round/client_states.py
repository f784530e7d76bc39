"""What clients keep between their rounds: control variates, previous models, duals.

A stateful method has one such state per client: far more than a device holds, and most of it idle. States therefore
live off the device and are read when a client is sampled: from the host's memory here, or from the run's folder
(`storage.client_files`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from fedskew.engine import ModelState, on_host
from fedskew.experiment.config import Config
from fedskew.methods import Part, Stage, Tensors, pack, unpack

Versions = Mapping[str, Mapping[int, int]]
"""The round after which each state was written, by model and client."""


class ClientStates(Protocol):
    """The states after some round. They are never changed: a round returns new ones."""

    @property
    def versions(self) -> Versions:
        """Which states exist, and from which round each is."""
        ...

    def read(self, model: str, clients: Sequence[int]) -> list[Tensors]:
        """What each client keeps for this model, on the host; nothing for a client that never took part."""
        ...

    def updated(self, model: str, round: int, states: Mapping[int, Tensors]) -> ClientStates:
        """These states with those of some clients replaced, as of `round`. The tensors are copied."""
        ...


class HeldStates:
    """States in the host's memory."""

    def __init__(self, held: Mapping[str, Mapping[int, tuple[int, Tensors]]] | None = None) -> None:
        self._held = held or {}

    @property
    def versions(self) -> Versions:
        return {
            model: {client: number for client, (number, _) in states.items()} for model, states in self._held.items()
        }

    def read(self, model: str, clients: Sequence[int]) -> list[Tensors]:
        held = self._held.get(model, {})
        return [held[client][1] if client in held else {} for client in clients]

    def updated(self, model: str, round: int, states: Mapping[int, Tensors]) -> ClientStates:
        copies = {client: (round, {name: t.clone() for name, t in state.items()}) for client, state in states.items()}
        return HeldStates({**self._held, model: {**self._held.get(model, {}), **copies}})


def initial_state(parts: Sequence[Part], params: Tensors) -> Tensors:
    """What every client starts with before its first round, on the host."""
    state: Tensors = {}
    for part in parts:
        state |= part.client_state(params)
    return {name: t.cpu() for name, t in state.items()}


def states_after(
    before: ClientStates,
    stage: Stage,
    round: int,
    clients: npt.NDArray[np.int64],
    stacked: Tensors,
    finite: npt.NDArray[np.bool_],
) -> ClientStates:
    """The states after a round, from a stack of what its clients came back with.

    A client whose update is not finite keeps the state that it had.
    """
    rows = np.flatnonzero(finite).tolist()
    if not stacked or not rows:
        return before
    stacked = on_host(stacked)
    kept = {int(clients[row]): {name: t[row] for name, t in stacked.items()} for row in rows}
    return before.updated(stage.model, round, kept)


def model_as_state(model: ModelState) -> Tensors:
    """A model, or a stack of models, as clients that train alone keep it."""
    return pack("params", model.params) | pack("buffers", model.buffers)


def model_from_state(state: Tensors, initial: ModelState, device: torch.device) -> ModelState:
    """The inverse, on `device`. A client that has kept nothing yet has the initial model."""
    own = ModelState(unpack("params", state), unpack("buffers", state)) if state else initial
    return ModelState(
        {n: t.to(device) for n, t in own.params.items()}, {n: t.to(device) for n, t in own.buffers.items()}
    )


def state_bytes(stage: Stage, parts: Sequence[Part], model: ModelState) -> int:
    """The size of one client's state in a stage with these parts."""
    state = initial_state(parts, model.params)
    if stage.cohort == "alone":
        state |= model_as_state(model)
    return sum(t.nbytes for t in state.values())


def most_states(config: Config, clients: int, rounds: int) -> int:
    """The largest number of states on disk after so many rounds, with older ones that checkpoints still name."""
    per_round = config.clients_per_round or clients
    replaced = 2 * config.checkpoint_every * per_round  # newer states exist, but two checkpoints are kept
    return min(rounds * per_round, clients + replaced)
