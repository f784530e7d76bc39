"""The state between rounds: models, the place in the schedule, and what clients keep.

A stateful method keeps one state per client (control variates, previous models, duals): far more than a device holds,
and most of it idle. Client states therefore live off the device and are read when a client is sampled: from the host's
memory here, or from the run's folder (`storage.checkpoints`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from fedskew.engine import ModelState, on_host
from fedskew.experiment.config import Config
from fedskew.methods import Method, Part, Stage, Survey, Tensors, pack, unpack
from fedskew.methods.stages import Notes

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


@dataclass(frozen=True)
class ServerModel:
    """A model that the server holds: the global one, or one that a stage of the method trains beside it."""

    model: ModelState
    rounds: int = 0
    """Rounds in which it was trained."""
    server_state: Tensors = field(default_factory=dict)
    """What the method's server side keeps for it, such as momentum."""


@dataclass(frozen=True)
class RunState:
    """All models of a run, its place in the schedule, and what its clients keep."""

    models: Mapping[str, ServerModel]
    round: int = 0
    """Rounds done, over all stages."""
    stage: int = 0
    stage_round: int = 0
    notes: Notes = field(default_factory=dict)
    survey: Survey | None = None
    """What clients reported at the end of this round, if a stage surveyed them. It is recorded once and not kept."""
    clients: ClientStates = field(default_factory=HeldStates)

    @property
    def model(self) -> ModelState:
        """The global model."""
        return self.models["global"].model

    def with_model(self, name: str, model: ServerModel) -> RunState:
        return replace(self, models={**self.models, name: model})

    def meta(self) -> dict[str, Any]:
        """The part of a checkpoint that is JSON, without the clients' states."""
        return {
            "round": self.round,
            "stage": self.stage,
            "stage_round": self.stage_round,
            "notes": self.notes,
            "trainees": {name: {"rounds": m.rounds} for name, m in self.models.items()},
        }

    def tensors(self) -> Tensors:
        """The part of a checkpoint that is tensors: models and server states under one flat naming."""
        flat: Tensors = {}
        for name, m in self.models.items():
            flat |= pack(f"{name}:params", m.model.params) | pack(f"{name}:buffers", m.model.buffers)
            flat |= pack(f"{name}:server", m.server_state)
        return flat

    @classmethod
    def restored(
        cls, tensors: Tensors, meta: Mapping[str, Any], clients: ClientStates, device: torch.device
    ) -> RunState:
        """The inverse of `tensors` and `meta`."""
        placed = {name: t.to(device) for name, t in sorted(tensors.items())}  # norms add up in the same order
        models = {
            name: ServerModel(
                model=ModelState(unpack(f"{name}:params", placed), unpack(f"{name}:buffers", placed)),
                rounds=about["rounds"],
                server_state=unpack(f"{name}:server", placed),
            )
            for name, about in meta["trainees"].items()
        }
        place = (meta["round"], meta["stage"], meta["stage_round"])
        return cls(models, *place, notes=dict(meta["notes"]), clients=clients)


AskClients = Callable[[Stage, RunState], Survey]
"""Collects what the clients report at the end of a stage that surveys them."""


class RunStages:
    """The stages of one run."""

    def __init__(self, method: Method, config: Config) -> None:
        self._method, self._config = method, config
        self._known: tuple[Notes, list[Stage]] | None = None

    def known(self, state: RunState) -> list[Stage]:
        """The stages known so far; a survey may add others."""
        if self._known is None or self._known[0] != state.notes:
            stages = self._method.stages(self._config.rounds, self._config.local_epochs, state.notes)
            self._known = state.notes, stages
        return self._known[1]

    def next(self, state: RunState) -> Stage | None:
        """The stage of the next round; None after the last round."""
        stages = self.known(state)
        return stages[state.stage] if state.stage < len(stages) else None

    def rounds_left(self, state: RunState) -> int:
        """Rounds still to come in the stages known so far."""
        return sum(stage.rounds for stage in self.known(state)[state.stage :]) - state.stage_round

    def enter_next(self, state: RunState, ask_clients: AskClients) -> RunState:
        """Leave the stages whose rounds are done, with what their surveys concluded."""
        state = replace(state, survey=None)
        while (stage := self.next(state)) is not None and state.stage_round >= stage.rounds:
            if stage.survey:
                survey = ask_clients(stage, state)
                state = replace(state, notes={**state.notes, **self._method.conclude(stage, survey)}, survey=survey)
            state = replace(state, stage=state.stage + 1, stage_round=0)
        return state


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
