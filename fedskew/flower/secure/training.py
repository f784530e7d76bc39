"""Training with secure aggregation.

The server learns the mean of the sites' updates, and of their losses if the sites share them. It also learns two
totals: the sites' samples, and the samples visited in training.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from fedskew.engine import RoundWork
from fedskew.experiment.round.plan import RoundPlan
from fedskew.flower.model_message import model_tensors, work_tensors
from fedskew.flower.received_replies import ReceivedReplies
from fedskew.flower.remote_training import Answers, SiteTraining, round_name
from fedskew.flower.secure.fixed_point import Total
from fedskew.flower.secure.sums import SecureSums
from fedskew.flower.settings import FederationSettings
from fedskew.flower.site_replies import Failure, Reply
from fedskew.flower.sites import Sites
from fedskew.flower.tensors import to_bytes
from fedskew.flower.wire import Facts
from fedskew.methods import Tensors


class SecureTraining(SiteTraining):
    """Lets the sites train, and adds up their updates with secure aggregation.

    The aggregation of a round expects one update per site. It receives the mean in place of every update. For a server
    rule that uses only the mean, the result is that of training without secure aggregation, up to rounding.
    """

    def __init__(
        self,
        sites: Sites,
        settings: FederationSettings,
        run: str,
        kept_rounds: int,
        count_release: Callable[[], None],
        received: ReceivedReplies,
    ) -> None:
        super().__init__(sites, settings, run, kept_rounds, count_release, received)
        self._sums = SecureSums(sites, settings)

    def request(
        self,
        plan: RoundPlan,
        test_request: Facts | None = None,  # noqa: ARG002
        local_tests: bool = False,  # noqa: ARG002
        kept: Mapping[int, Facts] | None = None,  # noqa: ARG002
    ) -> tuple[Answers, dict[int, Reply]]:
        """Ask the sites to train for one round.

        The replies have no test results, because these are added up in a request of their own (`SecureEvaluation`).
        """
        if self._settings.sites_add_noise:
            self._count_release()
        facts = {a.client: self._facts(plan, a.client, a.state) for a in plan.work.assignments}
        payload = to_bytes(work_tensors(plan.work, plan.stage.concatenates))
        found = self._sums.request("train", facts, payload, round_name(plan))
        if found.total is None:
            self._sites.log(f"round {round_name(plan)}: {found.reason}")
            return {client: Failure(found.failures.get(client, found.reason)) for client in facts}, {}
        # The server knows only the total number of samples, so each contributor counts with an even share of them,
        # but with one sample at least.
        samples = _even_shares(found.total.counts["samples"], len(found.contributors))
        for client, share in zip(found.contributors, samples, strict=True):
            self._sites.samples[client] = max(1, share)
        answers: dict[int, Reply | Failure] = {client: Failure(reason) for client, reason in found.failures.items()}
        answers |= _mean_replies(found.total, plan.work, found.contributors)
        return dict(sorted(answers.items())), {}


def _mean_replies(total: Total, work: RoundWork, contributors: list[int]) -> dict[int, Reply]:
    """Make a reply for every contributor, as if it had sent the mean and an even share of the counts."""
    payload = to_bytes(_mean_model(total, work))
    facts: Facts = {"round": work.key.round, "finite": True}
    if "loss" in total.means:
        facts["loss"] = float(total.means["loss"])
    visits = _even_shares(total.counts["visits"], len(contributors))
    return {
        client: Reply({**facts, "visits": count}, payload) for client, count in zip(contributors, visits, strict=True)
    }


def _mean_model(total: Total, work: RoundWork) -> Tensors:
    """Add the mean change to the model that the sites received. A number whose change is 0 keeps its exact value."""
    mean: Tensors = {}
    for name, sent in model_tensors("trained", work.exchanged).items():
        change = torch.from_numpy(total.means[name])
        before = sent.cpu()
        if before.is_floating_point():
            mean[name] = torch.where(change == 0, before, (before.double() + change).to(before.dtype))
        else:
            mean[name] = before + change.round().to(before.dtype)
    return mean


def _even_shares(total: int, number: int) -> list[int]:
    """Split a total into whole numbers that differ by at most one."""
    return [(total + index) // number for index in range(number)]
