"""Trackers tell other tools every round, also after a resume; what is not installed is one line."""

from __future__ import annotations

import shutil
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import fedskew as fs
from fedskew.cli import main
from fedskew.experiment.round.record import RoundRow
from fedskew.metrics.confusion import Evaluation
from fedskew.metrics.multi_label import MultiLabelEvaluation
from fedskew.tracking.choice import TRACKERS, make_trackers
from fedskew.tracking.trackers import scalars

ROUNDS = 3


def tracked(names: str, folder: Path) -> fs.Result:
    fed = fs.federation("digits", fs.Dirichlet(clients=3, beta=1.0))
    return fs.run(
        fed, "fedavg", rounds=ROUNDS, local_epochs=1, out=folder, callbacks=make_trackers(names, lambda _: folder)
    )


def test_a_round_s_numbers_have_names_that_tools_group_by() -> None:
    tested = Evaluation(np.array([[1, 3], [0, 0]]))
    row = RoundRow(round=1, loss=0.5, lr=0.1, compute=1.0, bytes={"up": 3, "down": 4}, evaluation=tested, seconds=2.0)
    told = scalars(row)
    assert told["train/loss"] == 0.5
    assert told["cost/bytes"] == 7
    assert told["test/accuracy"] == 0.25
    assert told["class/0"] == 0.25
    assert "class/1" not in told
    assert scalars(replace(row, tally={"distilled": 5, "expert 0": 3}))["tally/expert_0"] == 3
    assert "test/accuracy" not in scalars(replace(row, model="expert.0"))


def test_micro_f1_is_logged_only_where_it_is_not_the_accuracy() -> None:
    row = RoundRow(round=1, loss=0.5, lr=0.1, compute=1.0, bytes={}, evaluation=Evaluation(np.eye(2, dtype=int)))
    assert "test/micro_f1" not in scalars(row)
    by_label = MultiLabelEvaluation(np.array([[[3, 1], [0, 2]], [[2, 2], [1, 1]]]))
    assert scalars(replace(row, evaluation=by_label))["test/micro_f1"] == pytest.approx(6 / 10)


