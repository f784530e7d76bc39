"""Evaluate models on the sites' test data, and add up the results."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from fedskew.engine import ModelState
from fedskew.errors import UserError
from fedskew.experiment.round.evaluate import Labels, RowFields, TestSet
from fedskew.flower.model_message import companion_tensors, model_tensors
from fedskew.flower.settings import FederationSettings
from fedskew.flower.site_replies import Quorum, Reply, require_any_reply, usable_replies
from fedskew.flower.sites import Sites
from fedskew.flower.tensors import from_bytes, require_like, to_bytes
from fedskew.flower.wire import MAX_SAMPLES, Facts, Garbled, is_count
from fedskew.methods.stages import Notes
from fedskew.metrics.confusion import Confusion, Evaluation
from fedskew.metrics.score_histograms import SCORE_BINS, ScoreHistograms
from fedskew.metrics.scores import BINS
from fedskew.task import Task

Replies = Mapping[int, Reply]
"""The sites' reports on their tests, by client."""
Kept = Mapping[int, Facts]
"""By client, the facts that name the saved state to test with. Empty for methods without a personal part."""


class NoTests(UserError):
    """There are no usable test results of a model."""


@dataclass(frozen=True)
class TestedModel:
    """Which of a run's models is tested. A site tests it only if the run's configuration plans this test."""

    model: str
    """The name of the model, `global` for most methods."""
    round: int
    """The number of rounds that trained it."""
    notes: Notes
    """The server's notes between stages, on which the later stages of some methods depend."""

    __test__ = False  # for pytest


class SiteEvaluation:
    """Evaluates models on the sites' test data, on the server's, or on both."""

    def __init__(self, sites: Sites, settings: FederationSettings, classes: int, task: Task) -> None:
        self._sites, self._settings, self._classes, self._task = sites, settings, classes, task

    @property
    def by_sites(self) -> bool:
        """Whether the sites' test data give the `evaluation` of a round's row. Otherwise, the server's test data do."""
        return self._settings.evaluation == "sites"

    def test_request(self, tested: TestedModel, labels: Labels, frozen: Sequence[str] = ()) -> Facts | None:
        """Make the request for the sites' tests. None if the sites report no results (`site_metrics` is `none`).

        `frozen` names the models whose encoders are part of the tested model.
        """
        detail = self._settings.site_metrics
        if detail == "none":
            return None
        return {"labels": labels and list(labels), "detail": detail, "frozen": list(frozen), **asdict(tested)}

    def request(
        self, model: ModelState, tested: TestedModel, labels: Labels, frozen: Mapping[str, ModelState], kept: Kept
    ) -> dict[int, Reply]:
        """Ask the connected sites to test a model, with the personal tensors of the states that `kept` names."""
        return self._ask(model, self.test_request(tested, labels, list(frozen)) or {}, frozen, kept)

    def _ask(
        self, model: ModelState, test_request: Facts, frozen: Mapping[str, ModelState], kept: Kept
    ) -> dict[int, Reply]:
        self._sites.wait_for(self._settings.required_sites)
        payload = to_bytes(model_tensors("sent", model) | companion_tensors(frozen))
        facts = {client: {**test_request, **kept.get(client, {})} for client in self._sites.online}
        quorum = Quorum(self._settings.required_sites, frozenset(facts))
        answers = self._sites.request(
            "evaluate", facts, payload, self._settings.round_timeout, quorum=quorum, repeats=True
        )
        try:
            require_any_reply(answers, self._sites.names, "with its tests")
        except UserError as error:
            raise NoTests(str(error)) from error
        return dict(usable_replies(answers))

    def histograms(
        self, model: ModelState, tested: TestedModel, frozen: Mapping[str, ModelState], kept: Kept
    ) -> dict[str, ScoreHistograms]:
        """Request score histograms of the sites' tests. Empty if sites do not report results by class.

        It is also empty if no site replies, because the run is over and must not fail now.
        """
        if self._settings.site_metrics != "class":
            return {}
        try:
            test_request = {**(self.test_request(tested, None, list(frozen)) or {}), "scores": True}
            replies = self._ask(model, test_request, frozen, kept)
        except UserError as error:
            self._sites.log(f"the run has no scores such as AUROC: {error}")
            return {}
        found = {}
        for client, reply in replies.items():
            try:
                found[self._sites.names[client]] = read_histograms(reply, self._classes, self._task)
            except Garbled as problem:
                self._sites.log(
                    f"warning: the score histograms of {self._sites.names[client]} are discarded: {problem}"
                )
        return found

    def evaluate(self, replies: Replies) -> Evaluation:
        """Add up the sites' usable results: by class, or only totals if the sites report only totals."""
        blank = np.zeros(self._task.counts_shape(self._classes), np.int64)
        if self._settings.site_metrics == "class":
            matrices = self._matrices(replies)
            _require_tests({client: matrix for client, matrix in matrices.items() if matrix.any()})
            losses = [_log_loss(replies[client]) for client in matrices]
            total = np.sum([blank, *matrices.values()], axis=0)
            return Evaluation.from_counts(total, log_loss=math.fsum(losses) / int(total.sum()))
        counts = self._counts(replies)
        _require_tests(counts)
        right, tested = np.sum(list(counts.values()), axis=0).tolist()
        return Evaluation.from_counts(blank, (right, tested))

    def measure(self, replies: Replies, server_tests: TestSet, model: ModelState, labels: Labels) -> RowFields:
        """Return the evaluation's fields of the round's row. `server_tests` is the server's test set."""
        fields: RowFields = (
            {"evaluation": self.evaluate(replies)} if self.by_sites else server_tests.measure(model, labels)
        )
        if self._settings.site_metrics == "total":
            fields["sites"] = self._accuracies(replies)
        elif self._settings.site_metrics == "class":
            fields["sites"] = self._by_name(self._matrices(replies))
        own = {client: _read_counts(reply.facts.get("personal")) for client, reply in replies.items()}
        if any(own.values()):  # sites that have their own model beside the global one have tested it
            counts = [own.get(client) for client in range(len(self._sites.names))]
            fields["client_tests"] = {"personal": [None if count is None else count[0] / count[1] for count in counts]}
        return fields

    def _by_name(self, matrices: Mapping[int, Confusion]) -> dict[str, Any]:
        return {
            self._sites.names[client]: Evaluation.from_counts(m).to_json() for client, m in matrices.items() if m.any()
        }

    def _matrices(self, replies: Replies) -> dict[int, Confusion]:
        found = {}
        for client, reply in replies.items():
            try:
                found[client] = _matrix(reply, self._classes, self._task)
            except Garbled as problem:
                self._sites.log(f"warning: the test results of {self._sites.names[client]} are discarded: {problem}")
        return found

    def _accuracies(self, replies: Replies) -> dict[str, Any]:
        counts = self._counts(replies)
        return {self._sites.names[client]: {"accuracy": right / tested} for client, (right, tested) in counts.items()}

    def _counts(self, replies: Replies) -> dict[int, tuple[int, int]]:
        """Return the numbers of correct and of all predictions by site. Sites with unusable numbers are left out."""
        counts = {client: _read_counts(reply.facts) for client, reply in replies.items()}
        return {client: count for client, count in counts.items() if count is not None}


