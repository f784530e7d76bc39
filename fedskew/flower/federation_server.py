"""The server of a federation across machines. It plans and aggregates as in a simulation. The sites train."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import nn

from fedskew.engine import ModelState
from fedskew.errors import UserError
from fedskew.experiment.config import Config, config_hash
from fedskew.experiment.round.server import Server
from fedskew.experiment.round.state import RunState
from fedskew.flower.method_surveys import ask_survey
from fedskew.flower.model_message import model_tensors
from fedskew.flower.privacy import refuse_unbounded
from fedskew.flower.received_updates import VERSION
from fedskew.flower.remote_evaluation import SiteEvaluation, TestedModel
from fedskew.flower.remote_federation import RemoteFederation
from fedskew.flower.run_record import NAME
from fedskew.flower.settings import FederationSettings, require_testable
from fedskew.flower.site_replies import require_any_reply, usable_replies
from fedskew.flower.sites import Sites
from fedskew.flower.tensors import from_bytes, require_like, to_bytes
from fedskew.flower.wire import MAX_SAMPLES, Facts, Garbled
from fedskew.methods import Method, Part, Stage, Survey, Tensors
from fedskew.methods.personal import shared_tensors
from fedskew.methods.stages import survey_stage
from fedskew.metrics.confusion import Evaluation
from fedskew.metrics.score_histograms import ScoreHistograms
from fedskew.metrics.scores import Scores
from fedskew.metrics.site_scores import SiteScore, score_site_histograms


class FederationServer(Server):
    """Works like the server of a simulation, except that the sites answer surveys and test models."""

    how_to_repeat = f"flwr run, with the federation's app; the data are at the sites, and {NAME} has the other settings"

    def __init__(
        self,
        federation: RemoteFederation,
        method: Method,
        model: nn.Module,
        config: Config,
        sites: Sites,
        settings: FederationSettings,
        evaluation: type[SiteEvaluation] = SiteEvaluation,
        whole: Callable[[nn.Module], nn.Module] | None = None,
    ) -> None:
        """If the sites train only a part of the model, `model` is that part, and `whole` completes it."""
        self._whole = whole
        self.saves_whole_model = whole is not None
        super().__init__(federation, method, model, config)
        self._sites, self._settings = sites, settings
        if settings.privacy in ("central", "local"):
            buffers = shared_tensors(self.network.state().buffers, self.personal_names)
            refuse_unbounded(settings.privacy, method, config.average, buffers)
        require_testable(settings, method)
        self._surveys: dict[str, Survey] = {}
        self._final_histograms: dict[str, ScoreHistograms] | None = None
        self.site_evaluation = evaluation(sites, settings, federation.classes, federation.dataset.task)

    @property
    def engine_name(self) -> str:
        return "flower"

    def module(self, state: RunState) -> nn.Module:
        trained = super().module(state)
        return trained if self._whole is None else self._whole(trained)

    def initial_module(self) -> nn.Module:
        initial = super().initial_module()
        return initial if self._whole is None else self._whole(initial)

    def evaluate_model(self, model: ModelState) -> Evaluation:
        if not self.site_evaluation.by_sites:
            return super().evaluate_model(model)
        tested = TestedModel("global", 0, {})  # outside of rounds, only the initial model is evaluated
        return self.site_evaluation.evaluate(self.site_evaluation.request(model, tested, None, {}, {}))

    def scores(self, state: RunState) -> Scores | None:
        """Compute scores of the final model. None if the sites test it and send no score histograms."""
        if not self.site_evaluation.by_sites:
            return super().scores(state)
        histograms = self._histograms(state)
        if not histograms:
            return None
        return ScoreHistograms.total(histograms.values()).scores(self._config.specificity, self._positive)

    def site_scores(self, state: RunState) -> dict[str, SiteScore]:
        """Compute scores on each site's test data. Empty unless the sites report results by class."""
        return {name: score_site_histograms(found, self._positive) for name, found in self._histograms(state).items()}

    def _histograms(self, state: RunState) -> dict[str, ScoreHistograms]:
        """Return the sites' score histograms of the final model. The sites are asked only once."""
        if self._final_histograms is None:
            frozen = {name: state.models[name].model for name in self._stages.known(state)[-1].concatenates}
            exchanged, kept = self.exchanged_model(state.model), self.kept_states(state)
            tested = TestedModel("global", state.models["global"].rounds, state.notes)
            self._final_histograms = self.site_evaluation.histograms(exchanged, tested, frozen, kept)
        return self._final_histograms

    def exchanged_model(self, model: ModelState) -> ModelState:
        """Return the model as sites receive it, without the tensors that stay at the sites."""
        return ModelState(
            shared_tensors(model.params, self.personal_names), shared_tensors(model.buffers, self.personal_names)
        )

    def kept_states(self, state: RunState) -> dict[int, Facts]:
        """For each site, return the run and the round of the saved state with which the site tests its own model.

        The result is empty for methods without a personal part.
        """
        if self.personal is None:
            return {}
        run, clients = config_hash(self._config), range(self._federation.clients)
        versions = [kept.get(VERSION) for kept in state.clients.read("global", clients)]
        return {c: {"run": run, "kept": None if v is None else int(v)} for c, v in zip(clients, versions, strict=True)}

    def client_bytes(self, start: RunState, present: int) -> int:  # noqa: ARG002
        """Return zero, because the sites keep the clients' states."""
        return 0

    def survey(self, stage: Stage, state: RunState) -> Survey:
        """Return the sites' answers to the survey of a stage. The sites are asked only once."""
        if stage.name not in self._surveys:
            self._surveys[stage.name] = self._ask_survey(stage, state)
        return self._surveys[stage.name]

    def _ask_survey(self, stage: Stage, state: RunState) -> Survey:
        self._sites.wait_for(self._settings.required_sites)
        if isinstance(stage.survey, Part):
            return ask_survey(self._sites, self.plan(survey_stage(stage), state), self._settings.round_timeout)
        with_predictions = stage.survey == "predictions"
        payload = to_bytes(model_tensors("sent", state.models[stage.model].model)) if with_predictions else b""
        facts = {client: {"predictions": with_predictions, "notes": state.notes} for client in self._sites.online}
        answers = self._sites.request("survey", facts, payload, self._settings.round_timeout)
        require_any_reply(answers, self._sites.names, "with its label counts")
        classes = self._federation.classes
        counts = np.zeros((self._federation.clients, classes), np.int64)
        sums = np.zeros((classes, classes))
        for client, reply in usable_replies(answers):
            try:
                report = _check_counts(from_bytes(reply.payload), classes, with_predictions)
            except Garbled as problem:
                self._sites.log(f"warning: the label counts of {self._sites.names[client]} are discarded: {problem}")
                continue
            counts[client] = report["label_counts"].numpy()
            if with_predictions:
                sums += report["probability"].numpy() * counts[client][:, None]
        if not counts.any():
            raise UserError(f"no site sent usable label counts at the end of stage {stage.name!r}")
        total = counts.sum(axis=0)[:, None]
        mean = np.divide(sums, total, out=np.full_like(sums, np.nan), where=total > 0)
        return Survey(counts, mean if with_predictions else None)


