"""Sites whose samples have several labels come to the simulation's model and scores."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from findings import FINDINGS, findings_federation, findings_file
from in_process import case

import fedskew as fs
from fedskew.data import Dirichlet, federation
from fedskew.errors import UserError
from fedskew.experiment.config import Config, with_values
from fedskew.experiment.preparation import prepare
from fedskew.experiment.run import run_prepared
from fedskew.flower.contract import Contract
from fedskew.flower.server_app import run_federation


def settings(method: str) -> Config:
    values = {"method": method, "rounds": 2, "local_epochs": 1, "engine": "plain", "device": "cpu", "lr": 0.1}
    return with_values(Config(), {"partition.clients": 3, "batch_size": 20, **values})


@pytest.mark.parametrize("method", ["fedavg", "fedprox", "scaffold", "feddyn", "fedsam+fedavgm"])
@pytest.mark.parametrize("evaluation", ["server", "sites"])
def test_sites_come_to_the_simulated_model(method: str, evaluation: str, tmp_path: Path) -> None:
    data = findings_file(tmp_path)
    split = federation(str(data), Dirichlet(beta=0.5, clients=3), seed=0)
    own = {} if evaluation == "server" else {"evaluation": "sites", "site_metrics": "class", "test_data": None}
    here = case(tmp_path, split, data, settings(method), **own)
    apart, together = run_federation(here.grid, here.context), run_prepared(prepare(settings(method), split))
    for name, tensor in together.model.state_dict().items():
        torch.testing.assert_close(apart.model.state_dict()[name], tensor, rtol=0, atol=1e-6)
    assert apart.config.task == "multi-label"
    assert apart.evaluation.accuracy == together.evaluation.accuracy
    assert apart.evaluation.macro_f1 == pytest.approx(together.evaluation.macro_f1)
    assert apart.scores is not None
    assert together.scores is not None
    for some, other in zip(apart.scores.classes, together.scores.classes, strict=True):
        assert some.auroc == pytest.approx(other.auroc, abs=max(apart.scores.auroc_error * 4, 1e-9))
        assert some.sensitivity == pytest.approx(other.sensitivity)
    assert apart.scores.brier == pytest.approx(together.scores.brier)
    for name, score in apart.site_scores.items():
        assert score.accuracy == pytest.approx(apart.history[-1].sites[name]["accuracy"])
    assert bool(apart.site_scores) == (evaluation == "sites")


@pytest.mark.parametrize("weights", ["balanced", "counts", dict.fromkeys(FINDINGS, 2.0)])
def test_sites_weigh_their_labels_as_the_simulation_does(weights: object, tmp_path: Path) -> None:
    data = findings_file(tmp_path)
    split = federation(str(data), Dirichlet(beta=0.5, clients=3), seed=0)
    config = with_values(settings("fedprox"), {"class_weights": weights})
    here = case(tmp_path, split, data, config)
    apart, together = run_federation(here.grid, here.context), run_prepared(prepare(config, split))
    unweighted = run_prepared(prepare(settings("fedprox"), split))
    for name, tensor in together.model.state_dict().items():
        torch.testing.assert_close(apart.model.state_dict()[name], tensor, rtol=0, atol=1e-6)
        assert not torch.allclose(unweighted.model.state_dict()[name], tensor, rtol=0, atol=1e-6)


def test_sites_that_report_totals_only(tmp_path: Path) -> None:
    data = findings_file(tmp_path)
    split = federation(str(data), Dirichlet(beta=0.5, clients=3), seed=0)
    here = case(tmp_path, split, data, settings("fedavg"), evaluation="sites", site_metrics="total", test_data=None)
    apart, together = run_federation(here.grid, here.context), run_prepared(prepare(settings("fedavg"), split))
    assert apart.evaluation.accuracy == together.evaluation.accuracy
    assert apart.evaluation.samples == 3 * together.evaluation.samples


def test_the_contract_says_that_there_are_several_labels(tmp_path: Path) -> None:
    dataset = findings_federation().dataset
    contract = Contract.from_json(Contract.from_dataset(dataset).to_json())
    assert contract.task == contract.blank().task.name == "multi-label"
    order = [2, 0, 3, 1]
    other = replace(
        dataset,
        classes=tuple(FINDINGS[c] for c in order),
        train=replace(dataset.train, y=dataset.train.y[:, order]),
        test=replace(dataset.test, y=dataset.test.y[:, order]),
    )
    assert np.array_equal(contract.admit(other).train.y, dataset.train.y)
    fewer = replace(
        dataset,
        classes=FINDINGS[:3],
        train=replace(dataset.train, y=dataset.train.y[:, :3]),
        test=replace(dataset.test, y=dataset.test.y[:, :3]),
    )
    with pytest.raises(UserError, match="labels 'pain' are missing, and it is not known which samples have them"):
        contract.admit(fewer)
    one = replace(dataset, train=replace(dataset.train, y=dataset.train.y[:, 0]),
                  test=replace(dataset.test, y=dataset.test.y[:, 0]))  # fmt: skip
    with pytest.raises(UserError, match="labels are single-label, expected multi-label"):
        contract.admit(one)


def test_softmax_methods_are_refused_before_any_message(tmp_path: Path) -> None:
    data = findings_file(tmp_path)
    split = fs.federation(str(data), fs.Dirichlet(beta=0.5, clients=3))
    with pytest.raises(UserError, match="method 'fedvls' needs one class per sample"):
        case(tmp_path, split, data, settings("fedvls"))
