"""Surveys of a method at the sites: they answer as simulated clients do, and only surveys that the app plans."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from in_process import Case, case, small_data
from test_sites_equal_simulation import assert_same_model, settings

from fedskew.data import Dirichlet, Federation, federation
from fedskew.engine import LocalTraining, ModelState, Network, RoundKey
from fedskew.errors import UserError
from fedskew.experiment.preparation import prepare
from fedskew.experiment.round.plan import local_training
from fedskew.experiment.run import run_prepared
from fedskew.flower.contract import Contract
from fedskew.flower.model_message import model_tensors
from fedskew.flower.policy import Policy
from fedskew.flower.server_app import run_federation
from fedskew.flower.tensors import from_bytes, to_bytes
from fedskew.methods import Tensors
from fedskew.methods.stages import stage_without_training

METHOD = """
from dataclasses import dataclass

import torch

from fedskew.methods import Part, Schedule, ServerRule, Stage
from fedskew.methods.fedavg import CrossEntropy
from fedskew.randomness import fold, normal


@dataclass(frozen=True)
class FeatureNorm(Part):
    sends = "mean norm of its features, once"

    def opening(self, seen, client):
        return {"norms": torch.where(seen.y >= 0, seen.out.required_features.norm(dim=-1), 0.0).sum()}

    def uplink(self, trained, client):
        return {"norm": client.opening["norms"] / client.label_counts.sum()}


@dataclass(frozen=True)
class NoisyMean(ServerRule):
    def aggregate(self, sent, updates, state):
        bias = sent["head.bias"]
        noise = normal(fold(torch.tensor(updates.key), torch.arange(len(bias)))).to(bias)
        return {**updates.mean(), "head.bias": bias + 0.01 * noise}, state


@dataclass(frozen=True)
class LoudLast(Schedule):
    sends = "mean norm of its features, once"

    def stages(self, rounds, local_epochs, notes):
        first = Stage("all", rounds - 1, CrossEntropy(), survey=FeatureNorm())
        last = Stage("loud", 1, CrossEntropy(), clients=tuple(notes.get("loud", ())), server=NoisyMean())
        return [first, last] if notes else [first]

    def conclude(self, stage, survey):
        loudest = survey.answers["norm"].argsort(descending=True)[:2]
        return {"loud": sorted(survey.clients[row] for row in loudest.tolist()), "key": survey.key}
"""

SEVERAL = """

@dataclass(frozen=True)
class Several(Schedule):
    sends = "mean norm of its features, once"
    reveals = "label counts"

    def stages(self, rounds, local_epochs, notes):
        surveys = ("labels", "global"), ("predictions", "second"), (FeatureNorm(), "second"), (FeatureNorm(), "global")
        known = [Stage(str(n), 1, CrossEntropy(), model=m, survey=s) for n, (s, m) in enumerate(surveys)]
        return [*known, Stage("last", 1, CrossEntropy())][: len(notes) + 1]

    def conclude(self, stage, survey):
        return {stage.name: True}
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def split(data: Path) -> Federation:
    return federation(str(data), Dirichlet(beta=0.3, clients=3), seed=0)