def _check_counts(report: Tensors, classes: int, with_predictions: bool) -> Tensors:
    """Return a site's label counts and mean predictions. Raise `Garbled` if the numbers are impossible."""
    expected = {"label_counts": torch.empty(classes, dtype=torch.int64)}
    if with_predictions:
        expected["probability"] = torch.empty(classes, classes, dtype=torch.float64)
    require_like(report, expected)
    counts, means = report["label_counts"], report.get("probability", torch.zeros(()))
    is_possible = bool(((counts >= 0) & (counts <= MAX_SAMPLES)).all() & ((means >= 0) & (means <= 1 + 1e-6)).all())
    if not is_possible:
        raise Garbled("the report has impossible numbers")
    return report


def refuse_unfit(method: Method, config: Config) -> None:
    """Refuse methods and settings that a federation across machines cannot run."""
    for stage in method.stages(config.rounds, config.local_epochs, {}):
        if stage.cohort == "pooled":
            raise UserError(
                f"method {method.name!r} pools all samples in one place; a federation keeps them at the sites"
            )
        if stage.cohort == "alone":
            raise UserError(f"method {method.name!r} has no common model: each site can train alone without a server")
    if method.personal is not None and config.init is not None:
        raise UserError(
            f"init is {config.init!r}, but method {method.name!r} keeps tensors at the sites, where the seed "
            "initialises them; expected no init"
        )
    if config.client_test:
        raise UserError("client_test is for simulations; in a federation, every site tests on its own test data")
    if method.server.needs_server_data:
        raise UserError(
            f"method {method.name!r} needs samples at the server, which only a simulation has; expected a method "
            "whose samples stay at the sites"
        )
    if config.server_data:
        raise UserError("server_data is for simulations; the samples of a federation are at its sites")
    if config.save_predictions:
        raise UserError("save_predictions is for simulations; a federation's predictions stay at its sites")
    if config.eval_local:
        raise UserError(
            "eval_local is for simulations; expected federation.local_tests = true, with which the sites test before "
            "and after their training"
        )
