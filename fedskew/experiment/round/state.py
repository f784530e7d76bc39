"""Where a run stands after a round: everything that the next round depends on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from fedskew.engine.model.network import ModelState
from fedskew.experiment.round.client_states import ClientStates, HeldStates
from fedskew.methods.parts import Tensors, pack, unpack
from fedskew.methods.stages import Notes, Survey


@dataclass(frozen=True)
class Trainee:
    """A model in training, with the state that belongs to it."""

    model: ModelState
    rounds: int = 0
    """How many rounds it was trained."""
    server: Tensors = field(default_factory=dict)


@dataclass(frozen=True)
class RunState:
    """All models of a run, and its place in the schedule."""

    trainees: Mapping[str, Trainee]
    round: int = 0
    """Rounds done, over all stages."""
    stage: int = 0
    stage_round: int = 0
    notes: Notes = field(default_factory=dict)
    survey: Survey | None = None
    """What clients told at the end of this very round, if they were asked: it is recorded once, and not kept."""
    clients: ClientStates = field(default_factory=HeldStates)
    """What each client that took part keeps, by model."""

    @property
    def model(self) -> ModelState:
        """The global model."""
        return self.trainees["global"].model

    def with_trainee(self, name: str, trainee: Trainee) -> RunState:
        return replace(self, trainees={**self.trainees, name: trainee})

    def meta(self) -> dict[str, Any]:
        """What is not tensors, as JSON, but for the clients' states."""
        return {
            "round": self.round,
            "stage": self.stage,
            "stage_round": self.stage_round,
            "notes": self.notes,
            "trainees": {name: {"rounds": t.rounds} for name, t in self.trainees.items()},
        }

    def tensors(self) -> Tensors:
        """The models' and the server's tensors under one flat naming."""
        flat: Tensors = {}
        for name, t in self.trainees.items():
            flat |= pack(f"{name}:params", t.model.params) | pack(f"{name}:buffers", t.model.buffers)
            flat |= pack(f"{name}:server", t.server)
        return flat

    @classmethod
    def restored(
        cls, tensors: Tensors, meta: Mapping[str, Any], clients: ClientStates, device: torch.device
    ) -> RunState:
        """The inverse of `tensors` and `meta`."""
        placed = {name: t.to(device) for name, t in sorted(tensors.items())}  # norms add up in the same order
        trainees = {
            name: Trainee(
                model=ModelState(unpack(f"{name}:params", placed), unpack(f"{name}:buffers", placed)),
                rounds=about["rounds"],
                server=unpack(f"{name}:server", placed),
            )
            for name, about in meta["trainees"].items()
        }
        place = (meta["round"], meta["stage"], meta["stage_round"])
        return cls(trainees, *place, notes=dict(meta["notes"]), clients=clients)
