"""One run at a site."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch

from fedskew.data.federation import Federation
from fedskew.engine import Assignment, LocalTraining, ModelState, RoundKey, RoundWork
from fedskew.engine.personal_training import initial_personal, personal_model
from fedskew.errors import UserError
from fedskew.experiment.class_weights import with_class_weights
from fedskew.experiment.config import Config, config_hash
from fedskew.experiment.preparation import data_shape, model_input, positive_class, require_example_privacy
from fedskew.experiment.round.plan import sample_counts
from fedskew.experiment.round.runtime import ModelRuntime, RuntimeFactory
from fedskew.experiment.round.sampler import draw_samples
from fedskew.experiment.round.state import initial_state
from fedskew.experiment.trained_part import make_part
from fedskew.flower.contract import Contract
from fedskew.flower.model_message import model_tensors, read_model
from fedskew.flower.request_checks import require_known_code, require_shared_scaling
from fedskew.flower.secret_noise import draw_normals
from fedskew.flower.site_answers import Answer, SiteAnswers
from fedskew.flower.site_config import SiteConfig
from fedskew.flower.start_weights import load_start, needs_start
from fedskew.flower.tensors import require_like, to_bytes
from fedskew.flower.wire import Facts, Garbled, digest
from fedskew.methods import Stage, Tensors, make_method, unpack
from fedskew.methods.personal import personal_names, shared_tensors
from fedskew.metrics.score_histograms import ScoreHistograms
from fedskew.models import has_features, make_model
from fedskew.models.concatenation import concatenate


class SiteRun:
    """The data, model and method of one run at this site, from the terms that the server sends."""

    def __init__(self, site: SiteConfig, federation: Federation, terms: Facts) -> None:
        self.site = site
        config = Config.from_mapping(terms["config"])
        self.name = config_hash(config)
        """The run's name, which the server also uses."""
        contract = Contract.from_json(terms["contract"])
        self.contract_hash = hash_contract(contract)
        self.data_form = hash_data_form(contract)
        self.config = replace(config, device=site.device, engine="plain")
        require_known_code(self.config, site)
        site.policy.require_run(self.config)
        dataset = contract.admit(federation.dataset)
        model = make_model(self.config.model, data_shape(dataset), self.config.seed, self.config.head)
        if needs_start(config):
            load_start(site.state_folder, config, model)
        if config.train != "all":
            assert has_features(model)
            part = make_part(self.config, model, dataset)
            model, dataset = part.model, part.dataset
        all_samples = Federation(dataset, federation.indices, federation.partition, federation.seed)
        self._held: dict[tuple[int, ...] | None, Federation] = {None: all_samples}
        method = make_method(self.config.method, self.config.method_params)
        self.method = with_class_weights(method, self.config.class_weights, dataset)
        if config.example_noise is not None:
            require_shared_scaling(federation.dataset.scaling, contract)
            require_example_privacy(self.method, model, model_input(dataset, model))
        self.runtimes = RuntimeFactory(dataset, self.config, compile_steps=False)
        self._runtime = self.runtimes.runtime(model, "plain")
        personal = self.method.personal
        self._personal_names = personal_names(personal, model) if personal is not None else frozenset[str]()
        """Names of the model's tensors that stay at the site."""
        self._concatenated: tuple[Tensors, ModelRuntime] | None = None
        """The encoders of the last concatenated model, and its runtime."""

    @property
    def exchanged_buffers(self) -> Tensors:
        """The model's buffers that do not stay at the site."""
        return shared_tensors(self._runtime.network.state().buffers, self._personal_names)

    def held(self, labels: list[int] | tuple[int, ...] | None) -> Federation:
        """Return the site's samples, as a federation of one client.

        If `labels` are given, return only the samples with these labels.
        """
        key = None if labels is None else tuple(labels)
        if key not in self._held:
            self._held[key] = self._held[None].restrict(key or ())
        return self._held[key]

    def runtime(self, frozen: Sequence[str] = (), tensors: Tensors | None = None) -> ModelRuntime:
        """Return the runtime of the run's model, or of a model that concatenates the encoders of several models.

        `frozen` names these models, and `tensors` has them. Without names, it is the runtime of the run's model.
        """
        if not frozen or tensors is None:
            return self._runtime
        encoders = {name: t for name, t in tensors.items() if name.startswith("companion:")}
        if self._concatenated is None or not _are_equal(encoders, self._concatenated[0]):
            models = [self._runtime.network.module(read_model(f"companion:{name}", tensors)) for name in frozen]
            self._concatenated = encoders, self.runtimes.runtime(concatenate(models), "plain")
        return self._concatenated[1]

    def answer_once(self, question: str, request: Facts, tensors: Tensors, compute: Callable[[], Answer]) -> Answer:
        """Answer a request about the received model, or repeat the recorded answer.

        For each question, the site answers at most `tests_per_round` different requests.
        """
        request = {**request, "contract": self.contract_hash, "model": digest(to_bytes(tensors))}
        return SiteAnswers(self.site.state_folder).answer_once(
            f"{question} in run {self.name}", request, compute, self.site.policy.tests_per_round
        )

    def sample_count(self, stage: Stage) -> int:
        """The number of the site's training samples that the stage uses."""
        return int(self.held(stage.labels).sizes[0])

    def score(self, model: ModelState, frozen: Sequence[str] = (), tensors: Tensors | None = None) -> bytes:
        """Return histograms of the model's probabilities on the site's test part, as the tensors of a reply."""
        probabilities, true = self.runtime(frozen, tensors).test_set.predict(model)
        if not np.isfinite(probabilities).all():
            raise UserError("the model's probabilities are not finite")
        found = ScoreHistograms.from_probabilities(
            probabilities, true, positive_class(self.config, self.held(None).dataset)
        )
        sums = {"reliability": torch.from_numpy(found.reliability), "brier": torch.tensor(found.brier).double()}
        return to_bytes({"own": torch.from_numpy(found.own), "others": torch.from_numpy(found.others), **sums})

    def stage(self, facts: Facts) -> Stage:
        return self.method.stages(self.config.rounds, self.config.local_epochs, facts["notes"])[facts["stage"]]

    def on_device(self, tensors: Tensors) -> Tensors:
        return {name: t.to(self.runtimes.devices[0]) for name, t in tensors.items()}

    def received_model(self, tensors: Tensors) -> ModelState:
        """The received model. Tensors that stay at the sites have their initial values, which follow from the seed."""
        sent = read_model("sent", tensors)
        if not self._personal_names:
            return sent
        initial = self._runtime.network.state()
        return ModelState({**initial.params, **sent.params}, {**initial.buffers, **sent.buffers})

    def require_model(self, stage: Stage, tensors: Tensors) -> None:
        """Refuse a model whose tensors have other names, shapes or types than those of the run's model."""
        expected = self.runtime(stage.concatenates, tensors).network.state()
        shared = (shared_tensors(part, self._personal_names) for part in (expected.params, expected.buffers))
        try:
            require_like(model_tensors("sent", read_model("sent", tensors)), model_tensors("sent", ModelState(*shared)))
        except Garbled as problem:
            raise UserError(f"the server's model is not that of the run: {problem}") from problem

    def tested_model(self, tensors: Tensors, kept: Tensors) -> ModelState:
        """The model that the site tests: the global model, or the site's own if the method has no global model."""
        model, personal = self.received_model(tensors), self.method.personal
        return model if personal is None or personal.has_global_model else self.own_model(tensors, kept)

    @property
    def tests_both_models(self) -> bool:
        """Whether the site tests its own model beside the global one."""
        return self.method.personal is not None and self.method.personal.tests_both_models

    def own_model(self, tensors: Tensors, kept: Tensors) -> ModelState:
        """The received model with the site's personal tensors.

        `kept` has the personal tensors. If it is empty, as before the site's first round, initial values are used.
        """
        personal = self.method.personal
        assert personal is not None
        fresh = initial_personal(personal, self._personal_names, self._runtime.network.state())
        return personal_model(self.received_model(tensors), kept or fresh)

    def work(self, facts: Facts, stage: Stage, tensors: Tensors, kept: Tensors) -> RoundWork:
        """Make the site's work in a round, in the form that an engine expects.

        `kept` is the site's state from earlier rounds. It is empty if there is none, as before the site's first round.
        """
        key = RoundKey(**facts["key"])
        held, method = self.held(stage.labels), self.method.for_stage(stage)
        samples = draw_samples(held.indices[0], stage, key.round, facts["client"], self.config)
        work = RoundWork(
            objective=stage.objective,
            solver=method.solver,
            server=method.server,
            sent=self.received_model(tensors),
            downlink=unpack("downlink", tensors),
            companions={name: read_model(f"companion:{name}", tensors) for name in facts["companions"]},
            assignments=[Assignment(facts["client"], samples, held.label_counts[0], {})],
            local=LocalTraining(**facts["local"]),
            key=key,
            weighting=method.weighting,
            personal=method.personal,
            personal_names=self._personal_names,
            noise=lambda shape, _: draw_normals(shape),  # secret, so not from the seed, which the server knows
        )
        initial = self._runtime.network.state()
        fresh = initial_state(work.members, work.sent.params, work.personal, work.personal_names, initial)
        counted = sample_counts(work.members, held.sizes)[0]
        state = self.on_device({**fresh, **kept, **counted})
        return replace(work, assignments=[replace(work.assignments[0], state=state)])


def hash_contract(contract: Contract) -> str:
    """Hash a contract in its normal form, because the server may write the same contract in different ways.

    `from_sums` is left out: version 0.2 did not write it, and a site's records of that version must still match.
    """
    content = {key: value for key, value in contract.to_json().items() if key != "from_sums"}
    return digest(json.dumps(content, sort_keys=True).encode())


def hash_data_form(contract: Contract) -> str:
    """Hash the kind of data, the task, and the names of the classes, columns and inputs, in any order.

    Everything else is left out, because a server can write it in many ways that fit the same data: the order of these
    names, the categories, means and deviations of columns, the size of a vocabulary.
    """
    names = contract.classes, contract.column_names, [name for name, *_ in contract.fields]
    form = [contract.kind, contract.task, *map(sorted, names)]
    return digest(json.dumps(form).encode())


def _are_equal(one: Tensors, other: Tensors) -> bool:
    return one.keys() == other.keys() and all(torch.equal(t, other[name]) for name, t in one.items())
