"""Clients hold out samples of their own, never train on them, and models are tested on them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import fedskew as fs
from fedskew.engine import DeviceSamples
from fedskew.errors import UserError
from fedskew.experiment.config import Config, with_values
from fedskew.experiment.preparation import prepare
from fedskew.results import load_run

FED = {"data": "digits", "partition": fs.Dirichlet(clients=5, beta=0.3), "seed": 1}


@pytest.fixture(scope="module")
def fed() -> fs.Federation:
    return fs.federation(**FED)


def quick(fed: fs.Federation, method: str = "fedavg", **settings: object) -> fs.Result:
    return fs.run(fed, method, rounds=2, local_epochs=1, device="cpu", client_test=0.25, **settings)


def test_held_out_samples_are_a_stratified_part_of_each_client(fed: fs.Federation) -> None:
    held = fed.hold_out(0.25)
    assert held.clients == len(held.held_out) == 5
    assert held.unused == fed.unused
    for before, kept, own in zip(fed.indices, held.indices, held.held_out, strict=True):
        assert sorted([*kept, *own]) == sorted(before)
        assert set(np.unique(fed.dataset.train.y[kept])) == set(np.unique(fed.dataset.train.y[before])), "same skew"
    assert sum(map(len, held.held_out)) == pytest.approx(0.25 * sum(map(len, fed.indices)), rel=0.1)
    assert held.hash != fed.hash
    assert held.hash == fed.hold_out(0.25).hash


def test_the_global_model_is_tested_on_each_clients_samples(fed: fs.Federation, tmp_path: Path) -> None:
    run = quick(fed, out=tmp_path / "run", clients_per_round=3)
    data = DeviceSamples(fed.dataset, fed.dataset.train, torch.device("cpu"))
    held = fed.hold_out(0.25).held_out
    expected = []
    for rows in held:
        with torch.no_grad():
            predicted = run.model.eval()(data.inputs(torch.from_numpy(rows))).argmax(dim=1).numpy()
        expected.append(float((predicted == fed.dataset.train.y[rows]).mean()))
    last = run.history[-1]
    assert last.client_tests["accuracy"] == expected
    assert [score.accuracy for score in run.site_scores.values()] == pytest.approx(expected)
    assert [score.samples for score in run.site_scores.values()] == list(map(len, held))
    for when in ("before", "after"):
        tested = [k for k, value in enumerate(last.client_tests[when]) if value is not None]
        assert tested == sorted(last.clients)
    before = run.history[-2].client_tests["accuracy"]
    assert [last.client_tests["before"][k] for k in last.clients] == [before[k] for k in last.clients]
    again = load_run(tmp_path / "run")
    assert again.site_scores == run.site_scores
    assert again.history[-1] == last
    assert list(run.site_frame().index) == ["0", "1", "2", "3", "4"]


def test_clients_that_train_alone_are_tested_with_their_own_models(fed: fs.Federation) -> None:
    run = quick(fed, "local-only")
    alone = run.history[-1].client_tests["accuracy"]
    assert [score.accuracy for score in run.site_scores.values()] == pytest.approx(alone)
    assert np.mean(alone) > run.accuracy, "each knows the classes that it has"


@pytest.mark.parametrize("method", ["centralised", "pkd", "fedconcat", "scaffold"])
def test_every_kind_of_method_has_results_by_client(fed: fs.Federation, method: str) -> None:
    params = {"pkd": {"method_params": {"warmup_rounds": 1, "expert_rounds": 1}}}.get(method, {})
    run = quick(fed, method, **params)
    assert len(run.site_scores) == 5
    assert None not in run.evaluated[-1].client_tests["accuracy"]


def test_engines_agree(fed: fs.Federation) -> None:
    runs = [quick(fed, engine=engine, precision="float64") for engine in ("plain", "stacked")]
    assert runs[0].history[-1].client_tests == runs[1].history[-1].client_tests


def test_without_the_option_nothing_is_held_out(fed: fs.Federation) -> None:
    prepared = prepare(with_values(Config(), {"data": "digits", "method": "fedavg"}), fed)
    assert prepared.federation is fed
    assert fed.held_out == ()
    run = fs.run(fed, "fedavg", rounds=1, local_epochs=1)
    assert run.history[-1].client_tests is None
    assert "site_scores" not in run.summary()
    with pytest.raises(UserError, match="no results by site; expected a finished run with client_test"):
        run.site_frame()


def test_clients_that_are_too_small_are_refused() -> None:
    fed = fs.federation("digits", fs.IID(clients=1400), seed=0)
    with pytest.raises(UserError, match="no client holds out a sample"):
        fed.hold_out(0.2)
