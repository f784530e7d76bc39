"""The server: draws clients, has them trained, aggregates, moves through the stages of a method, evaluates."""

from __future__ import annotations

import time
import zlib
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from fedskew.data.augmentation.augment import make_augmentation
from fedskew.data.federation import Federation
from fedskew.engine import (
    Assignment,
    AutoEngine,
    DeviceSamples,
    DevicesEngine,
    Engine,
    Evaluator,
    LocalTraining,
    ModelState,
    Network,
    RoundKey,
    RoundResult,
    RoundWork,
    arithmetic,
    choose_devices,
    close_engine,
    make_engine,
    number_format,
    on_host,
    survey,
    worth_compiling,
)
from fedskew.errors import UserError
from fedskew.experiment.aggregation import merged_buffers, of_rows
from fedskew.experiment.client_states import ClientStates, HeldStates
from fedskew.experiment.config import Config
from fedskew.experiment.round_report import RoundReport, are_finite
from fedskew.experiment.run_state import RunState, Trainee
from fedskew.experiment.testing import Tests
from fedskew.experiment.traffic import traffic
from fedskew.methods import Method, Part, Stage, Tensors, Updates
from fedskew.metrics.confusion import Evaluation
from fedskew.randomness import sample

Row = dict[str, Any]
"""What is recorded of a round, as JSON."""


@dataclass(frozen=True)
class _Round:
    """One round in the making."""

    stage: Stage
    trainee: Trainee
    federation: Federation
    clients: npt.NDArray[np.int64]
    local: LocalTraining


