"""Tests of a model where the test data are: at the sites, whose confusion matrices add up."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from fedskew.engine import ModelState
from fedskew.experiment.round.test_set import Labels, Tests
from fedskew.flower.model_message import model_tensors, models_tensors
from fedskew.flower.settings import FederationSettings
from fedskew.flower.sites import Reply, Sites, good, require_some
from fedskew.flower.tensors import to_bytes
from fedskew.flower.wire import Facts, Garbled, is_count
from fedskew.metrics.confusion import Confusion, Evaluation


class SiteTests(Tests):
    """Where the sites' tests decide, or are told beside the server's own."""

    def __init__(
        self,
        own: Tests,
        sites: Sites,
        settings: FederationSettings,
        classes: int,
        frozen: Mapping[str, ModelState] | None = None,
    ) -> None:
        super().__init__({})
        self._own = own
        self._sites, self._settings, self._classes, self._frozen = sites, settings, classes, frozen or {}
        self.ahead: tuple[ModelState, dict[int, Reply]] | None = None
        """A model that the sites have tested already, and what they told of it."""

    def of(self, model: ModelState, labels: Labels = None) -> Evaluation:
        if self._settings.evaluation == "server":
            return self._own.of(model, labels)
        return self._total(self._matrices(model, labels))

    def row(self, model: ModelState, labels: Labels = None) -> dict[str, Any]:
        """With what each site tells of its own tests."""
        if self._settings.evaluation == "sites":
            matrices = self._matrices(model, labels)
            return {"evaluation": self._total(matrices), "sites": self._by_name(matrices)}
        recorded = self._own.row(model, labels)
        if self._settings.site_metrics == "total":
            recorded["sites"] = self._totals(model, labels)
        elif self._settings.site_metrics == "class":
            recorded["sites"] = self._by_name(self._matrices(model, labels))
        return recorded

    def _total(self, matrices: Mapping[int, Confusion]) -> Evaluation:
        return Evaluation(np.sum([np.zeros((self._classes, self._classes)), *matrices.values()], axis=0))

    def _by_name(self, matrices: Mapping[int, Confusion]) -> dict[str, Any]:
        return {self._sites.names[client]: Evaluation(m).to_json() for client, m in matrices.items() if m.any()}

    def _matrices(self, model: ModelState, labels: Labels) -> dict[int, Confusion]:
        found = {}
        for client, reply in self._asked(model, labels).items():
            try:
                found[client] = _matrix(reply, self._classes)
            except Garbled as problem:
                self._sites.say(f"the tests of {self._sites.names[client]} are left out: {problem}")
        return found

    def _totals(self, model: ModelState, labels: Labels) -> dict[str, Any]:
        replies = self._asked(model, labels)
        counts = {client: (reply.facts.get("right"), reply.facts.get("tested")) for client, reply in replies.items()}
        return {
            self._sites.names[client]: {"accuracy": right / tested}
            for client, (right, tested) in counts.items()
            if is_count(right) and is_count(tested, least=1) and right <= tested
        }

    def question(self, labels: Labels) -> Facts | None:
        """What the sites are asked of their tests; None: nothing."""
        detail = "class" if self._settings.evaluation == "sites" else self._settings.site_metrics
        if detail == "none":
            return None
        return {"labels": labels and list(labels), "detail": detail, "frozen": list(self._frozen)}

    def _asked(self, model: ModelState, labels: Labels) -> dict[int, Reply]:
        ahead, self.ahead = self.ahead, None
        if ahead is not None and ahead[0] is model and ahead[1]:
            return ahead[1]
        self._sites.await_some(self._settings.least)
        facts = {client: self.question(labels) or {} for client in self._sites.online}
        payload = to_bytes(model_tensors("sent", model) | models_tensors(self._frozen))
        answers = self._sites.ask("evaluate", facts, payload, self._settings.round_timeout)
        require_some(answers, self._sites.names, "with its tests")
        return dict(good(answers))


def _matrix(reply: Reply, classes: int) -> Confusion:
    try:
        matrix = np.array(reply.facts.get("confusion"), dtype=np.int64)
    except (TypeError, ValueError, OverflowError) as error:
        raise Garbled("there is no confusion matrix") from error
    if matrix.shape != (classes, classes) or not all(map(is_count, matrix.ravel().tolist())):
        raise Garbled(f"the confusion matrix is not one of {classes} classes")
    return matrix
