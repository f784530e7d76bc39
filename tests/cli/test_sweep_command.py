"""`fedskew sweep`."""

from __future__ import annotations

import csv
import json
import shlex
from pathlib import Path

import pytest

from fedskew.cli.app import EXAMPLES

GRID = """
data: {name: synthetic, samples: 300, test_samples: 100}
partition: {rule: dirichlet, clients: 4, beta: 0.5}
rounds: 2
local_epochs: 1
grid:
  method: [fedavg, fedprox]
  lr: [0.05, 0.1]
seeds: 1
"""


@pytest.fixture
def grid(cli) -> Path:
    path = Path("grid.yaml")
    path.write_text(GRID)
    return path


def test_a_sweep_has_one_tidy_table(cli, grid: Path) -> None:
    outcome = cli("sweep", "grid.yaml", "--workers", "1", "--quiet")
    assert outcome.status == 0, outcome.err
    rows = list(csv.DictReader(Path("runs/grid/table.csv").read_text().splitlines()))
    assert [(row["method"], row["lr"], row["status"], row["rounds"]) for row in rows] == [
        (method, lr, "finished", "2") for method in ("fedavg", "fedprox") for lr in ("0.05", "0.1")
    ]
    parquet = pytest.importorskip("pyarrow.parquet").read_table("runs/grid/table.parquet")
    assert [str(value) for value in parquet.column("accuracy").to_pylist()] == [row["accuracy"] for row in rows]
    assert "1/1" in outcome.out


def test_names_are_shown_whole_and_one_run_has_no_deviation(cli, grid: Path) -> None:
    grid.write_text(GRID.replace("[fedavg, fedprox]", "[fedavg+trimmed-mean]").replace("lr: [0.05, 0.1]", "lr: [0.05]"))
    out = cli("sweep", "grid.yaml", "--workers", "1", "--quiet").out
    assert "fedavg+trimmed-mean" in out
    assert "±" not in out


def test_a_grown_grid_runs_what_is_new(cli, grid: Path) -> None:
    grid.write_text(GRID.replace("[fedavg, fedprox]", "[fedavg]"))
    cli("sweep", "grid.yaml", "--workers", "1", "--quiet")
    grid.write_text(GRID)
    outcome = cli("sweep", "grid.yaml", "--workers", "1")
    assert "2 of 4 runs are already done" in outcome.err
    assert len(list(csv.DictReader(Path("runs/grid/table.csv").read_text().splitlines()))) == 4


@pytest.mark.parametrize(("axis", "where"), [("lr: [0.05]", ""), ("partition.beta: [0.5, 5.0]", " of each federation")])
def test_the_caption_says_what_the_best_points_are_the_best_of(cli, grid: Path, axis: str, where: str) -> None:
    grid.write_text(GRID.replace("lr: [0.05, 0.1]", axis))
    shown = " ".join(cli("sweep", "grid.yaml", "--workers", "1", "--quiet").out.split())
    assert f"* highest accuracy{where}" in shown
    assert ("of each federation and participation" in shown) == bool(where)


def test_a_failed_run_is_listed_and_fails_the_command(cli, grid: Path) -> None:
    grid.write_text(GRID.replace("lr: [0.05, 0.1]", "model: [dnn, mobilenetv3]"))
    outcome = cli("sweep", "grid.yaml", "--workers", "1", "--quiet", "--no-folders")
    assert outcome.status == 1
    listed = [line for line in outcome.err.splitlines() if line.startswith("failed: ")]
    assert len(listed) == 2
    assert all("mobilenetv3" in line for line in listed)
    statuses = [row["status"] for row in csv.DictReader(Path("runs/grid/table.csv").read_text().splitlines())]
    assert sorted(statuses) == ["failed", "failed", "finished", "finished"]


def test_runs_of_fewer_rounds_than_requested_are_not_in_the_means(cli, grid: Path) -> None:
    assert cli("sweep", "grid.yaml", "--workers", "1", "--quiet").status == 0
    longer = cli("sweep", "grid.yaml", "--workers", "1", "--quiet", "--rounds", "9", "--time-limit", "0.0001")
    assert longer.out.count("0/1") == 4
    assert "1/1" not in longer.out
    assert "highest accuracy" not in longer.out
    rows = list(csv.DictReader(Path("runs/grid/table.csv").read_text().splitlines()))
    assert [(row["status"], row["rounds"]) for row in rows] == [("unfinished", "2")] * 4


