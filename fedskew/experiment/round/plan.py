"""Plan a round: its clients, the model that they start from, the samples that they train on, and what else they get."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from fedskew.data.federation import Federation
from fedskew.engine import Assignment, LocalTraining, ModelState, RoundKey, RoundWork
from fedskew.experiment.config import Config
from fedskew.experiment.round.runtime import ModelRuntime
from fedskew.experiment.round.sampler import ClientSampler, Participants, model_number
from fedskew.experiment.round.state import ClientStates, RunState, ServerModel, initial_state, model_from_state
from fedskew.methods import Method, Part, Stage, Tensors
from fedskew.methods.parts import collect
from fedskew.methods.personal import shared_tensors


@dataclass(frozen=True)
class RoundPlan:
    """A round that is ready to be trained."""

    before: RunState
    """The run's state before the round."""
    stage: Stage
    parts: tuple[Part, ...]
    """What `RoundPlanner.parts` returns for the stage."""
    start: ServerModel
    """The model that the round starts from."""
    participants: Participants
    runtime: ModelRuntime
    work: RoundWork
    """The input of the engine."""

    @property
    def clients(self) -> npt.NDArray[np.int64]:
        return self.participants.clients

    @property
    def ends_stage(self) -> bool:
        """Whether this is the last round of its stage."""
        return self.before.stage_round + 1 >= self.stage.rounds

    @property
    def federation(self) -> Federation:
        """The clients, with only the samples that this stage uses."""
        return self.participants.federation


def sample_counts(parts: Sequence[Part], sizes: npt.NDArray[np.int64]) -> list[Tensors]:
    """The entry `sample_count` of each client's state. Nothing if no part has `needs_sample_count`."""
    if not any(part.needs_sample_count for part in parts):
        return [{}] * len(sizes)
    return [{"sample_count": torch.tensor(size)} for size in sizes.tolist()]


class RoundPlanner:
    """Plans the rounds of one run."""

    def __init__(
        self,
        federation: Federation,
        method: Method,
        config: Config,
        initial: ModelState,
        personal_names: frozenset[str] = frozenset(),
    ) -> None:
        """`personal_names` are the names of the tensors that stay on the clients."""
        self._method, self._config, self._initial, self._personal_names = method, config, initial, personal_names
        self._sampler = ClientSampler(federation, config)

    def parts(self, stage: Stage) -> tuple[Part, ...]:
        """The members of the stage's objective and of the method's solver, weighting and server rule."""
        method = self._method_in(stage)
        others = (part for part in (method.solver, method.weighting, method.server) if part is not None)
        return (*stage.objective.members, *(member for part in others for member in part.members))

    def _method_in(self, stage: Stage) -> Method:
        """The method with the parts that the stage uses (`Method.for_stage`)."""
        is_usual = stage.server is None and stage.local_epochs != 0
        return self._method if is_usual else self._method.for_stage(stage)

    def new_model(self, model: ModelState) -> ServerModel:
        """Start a server model from this model, with the method's initial server state."""
        kept = collect(self._method.members, "server_state", model.params)
        return ServerModel(
            model, server_state=shared_tensors(kept, self._personal_names) if self._personal_names else kept
        )

    def plan(self, stage: Stage, state: RunState, runtime: ModelRuntime) -> RoundPlan:
        """Plan the round after `state`. `stage` is the round's stage."""
        parts = self.parts(stage)
        method = self._method_in(stage)
        start = state.models.get(stage.model) or self.new_model(state.model)
        if stage.concatenates and not state.stage_round:
            start = self.new_model(runtime.network.state())
        if stage.server is not None:
            fresh = collect(stage.server.members, "server_state", start.model.params)
            start = replace(start, server_state={**fresh, **start.server_state})
        participants = self._sampler.sample(stage, start.rounds)
        work = RoundWork(
            objective=stage.objective,
            solver=method.solver,
            server=method.server,
            weighting=method.weighting,
            personal=self._method.personal,
            personal_names=self._personal_names,
            sent=start.model,
            downlink=collect(parts, "downlink", start.server_state),
            companions={name: m.model for name, m in state.models.items()},
            assignments=self._assignments(stage, parts, start, participants, state.clients),
            local=local_training(self._config, stage, start.rounds),
            key=RoundKey(self._config.seed, model_number(stage.model), start.rounds),
        )
        return RoundPlan(state, stage, parts, start, participants, runtime, work)

    def _assignments(
        self,
        stage: Stage,
        parts: Sequence[Part],
        start: ServerModel,
        participants: Participants,
        client_states: ClientStates,
    ) -> list[Assignment]:
        fresh = self.initial_state(parts, start.model)
        clients, counts = participants.clients.tolist(), participants.federation.label_counts
        train_alone = stage.cohort == "alone"
        states = client_states.read(stage.model, clients) if fresh or train_alone else [{}] * len(clients)
        counted = sample_counts(parts, participants.sizes)
        own_models = self._own_models(states) if train_alone else [None] * len(clients)
        # If a client trains alone, the state that it kept is its model, and the states of the parts start afresh.
        return [
            Assignment(client, samples, counts[client], {**(fresh if model else {**fresh, **state}), **count}, model)
            for client, samples, state, model, count in zip(
                clients, participants.samples, states, own_models, counted, strict=True
            )
        ]

    def initial_state(self, parts: Sequence[Part], model: ModelState) -> Tensors:
        """The state of a client before its first round with this model, on the host."""
        return initial_state(parts, model.params, self._method.personal, self._personal_names, self._initial)

    def _own_models(self, states: Sequence[Tensors]) -> list[ModelState | None]:
        """The models from which clients that train alone continue, on the host."""
        host = torch.device("cpu")
        return [model_from_state(state, self._initial, host) for state in states]


def local_training(config: Config, stage: Stage, rounds: int) -> LocalTraining:
    """The settings of local training in a stage, after this number of rounds of its model."""
    epochs = config.local_epochs if stage.local_epochs is None else stage.local_epochs
    return LocalTraining(
        epochs=1 if stage.local_batches else epochs,  # one pass over the drawn batches
        batch_size=config.batch_size,
        lr=config.lr * config.lr_decay**rounds,
        momentum=config.momentum,
        weight_decay=config.weight_decay,
        clip_norm=config.clip_norm,
        optimizer=config.optimizer,
        batches=config.batches,
        example_clip=config.example_clip,
        example_noise=config.example_noise,
    )
