"""The server: draws clients, has them trained, aggregates, moves through the stages of a method, evaluates."""

from __future__ import annotations

import contextlib
import operator
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from fedskew.data.federation import Federation
from fedskew.engine import (
    ENGINES,
    Assignment,
    AutoEngine,
    LocalTraining,
    ModelState,
    RoundKey,
    RoundResult,
    RoundWork,
    arithmetic,
    close_engine,
    foresee,
    on_host,
    survey,
    to_device,
    worth_compiling,
)
from fedskew.experiment.aggregation import merged_buffers, of_client, of_rows
from fedskew.experiment.client_states import ClientStates, HeldStates
from fedskew.experiment.config import Config
from fedskew.experiment.own_models import as_state, own_model
from fedskew.experiment.participants import Enlistment, model_number
from fedskew.experiment.round_report import AskedReport, RoundReport, are_finite
from fedskew.experiment.round_under_way import (
    Guess,
    LaunchedRound,
    ReadTest,
    Round,
    RoundInProgress,
    SettledRound,
    made_by,
)
from fedskew.experiment.run_state import RunState, Trainee
from fedskew.experiment.traffic import traffic
from fedskew.experiment.workbench import Workbench, Workshop
from fedskew.methods import Method, Part, Stage, Survey, Tensors, Updates
from fedskew.methods.hooks import pass_visits, server_step
from fedskew.metrics.confusion import Evaluation
from fedskew.models.concatenation import concatenated

Row = dict[str, Any]
"""What is recorded of a round, as JSON."""