def test_time_may_be_up(cli, grid: Path) -> None:
    outcome = cli("sweep", "grid.yaml", "--workers", "1", "--time-limit", "0.0001", "--json")
    assert outcome.status == 0
    assert {line["status"] for line in outcome.json} == {"unfinished"}
    assert "4 runs are unfinished; repeat the command to resume" in outcome.err


def test_time_may_be_up_for_one_run(cli, grid: Path) -> None:
    grid.write_text(GRID.replace("[fedavg, fedprox]", "[fedavg]").replace("[0.05, 0.1]", "[0.05]"))
    outcome = cli("sweep", "grid.yaml", "--workers", "1", "--time-limit", "0.0001", "--json")
    assert "1 run is unfinished; repeat the command to resume" in outcome.err


@pytest.mark.parametrize("example", EXAMPLES["sweep"])
@pytest.mark.slow
def test_the_examples_of_the_help_work(cli, grid: Path, example: str) -> None:
    assert example in cli("sweep", "--help").out
    assert cli(*shlex.split(example)[1:]).status == 0


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--workers", "0"), "workers is '0'; expected"),
        (("--time-limit", "-3"), "time_limit is '-3'; expected"),
        (("--set", "lrr=1"), "unknown key 'lrr'; did you mean 'lr'"),
    ],
)
def test_a_mistake_is_one_line(cli, grid: Path, arguments: tuple[str, ...], complaint: str) -> None:
    outcome = cli("sweep", "grid.yaml", *arguments)
    assert outcome.status == 2
    assert complaint in outcome.err
    assert len(outcome.err.splitlines()) == 1
    assert not Path("runs").exists(), "a mistake leaves nothing behind"


def test_the_best_point_of_each_federation_is_marked_by_the_metric_requested(cli, grid: Path) -> None:
    axes = "  method: [fedavg, fedprox]\n  partition.beta: [0.5, 5.0]"
    grid.write_text(GRID.replace("  method: [fedavg, fedprox]\n  lr: [0.05, 0.1]", axes))
    out = cli("sweep", "grid.yaml", "--workers", "1", "--quiet", "--rank-by", "auroc").out
    assert out.count("1/1 *") == 2
    assert "* highest AUROC" in out
    rows = list(csv.DictReader(Path("runs/grid/table.csv").read_text().splitlines()))
    for beta in ("0.5", "5.0"):
        best = max((row for row in rows if row["partition.beta"] == beta), key=lambda row: float(row["auroc"]))
        marked = next(line for line in out.splitlines() if beta in line and "*" in line)
        assert best["method"] in marked


def test_a_sweep_of_an_older_version_has_no_auroc(cli, grid: Path) -> None:
    cli("sweep", "grid.yaml", "--workers", "1", "--quiet")
    kept = Path("runs/grid/runs.jsonl")
    records = [json.loads(line) for line in kept.read_text().splitlines()]
    older = [{key: value for key, value in record.items() if key != "auroc"} for record in records]
    kept.write_text("".join(json.dumps(record) + "\n" for record in older))
    outcome = cli("sweep", "grid.yaml", "--workers", "1", "--quiet", "--rank-by", "auroc")
    assert outcome.status == 2
    assert "has no AUROC: " in outcome.err
    assert "is from an earlier version of fedskew; rank by macro-f1" in outcome.err
    assert cli("sweep", "grid.yaml", "--workers", "1", "--quiet", "--rank-by", "macro-f1").status == 0


def test_a_search_selects_by_the_metric_requested(cli, grid: Path) -> None:
    pytest.importorskip("optuna")
    grid.write_text(GRID.partition("grid:")[0].replace("rounds: 2", "rounds: 1") + "search: {lr: [0.05, 0.1]}\n")
    chosen = ("--rank-by", "macro-f1", "--trials", "1", "--workers", "1")
    found = cli("sweep", "grid.yaml", "--search", "optuna", *chosen, "--json").json
    shown = cli("sweep", "grid.yaml", "--search", "optuna", *chosen).out
    assert "mean macro F1 of the last 1 round\n" in shown
    assert found["rank_by"] == "macro-f1"
    assert found["validation_macro_f1"] > 0
    assert len(found["test_macro_f1"]) == 1


