"""Servers whose rounds overlap, as on a GPU, and their rounds by the loop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from toy_runs import config, norm_and_dropout

import fedskew as fs
from fedskew.experiment.loop import RoundDone, RoundLoop
from fedskew.experiment.preparation import Prepared, prepare
from fedskew.experiment.round.row import RoundRow
from fedskew.experiment.round.server import Server
from fedskew.experiment.round.state import RunState

RUNS: dict[str, dict[str, Any]] = {
    "fedavg": {},
    "fedavgm": {},
    "scaffold": {},
    "fedvls": {},
    "fedgr": {},
    "local-only": {},
    "centralised": {},
    "fedlmd-switch+scaffold": {},
    "fedconcat+fedavgm": {"clusters": 2, "encoder_rounds": 1},
    "pkd": {"warmup_rounds": 1, "expert_rounds": 2},
}
"""Methods of every kind, with hyper-parameters for a few rounds."""
ENGINES = pytest.mark.parametrize("engine", ["plain", "stacked"])


def timeless(row: RoundRow) -> RoundRow:
    return replace(row, time={}, seconds=0.0)


def driven(this: Server, record: Callable[[RoundDone], None]) -> RunState:
    """The loop's rounds, with their clients trained by the server."""
    rounds = RoundLoop(this, record).rounds(this.start())
    try:
        under_way = next(rounds)
        while True:
            try:
                trained = this.train(under_way), 0.0
            except BaseException as error:
                rounds.throw(error)
                raise
            under_way = rounds.send(trained)
    except StopIteration as end:
        after: RunState = end.value
        return after


def prepared(method: str = "fedavg") -> Prepared:
    federation = fs.federation("digits", fs.Dirichlet(beta=0.5, clients=6), seed=1)
    settings = config(rounds=5, engine="stacked", local_epochs=1, batch_size=64, clients_per_round=2)
    return prepare(settings, federation, method, norm_and_dropout(10))


def serving(kind: type[Server], method: str = "fedavg") -> tuple[Prepared, Server]:
    ready = prepared(method)
    this = kind(ready.federation, ready.method, ready.model, ready.config)
    this.overlaps = True
    return ready, this
