"""Decide when models are evaluated and which ones, and evaluate them for the round's row."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from fedskew.data.federation import Federation
from fedskew.engine import EvaluationSums, Evaluator, ModelState, RoundResult
from fedskew.experiment.config import Config
from fedskew.experiment.round.state import ClientStates, RunState, model_from_state
from fedskew.methods import Tensors
from fedskew.metrics.confusion import Confusion, Evaluation, accuracy
from fedskew.metrics.drift import drift_diversity, finite_or_none
from fedskew.metrics.groups import group_accuracy

if TYPE_CHECKING:
    from fedskew.experiment.round.aggregate import Aggregated
    from fedskew.experiment.round.client_tests import ClientTests
    from fedskew.experiment.round.personal_tests import PersonalTests
    from fedskew.experiment.round.plan import RoundPlan
    from fedskew.experiment.round.runtime import ModelRuntime
    from fedskew.methods import Personal

Labels = tuple[int, ...] | None
"""The classes to which a stage restricts the data. None means all classes."""
RowFields = dict[str, Any]
"""The fields of a `RoundRow` that an evaluation fills."""
Predictions = tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]
"""Probabilities [samples, classes], and true classes or labels."""


class RoundEvaluation:
    """Evaluates the models of one run's rounds."""

    def __init__(
        self,
        federation: Federation,
        config: Config,
        initial: ModelState,
        device: torch.device,
        personal: Personal | None = None,
        personal_names: frozenset[str] = frozenset(),
    ) -> None:
        """`personal_names` are the names of the tensors that stay on the clients."""
        self._federation, self._config, self._initial, self._device = federation, config, initial, device
        self._personal, self._personal_names = personal, personal_names

    def is_due(self, plan: RoundPlan) -> bool:
        """Whether this round ends with an evaluation: every `eval_every` rounds, and at the end of each stage.

        Only rounds that train the same model are counted. No evaluation is due if the test set has no samples with the
        stage's labels.
        """
        labels = plan.stage.labels
        if labels is not None and not np.isin(self._federation.dataset.test.y, labels).any():
            return False
        return plan.ends_stage or (plan.start.rounds + 1) % self._config.eval_every == 0

    def covers_one_model(self, plan: RoundPlan) -> bool:
        """Whether only the aggregated model is evaluated, and no client's model."""
        if self._personal is not None and not self._personal.has_global_model:
            return False
        return plan.stage.cohort != "alone" and not self._config.eval_local and not self._federation.held_out

    def evaluate(self, plan: RoundPlan, result: RoundResult, aggregated: Aggregated) -> RowFields:
        """Evaluate the round's models and return the fields for the round's row."""
        test_set, stage, after = plan.runtime.test_set, plan.stage, aggregated.after
        if stage.cohort == "alone":
            clients = self._federation.populated.tolist()
            restore = partial(model_from_state, initial=self._initial, device=self._device)
            fields = test_set.measure_own_models(clients, after.clients, stage.model, restore)
            if self._federation.held_out:
                tests = self.client_tests(plan.runtime)
                own_models = self.own_model_reader(after, stage.model)
                fields["client_tests"] = {"accuracy": tests.measure_own_models(own_models)}
            return fields
        if self._personal is not None:
            return self.personal_tests(self._personal).evaluate(plan, result, aggregated)
        fields = test_set.measure(aggregated.model.model, stage.labels)
        trained = {}
        if stage.cohort == "clients" and (self._config.eval_local or self._federation.held_out):
            rows = np.flatnonzero(aggregated.report.finite).tolist()
            trained = {int(plan.clients[row]): client_model(result.trained, row) for row in rows}
        if self._federation.held_out and stage.model == "global":
            tests = self.client_tests(plan.runtime)
            sent = plan.start.model if stage.cohort == "clients" else None  # no client receives a pooled model
            fields["client_tests"] = tests.measure(aggregated.model.model, sent, trained)
        if self._config.eval_local and stage.cohort == "clients":
            fields |= test_set.measure_participants(
                plan.start.model, trained, plan.federation, stage.labels, with_matrices=plan.ends_stage
            )
        return fields

    def client_tests(self, runtime: ModelRuntime) -> ClientTests:
        """Make the evaluator for the clients' held-out samples."""
        from fedskew.experiment.round.client_tests import ClientTests

        return ClientTests(self._federation, runtime.train_set)

    def personal_tests(self, personal: Personal) -> PersonalTests:
        """Make the evaluator of the clients' personal models."""
        from fedskew.experiment.round.personal_tests import PersonalTests

        return PersonalTests(personal, self._federation, self._config, self._initial, self._personal_names)

    def own_model_reader(self, state: RunState, model: str) -> Callable[[int], ModelState]:
        """Return a function that reads the model of a client that trains alone."""

        def read(client: int) -> ModelState:
            return model_from_state(state.clients.read(model, [client])[0], self._initial, self._device)

        return read


