"""The best points of a sweep, by a metric that some runs may lack."""

from __future__ import annotations

import pytest

from fedskew.errors import UserError
from fedskew.lab.sweep.table import Row, best_points
from fedskew.results.ranking import find_metric


def line(method: str, **measured: float | None) -> Row:
    return {"method": method, "seed": 0, "status": "finished", "accuracy": 0.5, **measured}


def test_the_best_by_auroc() -> None:
    lines = [line("fedavg", auroc=0.7), line("fedprox", auroc=0.8)]
    assert best_points(lines, find_metric("auroc")) == {("fedprox",)}


def test_a_point_with_an_unfinished_run_does_not_compete() -> None:
    lines = [line("fedavg", accuracy=0.5), line("fedprox", accuracy=0.6), line("fedvls", accuracy=0.9)]
    lines[2]["status"] = "unfinished"
    assert best_points(lines, find_metric("accuracy")) == {("fedprox",)}


@pytest.mark.parametrize(
    ("metric", "reason"),
    [
        ("auroc", "fedprox has no AUROC: it is computed for a global model .*; rank by macro-f1, or repeat"),
        (
            "balanced-accuracy",
            "fedprox has no balanced accuracy: its outputs are not finite, or an earlier version of fedskew ran it; "
            "rank by accuracy",
        ),
    ],
)
def test_a_missing_value_is_one_line_with_the_possible_reasons(metric: str, reason: str) -> None:
    lines = [line("fedavg", auroc=0.7, balanced_accuracy=0.6), line("fedprox", auroc=None, balanced_accuracy=None)]
    with pytest.raises(UserError, match=reason):
        best_points(lines, find_metric(metric))
