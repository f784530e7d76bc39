"""The state between rounds: models, the position in the schedule, and what clients keep.

A stateful method keeps one state per client, such as control variates or the previous model. All states together may
not fit on a device, and a round needs only those of its clients. So a state is read when its client is sampled, from
the host's memory (here) or from the run's folder (`storage.checkpoints`).
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
from fedskew.methods.parts import collect
from fedskew.methods.personal import Personal, shared_tensors
from fedskew.methods.stages import Notes

Versions = Mapping[str, Mapping[int, int]]
"""The round after which each client's newest state was written: model name → client id → round."""


class ClientStates(Protocol):
    """The clients' states after a round. They are immutable: `write` returns new ones."""

    @property
    def versions(self) -> Versions:
        """The round after which each state was written."""
        ...

    def read(self, model: str, clients: Sequence[int]) -> list[Tensors]:
        """Read what each client keeps for this model, on the host. It is empty for a client that keeps nothing yet."""
        ...

    def write(self, model: str, round: int, states: Mapping[int, Tensors]) -> ClientStates:
        """Store the states of some clients after `round`, as copies. Return all states, with these replaced."""
        ...


class StatesInMemory:
    """Client states in the host's memory."""

    def __init__(self, held: Mapping[str, Mapping[int, tuple[int, Tensors]]] | None = None) -> None:
        """Take the states by model and client, each with the round after which it was written."""
        self._held = held or {}

    @property
    def versions(self) -> Versions:
        return {model: {client: round for client, (round, _) in states.items()} for model, states in self._held.items()}

    def read(self, model: str, clients: Sequence[int]) -> list[Tensors]:
        held = self._held.get(model, {})
        return [held[client][1] if client in held else {} for client in clients]

    def write(self, model: str, round: int, states: Mapping[int, Tensors]) -> ClientStates:
        copies = {client: (round, {name: t.clone() for name, t in state.items()}) for client, state in states.items()}
        return StatesInMemory({**self._held, model: {**self._held.get(model, {}), **copies}})


@dataclass(frozen=True)
class ServerModel:
    """A model on the server: the global one, or another one that a stage trains."""

    model: ModelState
    rounds: int = 0
    """Number of rounds in which the model was trained."""
    server_state: Tensors = field(default_factory=dict)
    """What the method keeps on the server for this model, such as momentum."""


@dataclass(frozen=True)
class RunState:
    """All models of a run, its position in the schedule, and what its clients keep."""

    models: Mapping[str, ServerModel]
    round: int = 0
    """Number of finished rounds, over all stages."""
    stage: int = 0
    """Index of the current stage."""
    stage_round: int = 0
    """Number of finished rounds in the current stage."""
    notes: Notes = field(default_factory=dict)
    """Decisions of the method between stages, such as PKD's groups."""
    survey: Survey | None = None
    """What clients reported at the end of this round, if a stage surveyed them. The next round's state drops it."""
    clients: ClientStates = field(default_factory=StatesInMemory)

    @property
    def model(self) -> ModelState:
        """The global model."""
        return self.models["global"].model

    def with_model(self, name: str, model: ServerModel) -> RunState:
        return replace(self, models={**self.models, name: model})

    def meta(self) -> dict[str, Any]:
        """The JSON part of a checkpoint, without the clients' states. Its key for the models is `trainees`."""
        return {
            "round": self.round,
            "stage": self.stage,
            "stage_round": self.stage_round,
            "notes": self.notes,
            "trainees": {name: {"rounds": m.rounds} for name, m in self.models.items()},
        }

    def tensors(self) -> Tensors:
        """The tensors of a checkpoint: models and server states, by unique names."""
        flat: Tensors = {}
        for name, m in self.models.items():
            flat |= pack(f"{name}:params", m.model.params) | pack(f"{name}:buffers", m.model.buffers)
            flat |= pack(f"{name}:server", m.server_state)
        return flat

    @classmethod
    def restore(
        cls, tensors: Tensors, meta: Mapping[str, Any], clients: ClientStates, device: torch.device
    ) -> RunState:
        """Restore a state from its `tensors` and `meta`."""
        # The order is fixed, so that sums over the tensors have the same bits.
        placed = {name: t.to(device) for name, t in sorted(tensors.items())}
        models = {
            name: ServerModel(
                model=ModelState(unpack(f"{name}:params", placed), unpack(f"{name}:buffers", placed)),
                rounds=saved["rounds"],
                server_state=unpack(f"{name}:server", placed),
            )
            for name, saved in meta["trainees"].items()
        }
        position = (meta["round"], meta["stage"], meta["stage_round"])
        return cls(models, *position, notes=dict(meta["notes"]), clients=clients)


