"""Early stopping as a callback."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import fedskew as fs
from fedskew.experiment.round.row import RoundRow
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


def test_another_metric() -> None:
    stopping = fs.EarlyStopping(patience=1, metric="worst_class")
    assert not stopping.on_round(row(1, 0.2), 5)
    assert stopping.on_round(row(2, 0.4), 5), "the accuracy rose, the worst class stayed at 0"


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
        ({"min_delta": -1}, "min_delta is -1; expected a number, 0 or more"),
        ({"metric": "acuracy"}, "unknown metric 'acuracy'; did you mean 'accuracy'?"),
    ],
)
def test_mistakes_get_one_line(arguments: dict[str, Any], line: str) -> None:
    with pytest.raises(fs.UserError, match=line.replace("?", r"\?")):
        fs.EarlyStopping(**arguments)