def read_local_tests(replies: Replies, clients: int) -> dict[str, list[float | None]]:
    """Read the accuracies before and after local training. Each list has an entry per client.

    A client that does not report both has None in both lists.
    """
    found: dict[str, list[float | None]] = {"before": [None] * clients, "after": [None] * clients}
    for client, reply in replies.items():
        reported = reply.facts.get("local_tests")
        counts = [_read_counts(reported.get(when)) for when in found] if isinstance(reported, dict) else [None]
        if None not in counts:
            for when, count in zip(found, counts, strict=True):
                assert count is not None
                found[when][client] = count[0] / count[1]
    return found


def _read_counts(reported: object) -> tuple[int, int] | None:
    """Read the numbers of correct and of all predictions. None if they are missing or impossible, or 0 of 0."""
    if not isinstance(reported, dict):
        return None
    right, tested = reported.get("right"), reported.get("tested")
    return (right, tested) if is_count(right) and is_count(tested, at_least=1) and right <= tested else None


def _require_tests(results: Mapping[int, object]) -> None:
    if not results:
        raise NoTests(
            "no site reported usable test results; expected sites that have test samples, and whose `metrics` in "
            "site.yaml allow federation.site_metrics"
        )


def read_histograms(reply: Reply, classes: int, task: Task) -> ScoreHistograms:
    """Read score histograms of a site. Raise `Garbled` if they are not the counts of one test set."""
    tensors, counts = from_bytes(reply.payload), torch.empty(classes, SCORE_BINS, dtype=torch.int64)
    sums = {"reliability": torch.empty(3, BINS, dtype=torch.float64), "brier": torch.empty((), dtype=torch.float64)}
    require_like(tensors, {"own": counts, "others": counts, **sums})
    found = ScoreHistograms(
        tensors["own"].numpy(),
        tensors["others"].numpy(),
        tensors["reliability"].numpy(),
        float(tensors["brier"]),
        task.name == "multi-label",
    )
    if not found.is_consistent() or found.samples > MAX_SAMPLES:
        raise Garbled("they are not the counts of one test set")
    return found


def _log_loss(reply: Reply) -> float:
    """Return the sum of the samples' log losses. NaN if it is missing or impossible."""
    value = reply.facts.get("log_loss")
    return value if isinstance(value, float) and value >= 0 else math.nan


def _matrix(reply: Reply, classes: int, task: Task) -> Confusion:
    try:
        matrix = np.array(reply.facts.get("confusion"), dtype=np.int64)
    except (TypeError, ValueError, OverflowError) as error:
        raise Garbled("it has no confusion matrix") from error
    if matrix.shape != task.counts_shape(classes) or not all(map(is_count, matrix.ravel().tolist())):
        raise Garbled(f"its confusion matrix does not have counts of {classes} classes")
    return matrix