def test_tensorboard_reads_every_round(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    result = tracked("tensorboard", tmp_path / "run")
    events = accumulator.EventAccumulator(str(tmp_path / "run/tensorboard"))
    events.Reload()
    accuracies = events.Scalars("test/accuracy")
    assert [event.step for event in accuracies] == [1, 2, 3]
    assert accuracies[-1].value == pytest.approx(result.accuracy)
    assert [(event.step, event.value) for event in events.Scalars("test/auroc")] == [(3, pytest.approx(result.auroc))]
    assert "configuration/text_summary" in events.Tags()["tensors"]


def test_tensorboard_shows_a_round_once_if_a_run_starts_again(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")

    class Interrupt(fs.Callback):
        def on_round(self, row: RoundRow, rounds_ahead: int) -> None:
            if row.round == 2:
                raise KeyboardInterrupt

    folder = tmp_path / "run"
    fed = fs.federation("digits", fs.Dirichlet(clients=3, beta=1.0))
    settings = {"rounds": 4, "local_epochs": 1, "checkpoint_every": 100, "out": folder}
    trackers = make_trackers("tensorboard", lambda _: folder)
    with pytest.raises(KeyboardInterrupt):
        fs.run(fed, "fedavg", callbacks=[*trackers, Interrupt()], **settings)
    trackers[0].end(None)  # the end of the process would close the file
    fs.run(fed, "fedavg", callbacks=make_trackers("tensorboard", lambda _: folder), **settings)
    events = accumulator.EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("test/accuracy")] == [1, 2, 3, 4]


def test_a_run_that_is_finished_is_not_told_again(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    tracked("tensorboard", tmp_path / "run")
    files = set((tmp_path / "run/tensorboard").iterdir())
    tracked("tensorboard", tmp_path / "run")
    assert set((tmp_path / "run/tensorboard").iterdir()) == files


def test_the_command_says_which_runs_were_finished_and_are_not_logged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("tensorboard")
    folder = tmp_path / "runs"
    short = ["--clients", "3", "--rounds", "1", "--local-epochs", "1", "--log", "tensorboard", "--out", str(folder)]
    assert main(["run", *short, "--seeds", "2"]) == 0
    assert "--log wrote nothing" not in capsys.readouterr().err
    assert main(["run", *short, "--seeds", "3"]) == 0
    assert "2 of 3 runs were already finished, so --log wrote nothing about them\n" in capsys.readouterr().err
    short[-1] = str(next(folder.glob("*-s0-*")))
    assert main(["run", *short, "--quiet"]) == 0
    assert "the run was already finished, so --log wrote nothing about it\n" in capsys.readouterr().err


def test_mlflow_has_every_round(tmp_path: Path) -> None:
    tracking = pytest.importorskip("mlflow.tracking", reason="MLflow is not installed")
    result = tracked("mlflow", tmp_path / "runs/one")
    client = tracking.MlflowClient(f"sqlite:///{tmp_path}/runs/mlflow.db")
    (run,) = client.search_runs([client.get_experiment_by_name("fedskew").experiment_id])
    history = client.get_metric_history(run.info.run_id, "test/accuracy")
    assert sorted(metric.step for metric in history) == [1, 2, 3]
    assert run.data.metrics["test/accuracy"] == pytest.approx(result.accuracy)
    assert run.data.params["method.name"] == "fedavg"
    assert run.info.status == "FINISHED"


def test_mlflow_has_every_round_once_after_a_restart(tmp_path: Path) -> None:
    tracking = pytest.importorskip("mlflow.tracking", reason="MLflow is not installed")

    class Interrupt(fs.Callback):
        def on_round(self, row: RoundRow, rounds_ahead: int) -> None:
            if row.round == 3:
                raise KeyboardInterrupt

    folder, fed = tmp_path / "runs/one", fs.federation("digits", fs.Dirichlet(clients=3, beta=1.0))

    def run(*callbacks: fs.Callback) -> None:
        trackers = make_trackers("mlflow", lambda _: folder)
        fs.run(fed, "fedavg", rounds=4, local_epochs=1, checkpoint_every=2, out=folder,
               callbacks=[*trackers, *callbacks])  # fmt: skip

    with pytest.raises(KeyboardInterrupt):
        run(Interrupt())
    run()  # repeats round 3
    client = tracking.MlflowClient(f"sqlite:///{tmp_path}/runs/mlflow.db")
    experiment = client.get_experiment_by_name("fedskew").experiment_id
    (whole,) = client.search_runs([experiment])
    assert sorted(m.step for m in client.get_metric_history(whole.info.run_id, "test/accuracy")) == [1, 2, 3, 4]
    shutil.rmtree(folder)
    run()
    newest, _ = client.search_runs([experiment])
    assert sorted(m.step for m in client.get_metric_history(newest.info.run_id, "test/accuracy")) == [1, 2, 3, 4]
    assert newest.info.run_id != whole.info.run_id


def test_wandb_writes_a_folder_and_sends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="Weights & Biases is not installed")
    tracked("wandb", tmp_path / "runs/one")
    (run,) = (tmp_path / "runs/wandb").glob("offline-run-*")
    assert list(run.glob("*.wandb"))


@pytest.mark.parametrize("name", sorted(TRACKERS))
def test_a_tool_that_is_not_installed_is_one_line(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    for module in ("torch.utils.tensorboard", "mlflow", "mlflow.tracking", "wandb"):
        monkeypatch.setitem(sys.modules, module, None)
    assert main(["run", "--rounds", "1", "--log", name]) == 2
    assert f"--log {name} needs" in capsys.readouterr().err
    assert not Path("runs").exists()


def test_an_unknown_tool_is_refused_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--rounds", "1", "--log", "tensorbored"]) == 2
    assert "did you mean 'tensorboard'" in capsys.readouterr().err
