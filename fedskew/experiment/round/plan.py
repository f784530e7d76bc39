"""The plan of a round: who takes part, from which model, on which samples, with what beside the model."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from fedskew.data.federation import Federation
from fedskew.engine import Assignment, LocalTraining, ModelState, RoundKey, RoundWork
from fedskew.errors import UserError
from fedskew.experiment.config import Config
from fedskew.experiment.round.runtime import ModelRuntime
from fedskew.experiment.round.state import ClientStates, RunState, ServerModel, initial_state, model_from_state
from fedskew.methods import Method, Part, Stage, Tensors
from fedskew.randomness import sample

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Participants:
    """The clients of a round, in order, with the samples that each trains on."""

    federation: Federation
    clients: IntArray
    samples: tuple[IntArray, ...]
    """Training samples of each participant in this round."""
    population: int
    """Number of clients that the participants were drawn from."""

    @property
    def sizes(self) -> IntArray:
        """Number of samples that each participant holds, including those it does not train on in this round."""
        return self.federation.sizes[self.clients]


class ClientSampler:
    """Draws the clients of each round. It does not look at the method, so that all methods meet the same clients."""

    def __init__(self, federation: Federation, config: Config) -> None:
        self._federation, self._config = federation, config
        self._restricted: dict[tuple[int, ...], Federation] = {}

    def sample(self, stage: Stage, model_round: int) -> Participants:
        """Draw the participants of a model's round."""
        federation = self._with_labels(stage.labels)
        clients = self._draw(stage, model_round, federation)
        if stage.cohort == "pooled":
            return self._pool(stage, model_round, clients)
        indices = federation.indices
        samples = tuple(
            samples_of_round(indices[client], stage, model_round, client, self._config) for client in clients.tolist()
        )
        population = len(self._federation.indices) if stage.clients is None else len(stage.clients)
        return Participants(federation, clients, samples, population)

    def _with_labels(self, labels: tuple[int, ...] | None) -> Federation:
        if labels is None:
            return self._federation
        if labels not in self._restricted:
            self._restricted[labels] = self._federation.restrict(labels)
        return self._restricted[labels]

    def _draw(self, stage: Stage, model_round: int, federation: Federation) -> IntArray:
        eligible, per_round = federation.populated, self._config.clients_per_round
        if stage.clients is not None:
            in_stage = np.isin(eligible, stage.clients)
            per_round = None if per_round is None else max(1, round(per_round * in_stage.sum() / len(eligible)))
            eligible = eligible[in_stage]
        if not len(eligible):
            raise UserError(f"stage {stage.name!r} has no client with samples of classes {stage.labels}")
        number = min(per_round or len(eligible), len(eligible))
        key = (self._config.seed, "clients", model_number(stage.model), model_round)
        return np.sort(eligible[sample(number, len(eligible), *key)])

    def _pool(self, stage: Stage, model_round: int, drawn: IntArray) -> Participants:
        """One client with as many samples as the drawn clients hold together, taken anew from all clients."""
        everything = np.concatenate(self._federation.indices)
        budget = int(self._federation.sizes[drawn].sum())
        key = (self._config.seed, "pooled samples", model_number(stage.model), model_round)
        pool = everything[np.sort(sample(budget, len(everything), *key))]
        federation = Federation(self._federation.dataset, (pool,), {"name": "pooled"}, self._config.seed)
        return Participants(federation, np.zeros(1, np.int64), (pool,), 1)


def samples_of_round(own: IntArray, stage: Stage, model_round: int, client: int, config: Config) -> IntArray:
    """The samples that a client trains on in a round: all of its own, or some batches, drawn anew each round."""
    if stage.local_batches is None or len(own) <= stage.local_batches * config.batch_size:
        return own
    key = (config.seed, "batches", model_number(stage.model), model_round, client)
    some: IntArray = own[sample(stage.local_batches * config.batch_size, len(own), *key)]
    return some


def model_number(model: str) -> int:
    """The number that keys a model's randomness. It is 0 for the global model, in every method."""
    return 0 if model == "global" else zlib.crc32(model.encode())


@dataclass(frozen=True)
class RoundPlan:
    """A round that is ready to be trained."""

    before: RunState
    stage: Stage
    parts: tuple[Part, ...]
    """The method's parts in this stage."""
    start: ServerModel
    """The model that the round starts from."""
    participants: Participants
    runtime: ModelRuntime
    work: RoundWork
    """What the engine is given."""

    @property
    def clients(self) -> npt.NDArray[np.int64]:
        return self.participants.clients

    @property
    def federation(self) -> Federation:
        """The clients with the samples that count in this stage."""
        return self.participants.federation


class RoundPlanner:
    """Plans the rounds of one run."""

    def __init__(self, federation: Federation, method: Method, config: Config, initial: ModelState) -> None:
        self._method, self._config, self._initial = method, config, initial
        self._sampler = ClientSampler(federation, config)

    def parts(self, stage: Stage) -> tuple[Part, ...]:
        """The method's parts in a stage."""
        return (*stage.objective.members, *self._method.solver.members, *self._method.server.members)

    def new_model(self, model: ModelState) -> ServerModel:
        """A model before its first round."""
        state: Tensors = {}
        for part in self._method.members:
            state |= part.server_state(model.params)
        return ServerModel(model, server_state=state)

    def plan(self, stage: Stage, state: RunState, runtime: ModelRuntime) -> RoundPlan:
        """Plan the next round, which belongs to this stage."""
        parts = self.parts(stage)
        start = state.models.get(stage.model) or self.new_model(state.model)
        if stage.concatenates and not state.stage_round:
            start = self.new_model(runtime.network.state())
        participants = self._sampler.sample(stage, start.rounds)
        downlink: Tensors = {}
        for part in parts:
            downlink |= part.downlink(start.server_state)
        work = RoundWork(
            objective=stage.objective,
            solver=self._method.solver,
            server=self._method.server,
            sent=start.model,
            downlink=downlink,
            companions={name: m.model for name, m in state.models.items()},
            assignments=self._assignments(stage, parts, start, participants, state.clients),
            local=self._local_training(stage, start),
            key=RoundKey(self._config.seed, model_number(stage.model), start.rounds),
        )
        return RoundPlan(state, stage, parts, start, participants, runtime, work)

    def _local_training(self, stage: Stage, start: ServerModel) -> LocalTraining:
        config = self._config
        return LocalTraining(
            epochs=1 if stage.local_batches else stage.local_epochs or config.local_epochs,
            batch_size=config.batch_size,
            lr=config.lr * config.lr_decay**start.rounds,
            momentum=config.momentum,
            weight_decay=config.weight_decay,
            clip_norm=config.clip_norm,
            optimizer=config.optimizer,
        )

    def _assignments(
        self,
        stage: Stage,
        parts: Sequence[Part],
        start: ServerModel,
        participants: Participants,
        kept: ClientStates,
    ) -> list[Assignment]:
        fresh = initial_state(parts, start.model.params)
        clients, counts = participants.clients.tolist(), participants.federation.label_counts
        alone = stage.cohort == "alone"
        states = kept.read(stage.model, clients) if fresh or alone else [{}] * len(clients)
        own_models = self._own_models(states) if alone else [None] * len(clients)
        return [
            Assignment(client, samples, counts[client], fresh if own else {**fresh, **state}, own)
            for client, samples, state, own in zip(clients, participants.samples, states, own_models, strict=True)
        ]

    def _own_models(self, states: Sequence[Tensors]) -> list[ModelState | None]:
        """Where clients that train alone go on, on the host."""
        host = torch.device("cpu")
        return [model_from_state(state, self._initial, host) for state in states]
