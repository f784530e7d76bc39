"""The server: draws clients, has them trained, aggregates, moves through the stages of a method, evaluates.

Here is what comes after what; each step has a module of its own: `run_stages`, `round_planning`, `aggregation`,
`kept_states`, `round_rows`, `round_tests`.
"""

from __future__ import annotations

import contextlib
import operator
import time
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from fedskew.data.federation import Federation
from fedskew.engine import (
    ENGINES,
    AutoEngine,
    ModelState,
    RoundResult,
    arithmetic,
    survey,
    worth_compiling,
)
from fedskew.experiment.config import Config
from fedskew.experiment.round.aggregate import Aggregation
from fedskew.experiment.round.client_states import ClientStates, HeldStates
from fedskew.experiment.round.evaluate import RoundTests
from fedskew.experiment.round.kept_states import bytes_of_one, kept_after, most_states
from fedskew.experiment.round.phases import (
    Guess,
    LaunchedRound,
    ReadTest,
    Round,
    RoundInProgress,
    SettledRound,
)
from fedskew.experiment.round.plan import RoundPlanning
from fedskew.experiment.round.record import RoundRows
from fedskew.experiment.round.report import AskedReport
from fedskew.experiment.round.row import RoundRow
from fedskew.experiment.round.stages import RunStages
from fedskew.experiment.round.state import RunState, Trainee
from fedskew.experiment.round.workbench import Workbench, Workshop
from fedskew.methods import Method, Stage, Survey
from fedskew.metrics.confusion import Evaluation
from fedskew.models.concatenation import concatenate


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
        self._federation, self._config = federation, config
        self._workshop: Workshop = beside._workshop if beside else self._new_workshop()
        self.device = self._workshop.devices[0]
        self.overlaps = self.device.type == "cuda"
        """Whether the device works on by itself, so that rounds may overlap."""
        bench = beside._narrow if beside else self._workshop.bench(model, config.engine)
        self.network, self.engine = bench.network, bench.engine
        self._tests = bench.tests.of_another_run() if beside else bench.tests
        self._initial = self._workshop.initial(model) if beside else self.network.state()
        self._wide: tuple[list[ModelState], Workbench] | None = None
        self._stages = RunStages(method, config)
        self._planning = RoundPlanning(federation, method, config, self._initial)
        self._aggregation = Aggregation(federation, method, config, self.device)
        self._rows = RoundRows(federation, config)
        self._round_tests = RoundTests(federation, config, self._initial, self.device)

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
        self.engine.close()
        if self._wide is not None:
            self._wide[1].engine.close()

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
            wide = concatenate([self.network.module(model) for model in models], seed)
            bench = self._workshop.bench(wide, self.engine.name if self.engine.name in ENGINES else self._config.engine)
            bench.engine.notices = self.engine.notices
            self._wide = models, bench
        return self._wide[1]

    def module(self, state: RunState) -> nn.Module:
        """The global model of a run at its end."""
        return self._bench(self.stages(state)[-1], state).network.module(state.model)

    # -- the stages --------------------------------------------------------------------------------------

    def start(self, clients: ClientStates | None = None) -> RunState:
        """The state before the first round; what clients keep goes to `clients`, or else to the host's memory."""
        trainees = {"global": self._planning.new_trainee(self._initial)}
        return self._stages.past_empty(RunState(trainees, clients=clients or HeldStates()), self._survey)

    def stages(self, state: RunState) -> list[Stage]:
        """The stages known so far."""
        return self._stages.known(state)

    def stage(self, state: RunState) -> Stage | None:
        """The stage that the next round belongs to; None at the end."""
        return self._stages.next(state)

    def rounds_ahead(self, state: RunState) -> int:
        """Rounds still to come, as far as the stages are known."""
        return self._stages.rounds_ahead(state)

    def client_bytes(self, start: RunState, there: int) -> int:
        """What the clients of a run come to keep in all, beyond the states that are `there` already."""
        stage = self.stage(start)
        if stage is None:
            return 0
        most = most_states(self._config, self._federation.clients, self.rounds_ahead(start))
        return max(0, most - there) * bytes_of_one(stage, self._planning.parts(stage), start.model)

    def _survey(self, stage: Stage, state: RunState) -> Survey:
        probability = None
        if stage.survey == "predictions":
            samples = np.concatenate(self._federation.indices)
            model = state.trainees[stage.model].model
            probability = survey(self.network, model, self._workshop.train, samples).probability
        return Survey(self._federation.label_counts, probability)

    # -- a round -----------------------------------------------------------------------------------------

    def advance(self, state: RunState) -> tuple[RunState, RoundRow]:
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
            this = self._planning.round(stage, state, self._bench(stage, state))
            work = self._planning.work(this, state)
        return RoundInProgress(state, this, work, time.perf_counter() - began)

    def train(self, under_way: RoundInProgress) -> RoundResult:
        """Have the clients of this round trained, on their own."""
        with arithmetic(self._config.precision):
            return under_way.engine.train(under_way.work)

    def finish(self, under_way: RoundInProgress, result: RoundResult, seconds: float) -> tuple[RunState, RoundRow]:
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
            if guess is not None and guess.after is not None and self._round_tests.due(this, guess.after):
                everyone = np.ones(len(this.clients), dtype=bool)
                with contextlib.suppress(Exception):  # of a model, on a wrong guess; `settle` tests what is right
                    test = self._test(this, result, everyone, guess.trainee, guess.after)
        return LaunchedRound(under_way, result, report, guess, test, began)

    def _guess(self, under_way: RoundInProgress, result: RoundResult) -> Guess | None:
        state, this = under_way.state, under_way.this
        try:
            trainee = self._aggregation.of(this, result, np.ones(len(this.clients), dtype=bool))
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
            ahead.engine.prefetch(ahead.work)
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
                trainee, finite = self._aggregation.of_finite(this, result, report.finite)
                after, test = None, None
            if after is None:
                after = self._after(under_way, kept_after(this, result, finite, under_way.state), trainee)
            row = self._rows.of(this, under_way.work, result, replace(report, finite=finite), after)
            served_at = time.perf_counter()
            if test is None and self._round_tests.due(this, after):
                test = self._test(this, result, finite, trainee, after)
        laps = np.diff([launched.began, trained_at, served_at, time.perf_counter()]).tolist()
        return SettledRound(after, row, test, dict(zip(("train", "server", "evaluate"), laps, strict=True)))

    def _after(self, under_way: RoundInProgress, clients: ClientStates, trainee: Trainee) -> RunState:
        """The state after a round."""
        before, stage = under_way.state, under_way.this.stage
        after = replace(before, round=before.round + 1, stage_round=before.stage_round + 1, clients=clients)
        return self._stages.past_empty(after.with_trainee(stage.model, trainee), self._survey)

    def _test(
        self, this: Round, result: RoundResult, finite: npt.NDArray[np.bool_], trainee: Trainee, after: RunState
    ) -> ReadTest:
        """The test after a round: begun, where a device goes on with it by itself, and else made."""
        if self.overlaps and self._round_tests.of_one_model(this):
            return this.bench.tests.begun(trainee.model, this.stage.labels)
        row = self._round_tests.row(this, result, finite, trainee, after)
        return lambda: row

    def evaluate(self, model: ModelState, labels: tuple[int, ...] | None = None) -> Evaluation:
        """The model on the test set."""
        with arithmetic(self._config.precision):  # before the first round, too, as after a resume
            return self._tests.of(model, labels)