@pytest.fixture
def surveying(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of the method in a module that sites allow."""
    (tmp_path / "surveying.py").write_text(METHOD + SEVERAL)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "surveying:LoudLast"


def test_sites_answer_a_survey_as_simulated_clients_do(
    surveying: str, data: Path, split: Federation, tmp_path: Path
) -> None:
    config = settings(surveying)
    here = case(tmp_path, split, data, config, site={"packages": ("surveying",)})
    apart, together = run_federation(here.grid, here.context), run_prepared(prepare(config, split))
    assert_same_model(apart, together)
    assert apart.notes == together.notes
    assert [row.stage for row in apart.history[1:]] == ["all", "loud"]
    answers = [from_bytes(m.payload) for m in here.grid.sent if m.kind == "survey"]
    assert [set(found) for found in answers] == [{"norm"}] * 3
    assert all(found["norm"].dim() == 0 for found in answers), "one number, and nothing else"


@pytest.mark.usefixtures("surveying")
def test_sites_answer_surveys_that_follow_from_earlier_ones(data: Path, split: Federation, tmp_path: Path) -> None:
    """The server's notes are part of every request, because a site learns of these stages only from the notes."""
    config = settings("surveying:Several", lr_decay=0.9)
    here = case(tmp_path, split, data, config, site={"packages": ("surveying",)})
    apart, together = run_federation(here.grid, here.context), run_prepared(prepare(config, split))
    assert_same_model(apart, together)
    assert [row.stage for row in apart.history[1:]] == ["0", "1", "2", "3", "last"]


def test_sites_send_the_statistics_of_a_calibration(data: Path, split: Federation, tmp_path: Path) -> None:
    config = settings("fedprox+ccvr", clients_per_round=2)
    here = case(tmp_path, split, data, config)
    assert_same_model(run_federation(here.grid, here.context), run_prepared(prepare(config, split)))
    uplinks = [n for m in here.grid.sent if m.kind == "train" for n in from_bytes(m.payload) if n.startswith("uplink/")]
    assert sorted(uplinks) == sorted([f"uplink/{name}" for name in ("counts", "covariances", "means")] * 3)


def test_a_survey_whose_answers_are_all_discarded_ends_the_run(
    surveying: str, data: Path, split: Federation, tmp_path: Path
) -> None:
    here = case(tmp_path, split, data, settings(surveying), site={"packages": ("surveying",)})
    spoiled = to_bytes({"norm": torch.tensor(float("nan"))})
    here.grid.meddle = lambda site, asked, facts, payload: (facts, spoiled if asked["kind"] == "survey" else payload)
    with pytest.raises(UserError, match="no site sent usable answers to the survey of stage 'all'"):
        run_federation(here.grid, here.context)


def test_an_answer_of_another_form_is_discarded_even_if_only_two_sites_answer(
    surveying: str, data: Path, split: Federation, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    here = case(tmp_path, split, data, settings(surveying), site={"packages": ("surveying",)})
    sent = {"site-2": to_bytes({"norm": torch.zeros(2)}), "site-3": b""}
    here.grid.meddle = lambda site, asked, facts, payload: (
        facts,
        sent.get(site, payload) if asked["kind"] == "survey" else payload,
    )
    run_federation(here.grid, here.context)
    assert "their form differs from that of other sites" in caplog.text


def ask(here: Case, split: Federation, **changed: Any) -> tuple[Any, bytes]:
    """Ask the first site the survey of a stage, as a server could."""
    _, site = next(iter(here.grid._sites.values()))
    prepared = prepare(here.config, split)
    model = prepared.model
    terms = {"contract": Contract.from_dataset(split.dataset).to_json(), "config": here.config.to_mapping()}
    question = {"stage": 0, "notes": {}, "client": 0, "key": asdict(RoundKey(0, 0, 1))}
    local = asdict(local_training(here.config, stage_without_training("survey"), 1))
    sent = ModelState(dict(model.named_parameters()), dict(model.named_buffers()))
    payload = to_bytes({name: t.detach() for name, t in model_tensors("sent", sent).items()})
    return site.answer({"kind": "survey", "terms": terms, **question, "local": local, **changed}, payload)


def test_a_site_answers_only_surveys_of_its_method(
    surveying: str, data: Path, split: Federation, tmp_path: Path
) -> None:
    here = case(tmp_path, split, data, settings(surveying), site={"packages": ("surveying",)})
    _, payload = ask(here, split)
    assert set(from_bytes(payload)) == {"norm"}
    plain = case(tmp_path / "plain", split, data, settings("fedavg"))
    with pytest.raises(UserError, match="the survey of stage 0 after round 1, which the run's configuration does not"):
        ask(plain, split)


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({"stage": 1, "notes": {"loud": [0]}}, "the survey of stage 1 after round 1, which the run's configuration"),
        ({"stage": 2}, "the survey of stage 2 after round 1, which the run's configuration does not plan"),
        ({"stage": -1}, "the server sets stage to -1; expected a whole number"),
        ({"stage": None}, "the server sets stage to None; expected a whole number"),
        ({"notes": []}, r"the server sets notes to \[\]; expected named values"),
        ({"notes": {"loud": [0, 0]}}, "the server's notes have empty clusters, clients in two clusters"),
        ({"key": asdict(RoundKey(0, 0, 2))}, "the survey of stage 0 after round 2"),
        ({"key": asdict(RoundKey(7, 0, 1))}, "the server sets seed to 7 in this round; expected 0"),
        ({"local": asdict(LocalTraining(epochs=3, batch_size=20, lr=1.0))}, "the server sets epochs to 3"),
        ({"client": 1}, "the server sets client to 1, which is not the number of this site"),
    ],
)
def test_a_site_refuses_a_survey_that_its_app_does_not_plan(
    changed: dict[str, Any], line: str, surveying: str, data: Path, split: Federation, tmp_path: Path
) -> None:
    here = case(tmp_path, split, data, settings(surveying), site={"packages": ("surveying",)})
    with pytest.raises(UserError, match=line):
        ask(here, split, **changed)