def test_a_search_shows_a_mean_of_one_round_if_the_method_has_only_one(cli, grid: Path) -> None:
    pytest.importorskip("optuna")
    grid.write_text(GRID.partition("grid:")[0] + "method: fed3r\nsearch: {method.ridge: [0.01]}\n")
    out = cli("sweep", "grid.yaml", "--search", "optuna", "--trials", "1", "--workers", "1").out
    assert "best of 1 trial: trial 0, method.ridge 0.01\nmean accuracy of the last 1 round\n" in out


def test_runs_that_serve_two_points_are_not_called_done(cli, grid: Path) -> None:
    axes = "  method: [fedavg, fedprox]\n  lr: [0.05, 0.1]"
    grid.write_text(GRID.replace(axes, "  rounds: [1, 2]"))
    assert "already done" not in cli("sweep", "grid.yaml", "--workers", "1").err
    assert "2 of 2 runs are already done" in cli("sweep", "grid.yaml", "--workers", "1").err


def table() -> list[dict[str, str]]:
    return list(csv.DictReader(Path("runs/grid/table.csv").read_text().splitlines()))


def test_an_axis_keeps_its_values_if_a_measured_column_has_its_name(cli, grid: Path) -> None:
    axes = "  rounds: [1, 9]\n  split: {mild: {partition.beta: 5.0}, strong: {partition.beta: 0.1}}"
    two_seeds = GRID.replace("seeds: 1", "seeds: 2")
    grid.write_text(two_seeds.replace("  method: [fedavg, fedprox]\n  lr: [0.05, 0.1]", axes))
    out = cli("sweep", "grid.yaml", "--workers", "1", "--quiet", "--time-limit", "0.0001").out
    assert out.count("0/2") == 4
    listed = [(row["rounds"], row["split"], row["seed"]) for row in table()]
    assert listed == [(r, split, seed) for seed in "01" for r in "19" for split in ("mild", "strong")]


def test_a_setting_that_only_changes_means_applies_to_earlier_runs(cli, grid: Path) -> None:
    assert cli("sweep", "grid.yaml", "--workers", "1", "--quiet", "--set", "mean_last=1").status == 0
    assert [row["mean_last"] for row in table()] == [row["accuracy"] for row in table()]
    outcome = cli("sweep", "grid.yaml", "--workers", "1", "--set", "mean_last=2")
    assert "4 of 4 runs are already done" in outcome.err
    assert any(row["mean_last"] != row["accuracy"] for row in table())


def test_all_points_of_a_failed_run_are_failed(cli, grid: Path) -> None:
    axes = "  method: [fedprox, {name: fedprox, mu: 0.01}]\n  partition.min_size: [299]"
    grid.write_text(GRID.replace("  method: [fedavg, fedprox]\n  lr: [0.05, 0.1]", axes))
    outcome = cli("sweep", "grid.yaml", "--workers", "1", "--quiet")
    assert outcome.status == 1
    assert [row["status"] for row in table()] == ["failed", "failed"]


def test_the_final_runs_of_a_search_may_be_stopped(cli, grid: Path) -> None:
    """Their scores are not known then. AUROC ended in a traceback."""
    pytest.importorskip("optuna")
    grid.write_text(GRID.partition("grid:")[0].replace("rounds: 2", "rounds: 1") + "search: {lr: [0.05]}\n")
    command = ("sweep", "grid.yaml", "--search", "optuna", "--rank-by", "auroc", "--trials", "1", "--workers", "1")
    assert len(cli(*command, "--json").json["test_auroc"]) == 1
    kept = Path("runs/grid/runs.jsonl")
    record = json.loads(kept.read_text())
    stopped = {**record, "rounds": [0], "accuracy": record["accuracy"][:1]}
    kept.write_text(json.dumps({key: value for key, value in stopped.items() if key != "auroc"}) + "\n")
    outcome = cli(*command, "--json", "--time-limit", "0.0001")
    assert outcome.status == 0, outcome.err
    assert outcome.json["test_auroc"] == []
    assert "1 run is unfinished" in outcome.err
