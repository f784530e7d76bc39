"""A folder keeps the run of one model: another of the same class is not taken for it."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import nn

import fedskew as fs
from fedskew.experiment.callbacks import Callback


class Net(nn.Sequential):
    def __init__(self, width: int) -> None:
        super().__init__(nn.Flatten(), nn.Linear(64, width), nn.BatchNorm1d(width), nn.Linear(width, 10))


class Interruption(Callback):
    def on_round(self, row: object, rounds_ahead: int) -> None:
        raise KeyboardInterrupt


@pytest.mark.parametrize("finished", [True, False])
def test_another_model_of_the_same_class_is_refused(tmp_path: Path, finished: bool) -> None:
    federation = fs.federation("digits", fs.Dirichlet(clients=3, beta=1.0), seed=0)
    settings = {"rounds": 2, "local_epochs": 1, "engine": "plain", "out": tmp_path / "run"}
    if finished:
        fs.run(federation, "fedavg", Net(8), **settings)
    else:
        with pytest.raises(KeyboardInterrupt):
            fs.run(federation, "fedavg", Net(8), callbacks=[Interruption()], **settings)
    with pytest.raises(fs.UserError, match="holds a run of another model"):
        fs.run(federation, "fedavg", Net(16), **settings)
    assert fs.run(federation, "fedavg", Net(8), **settings).model[1].out_features == 8
