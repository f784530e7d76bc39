"""Evaluate personalised methods (`methods.personal`): the clients' own models, and the global model if there is one.

If there is no global model, the result on the server's test set is the mean over all clients' models. If clients hold
out samples (`client_test`), each client's own model is also tested on these. Some methods fine-tune every client's
model before its test, which takes long. Those with a global model do so only after the last round of a stage or of the
run.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from fedskew.data.federation import Federation
from fedskew.engine import Assignment, LocalTraining, ModelState, RoundKey, RoundResult, RoundWork
from fedskew.engine.personal_training import initial_personal, personal_model, phase_work
from fedskew.experiment.config import Config
from fedskew.experiment.round.aggregate import Aggregated
from fedskew.experiment.round.client_tests import ClientTests, ModelFor
from fedskew.experiment.round.evaluate import RowFields, client_model
from fedskew.experiment.round.plan import RoundPlan
from fedskew.experiment.round.runtime import ModelRuntime
from fedskew.experiment.round.state import RunState
from fedskew.methods.fedavg import SGD, CrossEntropy, Mean
from fedskew.methods.personal import Personal, Phase
from fedskew.metrics.confusion import Evaluation, accuracy

_STATES = "global"
"""The clients' states are stored under this name, even if the method has no global model."""


@dataclass(frozen=True)
class PersonalTests:
    """Evaluates the models of one run's rounds, for a personalised method."""

    personal: Personal
    federation: Federation
    config: Config
    initial: ModelState
    personal_names: frozenset[str]
    """Names of the tensors that stay on the clients."""

    def evaluate(self, plan: RoundPlan, result: RoundResult, aggregated: Aggregated) -> RowFields:
        """Evaluate the round's models and return the fields for the round's row."""
        after, model = aggregated.after, aggregated.model.model
        fields = (
            plan.runtime.test_set.measure(model)
            if self.personal.has_global_model
            else self._measure_all_clients(plan, aggregated)
        )
        rows = np.flatnonzero(aggregated.report.finite).tolist()
        trained = {
            int(plan.clients[row]): self._join(plan, after, int(plan.clients[row]), client_model(result.trained, row))
            for row in rows
        }
        if self.config.eval_local:
            fields |= plan.runtime.test_set.measure_participants(
                plan.start.model, trained, plan.federation, None, with_matrices=plan.ends_stage
            )
        if self.federation.held_out:
            tests = ClientTests(self.federation, plan.runtime.train_set)
            fields["client_tests"] = self._client_tests(tests, plan, after, model, trained)
        return fields

    def _client_tests(
        self, tests: ClientTests, plan: RoundPlan, after: RunState, model: ModelState, trained: dict[int, ModelState]
    ) -> dict[str, list[float | None]]:
        """Return the field `client_tests` of the row. `Result.client_tests` explains its keys."""
        if self.personal.has_global_model:
            found = tests.measure(model, plan.start.model, trained)
            is_cheap = self.personal.fine_tuning() is None  # fine-tuning every client in every round would take long
            tests_own_models = plan.ends_stage or is_cheap
            own = tests.measure_own_models(self.models(plan.runtime, after, model)) if tests_own_models else None
            return found if own is None else {**found, "personal": own}
        own = tests.measure_own_models(self.models(plan.runtime, after, model))
        participants = tests.with_held_out(trained)
        return {
            "accuracy": own,
            "before": tests.measure_own_models(self._kept_models(plan.before, plan.start.model), participants),
            "after": tests.measure_own_models(trained.__getitem__, participants),
            "personal": own,
        }

    def _measure_all_clients(self, plan: RoundPlan, aggregated: Aggregated) -> RowFields:
        """Evaluate every client's model on the whole test set.

        Without fine-tuning, clients that never took part share one model.
        """
        after, test_set, fine_tunes = aggregated.after, plan.runtime.test_set, self.personal.fine_tuning() is not None
        model_for = self.models(plan.runtime, after, aggregated.model.model)
        participants = after.clients.versions.get(_STATES, {})
        untrained, found = None, []
        for client in self.federation.populated.tolist():
            if fine_tunes or client in participants:
                found.append(test_set.sums(model_for(client)))
                continue
            untrained = test_set.sums(model_for(client)) if untrained is None else untrained
            found.append(untrained)
        total = np.sum([one.confusion for one in found], axis=0)
        log_loss = math.fsum(one.log_loss for one in found) / max(1, int(total.sum()))
        return {
            "evaluation": Evaluation.from_counts(total, log_loss=log_loss),
            "client_accuracy": [accuracy(one.confusion) for one in found],
        }

    def models(self, runtime: ModelRuntime, state: RunState, model: ModelState) -> ModelFor:
        """Return a function that makes each client's model for its tests. `model` is the global model of `state`."""
        kept, tuning = self._kept_models(state, model), self.personal.fine_tuning()
        if tuning is None:
            return kept
        return lambda client: self._fine_tune(runtime, client, kept(client), tuning, state.models["global"].rounds)

    def _kept_models(self, state: RunState, model: ModelState) -> ModelFor:
        """Return a function that joins this model with the personal tensors that a client keeps."""

        def kept(client: int) -> ModelState:
            own = state.clients.read(_STATES, [client])[0] or self._initial_state()
            return personal_model(model, own)

        return kept

    def _join(self, plan: RoundPlan, after: RunState, client: int, trained: ModelState) -> ModelState:
        """Return a participant's model after training: the trained tensors that it sends, and its other tensors.

        If there is a global model, the others are those of the global model that it received.
        """
        received = plan.start.model
        others = received if self.personal.has_global_model else self._kept_models(after, received)(client)
        return ModelState({**others.params, **trained.params}, {**others.buffers, **trained.buffers})

    def _initial_state(self) -> dict[str, torch.Tensor]:
        return initial_personal(self.personal, self.personal_names, self.initial)

    def _fine_tune(
        self, runtime: ModelRuntime, client: int, start: ModelState, tuning: Phase, rounds: int
    ) -> ModelState:
        """Train a client's model on its own samples, with the run's settings and the cross entropy."""
        config = self.config
        work = RoundWork(
            objective=CrossEntropy(),
            solver=SGD(),
            server=Mean(),
            sent=start,
            downlink={},
            companions={},
            assignments=[Assignment(client, self.federation.indices[client], self.federation.label_counts[client], {})],
            local=LocalTraining(
                epochs=config.local_epochs,
                batch_size=config.batch_size,
                lr=config.lr * config.lr_decay**rounds,
                momentum=config.momentum,
                weight_decay=config.weight_decay,
                clip_norm=config.clip_norm,
                optimizer=config.optimizer,
                batches=config.batches,
            ),
            key=RoundKey(config.seed, 0, rounds, _FINE_TUNING),
            personal_names=self.personal_names,
        )
        trained = client_model(runtime.engine.train(phase_work(work, tuning, _FINE_TUNING, {})).trained, 0)
        whole = {**trained.params, **trained.buffers}  # parameters that were fixed are among the buffers
        return ModelState({n: whole[n] for n in start.params}, {n: whole[n] for n in start.buffers})


_FINE_TUNING = 1000
"""The phase number in the random key of fine-tuning. No phase of a round has this number."""
