"""The model card of a federation lists everything that its sites sent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from in_process import case, small_data

import fedskew as fs
from fedskew.experiment.config import Config, with_values
from fedskew.experiment.result import Result
from fedskew.export.card_disclosures import describe_disclosures
from fedskew.flower.policy import LOCAL_TESTS, Policy
from fedskew.flower.server_app import run_federation


def federated(folder: Path, method: str = "fedavg", site: dict[str, Any] | None = None, **own: Any) -> Result:
    """A run of two rounds at three sites, one site per round."""
    data = small_data(folder)
    split = fs.federation(str(data), fs.Dirichlet(beta=0.5, clients=3), seed=0)
    values = {"method": method, "rounds": 2, "local_epochs": 1, "device": "cpu", "clients_per_round": 1}
    config = with_values(Config(), values | {"partition.clients": 3})
    here = case(folder, split, data, config, site=site, **own)
    return run_federation(here.grid, here.context)


@pytest.mark.parametrize(
    ("share_loss", "line"),
    [
        (True, "a participating client sends the server: model, sample count and the mean training loss."),
        (False, "a participating client sends the server: model, sample count."),
    ],
)
def test_the_training_loss_is_listed_if_the_sites_shared_it(share_loss: bool, line: str, tmp_path: Path) -> None:
    assert line in describe_disclosures(federated(tmp_path, share_loss=share_loss))


def test_the_simulation_of_a_method_lists_no_loss(tmp_path: Path) -> None:
    split = fs.federation(str(small_data(tmp_path)), fs.Dirichlet(beta=0.5, clients=3), seed=0)
    run = fs.run(split, "fedavg", rounds=1, local_epochs=1, device="cpu")
    assert "sends the server: model, sample count. " in describe_disclosures(run)


TOTALS = {"evaluation": "sites", "site_metrics": "total", "test_data": None}


def test_dittos_sites_reported_the_accuracy_of_their_own_models(tmp_path: Path) -> None:
    card = describe_disclosures(federated(tmp_path, "ditto", **TOTALS))
    assert "The sites reported the number of their test samples and of correct predictions. " in card
    assert "These sites also reported the accuracy of their own model: site-0, site-1, site-2. " in card


def test_local_tests_of_every_round_are_listed(tmp_path: Path) -> None:
    site = {"policy": Policy(reveals=(LOCAL_TESTS,))}
    run = federated(tmp_path, site=site, local_tests=True, **TOTALS)
    trained = sorted({client for row in run.history for client in row.clients})
    assert len(trained) == 2, "otherwise the last round has all of them"
    names = ", ".join(f"site-{client}" for client in trained)
    assert f"reported the accuracy before and after local training: {names}. " in describe_disclosures(run)
