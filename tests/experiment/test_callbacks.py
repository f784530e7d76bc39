"""Callbacks that stop a run: early stopping, and what becomes of a stopped run."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedskew as fs
from fedskew.experiment.round.record import RoundRow
from fedskew.metrics.confusion import Evaluation


def row(number: int, accuracy: float, model: str = "global") -> RoundRow:
    """A row whose global model has this accuracy on 100 test samples of two classes."""
    right = round(100 * accuracy)
    evaluation = Evaluation(np.array([[right, 50 - min(right, 50)], [50 - max(right - 50, 0), 0]]))
    return RoundRow(round=number, model=model, evaluation=evaluation)


def stopped_after(stopping: fs.EarlyStopping, accuracies: list[float]) -> int | None:
    for number, accuracy in enumerate(accuracies, 1):
        if stopping.on_round(row(number, accuracy), 10):
            return number
    return None


def test_stops_after_patience_evaluations_without_a_gain() -> None:
    assert stopped_after(fs.EarlyStopping(patience=2), [0.1, 0.2, 0.2, 0.3, 0.3, 0.25, 0.4]) == 6
    assert stopped_after(fs.EarlyStopping(patience=3), [0.1, 0.2, 0.2, 0.3, 0.3, 0.25, 0.4]) is None


def test_a_gain_of_min_delta_or_less_is_none() -> None:
    assert stopped_after(fs.EarlyStopping(patience=2, min_delta=0.05), [0.1, 0.14, 0.15, 0.3]) == 3
    assert stopped_after(fs.EarlyStopping(patience=2, min_delta=0.03), [0.1, 0.14, 0.15, 0.3]) is None


def test_rounds_without_an_evaluation_of_the_global_model_do_not_count() -> None:
    stopping = fs.EarlyStopping(patience=1)
    assert not stopping.on_round(row(0, 0.9), 5)
    assert not stopping.on_round(row(1, 0.2), 5)
    assert not stopping.on_round(row(2, 0.1, model="expert 0"), 5)
    assert not stopping.on_round(RoundRow(round=3), 5)
    assert stopping.on_round(row(4, 0.1), 5)


def test_numpy_numbers_are_numbers() -> None:
    stopping = fs.EarlyStopping(patience=np.int64(2), min_delta=np.float32(0.25))
    assert stopped_after(stopping, [0.1, 0.3, 0.2]) == 3


def test_another_metric() -> None:
    stopping = fs.EarlyStopping(patience=1, metric="worst_class")
    assert not stopping.on_round(row(1, 0.2), 5)
    assert stopping.on_round(row(2, 0.4), 5), "the accuracy rose, the worst class stayed at 0"


@pytest.mark.parametrize("metric", ["macro-f1", "macro_f1", "Macro-F1"])
def test_a_metric_may_be_spelled_as_in_rank_by(metric: str) -> None:
    assert fs.EarlyStopping(metric=metric).metric == "macro_f1"


@pytest.mark.parametrize("metric", ["balanced-accuracy", "mean_class", "kappa"])
def test_a_metric_whose_highest_value_is_the_best(metric: str) -> None:
    assert stopped_after(fs.EarlyStopping(patience=1, metric=metric), [0.1, 0.2, 0.3, 0.2, 0.9]) == 4


def test_the_log_loss_improves_if_it_falls_and_an_unknown_one_is_no_gain() -> None:
    stopping = fs.EarlyStopping(patience=2, metric="log-loss", min_delta=0.1)
    losses = [1.0, 0.5, 0.45, 0.2, None, math.nan, 0.1]
    rows = [RoundRow(number, evaluation=Evaluation(np.eye(2), None, loss)) for number, loss in enumerate(losses, 1)]
    assert [stopping.on_round(row, 9) for row in rows[:6]] == [False] * 5 + [True]
    resumed = fs.EarlyStopping(patience=2, metric="log-loss", min_delta=0.1)
    assert resumed.on_resume(rows[:6])


def test_a_resumed_run_stops_where_the_whole_run_does() -> None:
    rows = [row(number, 0.2) for number in range(1, 4)]
    resumed = fs.EarlyStopping(patience=3)
    assert not resumed.on_resume(rows)
    assert resumed.on_round(row(4, 0.1), 5)
    assert fs.EarlyStopping(patience=2).on_resume(rows), "killed after the decision to stop"


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ({"patience": 0}, "patience is 0; expected a number of evaluations, at least 1"),
        ({"min_delta": -1}, "min_delta is -1; expected a finite number of at least 0"),
        ({"min_delta": math.inf}, "min_delta is inf; expected a finite number of at least 0"),
        ({"metric": "acuracy"}, "unknown metric 'acuracy'; did you mean 'accuracy'?"),
        ({"metric": "auroc"}, "choose from: accuracy, balanced_accuracy, best_class, kappa, log_loss, macro"),
    ],
)
def test_mistakes_get_one_line(arguments: dict[str, Any], line: str) -> None:
    with pytest.raises(fs.UserError, match=line.replace("?", r"\?")):
        fs.EarlyStopping(**arguments)


# Runs that are stopped


class StopAfter(fs.Callback):
    """Stops a run after a round, and keeps what it was told."""

    def __init__(self, last: int) -> None:
        self.last = last
        self.rounds: list[int] = []

    def on_round(self, row: RoundRow, rounds_ahead: int) -> bool:
        self.rounds.append(row.round)
        return row.round == self.last


SHORT: dict[str, Any] = {"rounds": 5, "local_epochs": 1, "clients_per_round": 2}


@pytest.fixture(scope="module")
def federation() -> fs.Federation:
    return fs.federation("digits", fs.Dirichlet(clients=4, beta=0.5), seed=0)


def test_a_stopped_run_is_finished(tmp_path: Path, federation: fs.Federation) -> None:
    stop = StopAfter(2)
    result = fs.run(federation, "fedavg", out=tmp_path / "run", callbacks=[stop], **SHORT)
    whole = fs.run(federation, "fedavg", **SHORT)
    assert stop.rounds == [1, 2]
    assert (result.rounds, result.stopped_early, whole.stopped_early) == (2, True, False)
    assert result.accuracy == whole.history[2].accuracy
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["status"], summary["rounds"], summary["stopped_early"]) == ("finished", 2, True)
    assert "stopped_early" not in whole.summary()

    again = fs.run(federation, "fedavg", out=tmp_path / "run", callbacks=[StopAfter(2)], **SHORT)
    loaded = fs.load_run(tmp_path / "run")
    for other in (again, loaded):
        assert (other.accuracy, other.rounds, other.stopped_early) == (result.accuracy, 2, True)
        for name, tensor in result.model.state_dict().items():
            torch.testing.assert_close(other.model.state_dict()[name], tensor, rtol=0, atol=0)


def test_early_stopping_ends_a_run_without_gains(federation: fs.Federation) -> None:
    result = fs.run(federation, "fedavg", callbacks=[fs.EarlyStopping(patience=2, min_delta=1.0)], **SHORT)
    assert (result.rounds, result.stopped_early) == (3, True), "the first evaluation is the best; two more do not gain"


def test_a_killed_run_stops_where_the_uninterrupted_run_does(tmp_path: Path, federation: fs.Federation) -> None:
    class Kill(fs.Callback):
        def on_round(self, row: RoundRow, rounds_ahead: int) -> None:
            if row.round == 2:
                raise KeyboardInterrupt

    def stopping() -> fs.EarlyStopping:
        return fs.EarlyStopping(patience=2, min_delta=1.0)

    with pytest.raises(KeyboardInterrupt):
        fs.run(federation, "fedavg", out=tmp_path / "run", callbacks=[stopping(), Kill()], **SHORT)
    result = fs.run(federation, "fedavg", out=tmp_path / "run", callbacks=[stopping()], **SHORT)
    assert (result.rounds, result.stopped_early) == (3, True)


@pytest.mark.parametrize(("rounds", "stopped_early"), [(5, True), (3, False)])
def test_a_run_killed_before_its_summary_ends_as_the_uninterrupted_run_does(
    rounds: int, stopped_early: bool, tmp_path: Path, federation: fs.Federation
) -> None:
    """The last of three rounds stops nothing, even if the metric no longer improves."""
    for _ in range(2):
        stopping = fs.EarlyStopping(patience=2, min_delta=1.0)
        settings = SHORT | {"rounds": rounds}
        result = fs.run(federation, "fedavg", out=tmp_path / "run", callbacks=[stopping], **settings)
        assert (result.rounds, result.stopped_early) == (3, stopped_early)
        (tmp_path / "run" / "summary.json").unlink()


def test_one_callback_may_watch_several_runs(federation: fs.Federation) -> None:
    stopping = fs.EarlyStopping(patience=2, min_delta=1.0)
    rounds = [fs.run(federation, "fedavg", callbacks=[stopping], **SHORT).rounds for _ in range(2)]
    assert rounds == [3, 3]


def test_a_run_that_reached_its_last_round_was_not_stopped_early(federation: fs.Federation) -> None:
    assert not fs.run(federation, "fedavg", callbacks=[StopAfter(5)], **SHORT).stopped_early
