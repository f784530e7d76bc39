"""A grid in YAML."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedskew.errors import UserError
from fedskew.lab.sweep.grid import read_grid
from fedskew.lab.sweep.job import Job

GRID = """
data: digits
rounds: 5
partition: {rule: dirichlet, clients: 6}
grid:
  method: [fedavg, {name: fedvls, distill_weight: 0.5}]
  partition.beta: [0.1, 0.5]
seeds: 2
"""


@pytest.fixture
def grid(tmp_path: Path) -> Path:
    path = tmp_path / "grid.yaml"
    path.write_text(GRID)
    return path


def test_every_combination_is_a_run_and_seeds_vary_slowest(grid: Path) -> None:
    points = read_grid(grid, {}).points()
    assert [tuple(point.grid_values.values()) for point in points][:5] == [
        ("fedavg", 0.1, 0), ("fedavg", 0.5, 0), ("fedvls(distill_weight=0.5)", 0.1, 0),
        ("fedvls(distill_weight=0.5)", 0.5, 0), ("fedavg", 0.1, 1),
    ]  # fmt: skip
    assert len({point.job.identity for point in points}) == len(points) == 8
    assert points[2].config.method_params == {"distill_weight": 0.5}
    assert points[2].config.partition.clients == 6
    assert points[1].job.label == "method fedavg, partition.beta 0.5, seed 0"


def test_a_method_with_settings_may_be_text(grid: Path) -> None:
    axis = "[fedprox:mu=1, fedvls+fedavgm:distill_weight=0.5]"
    grid.write_text(GRID.replace("[fedavg, {name: fedvls, distill_weight: 0.5}]", axis))
    points = read_grid(grid, {}, 1).points()
    assert points[0].grid_values["method"] == "fedprox(mu=1)"
    assert (points[0].config.method, points[0].config.method_params) == ("fedprox", {"mu": 1})
    assert (points[2].config.method, points[2].config.method_params) == ("fedvls+fedavgm", {"distill_weight": 0.5})


def test_values_override_the_file_and_seeds_may_be_listed(grid: Path) -> None:
    points = read_grid(grid, {"rounds": 2, "lr": 0.3}, 1).points()
    assert {point.config.rounds for point in points} == {2}
    assert {point.config.lr for point in points} == {0.3}
    grid.write_text(GRID.replace("seeds: 2", "seeds: [4, 7]"))
    assert {point.config.seed for point in read_grid(grid, {}).points()} == {4, 7}


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("grid:", "grit:", r"no grid; expected a mapping such as"),
        ("grid:", "search:", r"no grid, but a search; expected --search optuna"),
        ("grid:", "grid: [fedavg]\nx:", r"grid is \['fedavg'\]; expected a mapping such as"),
        ("[0.1, 0.5]", "0.1", r"grid.partition.beta is 0.1; expected a list"),
        ("partition.beta:", "partition.bet:", r"at method=fedavg, partition.bet=0.1: .*beta"),
        ("fedavg,", "fedavgg,", r"at method=fedavgg.*did you mean 'fedavg'"),
        ("partition.beta: [0.1, 0.5]", "seed: [1, 2]", r"expected seeds outside the grid"),
        ("seeds: 2", "seeds: 0", r"seeds is 0; expected"),
        ("partition.beta: [0.1, 0.5]", "start: {cold: 0.1}", r"grid.start.cold is 0.1; expected the keys"),
        ("partition.beta: [0.1, 0.5]", "start: {}", r"grid.start is \{\}; expected a list .* or a mapping"),
        ("[0.1, 0.5]", "[0.1, 0.10]", r"grid.partition.beta has 0.1 twice; expected different values"),
        ("fedavg,", "fedavg, {name: fedavg},", r"grid.method has fedavg twice"),
        ("fedavg,", "fedvls:distill_weight=0.5,", r"grid.method has fedvls\(distill_weight=0.5\) twice"),
        ("fedavg,", "{mu: 1},", r"method is \{'mu': 1\}, without a name"),
        ("partition.beta: [0.1, 0.5]", "augment: [[], []]", r"grid.augment has \[\] twice"),
        ("seeds: 2", "seeds: [4, 7, 4]", r"seeds has 4 twice"),
        ("seeds: 2", "seeds: [4, 4.0]", r"seeds has 4 twice"),
        ("seeds: 2", "seeds: []", r"seeds is \[\]; expected at least 1 seed"),
        ("partition.beta: [0.1, 0.5]", "start: {cold: {seed: 3}}", r"grid.start sets the seed; expected seeds outside"),
        ("partition.beta: [0.1, 0.5]", "lr: [0.1, x]", r"at method=fedavg, lr=x: lr is 'x'"),
        ("partition.beta: [0.1, 0.5]", "accuracy: {low: {lr: 0.1}}", r"grid.accuracy is a result in the table"),
        ("partition.beta:", "start: {cold: {method: fedrs}}\n  partition.beta:", r"two axes of the grid set method"),
    ],
)
def test_a_mistake_is_named_before_anything_runs(grid: Path, old: str, new: str, complaint: str) -> None:
    grid.write_text(GRID.replace(old, new))
    with pytest.raises(UserError, match=complaint):
        read_grid(grid, {}).points()


def test_number_formats_that_are_compared_are_runs_of_their_own(grid: Path) -> None:
    grid.write_text(GRID.replace("partition.beta: [0.1, 0.5]", "precision: [float32, float64]\n  rounds: [2, 5]"))
    points = read_grid(grid, {}, 1).points()
    assert len(points) == 8
    assert len({point.job.identity for point in points}) == 4
    assert {Job.from_json(point.job.to_json()).identity for point in points} == {p.job.identity for p in points}


def test_a_key_is_in_the_grid_or_set(grid: Path) -> None:
    with pytest.raises(UserError, match=r"partition.beta is given by a flag and in the grid"):
        read_grid(grid, {"partition.beta": 0.3})


def test_a_case_sets_several_keys_and_is_shown_by_its_name(grid: Path) -> None:
    cases = "start: {cold: {}, warm: {partition.beta: 0.5, lr: 0.3, precision: float64}}"
    grid.write_text(GRID.replace("partition.beta: [0.1, 0.5]", cases))
    points = read_grid(grid, {}, 1).points()
    assert [point.grid_values["start"] for point in points] == ["cold", "warm"] * 2
    assert points[1].config.partition.params["beta"] == 0.5
    assert (points[1].config.lr, points[0].config.lr) == (0.3, 0.05)
    assert points[1].job.tag == "precision=float64"
    with pytest.raises(UserError, match=r"lr is given by a flag and in the grid"):
        read_grid(grid, {"lr": 0.1})


@pytest.mark.parametrize(
    ("axis", "flag", "complaint"),
    [
        ("method: [fedavg, fedprox]", "method.mu", r"method.mu is given by a flag, but method fedavg in the grid"),
        ("method: [{name: fedprox}]", "method.mu", r"in the grid replaces it; expected mu in the grid"),
        ("method: [fedvls, 'fedvls:suppress_weight=1']", "method.distill_weight", r"expected distill_weight in"),
        ("method: [{name: fedprox, mu: 1}, {name: fedprox, mu: 2}]", "method.mu", r"expected mu in the grid"),
        ("partition: [iid, {rule: shards}]", "partition.clients", r"is given by a flag, but partition"),
        ("split: {a: {partition: {rule: shards}}}", "partition.clients", r"expected clients in the grid"),
    ],
)
def test_a_flag_that_the_grid_replaces_is_refused(grid: Path, axis: str, flag: str, complaint: str) -> None:
    grid.write_text(f"data: digits\ngrid: {{{axis}}}\n")
    with pytest.raises(UserError, match=complaint):
        read_grid(grid, {flag: 3})


def test_a_flag_that_the_grid_keeps_is_used(grid: Path) -> None:
    grid.write_text("data: digits\ngrid: {partition: [iid, shards, {rule: quantity, clients: 7}]}\n")
    assert [p.config.partition.clients for p in read_grid(grid, {"partition.clients": 3}).points()] == [3, 3, 7]
