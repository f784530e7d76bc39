"""What the server does in each step of a round. `loop` and `overlap` call the steps."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import nn

from fedskew.data.federation import Federation
from fedskew.engine import ENGINES, Engine, ModelState, RoundResult, cpu_engine, survey, train_clients, worth_compiling
from fedskew.experiment.config import Config
from fedskew.experiment.preparation import positive_class
from fedskew.experiment.round.aggregate import Aggregated, Aggregator, TrainingReport, server_key
from fedskew.experiment.round.evaluate import Predictions, RoundEvaluation, RowFields
from fedskew.experiment.round.plan import RoundPlan, RoundPlanner
from fedskew.experiment.round.record import RoundRecord, RoundRow
from fedskew.experiment.round.runtime import ModelRuntime, RuntimeFactory
from fedskew.experiment.round.state import (
    ClientStates,
    RunStages,
    RunState,
    ServerModel,
    StatesInMemory,
    max_states_on_disk,
    model_as_state,
    state_bytes,
    states_after,
)
from fedskew.methods import Method, Part, Stage, Survey
from fedskew.methods.personal import personal_names
from fedskew.methods.stages import survey_stage
from fedskew.metrics.confusion import Evaluation
from fedskew.metrics.scores import Scores, score_probabilities
from fedskew.metrics.site_scores import SiteScore
from fedskew.models.concatenation import concatenate


class Server:
    """The server of one run. It plans rounds, passes them to an engine, aggregates, evaluates and records."""

    how_to_repeat = "fedskew run -c config.yaml"
    """How to repeat the run, for a comment in its config.yaml."""
    saves_whole_model: bool = False
    """Whether the saved model also has the tensors that the run does not train."""

    def __init__(self, federation: Federation, method: Method, model: nn.Module, config: Config) -> None:
        self._federation, self._config = federation, config
        self.saves_whole_model = self.saves_whole_model or config.head == "etf"  # the head's simplex is not trained
        if federation.dataset.in_memory:
            self.how_to_repeat = "the same call in Python, with the same data"
        self._runtimes = RuntimeFactory(federation.dataset, config, _compiles_steps(federation, config, model))
        self.device = self._runtimes.devices[0]
        self._base_runtime = self._runtimes.runtime(model, self._resolve_engine(model))
        self._concatenated: tuple[list[ModelState], ModelRuntime] | None = None
        """The models that a stage concatenates, and the runtime of the result."""
        self.network = self._base_runtime.network
        self._initial = self.network.state()
        self._stages = RunStages(method, config)
        self.personal = method.personal
        self.personal_names = personal_names(self.personal, model) if self.personal is not None else frozenset[str]()
        """Names of the tensors that stay on the clients."""
        self._planner = RoundPlanner(federation, method, config, self._initial, self.personal_names)
        self._rows = RoundRecord(federation, config)
        self.aggregator = Aggregator(federation, config, self.device)
        self.evaluation = RoundEvaluation(
            federation, config, self._initial, self.device, self.personal, self.personal_names
        )

    def close(self) -> None:
        """End the engines' processes and threads. Before that, wait for the device: the next run uses its memory."""
        if self.device.type == "cuda":
            with contextlib.suppress(RuntimeError):  # after a GPU error, this fails too
                torch.cuda.synchronize(self.device)
        self._base_runtime.engine.close()
        if self._concatenated is not None:
            self._concatenated[1].engine.close()

    # -- the engine --------------------------------------------------------------------------------------

    @property
    def engine(self) -> Engine:
        """The engine that trains the clients."""
        return self._base_runtime.engine

    @property
    def engine_name(self) -> str:
        return self._base_runtime.engine.name

    @property
    def notices(self) -> list[str]:
        """Lines for the user about things that the engine did differently than requested."""
        return self._base_runtime.engine.notices

    def resume_with(self, engine: str | None) -> None:
        """Use the engine that the run started with, if the setting is `auto`. `auto` might choose another one now."""
        if self._config.engine != "auto" or engine not in ENGINES or engine == self.engine_name:
            return
        self._base_runtime.engine.close()
        self._base_runtime = self._runtimes.runtime(self.network.module(self._initial), engine)
        self.network = self._base_runtime.network

    def _resolve_engine(self, model: nn.Module) -> str:
        """Return the engine of the run. For a long run on a CPU, `choose_engine` leaves the choice to this method."""
        if self._config.engine != "auto" or self.device.type != "cpu":
            return self._config.engine
        clients = self._federation.clients
        return cpu_engine(
            model,
            self._runtimes.train_samples.some_inputs()[:1],
            min(self._config.clients_per_round or clients, clients),
        )

    # -- before the first round, between stages and after the last round ------------------------------------

    def start(self, clients: ClientStates | None = None) -> RunState:
        """Make the state before the first round. Client states are kept in `clients`, by default in memory."""
        models = {"global": self._planner.new_model(self._initial)}
        return self._stages.enter_next(RunState(models, clients=clients or StatesInMemory()), self.survey)

    def next_stage(self, state: RunState) -> Stage | None:
        """The stage of the next round. None after the last round."""
        return self._stages.next(state)

    def rounds_left(self, state: RunState) -> int:
        """Number of remaining rounds in the stages known so far."""
        return self._stages.rounds_left(state)

    def survey(self, stage: Stage, state: RunState) -> Survey:
        """Collect what all clients report at the end of this stage."""
        if isinstance(stage.survey, Part):
            plan = self.plan(survey_stage(stage), state)
            answers = train_clients(plan.runtime.engine, plan.work).uplink
            return Survey(answers=answers, clients=tuple(plan.clients.tolist()), key=server_key(plan.work.key))
        probability = None
        if stage.survey == "predictions":
            samples = self._federation.samples
            model = state.models[stage.model].model
            probability = survey(self.network, model, self._runtimes.train_samples, samples).probability
        return Survey(self._federation.label_counts, probability)

    def module(self, state: RunState) -> nn.Module:
        """The global model of the last stage, as a module."""
        return self.runtime(self._stages.known(state)[-1], state).network.module(state.model)

    def initial_module(self) -> nn.Module:
        """The model before the first round, as a module."""
        return self.network.module(self.network.state())

    def encoder_count(self, state: RunState) -> int:
        """The number of encoders that the final global model concatenates. 0 if it concatenates none."""
        return len(self._stages.known(state)[-1].concatenates)

    def client_bytes(self, start: RunState, present: int) -> int:
        """Bytes on disk that new client states will need. `present` is the number of states already on disk."""
        stage = self.next_stage(start)
        if stage is None:
            return 0
        most = max_states_on_disk(self._config, self._federation.clients, self.rounds_left(start), present)
        state = self._planner.initial_state(self._planner.parts(stage), start.model)
        return max(0, most - present) * state_bytes(stage, state, start.model)

    # -- the steps of a round ------------------------------------------------------------------------------

    def plan(self, stage: Stage, state: RunState) -> RoundPlan:
        """Choose which clients take part in the next round, and what each receives."""
        return self._planner.plan(stage, state, self.runtime(stage, state))

    def train(self, plan: RoundPlan) -> RoundResult:
        """Train the clients of this round, with the engine."""
        return train_clients(plan.runtime.engine, plan.work)

    def aggregate(self, plan: RoundPlan, result: RoundResult, report: TrainingReport) -> Aggregated:
        """Compute the next model from the finite updates, and end the round with it."""
        model, finite = self.aggregator.combine_safely(plan, result, report.finite)
        return self.conclude(plan, result, replace(report, finite=finite), model)

    def conclude(self, plan: RoundPlan, result: RoundResult, report: TrainingReport, model: ServerModel) -> Aggregated:
        """End a round with this model: store the clients' states, and advance in the schedule."""
        stacked = model_as_state(result.trained) if plan.stage.cohort == "alone" else result.states
        clients = states_after(
            plan.before.clients, plan.stage, plan.before.round + 1, plan.clients, stacked, report.finite
        )
        return Aggregated(model, self.state_after(plan, clients, model), report)

    def state_after(self, plan: RoundPlan, clients: ClientStates, model: ServerModel) -> RunState:
        """The state after a round that ended with this model and these client states."""
        before = plan.before
        after = replace(before, round=before.round + 1, stage_round=before.stage_round + 1, clients=clients)
        return self._stages.enter_next(after.with_model(plan.stage.model, model), self.survey)

    def evaluate(self, plan: RoundPlan, result: RoundResult, aggregated: Aggregated) -> RowFields:
        """Evaluate the round's models if an evaluation is due, and return the fields for the round's row."""
        if not self.evaluation.is_due(plan):
            return {}
        return self.evaluation.evaluate(plan, result, aggregated)

    def record(self, plan: RoundPlan, result: RoundResult, aggregated: Aggregated) -> RoundRow:
        """Make the row of the round, without its evaluation and its time."""
        return self._rows.row(plan, result, aggregated)

    # -- evaluation outside of rounds ----------------------------------------------------------------------

    def evaluate_model(self, model: ModelState) -> Evaluation:
        """Evaluate a model of the run's architecture on the test set, outside of a round."""
        return self._base_runtime.test_set.evaluate(model)

    def scores(self, state: RunState) -> Scores | None:
        """Metrics of the final global model's probabilities.

        None if there is no such model, if there is too little memory, or if a probability is not finite.
        """
        predicted = self.predict(state)
        if predicted is None:
            return None
        return score_probabilities(*predicted, self._config.specificity, self._positive)

    def site_scores(self, state: RunState) -> dict[str, SiteScore]:
        """Scores of the final model on each client's held-out samples, by the client's name. Empty if there are none.

        If the method gives each client its own model, that model is scored.
        """
        if not self._federation.held_out:
            return {}
        stage = self._stages.known(state)[-1]
        tests = self.evaluation.client_tests(self.runtime(stage, state))
        return tests.scores(self._model_for(stage, state), self._positive)

    def _model_for(self, stage: Stage, state: RunState) -> Callable[[int], ModelState]:
        """Return a function from a client to its final model: the global one, unless the client has its own."""
        if self.personal is not None:
            return self.evaluation.personal_tests(self.personal).models(self.runtime(stage, state), state, state.model)
        if stage.cohort == "alone":
            return self.evaluation.own_model_reader(state, stage.model)
        return lambda _: state.model

    @property
    def _positive(self) -> int | None:
        """The index of the positive class, if the configuration names it."""
        return positive_class(self._config, self._federation.dataset)

    def predict(self, state: RunState) -> Predictions | None:
        """Predict the test set with the final global model. None if there is no such model, or too little memory."""
        stage = self._stages.known(state)[-1]
        if stage.cohort == "alone" or (self.personal is not None and not self.personal.has_global_model):
            return None
        try:
            return self.runtime(stage, state).test_set.predict(state.model)
        except torch.OutOfMemoryError:  # the rest of the result is more important
            return None

    # -- the models of a run ---------------------------------------------------------------------------------

    def runtime(self, stage: Stage, state: RunState) -> ModelRuntime:
        """The runtime that trains and evaluates the stage's model."""
        if not stage.concatenates:
            return self._base_runtime
        models = [state.models[name].model for name in stage.concatenates]
        if self._concatenated is None or not all(map(operator.is_, models, self._concatenated[0])):
            seed = self._config.seed if stage.new_head else None
            model = concatenate([self.network.module(one) for one in models], seed)
            engine = self.engine_name if self.engine_name in ENGINES else self._config.engine
            runtime = self._runtimes.runtime(model, engine)
            runtime.engine.notices = self.notices
            self._concatenated = models, runtime
        return self._concatenated[1]


def _compiles_steps(federation: Federation, config: Config, model: nn.Module) -> bool:
    steps = -(-float(federation.sizes.mean()) // config.batch_size)
    return worth_compiling(config.compile, config.rounds * config.local_epochs * steps, model)
