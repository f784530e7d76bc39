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


@pytest.mark.parametrize("finished", [True, False])
@pytest.mark.parametrize("rule", [fs.IID(clients=2), fs.Dirichlet(clients=2, beta=1.0)])
def test_changed_labels_are_refused(tmp_path: Path, rule: fs.Partition, finished: bool) -> None:
    table, settings = tmp_path / "table.csv", {"rounds": 2, "checkpoint_every": 1, "out": tmp_path / "run"}
    labels = ["ab"[i % 2] for i in range(60)]

    def run(labels: list[str], *callbacks: Callback) -> None:
        table.write_text("age,y\n" + "".join(f"{i % 7}.5,{y}\n" for i, y in enumerate(labels)))
        fs.run(fs.federation(table, rule), "fedavg", callbacks=callbacks, **settings)

    if finished:
        run(labels)
    else:
        with pytest.raises(KeyboardInterrupt):
            run(labels, Interruption())
    with pytest.raises(fs.UserError, match="the data or the split has changed since the run"):
        run(["a", *labels[1:30], "a", "a", *labels[32:]])
    run(labels)


def test_inputs_in_another_order_are_refused(tmp_path: Path) -> None:
    table, settings = tmp_path / "table.csv", {"rounds": 2, "checkpoint_every": 1, "out": tmp_path / "run"}
    rows = [(f"{i}.5", ("true", "false", "maybe")[i % 3], "ab"[i % 2]) for i in range(60)]
    table.write_text("age,flag,y\n" + "".join(f"{age},{flag},{y}\n" for age, flag, y in rows))
    with pytest.raises(KeyboardInterrupt):
        fs.run(fs.federation(table, fs.IID(clients=2)), "fedavg", callbacks=[Interruption()], **settings)
    about = tmp_path / "run" / "about.json"
    now, before = '"flag=False", "flag=True", "flag=maybe"', '"flag=false", "flag=maybe", "flag=true"'
    assert now in about.read_text()
    about.write_text(about.read_text().replace(now, before))  # as in a run of fedskew 0.2
    with pytest.raises(fs.UserError, match="the order of the table's inputs has changed since the run"):
        fs.run(fs.federation(table, fs.IID(clients=2)), "fedavg", **settings)
    about.write_text(about.read_text().replace(before, now.lower()))
    assert fs.run(fs.federation(table, fs.IID(clients=2)), "fedavg", **settings).finished
