"""Federations that train only the head or adapters: they travel alone, and the model is that of the simulation."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from in_process import Case, case, small_data
from method_cases import slow
from test_sites_equal_simulation import TESTED_BY_SITES, assert_same_model, settings

from fedskew.data import Dirichlet, Federation, federation
from fedskew.errors import UserError
from fedskew.experiment import head_training
from fedskew.experiment.config import Config
from fedskew.experiment.preparation import prepare
from fedskew.experiment.run import run_prepared
from fedskew.flower.app_folder import write_app
from fedskew.flower.app_review import make_approval
from fedskew.flower.approved_apps import add_approval
from fedskew.flower.contract import Contract
from fedskew.flower.disclosure import noise_warning
from fedskew.flower.policy import Policy
from fedskew.flower.remote_survey import SURVEY
from fedskew.flower.server_app import ask_sites, run_federation
from fedskew.flower.settings import FederationSettings
from fedskew.flower.site_survey import SurveyRules
from fedskew.flower.tensors import from_bytes, to_bytes
from fedskew.flower.wire import Facts


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def split(data: Path) -> Federation:
    return federation(str(data), Dirichlet(beta=0.3, clients=3), seed=0)


@pytest.fixture(scope="module")
def weights(split: Federation, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A file of weights, which only the server has."""
    folder = tmp_path_factory.mktemp("weights")
    run_prepared(prepare(settings("fedavg", seed=7, model="resnet8", rounds=1), split), folder)
    return str(folder / "model.safetensors")


def names_sent(here: Case) -> set[str]:
    trained = [from_bytes(m.payload) for m in here.grid.sent if m.kind == "train" and m.payload]
    return {name.rpartition("/")[2] for payload in trained for name in payload if name.startswith("trained:")}


@pytest.mark.parametrize("start", ["a file", *slow("the seed")])
@pytest.mark.parametrize("train", ["head", "lora"])
def test_sites_come_to_the_simulated_model(
    train: str, start: str, data: Path, split: Federation, weights: str, tmp_path: Path
) -> None:
    init = weights if start == "a file" else None
    config = settings("scaffold", model="resnet8", train=train, lora_rank=2, init=init, clients_per_round=2)
    here = case(tmp_path, split, data, config)
    apart, together = run_federation(here.grid, here.context), run_prepared(prepare(config, split))
    assert_same_model(apart, together)
    assert (apart.evaluation.confusion == together.evaluation.confusion).all()
    assert [row.bytes for row in apart.history] == [row.bytes for row in together.history]
    sent = names_sent(here)
    if train == "head":
        assert sent == {"head.weight", "head.bias"}
    else:
        assert {"head.weight", "head.bias"} < sent
        assert not [name for name in sent if name.endswith("base.weight")], "frozen weights do not travel"


def test_sites_test_the_part_on_features_that_they_compute_once(
    data: Path, split: Federation, weights: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed: list[int] = []
    compute = head_training._compute
    monkeypatch.setattr(head_training, "_compute", lambda d, *a: computed.append(len(d.train)) or compute(d, *a))
    monkeypatch.setattr(head_training, "_LAST", [])
    config = settings("fedavg", model="resnet8", train="head", init=weights, rounds=3)
    here = case(tmp_path, split, data, config, **TESTED_BY_SITES)
    apart = run_federation(here.grid, here.context)
    assert len(computed) == 1 + 3, "once by the server, for its form of the data, and once by each site"
    together = run_prepared(prepare(config, split))
    assert apart.accuracy == together.accuracy, "every site of this trial has the whole test set"


def greeting(here: Case, split: Federation, config: Config) -> dict[str, Any]:
    terms = {"contract": Contract.from_dataset(split.dataset).to_json(), "config": config.to_mapping() | {"init": None}}
    return {"kind": "hello", "terms": terms}


def test_a_site_keeps_the_weights_that_a_run_began_with(
    data: Path, split: Federation, weights: str, tmp_path: Path
) -> None:
    config = settings("fedavg", model="resnet8", train="head", init=weights)
    here = case(tmp_path, split, data, config)
    _, site = next(iter(here.grid._sites.values()))
    question = greeting(here, split, here.config)
    with pytest.raises(UserError, match="has not received the weights that the run starts from"):
        site.answer(question, b"")
    state = {name: t.detach() for name, t in prepare(here.config, split).model.state_dict().items()}
    assert site.answer(question, to_bytes(state))[0]["samples"] == split.sizes[0]
    site._runs.clear()  # as after a restart
    assert site.answer(question, b"")[0]["samples"] == split.sizes[0]
    assert site.answer(question, to_bytes(state))[0]["samples"] == split.sizes[0]
    with pytest.raises(UserError, match="other weights than those that this run began with"):
        site.answer(question, to_bytes(state | {"head.bias": state["head.bias"] + 1}))


def test_sites_answer_a_survey_before_they_train_a_part(
    data: Path, split: Federation, weights: str, tmp_path: Path
) -> None:
    """They make the model, frozen weights included, before they answer anything."""

    def require_reply(site: str, asked: Facts, facts: Facts, answer: bytes) -> tuple[Facts, bytes]:
        assert "refused" not in facts
        return facts, answer

    config, agreed = settings("fedavg", model="resnet8", train="head", init=weights), Policy(survey=SurveyRules())
    here = case(tmp_path, split, data, config, meddle=require_reply, site={"policy": agreed}, survey=True)
    here.context.run_config["federation.purpose"] = "survey"
    ask_sites(here.grid, here.context)
    assert json.loads((tmp_path / "run-survey" / SURVEY).read_text())["sites"].keys() == set(here.names)


def test_a_site_approves_an_app_without_the_file_of_weights(
    data: Path, split: Federation, weights: str, tmp_path: Path
) -> None:
    """Only the server has the file. The approval names its digest, which every request has."""
    file = tmp_path / "start.safetensors"
    shutil.copyfile(weights, file)
    config = settings("fedavg", model="resnet8", train="head", init=str(file))
    here = case(tmp_path, split, data, config)
    app = write_app(tmp_path / "app", here.settings, Contract.from_dataset(split.dataset), here.config)
    file.rename(tmp_path / "at-the-server")
    for name in here.names:
        (tmp_path / name).mkdir(exist_ok=True)
        add_approval(tmp_path / name, make_approval(app, name))
    file.symlink_to(tmp_path / "at-the-server")
    assert run_federation(here.grid, here.context).site_rounds == dict.fromkeys(here.names, 2)


def test_the_noise_is_compared_with_the_trained_part(split: Federation) -> None:
    private = FederationSettings(sites=("a", "b", "c"), privacy="central", noise=0.05, clip=1.0)
    contract = Contract.from_dataset(split.dataset)
    assert noise_warning(private, contract, settings("fedavg", model="resnet8")) is not None
    assert noise_warning(private, contract, settings("fedavg", model="resnet8", train="head")) is None
