"""Runs whose rounds overlap, as on a GPU, for the tests of that loop."""

from __future__ import annotations

from typing import Any

import pytest
from toy_runs import ListRecorder, config, norm_and_dropout

import fedskew as fs
from fedskew.engine import arithmetic
from fedskew.experiment.overlap import run_overlapping_rounds
from fedskew.experiment.preparation import Prepared, prepare
from fedskew.experiment.round.server import Server
from fedskew.experiment.round.state import RunState

RUNS: dict[str, dict[str, Any]] = {
    "fedavg": {},
    "fedavgm": {},
    "scaffold": {},
    "fedvls": {},
    "fedgr": {},
    "fedper+scaffold": {},
    "fedrep": {"head_epochs": 2},
    "ditto": {},
    "local-only": {},
    "centralised": {},
    "fedlmd-switch+scaffold": {},
    "fedconcat+fedavgm": {"clusters": 2, "encoder_rounds": 1},
    "pkd": {"warmup_rounds": 1, "expert_rounds": 2},
}
"""Methods of every kind, with hyper-parameters for a few rounds."""
ENGINES = pytest.mark.parametrize("engine", ["plain", "stacked"])


def run_overlapping(server: Server, recorder: ListRecorder | None = None) -> tuple[RunState, ListRecorder]:
    """All rounds of a run by the loop of a GPU."""
    recorder = recorder or ListRecorder(server)
    with arithmetic(server._config.precision):
        return run_overlapping_rounds(server, server.start(), recorder), recorder


def prepared(method: str = "fedavg") -> Prepared:
    federation = fs.federation("digits", fs.Dirichlet(beta=0.5, clients=6), seed=1)
    settings = config(rounds=5, engine="stacked", local_epochs=1, batch_size=64, clients_per_round=2)
    return prepare(settings, federation, method, norm_and_dropout(10))


def serving(kind: type[Server], method: str = "fedavg") -> tuple[Prepared, Server]:
    ready = prepared(method)
    return ready, kind(ready.federation, ready.method, ready.model, ready.config)
