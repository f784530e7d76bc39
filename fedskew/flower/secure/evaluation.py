"""Tests at the sites with secure aggregation.

The server learns only two totals over the sites: the number of predictions, and the number of correct ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fedskew.engine import ModelState
from fedskew.errors import plural
from fedskew.experiment.round.evaluate import Labels, RowFields, TestSet
from fedskew.flower.model_message import companion_tensors, model_tensors
from fedskew.flower.remote_evaluation import Kept, NoTests, Replies, SiteEvaluation, TestedModel
from fedskew.flower.secure.sums import SecureSums
from fedskew.flower.settings import FederationSettings
from fedskew.flower.site_replies import Reply
from fedskew.flower.sites import Sites
from fedskew.flower.tensors import to_bytes
from fedskew.flower.wire import Facts
from fedskew.task import Task

_ALL_SITES = -1
"""The key of the reply with the totals, in place of a site's number."""


class SecureEvaluation(SiteEvaluation):
    """Evaluates models by the sum of the sites' test results, or on the server's test data."""

    def __init__(self, sites: Sites, settings: FederationSettings, classes: int, task: Task) -> None:
        super().__init__(sites, settings, classes, task)
        self._sums = SecureSums(sites, settings)

    def test_request(self, tested: TestedModel, labels: Labels, frozen: Sequence[str] = ()) -> Facts | None:
        """Make the request for the sites' tests. None if the server tests the model itself."""
        return super().test_request(tested, labels, frozen) if self.by_sites else None

    def _ask(
        self, model: ModelState, test_request: Facts, frozen: Mapping[str, ModelState], kept: Kept
    ) -> dict[int, Reply]:
        self._sites.wait_for(self._settings.sites_to_begin_round)
        payload = to_bytes(model_tensors("sent", model) | companion_tensors(frozen))
        facts = {client: {**test_request, **kept.get(client, {})} for client in self._sites.online}
        for _ in range(self._settings.attempts):
            found = self._sums.request("evaluate", facts, payload)
            if found.total is not None:
                return {_ALL_SITES: Reply({**found.total.counts}, b"")}
            self._sites.log(f"the sites' test results could not be added up: {found.reason}")
        attempts = plural(self._settings.attempts, "attempt")
        raise NoTests(f"the sites' test results could not be added up in {attempts}: {found.reason}")

    def measure(self, replies: Replies, server_tests: TestSet, model: ModelState, labels: Labels) -> RowFields:
        """Return the evaluation of the round, without results by site."""
        return {"evaluation": self.evaluate(replies)} if self.by_sites else server_tests.measure(model, labels)