SurveyClients = Callable[[Stage, RunState], Survey]
"""Collects what the clients report at the end of a stage that surveys them."""


class RunStages:
    """The stages of one run."""

    def __init__(self, method: Method, config: Config) -> None:
        self._method, self._config = method, config
        self._known: tuple[Notes, list[Stage]] | None = None

    def known(self, state: RunState) -> list[Stage]:
        """The stages known so far. A survey may add others."""
        if self._known is None or self._known[0] != state.notes:
            stages = self._method.stages(self._config.rounds, self._config.local_epochs, state.notes)
            self._known = state.notes, stages
        return self._known[1]

    def next(self, state: RunState) -> Stage | None:
        """The stage of the next round. None after the last round."""
        stages = self.known(state)
        return stages[state.stage] if state.stage < len(stages) else None

    def rounds_left(self, state: RunState) -> int:
        """Number of remaining rounds, in the stages known so far."""
        return sum(stage.rounds for stage in self.known(state)[state.stage :]) - state.stage_round

    def enter_next(self, state: RunState, survey_clients: SurveyClients) -> RunState:
        """Move past the stages with no rounds left, and add the conclusions of their surveys to the notes."""
        state = replace(state, survey=None)
        while (stage := self.next(state)) is not None and state.stage_round >= stage.rounds:
            if stage.survey:
                survey = survey_clients(stage, state)
                state = replace(state, notes={**state.notes, **self._method.conclude(stage, survey)}, survey=survey)
            state = replace(state, stage=state.stage + 1, stage_round=0)
        return state


def initial_state(
    parts: Sequence[Part],
    params: Tensors,
    personal: Personal | None,
    personal_names: frozenset[str],
    initial: ModelState,
) -> Tensors:
    """The state of every client before its first round, on the host. Personal tensors start at their initial values."""
    state = {name: t.cpu() for name, t in collect(parts, "client_state", params).items()}
    if personal is None:
        return state
    from fedskew.engine.personal_training import initial_personal

    return shared_tensors(state, personal_names) | initial_personal(personal, personal_names, initial)


def states_after(
    before: ClientStates,
    stage: Stage,
    round: int,
    clients: npt.NDArray[np.int64],
    stacked: Tensors,
    finite: npt.NDArray[np.bool_],
) -> ClientStates:
    """Update the clients' states after a round, from a stack of their new states.

    A client with an update that is not finite keeps its previous state.
    """
    rows = np.flatnonzero(finite).tolist()
    if not stacked or not rows:
        return before
    stacked = on_host(stacked)
    kept = {int(clients[row]): {name: t[row] for name, t in stacked.items()} for row in rows}
    return before.write(stage.model, round, kept)


def model_as_state(model: ModelState) -> Tensors:
    """Turn a model, or a stack of models, into the state of clients that train alone."""
    return pack("params", model.params) | pack("buffers", model.buffers)


def model_from_state(state: Tensors, initial: ModelState, device: torch.device) -> ModelState:
    """Turn what `model_as_state` returned into a model on `device`. An empty state gives the initial model."""
    model = ModelState(unpack("params", state), unpack("buffers", state)) if state else initial
    return ModelState(
        {n: t.to(device) for n, t in model.params.items()}, {n: t.to(device) for n, t in model.buffers.items()}
    )


def state_bytes(stage: Stage, state: Tensors, model: ModelState) -> int:
    """The size in bytes of one client's state. `state` is the state before the client's first round.

    If clients train alone, the size of the client's model is added.
    """
    if stage.cohort == "alone":
        state = state | model_as_state(model)
    return sum(t.nbytes for t in state.values())


def max_states_on_disk(config: Config, clients: int, rounds: int, present: int) -> int:
    """The largest number of client states on disk during the next `rounds` rounds, if `present` are there now."""
    per_round = config.clients_per_round or clients
    replaced = 2 * config.checkpoint_every * per_round  # older states that the two kept checkpoints may need
    return min(present + rounds * per_round, clients + replaced)