class Server:
    """One run's server: `start`, then `advance` until `stage` is None."""

    def __init__(self, federation: Federation, method: Method, model: nn.Module, config: Config) -> None:
        self._federation = federation
        self._federations: dict[tuple[int, ...] | None, Federation] = {None: federation}
        self._method = method
        self._config = config
        devices = choose_devices(config.device)
        self.device = devices[0]
        dtype, autocast = number_format(config.precision)
        dataset = federation.dataset
        augmentation = make_augmentation(config.augment, dataset.input_shape) if config.augment else None

        def training_samples(device: torch.device) -> DeviceSamples:
            return DeviceSamples(dataset, dataset.train, device, dtype, augmentation)

        self._train = training_samples(self.device)
        self.network = Network(model, dtype, autocast).to(self.device)
        test_samples = DeviceSamples(dataset, dataset.test, self.device, dtype)
        self._tests = Tests(Evaluator(self.network, test_samples, self._compiles()))
        smallest = self.network.smallest_batch(self._train.some_inputs())
        if config.batch_size < smallest:
            raise UserError(
                f"batch_size is {config.batch_size}; expected at least {smallest}: "
                "BatchNorm cannot train on a batch of one sample here"
            )
        networks = [self.network, *(Network(model, dtype, autocast).to(device) for device in devices[1:])]
        samples = [self._train, *map(training_samples, devices[1:])]
        engines = [
            make_engine(config.engine, *there, smallest, self._compiles())
            for there in zip(networks, samples, strict=True)
        ]
        self.engine: Engine = engines[0] if len(engines) == 1 else DevicesEngine(engines, devices)

    def _compiles(self) -> bool:
        config = self._config
        steps = -(-float(self._federation.sizes.mean()) // config.batch_size)
        return worth_compiling(config.compile, config.rounds * config.local_epochs * steps)

    def close(self) -> None:
        """End the processes and threads of the engine."""
        close_engine(self.engine)

    def resume_with(self, engine: str | None) -> None:
        """The engine that the run began with, where `auto` might take another now."""
        if engine is not None and isinstance(self.engine, AutoEngine):
            self.engine.take(engine)

    # -- the schedule ------------------------------------------------------------------------------------

    def start(self, clients: ClientStates | None = None) -> RunState:
        """The state before the first round; what clients keep goes to `clients`, or else to the host's memory."""
        trainees = {"global": self._new_trainee(self.network.state())}
        return self._past_empty_stages(RunState(trainees, clients=clients or HeldStates()))

    def stages(self, state: RunState) -> list[Stage]:
        """The stages known so far."""
        return self._method.stages(self._config.rounds, self._config.local_epochs, state.notes)

    def stage(self, state: RunState) -> Stage | None:
        """The stage that the next round belongs to; None at the end."""
        stages = self.stages(state)
        return stages[state.stage] if state.stage < len(stages) else None

    def rounds_ahead(self, state: RunState) -> int:
        """Rounds still to come, as far as the stages are known."""
        return sum(stage.rounds for stage in self.stages(state)[state.stage :]) - state.stage_round

    def _past_empty_stages(self, state: RunState) -> RunState:
        while (stage := self.stage(state)) is not None and state.stage_round >= stage.rounds:
            if stage.survey:
                state = replace(state, notes={**state.notes, **self._concluded(stage, state)})
            state = replace(state, stage=state.stage + 1, stage_round=0)
        return state

    def _concluded(self, stage: Stage, state: RunState) -> dict[str, Any]:
        samples = np.concatenate(self._federation.indices)
        told = survey(self.network, state.trainees[stage.model].model, self._train, samples)
        return self._method.conclude(stage, told)

    # -- a round -----------------------------------------------------------------------------------------

    def advance(self, state: RunState) -> tuple[RunState, Row]:
        """One round."""
        with arithmetic(self._config.precision):
            stage = self.stage(state)
            if stage is None:
                raise ValueError("the run is at its end")
            laps = [time.perf_counter()]
            this = self._prepare(stage, state)
            work = self._work(this, state)
            result = self.engine.train(work)
            report = RoundReport.of(result, this.trainee.model)
            laps.append(time.perf_counter())
            finite = report.finite
            trainee = self._aggregated(this, result, finite)
            if not are_finite([*trainee.model.params.values(), *trainee.server.values()]):
                finite = np.zeros_like(finite)  # each update was finite, but the server's step over them is not
                trainee = self._aggregated(this, result, finite)
            after = replace(state, round=state.round + 1, stage_round=state.stage_round + 1)
            after = replace(after, clients=self._kept(this, result, finite, after))
            after = self._past_empty_stages(after.with_trainee(stage.model, trainee))
            row = self._row(this, replace(report, finite=finite), result.visits, after)
            row["bytes"] = traffic(work, result)
            laps.append(time.perf_counter())
            if self._is_evaluated(this, after):
                row |= self._evaluated(this, result, finite, trainee, last=after.stage_round == 0)
            laps.append(time.perf_counter())
            row["time"] = dict(zip(("train", "server", "evaluate"), np.diff(laps).tolist(), strict=True))
        return after, row

    def _prepare(self, stage: Stage, state: RunState) -> _Round:
        config = self._config
        trainee = state.trainees.get(stage.model) or self._new_trainee(state.model)
        federation = self._federation_of(stage.labels)
        local = LocalTraining(
            epochs=stage.local_epochs or config.local_epochs,
            batch_size=config.batch_size,
            lr=config.lr * config.lr_decay**trainee.rounds,
            momentum=config.momentum,
            weight_decay=config.weight_decay,
            clip_norm=config.clip_norm,
        )
        return _Round(stage, trainee, federation, self._sampled(stage, trainee, federation), local)

    def _new_trainee(self, model: ModelState) -> Trainee:
        state: Tensors = {}
        for part in self._method.parts:
            state |= part.server_state(model.params)
        return Trainee(model, server=state)

    def _federation_of(self, labels: tuple[int, ...] | None) -> Federation:
        if labels not in self._federations:
            self._federations[labels] = self._federation.restrict(labels or ())
        return self._federations[labels]

    def _sampled(self, stage: Stage, trainee: Trainee, federation: Federation) -> npt.NDArray[np.int64]:
        """The round's clients, in order, drawn without regard to the method: all methods meet the same ones."""
        eligible = federation.populated
        if not len(eligible):
            raise UserError(f"stage {stage.name!r} has no client with samples of classes {stage.labels}")
        wanted = min(self._config.clients_per_round or len(eligible), len(eligible))
        key = (self._config.seed, "clients", _number(stage.model), trainee.rounds)
        return np.sort(eligible[sample(wanted, len(eligible), *key)])

    def _work(self, this: _Round, state: RunState) -> RoundWork:
        downlink: Tensors = {}
        for part in self._parts(this.stage):
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
            key=RoundKey(self._config.seed, _number(this.stage.model), this.trainee.rounds),
        )

    def _assignments(self, this: _Round, kept: ClientStates) -> list[Assignment]:
        fresh = self._fresh_state(this.stage, this.trainee.model.params)
        federation, clients = this.federation, this.clients.tolist()
        states = kept.of(this.stage.model, clients) if fresh else [{}] * len(clients)
        return [
            Assignment(client, federation.indices[client], federation.label_counts[client], {**fresh, **state})
            for client, state in zip(clients, states, strict=True)
        ]

    def _fresh_state(self, stage: Stage, params: Tensors) -> Tensors:
        """What a client keeps before its first round: one for all of them, on the host as the others are."""
        state: Tensors = {}
        for part in self._parts(stage):
            state |= part.client_state(params)
        return {name: t.cpu() for name, t in state.items()}

    def client_bytes(self, start: RunState, there: int) -> int:
        """What the clients of a run come to keep in all, beyond the states that are `there` already."""
        stage = self.stage(start)
        if stage is None:
            return 0
        state = self._fresh_state(stage, start.model.params)
        a_round = self._config.clients_per_round or self._federation.clients
        written = self.rounds_ahead(start) * a_round
        replaced = 2 * self._config.checkpoint_every * a_round  # by newer states, and kept for two checkpoints
        most = min(written, self._federation.clients + replaced)
        return max(0, most - there) * sum(t.nbytes for t in state.values())

    def _kept(self, this: _Round, result: RoundResult, finite: npt.NDArray[np.bool_], after: RunState) -> ClientStates:
        """What the clients keep now; one whose update is not finite, what it had."""
        rows = np.flatnonzero(finite).tolist()
        if not result.states or not rows:
            return after.clients
        states = on_host(result.states)
        kept = {int(this.clients[row]): {name: t[row] for name, t in states.items()} for row in rows}
        return after.clients.updated(this.stage.model, after.round, kept)

    def _parts(self, stage: Stage) -> tuple[Part, Part, Part]:
        return stage.objective, self._method.solver, self._method.server

    def _aggregated(self, this: _Round, result: RoundResult, finite: npt.NDArray[np.bool_]) -> Trainee:
        """The next global model, from the clients whose update is finite."""
        trainee = replace(this.trainee, rounds=this.trainee.rounds + 1)
        if not finite.any():
            return trainee
        sizes = this.federation.sizes[this.clients][finite]
        shares = sizes if self._config.average == "samples" else np.ones_like(sizes)
        weights = torch.from_numpy(shares / shares.sum()).to(self.device)
        updates = Updates(
            params=of_rows(result.trained.params, finite),
            weights=weights,
            uplink=of_rows(result.uplink, finite),
            lr=this.local.lr,
            participation=len(sizes) / self._federation.clients,
        )
        params, server = self._method.server.aggregate(this.trainee.model.params, updates, this.trainee.server)
        buffers = merged_buffers(this.trainee.model.buffers, of_rows(result.trained.buffers, finite), weights)
        return replace(trainee, model=ModelState(params, buffers), server={**this.trainee.server, **server})

    # -- what is recorded --------------------------------------------------------------------------------

    def _row(self, this: _Round, report: RoundReport, visited: npt.NDArray[np.int64], after: RunState) -> Row:
        finite, visits = report.finite, int(visited.sum())
        forwards = this.stage.objective.extra_forwards(visits, report.tally) if visits else 0.0
        return {
            "round": after.round,
            "stage": this.stage.name,
            "model": this.stage.model,
            "model_round": this.trainee.rounds + 1,
            "clients": this.clients.tolist(),
            "lr": this.local.lr,
            "loss": float(np.average(report.loss[finite], weights=visited[finite] + 1e-9)) if finite.any() else None,
            "diverged": this.clients[~finite].tolist(),
            "visits": visits,
            "tally": report.tally,
            "compute": (visits * self._method.solver.gradients() + forwards / 3) / self._baseline_visits(this),
            "notes": after.notes,
        }

    def _baseline_visits(self, this: _Round) -> float:
        """Sample visits of a FedAvg round: by the same clients, or, where a stage leaves clients out, by as many as
        the run draws, on average."""
        sizes = self._federation.sizes
        if this.stage.labels is None:
            return self._config.local_epochs * float(sizes[this.clients].sum())
        drawn = min(self._config.clients_per_round or len(sizes), len(sizes))
        return self._config.local_epochs * float(sizes.mean()) * drawn

    def _is_evaluated(self, this: _Round, after: RunState) -> bool:
        if this.stage.labels is not None and not np.isin(self._federation.dataset.test.y, this.stage.labels).any():
            return False
        last_of_stage = after.stage_round == 0
        return last_of_stage or (this.trainee.rounds + 1) % self._config.eval_every == 0

    def evaluate(self, model: ModelState, labels: tuple[int, ...] | None = None) -> Evaluation:
        """The model on the test set."""
        with arithmetic(self._config.precision):  # before the first round, too, as after a resume
            return self._tests.of(model, labels)

    def _evaluated(
        self, this: _Round, result: RoundResult, finite: npt.NDArray[np.bool_], trainee: Trainee, last: bool
    ) -> Row:
        labels = this.stage.labels
        row: Row = {"evaluation": self.evaluate(trainee.model, labels).to_json()}
        if self._config.eval_local:
            sent, trained = this.trainee.model, result.trained
            row |= self._tests.of_clients(sent, trained, this.clients, finite, this.federation, labels, matrices=last)
        return row


def _number(model: str) -> int:
    """What keys a model's randomness; the global model's is 0, in every method."""
    return 0 if model == "global" else zlib.crc32(model.encode())