@pytest.mark.parametrize(
    ("method", "predictions", "line"),
    [
        ("ccvr", False, "the server requests a survey of labels, which the run's configuration does not plan"),
        ("ccvr", True, "the server requests a survey of predictions, which the run's configuration does not plan"),
        ("fedconcat", True, "the server requests a survey of predictions"),
        ("fedconcat", None, "the server sets predictions to None; expected true or false"),
        ("pkd", False, "the server requests a survey of labels"),
    ],
)
def test_a_site_counts_its_labels_only_in_surveys_that_its_app_plans(
    method: str, predictions: bool | None, line: str, data: Path, split: Federation, tmp_path: Path
) -> None:
    """The declaration of label counts is not enough: these methods declare them."""
    here = case(tmp_path, split, data, settings(method))
    _, site = next(iter(here.grid._sites.values()))
    terms = {"contract": Contract.from_dataset(split.dataset).to_json(), "config": here.config.to_mapping()}
    with pytest.raises(UserError, match=line):
        site.answer({"kind": "survey", "terms": terms, "predictions": predictions}, to_bytes({}))


def test_a_site_that_demands_noise_answers_no_survey(
    surveying: str, data: Path, split: Federation, tmp_path: Path
) -> None:
    site = {"packages": ("surveying",), "policy": Policy(noise=1.0)}
    here = case(tmp_path, split, data, settings(surveying), site=site)
    with pytest.raises(UserError, match=r"the survey of stage 'all', whose answers have no noise; this site demands"):
        ask(here, split)


def test_a_site_that_demands_noise_sends_no_mean_predictions_though_it_allows_label_counts(
    data: Path, split: Federation, tmp_path: Path
) -> None:
    policy = Policy(noise=1.0, reveals=("label counts",))

    def answer(method: str, predictions: bool) -> Tensors:
        here = case(tmp_path / method, split, data, settings(method), site={"policy": policy})
        _, site = next(iter(here.grid._sites.values()))
        terms = {"contract": Contract.from_dataset(split.dataset).to_json(), "config": here.config.to_mapping()}
        model = model_tensors("sent", Network(prepare(here.config, split).model).state())
        request = {"kind": "survey", "terms": terms, "predictions": predictions}
        return from_bytes(site.answer(request, to_bytes(model if predictions else {}))[1])

    assert answer("fedconcat", predictions=False).keys() == {"label_counts"}
    with pytest.raises(UserError, match="the survey of stage 'warm-up', whose answers have no noise; this site"):
        answer("pkd", predictions=True)
