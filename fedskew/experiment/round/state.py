"""Where a run stands after a round, and its way through the stages of its method."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from fedskew.engine import ModelState
from fedskew.experiment.config import Config
from fedskew.experiment.round.client_states import ClientStates, HeldStates
from fedskew.methods import Method, Stage, Survey, Tensors, pack, unpack
from fedskew.methods.stages import Notes


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

    def known(self, state: RunState) -> list[Stage]:
        """The stages known so far; a survey may add others."""
        return self._method.stages(self._config.rounds, self._config.local_epochs, state.notes)

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
