"""A personal part of one's own, whose local training starts from other tensors, at the sites."""

from __future__ import annotations

from pathlib import Path

import pytest
from in_process import case, small_data
from test_sites_equal_simulation import TESTED_BY_SITES, assert_same_model, settings

from fedskew.data import Dirichlet, federation
from fedskew.experiment.preparation import prepare
from fedskew.experiment.run import run_prepared
from fedskew.flower.server_app import run_federation

METHOD = """
from dataclasses import dataclass

from fedskew.methods import Personal
from fedskew.methods.fedprox import FedProx


@dataclass(frozen=True)
class HalfInitialHead(Personal):
    shares = "model without its head"

    def keeps(self):
        return ("head",)

    def start(self, own, received):
        return {name: (t + received[name]) / 2 for name, t in own.items()}


@dataclass(frozen=True)
class FromReceived(Personal):
    has_global_model = True

    def own_solver(self):
        return FedProx()

    def start(self, own, received):
        return {name: received[name] for name in own}
"""


@pytest.mark.parametrize("name", ["HalfInitialHead", "FromReceived"])
def test_a_start_is_the_simulations(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "starting.py").write_text(METHOD)
    monkeypatch.syspath_prepend(tmp_path)
    data = small_data(tmp_path)
    split = federation(str(data), Dirichlet(beta=0.3, clients=3), seed=0)
    config = settings(f"starting:{name}", rounds=3, clients_per_round=2)
    local = {"local_tests": True} if name == "FromReceived" else {}
    here = case(tmp_path, split, data, config, site={"packages": ("starting",)}, **TESTED_BY_SITES, **local)
    apart = run_federation(here.grid, here.context)
    together = run_prepared(prepare(config, split))
    assert_same_model(apart, together)
    assert [row.loss for row in apart.history] == [row.loss for row in together.history]
