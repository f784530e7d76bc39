"""Sweeps over what a paper leaves open are compared with the paper's printed numbers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from fedskew.lab.papers.sweep_section import Sweep, read_sweeps
from fedskew.lab.papers.unknowns import compare_settings, unknowns_section
from fedskew.lab.sweep.grid import read_grid

GRID = """\
# What could explain the low levels?
data: fashion-mnist
partition: {rule: fedgr-double, clients: 100}
rounds: 2
mean_last: 2
grid:
  partition.labels_per_client: [2]
  setting:
    as printed: {}
    exponent 3: {partition.exponent: 3.0}
  method: [fedavg, {name: fedrs, alpha: 0.25}, {name: fedrs, alpha: 0.5}, fedgr]
"""
# The paper prints 51.36 (FedAvg), 62.52 (FedRS, α 0.25) and 65.62 (FedGR) for two labels per client.
ACCURACIES = {
    ("as printed", "fedavg", None): 0.5336,
    ("as printed", "fedrs", 0.25): 0.6452,
    ("as printed", "fedrs", 0.5): 0.9,
    ("as printed", "fedgr", None): 0.6362,
    ("exponent 3", "fedavg", None): 0.5136,
    ("exponent 3", "fedrs", 0.25): 0.6252,
    ("exponent 3", "fedgr", None): 0.6562,
}


@pytest.fixture
def sweep(tmp_path: Path, request: pytest.FixtureRequest) -> Sweep:
    """A sweep with made-up accuracies. All else in its records is that of a real run."""
    records = request.config.rootpath / "results" / "grids" / "fedgr-unknowns-dnn.jsonl"
    real = json.loads(records.read_text(encoding="utf-8").splitlines()[0])
    grids = tmp_path / "grids"
    grids.mkdir()
    path = grids / "fedgr-unknowns.yaml"
    path.write_text(GRID, encoding="utf-8")
    lines = []
    for point in read_grid(path, {}).points():
        config = point.config
        accuracy = ACCURACIES.get((str(point.grid_values["setting"]), config.method, config.method_params.get("alpha")))
        if accuracy is not None:
            curves = {"accuracy": [0.1, accuracy - 0.1, accuracy + 0.1], "worst_class": [0, 0, 0], "compute": [0, 1, 2]}
            own = {"experiment": point.job.identity, "config": config.to_mapping(), "rounds": [0, 1, 2], **curves}
            lines.append(json.dumps(real | own))
    path.with_suffix(".jsonl").write_text("\n".join(lines) + "\n")
    [found] = read_sweeps(tmp_path)
    return found


def test_the_distance_is_the_mean_absolute_difference_from_the_printed_numbers(sweep: Sweep) -> None:
    as_printed, exponent = compare_settings(sweep)
    assert as_printed.setting == ("2", "as printed")
    assert set(as_printed.accuracies) == {"FedAvg", "FedRS", "FedGR"}  # FedRS only with the paper's α
    assert as_printed.distance == pytest.approx(2.0)
    assert exponent.distance == pytest.approx(0.0)


def test_the_order_of_the_methods_is_compared_by_pairs(sweep: Sweep) -> None:
    as_printed, exponent = compare_settings(sweep)
    assert str(as_printed.order) == "2 of 3 pairs in the paper's order, best is FedRS, not FedGR"
    assert str(exponent.order) == "3 of 3 pairs in the paper's order, the same best"


def test_only_the_column_with_the_same_split_counts(sweep: Sweep) -> None:
    points = [
        replace(p, config=replace(p.config, partition=replace(p.config.partition, params={"labels_per_client": 4})))
        for p in sweep.points
    ]
    assert all(not found.accuracies for found in compare_settings(replace(sweep, points=points)))


def test_the_section_has_a_row_per_setting(sweep: Sweep) -> None:
    text = "\n".join(unknowns_section(sweep, "## Sweep"))
    assert "| 2 | as printed | 2.0 | 2 of 3 pairs in the paper's order, best is FedRS, not FedGR |" in text
    other = replace(sweep, path=sweep.path.with_name("another.yaml"))
    sweep.path.rename(other.path)
    assert "pairs" not in "\n".join(unknowns_section(other, "## Sweep"))