class TestSet:
    """Evaluates models on one test set."""

    __test__ = False  # pytest must not collect it

    def __init__(self, evaluators: Mapping[str, Evaluator]) -> None:
        """Take one evaluator per domain, under the domain's name. For data without domains, take a single one."""
        self._evaluators = evaluators
        self._last_results: dict[int, tuple[int, Confusion]] = {}
        """For each client: the version of its own model at the last evaluation, and that version's confusion matrix."""

    def evaluate(self, model: ModelState, labels: Labels = None) -> Evaluation:
        """Evaluate the model on the test set, or only on samples with these labels."""
        return _evaluation(self.sums(model, labels))

    def sums(self, model: ModelState, labels: Labels = None) -> EvaluationSums:
        """Return the confusion matrix and the sum of log losses of the model. Zeros if no sample has these labels."""
        return _total(self._by_domain(model, labels))

    def confusion(self, model: ModelState, labels: Labels = None) -> Confusion:
        """The confusion matrix. All zeros if no sample has these labels."""
        return self.sums(model, labels).confusion

    def measure(self, model: ModelState, labels: Labels = None) -> RowFields:
        """Evaluate the model, also on each domain if there are several, and return the row's fields."""
        return _row_fields(self._by_domain(model, labels))

    def predict(self, model: ModelState) -> Predictions:
        """Predict the whole test set, domain by domain."""
        found = [evaluator.probabilities(model) for evaluator in self._evaluators.values()]
        probabilities, true = zip(*found, strict=True)
        return torch.cat(probabilities).cpu().numpy(), torch.cat(true).cpu().numpy()

    def begin_to_measure(self, model: ModelState, labels: Labels = None) -> Callable[[], RowFields]:
        """Start `measure` on the device, and return a function that waits for the result."""
        pending = {name: evaluator.begin(model, labels) for name, evaluator in self._evaluators.items()}
        return lambda: _row_fields({name: read() for name, read in pending.items()})

    def measure_own_models(
        self, clients: Sequence[int], states: ClientStates, model: str, restore: Callable[[Tensors], ModelState]
    ) -> RowFields:
        """Evaluate the own models of clients that train alone, each on the whole test set.

        `restore` turns a client's state into its model. The clients' confusion matrices are added up, so every accuracy
        is the mean over clients. Only models that have changed are evaluated again. Models that were never trained
        (version 0) are equal, so only one of them is evaluated.
        """
        versions = states.versions.get(model, {})
        for client in clients:
            version = versions.get(client, 0)
            if self._last_results.get(client, (-1,))[0] == version:
                continue
            untrained = next((result for result in self._last_results.values() if result[0] == version == 0), None)
            tensors = states.read(model, [client])[0]
            self._last_results[client] = untrained or (version, self.confusion(restore(tensors)))
        matrices = [self._last_results[client][1] for client in clients]
        return {
            "evaluation": Evaluation.from_counts(np.sum(matrices, axis=0)),
            "client_accuracy": [accuracy(matrix) for matrix in matrices],
        }

    def measure_participants(
        self,
        sent: ModelState,
        trained: Mapping[int, ModelState],
        federation: Federation,
        labels: Labels,
        with_matrices: bool = False,
    ) -> RowFields:
        """Evaluate participants' models before and after the update, also on vacant, minority and majority classes."""
        before = self.evaluate(sent, labels)
        local = []
        for client, model in trained.items():
            after = self.evaluate(model, labels)
            groups = {
                "vacant": federation.vacant(client),
                "minority": federation.minority(client),
                "majority": federation.majority(client),
            }
            local.append(
                {
                    "client": client,
                    "before": {"accuracy": before.accuracy} | group_accuracy(before.class_accuracy, groups),
                    "after": {"accuracy": after.accuracy} | group_accuracy(after.class_accuracy, groups),
                    "class_accuracy": list(after.class_accuracy),
                }
                | ({"confusion": after.confusion.tolist()} if with_matrices else {})
            )
        updates = (_flat_update(sent, model) for model in trained.values())
        return {
            "local": local,
            "local_before": list(before.class_accuracy),
            "drift_diversity": finite_or_none(drift_diversity(updates)) if trained else None,
        }

    def _by_domain(self, model: ModelState, labels: Labels) -> dict[str, EvaluationSums]:
        return {name: evaluator.begin(model, labels)() for name, evaluator in self._evaluators.items()}


def _total(by_domain: Mapping[str, EvaluationSums]) -> EvaluationSums:
    parts = by_domain.values()
    return EvaluationSums(np.sum([one.confusion for one in parts], axis=0), math.fsum(one.log_loss for one in parts))


def _evaluation(tested: EvaluationSums) -> Evaluation:
    return Evaluation.from_counts(tested.confusion, log_loss=tested.log_loss / max(1, int(tested.confusion.sum())))


def _row_fields(by_domain: Mapping[str, EvaluationSums]) -> RowFields:
    fields: RowFields = {"evaluation": _evaluation(_total(by_domain))}
    if len(by_domain) > 1:
        fields["domain_accuracy"] = {
            name: accuracy(one.confusion) if one.confusion.any() else None for name, one in by_domain.items()
        }
    return fields


def client_model(stacked: ModelState, row: int) -> ModelState:
    """One client's model, as views of the stacked tensors."""
    return ModelState(
        {name: t[row] for name, t in stacked.params.items()}, {name: t[row] for name, t in stacked.buffers.items()}
    )


def _flat_update(sent: ModelState, trained: ModelState) -> npt.NDArray[np.generic]:
    return np.concatenate(
        [(trained.params[name] - w).cpu().double().numpy().ravel() for name, w in sent.params.items()]
    )
