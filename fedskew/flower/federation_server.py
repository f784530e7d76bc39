"""The server of a federation across machines: the simulation's server, with sites in place of its engine and tests."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from fedskew.engine import RoundResult
from fedskew.errors import UserError
from fedskew.experiment.config import Config, config_hash
from fedskew.experiment.round.phases import ReadTest, RoundInProgress
from fedskew.experiment.round.row import RoundRow
from fedskew.experiment.round.server import Server
from fedskew.experiment.round.state import RunState, Trainee
from fedskew.experiment.round.workbench import Workbench
from fedskew.flower.model_message import model_tensors
from fedskew.flower.privacy import SENSITIVITY, epsilon, refuse_unbounded
from fedskew.flower.remote_federation import RemoteFederation
from fedskew.flower.run_record import NAME, RunRecord
from fedskew.flower.settings import FederationSettings
from fedskew.flower.site_tests import SiteTests
from fedskew.flower.sites import Sites, good, require_some
from fedskew.flower.sites_engine import SitesEngine, Situation
from fedskew.flower.tensors import from_bytes, require_like, to_bytes
from fedskew.flower.wire import MOST, Garbled
from fedskew.methods import Method, Stage, Survey, Tensors


class FederationServer(Server):
    """Everything that a method's server does is the simulation's; who trains, and who tests, are the sites."""

    repeated_by = f"flwr run, with the federation's app; the data are at its sites, and {NAME} has its other settings"

    def __init__(
        self,
        federation: RemoteFederation,
        method: Method,
        model: nn.Module,
        config: Config,
        sites: Sites,
        settings: FederationSettings,
        record: RunRecord,
    ) -> None:
        super().__init__(federation, method, model, config)
        self.overlaps = False  # the sites decide how long a round takes
        self._sites, self._settings, self._record = sites, settings, record
        if settings.privacy != "none":
            refuse_unbounded(settings.privacy, method, config.average, self.network.state().buffers)
        self._run = config_hash(config)
        self._surveys: dict[str, Survey] = {}
        self._remote = SitesEngine(sites, settings, sites.say, record.release)
        self.engine = self._remote
        self._tests = SiteTests(self._tests, sites, settings, federation.classes)

    def _bench(self, stage: Stage, state: RunState) -> Workbench:
        bench = super()._bench(stage, state)
        if not stage.concatenates:
            return bench
        frozen = {name: state.trainees[name].model for name in stage.concatenates}
        tests = SiteTests(bench.tests, self._sites, self._settings, self._federation.classes, frozen)
        return Workbench(bench.network, self._remote, tests)

    def begin(self, state: RunState) -> RoundInProgress:
        """Who takes part in the next round, once there are enough."""
        self._sites.await_some(self._settings.least)
        self._remote.situation = self._situation(state)
        return super().begin(state)

    def finish(self, under_way: RoundInProgress, result: RoundResult, seconds: float) -> tuple[RunState, RoundRow]:
        """With what the sites are to blame for, and without what they keep to themselves."""
        after, row = super().finish(under_way, result, seconds)
        failures = self._remote.failures
        row = replace(
            row,
            diverged=[client for client in row.diverged if client not in failures],
            failed={self._sites.names[client]: reason for client, reason in failures.items()},
            loss=row.loss if self._settings.share_loss else None,
            privacy=None if self._settings.privacy == "none" else self._spent(),
        )
        return after, row

    def _test(
        self, this: Any, result: RoundResult, finite: npt.NDArray[np.bool_], trainee: Trainee, after: RunState
    ) -> ReadTest:
        """By the sites in the messages that have the next round trained, where there is one: half as many messages."""
        tests = this.bench.tests
        question = tests.question(this.stage.labels)
        if question is not None and after.stage_round > 0:
            self._sites.look_around()
            self._remote.situation = self._situation(after)
            work = super().begin(after).work  # of the sites that are there: nobody is waited for
            tests.ahead = trainee.model, self._remote.ask_ahead(work, question)
        return super()._test(this, result, finite, trainee, after)

    def _situation(self, state: RunState) -> Situation:
        stage = self.stage(state)
        oldest = max(0, state.round - 2 * self._config.checkpoint_every)
        return Situation(self._run, state.stage, state.notes, stage.concatenates if stage else (), oldest)

    def _spent(self) -> dict[str, Any]:
        """What a site that took part in every round has spent, with those that a crash undid."""
        own = self._settings
        reached = epsilon(self._record.releases, own.noise, own.delta, SENSITIVITY[own.privacy])
        self._sites.say(f"{own.privacy} privacy of a site so far: ε = {reached:.3g} at δ = {own.delta:g}")
        return {"kind": own.privacy, "epsilon": reached, "delta": own.delta}

    def client_bytes(self, start: RunState, there: int) -> int:  # noqa: ARG002
        """What clients keep is kept by the sites."""
        return 0

    def _survey(self, stage: Stage, state: RunState) -> Survey:
        """What the sites tell, as the method declares; they are asked once."""
        if stage.name not in self._surveys:
            self._surveys[stage.name] = self._asked(stage, state)
        return self._surveys[stage.name]

    def _asked(self, stage: Stage, state: RunState) -> Survey:
        self._sites.await_some(self._settings.least)
        predictions = stage.survey == "predictions"
        payload = to_bytes(model_tensors("sent", state.trainees[stage.model].model)) if predictions else b""
        asked = {client: {"predictions": predictions} for client in self._sites.online}
        answers = self._sites.ask("survey", asked, payload, self._settings.round_timeout)
        require_some(answers, self._sites.names, "with its label counts")
        classes = self._federation.classes
        counts = np.zeros((self._federation.clients, classes), np.int64)
        sums = np.zeros((classes, classes))
        for client, reply in good(answers):
            try:
                told = _checked(from_bytes(reply.payload), classes, predictions)
            except Garbled as problem:
                self._sites.say(f"what {self._sites.names[client]} tells of its labels is left out: {problem}")
                continue
            counts[client] = told["label_counts"].numpy()
            if predictions:
                sums += told["probability"].numpy() * counts[client][:, None]
        total = counts.sum(axis=0)[:, None]
        mean = np.divide(sums, total, out=np.full_like(sums, np.nan), where=total > 0)
        return Survey(counts, mean if predictions else None)


def _checked(told: Tensors, classes: int, predictions: bool) -> Tensors:
    expected = {"label_counts": torch.empty(classes, dtype=torch.int64)}
    if predictions:
        expected["probability"] = torch.empty(classes, classes, dtype=torch.float64)
    require_like(told, expected)
    counts, shares = told["label_counts"], told.get("probability", torch.zeros(()))
    if not bool(((counts >= 0) & (counts <= MOST)).all()) or not bool(((shares >= 0) & (shares <= 1 + 1e-6)).all()):
        raise Garbled("it has numbers that cannot be")
    return told


def refuse_unfit(method: Method, config: Config) -> None:
    """Methods that cannot leave one machine, before anything begins."""
    for stage in method.stages(config.rounds, config.local_epochs, {}):
        if stage.cohort == "pooled":
            raise UserError(f"method {method.name!r} pools all samples in one place; in a federation they stay apart")
        if stage.cohort == "alone":
            raise UserError(f"method {method.name!r} has no common model: each site can train alone without a server")
    if config.eval_local:
        raise UserError("eval_local needs the sites' models tested one by one; it is for simulations")
