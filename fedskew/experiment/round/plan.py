"""A round before it is trained: from which model, by whom, on which samples, with what beside the model."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fedskew.data.federation import Federation
from fedskew.engine import Assignment, LocalTraining, ModelState, RoundKey, RoundWork
from fedskew.experiment.config import Config
from fedskew.experiment.round.client_states import ClientStates
from fedskew.experiment.round.kept_states import fresh_state
from fedskew.experiment.round.own_models import own_model
from fedskew.experiment.round.phases import Round
from fedskew.experiment.round.sampler import Enlistment, model_number
from fedskew.experiment.round.state import RunState, Trainee
from fedskew.experiment.round.workbench import Workbench
from fedskew.methods import Method, Part, Stage, Tensors


class RoundPlanning:
    """Plans the rounds of one run."""

    def __init__(self, federation: Federation, method: Method, config: Config, initial: ModelState) -> None:
        self._method, self._config, self._initial = method, config, initial
        self._enlistment = Enlistment(federation, config)

    def parts(self, stage: Stage) -> tuple[Part, ...]:
        """Those of a stage, one by one."""
        return (*stage.objective.members, *self._method.solver.members, *self._method.server.members)

    def new_trainee(self, model: ModelState) -> Trainee:
        """A model before its first round."""
        state: Tensors = {}
        for part in self._method.members:
            state |= part.server_state(model.params)
        return Trainee(model, server=state)

    def round(self, stage: Stage, state: RunState, bench: Workbench) -> Round:
        """Who takes part in the next round, which is of this stage."""
        config = self._config
        trainee = state.trainees.get(stage.model) or self.new_trainee(state.model)
        if stage.concatenates and not state.stage_round:
            trainee = self.new_trainee(bench.network.state())
        local = LocalTraining(
            epochs=1 if stage.local_batches else stage.local_epochs or config.local_epochs,
            batch_size=config.batch_size,
            lr=config.lr * config.lr_decay**trainee.rounds,
            momentum=config.momentum,
            weight_decay=config.weight_decay,
            clip_norm=config.clip_norm,
            optimizer=config.optimizer,
        )
        return Round(stage, self.parts(stage), trainee, self._enlistment.of(stage, trainee.rounds), local, bench)

    def work(self, this: Round, state: RunState) -> RoundWork:
        """What its clients are given."""
        downlink: Tensors = {}
        for part in this.parts:
            downlink |= part.downlink(this.trainee.server)
        return RoundWork(
            objective=this.stage.objective,
            solver=self._method.solver,
            server=self._method.server,
            sent=this.trainee.model,
            downlink=downlink,
            companions={name: t.model for name, t in state.trainees.items()},
            assignments=self._assignments(this, state.clients),
            local=this.local,
            key=RoundKey(self._config.seed, model_number(this.stage.model), this.trainee.rounds),
        )

    def _assignments(self, this: Round, kept: ClientStates) -> list[Assignment]:
        fresh = fresh_state(this.parts, this.trainee.model.params)
        clients, counts = this.clients.tolist(), this.federation.label_counts
        alone = this.stage.cohort == "alone"
        states = kept.of(this.stage.model, clients) if fresh or alone else [{}] * len(clients)
        starts = self._own_models(states) if alone else [None] * len(clients)
        return [
            Assignment(client, samples, counts[client], fresh if start else {**fresh, **state}, start)
            for client, samples, state, start in zip(clients, this.participants.samples, states, starts, strict=True)
        ]

    def _own_models(self, states: Sequence[Tensors]) -> list[ModelState | None]:
        """Where clients that share their models with nobody go on, on the host."""
        host = torch.device("cpu")
        return [own_model(state, self._initial, host) for state in states]
