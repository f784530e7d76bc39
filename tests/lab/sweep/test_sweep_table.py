"""The best points of a sweep, by a metric that some runs may lack."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from fedskew.errors import UserError
from fedskew.experiment.config import Config, with_values
from fedskew.lab.sweep.grid import read_grid
from fedskew.lab.sweep.table import PointKey, Row, best_points
from fedskew.results.ranking import find_metric


def line(method: str, **measured: float | None) -> Row:
    return {"method": method, "seed": 0, "status": "finished", "accuracy": 0.5, **measured}


def best(lines: Sequence[Row], metric: str) -> set[PointKey]:
    return best_points(lines, [with_values(Config(), {"method": row["method"]}) for row in lines], find_metric(metric))


def best_of_grid(path: Path, axes: str, accuracies: Sequence[float]) -> set[PointKey]:
    """The best points of a grid with two seeds, in which a point has the same accuracy with both."""
    path.write_text(f"grid:\n  {axes}\nseeds: 2\n")
    points = read_grid(path, {}).points()
    lines = [
        {**point.grid_values, "status": "finished", "accuracy": accuracy}
        for point, accuracy in zip(points, [*accuracies] * 2, strict=True)
    ]
    return best_points(lines, [point.config for point in points], find_metric("accuracy"))


def test_the_best_by_auroc() -> None:
    lines = [line("fedavg", auroc=0.7), line("fedprox", auroc=0.8)]
    assert best(lines, "auroc") == {("fedprox",)}


def test_a_point_with_an_unfinished_run_does_not_compete() -> None:
    lines = [line("fedavg", accuracy=0.5), line("fedprox", accuracy=0.6), line("fedvls", accuracy=0.9)]
    lines[2]["status"] = "unfinished"
    assert best(lines, "accuracy") == {("fedprox",)}


@pytest.mark.parametrize(
    ("axis", "expected"),
    [
        ("partition.clients: [10, 20]", {("10", "fedavg"), ("20", "fedvls")}),
        (
            "federation: {few: {partition.clients: 10}, many: {partition.clients: 20, clients_per_round: 5}}",
            {("few", "fedavg"), ("many", "fedvls")},
        ),
        ("start: {scratch: {}, low: {lr: 0.001}}", {("scratch", "fedavg")}),
        ("partition: {first: {lr: 0.1}, second: {lr: 0.2}}", {("first", "fedavg")}),
    ],
)
def test_each_federation_has_its_best_point_whatever_the_axis_is_called(
    axis: str, expected: set[PointKey], tmp_path: Path
) -> None:
    axes = f"{axis}\n  method: [fedavg, fedvls]"
    assert best_of_grid(tmp_path / "grid.yaml", axes, [0.9, 0.8, 0.5, 0.6]) == expected


def test_a_reference_bound_does_not_compete_whatever_the_axis_is_called(tmp_path: Path) -> None:
    cases = "{bound: {method: centralised}, plain: {method: fedavg}, new: {method: fedvls}}"
    assert best_of_grid(tmp_path / "grid.yaml", f"approach: {cases}", [0.9, 0.7, 0.8]) == {("new",)}


@pytest.mark.parametrize(
    ("metric", "reason"),
    [
        (
            "auroc",
            "fedprox has no AUROC: this metric is computed only for the global model .*; rank by macro-f1, or repeat",
        ),
        (
            "balanced-accuracy",
            "fedprox has no balanced accuracy: the outputs of a run's model are not finite, the test samples do not "
            "define this metric, or a run is from an earlier version of fedskew; rank by accuracy",
        ),
    ],
)
def test_a_missing_value_is_one_line_with_the_possible_reasons(metric: str, reason: str) -> None:
    lines = [line("fedavg", auroc=0.7, balanced_accuracy=0.6), line("fedprox", auroc=None, balanced_accuracy=None)]
    with pytest.raises(UserError, match=reason):
        best(lines, metric)