class Server:
    """One run's server: `start`, then `advance` until `stage` is None.

    `advance` is `begin`, `train` and `finish`; who trains the clients of several runs together calls the first and the
    last.
    """

    repeated_by = "fedskew run -c config.yaml"
    """What its run's folder tells its readers."""

    def __init__(
        self,
        federation: Federation,
        method: Method,
        model: nn.Module,
        config: Config,
        beside: Server | None = None,
    ) -> None:
        """`beside` is the server of a run of the same dataset, model and settings, but for seed, split and
        method: both train and test with the same network, engine and data on the device."""
        self._federation, self._method, self._config = federation, method, config
        self._enlistment = Enlistment(federation, config)
        self._workshop: Workshop = beside._workshop if beside else self._new_workshop()
        self.device = self._workshop.devices[0]
        self.overlaps = self.device.type == "cuda"
        """Whether the device works on by itself, so that rounds may overlap."""
        bench = beside._narrow if beside else self._workshop.bench(model, config.engine)
        self.network, self.engine = bench.network, bench.engine
        self._tests = bench.tests.of_another_run() if beside else bench.tests
        self._initial = self._workshop.initial(model) if beside else self.network.state()
        self._wide: tuple[list[ModelState], Workbench] | None = None

    def _new_workshop(self) -> Workshop:
        config = self._config
        steps = -(-float(self._federation.sizes.mean()) // config.batch_size)
        compiles = worth_compiling(config.compile, config.rounds * config.local_epochs * steps)
        return Workshop(self._federation.dataset, config, compiles)

    def close(self) -> None:
        """End the processes and threads of the engines, and what a device still does: its memory will be others'."""
        if self.device.type == "cuda":
            with contextlib.suppress(RuntimeError):  # a GPU on which something went wrong answers no more
                torch.cuda.synchronize(self.device)
        close_engine(self.engine)
        if self._wide is not None:
            close_engine(self._wide[1].engine)

    def resume_with(self, engine: str | None) -> None:
        """The engine that the run began with, where `auto` might take another now."""
        if engine is not None and isinstance(self.engine, AutoEngine):
            self.engine.take(engine)

    @property
    def _narrow(self) -> Workbench:
        """That of the run's own model."""
        return Workbench(self.network, self.engine, self._tests)

    def _bench(self, stage: Stage, state: RunState) -> Workbench:
        """What the stage's model is trained and tested with."""
        if not stage.concatenates:
            return self._narrow
        models = [state.trainees[name].model for name in stage.concatenates]
        if self._wide is None or not all(map(operator.is_, models, self._wide[0])):
            seed = self._config.seed if stage.new_head else None
            wide = concatenated([self.network.module(model) for model in models], seed)
            bench = self._workshop.bench(wide, self.engine.name if self.engine.name in ENGINES else self._config.engine)
            bench.engine.notices = self.engine.notices
            self._wide = models, bench
        return self._wide[1]

    def module(self, state: RunState) -> nn.Module:
        """The global model of a run at its end."""
        return self._bench(self.stages(state)[-1], state).network.module(state.model)

    # -- the schedule ------------------------------------------------------------------------------------

    def start(self, clients: ClientStates | None = None) -> RunState:
        """The state before the first round; what clients keep goes to `clients`, or else to the host's memory."""
        trainees = {"global": self._new_trainee(self._initial)}
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
        state = replace(state, survey=None)
        while (stage := self.stage(state)) is not None and state.stage_round >= stage.rounds:
            if stage.survey:
                told = self._survey(stage, state)
                state = replace(state, notes={**state.notes, **self._method.conclude(stage, told)}, survey=told)
            state = replace(state, stage=state.stage + 1, stage_round=0)
        return state

    def _survey(self, stage: Stage, state: RunState) -> Survey:
        probability = None
        if stage.survey == "predictions":
            samples = np.concatenate(self._federation.indices)
            model = state.trainees[stage.model].model
            probability = survey(self.network, model, self._workshop.train, samples).probability
        return Survey(self._federation.label_counts, probability)

    # -- a round -----------------------------------------------------------------------------------------

    def advance(self, state: RunState) -> tuple[RunState, Row]:
        """One round."""
        this = self.begin(state)
        began = time.perf_counter()
        result = self.train(this)
        return self.finish(this, result, time.perf_counter() - began)

    def begin(self, state: RunState) -> RoundInProgress:
        """Who takes part in the next round, and what they are given."""
        began = time.perf_counter()
        stage = self.stage(state)
        if stage is None:
            raise ValueError("the run is at its end")
        with arithmetic(self._config.precision):
            this = self._prepare(stage, state)
            work = self._work(this, state)
        return RoundInProgress(state, this, work, time.perf_counter() - began)

    def train(self, under_way: RoundInProgress) -> RoundResult:
        """Have the clients of this round trained, on their own."""
        with arithmetic(self._config.precision):
            return under_way.engine.train(under_way.work)

    def finish(self, under_way: RoundInProgress, result: RoundResult, seconds: float) -> tuple[RunState, Row]:
        """Aggregate and test what the clients came back with, for whom `seconds` were spent."""
        settled = self.settle(self.launch(under_way, result, seconds))
        return settled.state, settled.row()

    def launch(self, under_way: RoundInProgress, result: RoundResult, seconds: float) -> LaunchedRound:
        """Give the device all that is left of the round, on the guess that the clients' numbers are finite: to ask
        first would make it wait."""
        began = time.perf_counter() - under_way.seconds - seconds
        this, test = under_way.this, None
        with arithmetic(self._config.precision):
            guess = self._guess(under_way, result) if self.overlaps else None
            report = AskedReport(result, this.trainee.model, guess.tensors if guess else ())
            if guess is not None and guess.after is not None and self._is_evaluated(this, guess.after):
                everyone = np.ones(len(this.clients), dtype=bool)
                with contextlib.suppress(Exception):  # of a model, on a wrong guess; `settle` tests what is right
                    test = self._test(this, result, everyone, guess.trainee, guess.after)
        return LaunchedRound(under_way, result, report, guess, test, began)

    def _guess(self, under_way: RoundInProgress, result: RoundResult) -> Guess | None:
        state, this = under_way.state, under_way.this
        try:
            trainee = self._aggregated(this, result, np.ones(len(this.clients), dtype=bool))
        except Exception:  # of a server's rule, on numbers that are not finite; what it does to others is seen later
            return None
        keeps = bool(result.states) or this.stage.cohort == "alone"
        if keeps or state.stage_round + 1 >= this.stage.rounds or self._config.eval_local:
            return Guess(trainee, None)
        return Guess(trainee, self._after(under_way, state.clients, trainee))

    def foresee(self, launched: LaunchedRound) -> RoundInProgress | None:
        """The round after a launched one, made ready while the device is busy; None if it depends on what is not yet
        known. It is of use if the guess turns out right: `settle` then returns the state that it begins with."""
        if launched.guess is None or launched.guess.after is None:
            return None
        try:
            ahead = self.begin(launched.guess.after)
            foresee(ahead.engine, ahead.work)
        except Exception:  # of a method's part, on a wrong guess; or it shows again when the round begins
            return None
        return replace(ahead, seconds=0.0)

    def settle(self, launched: LaunchedRound) -> SettledRound:
        """Wait until the clients are trained, and undo the guess if it was wrong."""
        under_way, result, guess = launched.under_way, launched.result, launched.guess
        this = under_way.this
        with arithmetic(self._config.precision):
            report = launched.report.read()
            trained_at = time.perf_counter()
            if guess is not None and report.finite.all() and launched.report.made_well():
                trainee, finite, after, test = guess.trainee, report.finite, guess.after, launched.test
            else:
                trainee, finite, after, test = *self._sound(this, result, report.finite), None, None
            if after is None:
                now = replace(under_way.state, round=under_way.state.round + 1)
                after = self._after(under_way, self._kept(this, result, finite, now), trainee)
            row = self._row(this, replace(report, finite=finite), result.visits, after)
            federated, nothing = this.stage.cohort == "clients", {"down": 0, "up": 0}
            row["bytes"] = traffic(under_way.work, result, this.stage.concatenates) if federated else nothing
            served_at = time.perf_counter()
            if test is None and self._is_evaluated(this, after):
                test = self._test(this, result, finite, trainee, after)
        laps = np.diff([launched.began, trained_at, served_at, time.perf_counter()]).tolist()
        return SettledRound(after, row, test, dict(zip(("train", "server", "evaluate"), laps, strict=True)))

    def _sound(
        self, this: Round, result: RoundResult, finite: npt.NDArray[np.bool_]
    ) -> tuple[Trainee, npt.NDArray[np.bool_]]:
        """The next global model, and the clients that it is made of."""
        trainee = self._aggregated(this, result, finite)
        if are_finite(made_by(trainee)):
            return trainee, finite
        nobody = np.zeros_like(finite)  # each update was finite, but the server's step over them is not
        return self._aggregated(this, result, nobody), nobody

    def _after(self, under_way: RoundInProgress, clients: ClientStates, trainee: Trainee) -> RunState:
        """The state after a round."""
        before, stage = under_way.state, under_way.this.stage
        after = replace(before, round=before.round + 1, stage_round=before.stage_round + 1, clients=clients)
        return self._past_empty_stages(after.with_trainee(stage.model, trainee))

    def _prepare(self, stage: Stage, state: RunState) -> Round:
        config, bench = self._config, self._bench(stage, state)
        trainee = state.trainees.get(stage.model) or self._new_trainee(state.model)
        if stage.concatenates and not state.stage_round:
            trainee = self._new_trainee(bench.network.state())
        local = LocalTraining(
            epochs=1 if stage.local_batches else stage.local_epochs or config.local_epochs,
            batch_size=config.batch_size,
            lr=config.lr * config.lr_decay**trainee.rounds,
            momentum=config.momentum,
            weight_decay=config.weight_decay,
            clip_norm=config.clip_norm,
        )
        return Round(stage, trainee, self._enlistment.of(stage, trainee.rounds), local, bench)

    def _new_trainee(self, model: ModelState) -> Trainee:
        state: Tensors = {}
        for part in self._method.members:
            state |= part.server_state(model.params)
        return Trainee(model, server=state)

    def _work(self, this: Round, state: RunState) -> RoundWork:
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
            key=RoundKey(self._config.seed, model_number(this.stage.model), this.trainee.rounds),
        )

    def _assignments(self, this: Round, kept: ClientStates) -> list[Assignment]:
        fresh = self._fresh_state(this.stage, this.trainee.model.params)
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
        if stage.cohort == "alone":
            state |= as_state(start.model)
        a_round = self._config.clients_per_round or self._federation.clients
        written = self.rounds_ahead(start) * a_round
        replaced = 2 * self._config.checkpoint_every * a_round  # by newer states, and kept for two checkpoints
        most = min(written, self._federation.clients + replaced)
        return max(0, most - there) * sum(t.nbytes for t in state.values())

    def _kept(self, this: Round, result: RoundResult, finite: npt.NDArray[np.bool_], after: RunState) -> ClientStates:
        """What the clients keep now; one whose update is not finite, what it had."""
        rows = np.flatnonzero(finite).tolist()
        states = as_state(result.trained) if this.stage.cohort == "alone" else result.states
        if not states or not rows:
            return after.clients
        states = on_host(states)
        kept = {int(this.clients[row]): {name: t[row] for name, t in states.items()} for row in rows}
        return after.clients.updated(this.stage.model, after.round, kept)

    def _parts(self, stage: Stage) -> tuple[Part, ...]:
        """Those of a stage, one by one."""
        return (*stage.objective.members, *self._method.solver.members, *self._method.server.members)

    def _aggregated(self, this: Round, result: RoundResult, finite: npt.NDArray[np.bool_]) -> Trainee:
        """The next global model, from the clients whose update is finite."""
        trainee = replace(this.trainee, rounds=this.trainee.rounds + 1)
        if not finite.any():
            return trainee
        if this.stage.cohort == "alone":
            return replace(trainee, model=self._representative(this, result, finite))
        sizes = this.participants.sizes[finite]
        average = this.stage.average or self._config.average
        shares = sizes if average == "samples" else np.ones_like(sizes)
        weights = to_device(torch.from_numpy(shares / shares.sum()), self.device)
        updates = Updates(
            params=of_rows(result.trained.params, finite),
            weights=weights,
            uplink=of_rows(result.uplink, finite),
            lr=this.local.lr,
            participation=len(sizes) / this.participants.population,
        )
        sent, before = this.trainee.model, this.trainee.server
        params, server = server_step(self._method.server, self._parts(this.stage), sent.params, updates, before)
        buffers = merged_buffers(sent.buffers, of_rows(result.trained.buffers, finite), weights)
        return replace(trainee, model=ModelState(params, buffers), server=server)

    def _representative(self, this: Round, result: RoundResult, finite: npt.NDArray[np.bool_]) -> ModelState:
        """Where there is no common model, what is saved in its place: that of the client with most samples."""
        row = np.flatnonzero((this.clients == self._federation.sizes.argmax()) & finite)
        return of_client(result.trained, int(row[0])) if len(row) else this.trainee.model

    # -- what is recorded --------------------------------------------------------------------------------

    def _row(self, this: Round, report: RoundReport, visited: npt.NDArray[np.int64], after: RunState) -> Row:
        finite, visits = report.finite, int(visited.sum())
        forwards = this.stage.objective.extra_forwards(visits, report.tally) if visits else 0.0
        passes = pass_visits(self._parts(this.stage)) * sum(map(len, this.participants.samples))
        spent = visits * this.stage.cost * self._method.solver.gradients() + forwards / 3 + passes
        return {
            "round": after.round,
            "stage": this.stage.name,
            "model": this.stage.model,
            "model_round": this.trainee.rounds + 1,
            "clients": [] if this.stage.cohort == "pooled" else this.clients.tolist(),
            "lr": this.local.lr,
            "loss": float(np.average(report.loss[finite], weights=visited[finite] + 1e-9)) if finite.any() else None,
            "diverged": this.clients[~finite].tolist(),
            "visits": visits,
            "tally": report.tally,
            "compute": spent / self._baseline_visits(this),
            "notes": after.notes,
            **({} if after.survey is None else after.survey.recorded()),
        }

    def _baseline_visits(self, this: Round) -> float:
        """Sample visits of a FedAvg round: by the same clients, or, where a stage leaves clients out, by as many as
        the run draws, on average."""
        sizes = self._federation.sizes
        if this.stage.labels is None and this.stage.clients is None:
            return self._config.local_epochs * float(this.participants.sizes.sum())
        drawn = min(self._config.clients_per_round or len(sizes), len(sizes))
        return self._config.local_epochs * float(sizes.mean()) * drawn

    def _is_evaluated(self, this: Round, after: RunState) -> bool:
        if this.stage.labels is not None and not np.isin(self._federation.dataset.test.y, this.stage.labels).any():
            return False
        last_of_stage = after.stage_round == 0
        return last_of_stage or (this.trainee.rounds + 1) % self._config.eval_every == 0

    def evaluate(self, model: ModelState, labels: tuple[int, ...] | None = None) -> Evaluation:
        """The model on the test set."""
        with arithmetic(self._config.precision):  # before the first round, too, as after a resume
            return self._tests.of(model, labels)

    def _test(
        self, this: Round, result: RoundResult, finite: npt.NDArray[np.bool_], trainee: Trainee, after: RunState
    ) -> ReadTest:
        """The test after a round: begun, where a device goes on with it by itself, and else made."""
        if self.overlaps and this.stage.cohort != "alone" and not self._config.eval_local:
            return this.bench.tests.begun(trainee.model, this.stage.labels)
        row = self._evaluated(this, result, finite, trainee, after)
        return lambda: row

    def _evaluated(
        self, this: Round, result: RoundResult, finite: npt.NDArray[np.bool_], trainee: Trainee, after: RunState
    ) -> Row:
        tests, labels = this.bench.tests, this.stage.labels
        if this.stage.cohort == "alone":
            everyone = self._federation.populated.tolist()
            own = partial(own_model, initial=self._initial, device=self.device)
            return tests.of_everyone(everyone, after.clients, this.stage.model, own)
        row: Row = tests.row(trainee.model, labels)
        if self._config.eval_local and this.stage.cohort == "clients":
            sent, trained, last = this.trainee.model, result.trained, after.stage_round == 0
            row |= tests.of_clients(sent, trained, this.clients, finite, this.federation, labels, matrices=last)
        return row
