"""The section on pretrained starts, from the records of tiny grids of the same form."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedskew.cli import main
from fedskew.lab.papers.pretrained import StartResult, closed_forms, draw_pretrained, start_results
from fedskew.lab.papers.results_page import results_page
from fedskew.lab.papers.sweep_section import read_sweeps
from fedskew.lab.sweep.execution import execute
from fedskew.lab.sweep.grid import read_grid
from fedskew.lab.sweep.job import SweepSettings
from fedskew.lab.sweep.records import RecordsFile

RESULTS = Path(__file__).parents[3] / "results"
SHARED = "model: dnn\nrounds: 1\nlocal_epochs: 1\nlr: 0.1\n"
STARTS = (
    f"# Two starts.\n{SHARED}partition: {{rule: dirichlet}}\ngrid:\n"
    "  federation:\n    all of 3 clients: {partition.clients: 3}\n"
    "  partition.beta: [0.3, 5]\n  start:\n    scratch: {}\n    head only: {train: head}\n"
    "  method: [fedavg, fedvls]\n"
)
HEADS = (
    f"{SHARED}partition: {{rule: iid, clients: 3}}\ntrain: head\ngrid:\n"
    "  network:\n    dnn: {}\n  method: [fedncm, fed3r]\n"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of results with two grids. One combination was not run."""
    found = tmp_path_factory.mktemp("results")
    grids = found / "grids"
    grids.mkdir()
    for name, text in (("pretrained-dnn", STARTS), ("pretrained-closed-form", HEADS)):
        (grids / f"{name}.yaml").write_text(text)
        points = read_grid(grids / f"{name}.yaml", {"device": "cpu", "engine": "plain"}).points()
        for point in points if name == "pretrained-closed-form" else points[:-1]:
            record = execute(point.job, SweepSettings(), lambda *_: None).record
            assert record is not None
            RecordsFile(grids / f"{name}.jsonl").append(record)
    return found


def test_the_page_has_the_summary_the_picture_and_the_tables(folder: Path) -> None:
    (folder / "findings.yaml").write_text("pretrained: Skew hurts less.\n")
    page = results_page(folder)
    section = page[page.index("## Pretrained starts") :]
    assert section.startswith("## Pretrained starts\n\nSkew hurts less.\n\nCIFAR-10, from random weights")
    assert "| network | clients | start | FedAvg, β 5 | FedAvg, β 0.3 | lost | best | gain |" in section
    assert "| dnn | all of 3 clients | scratch |" in section
    assert "](results/pretrained.png)" in section
    assert "### pretrained-closed-form" in section
    assert "### pretrained-dnn\n\nTwo starts." in section
    assert "Not run: all of 3 clients 5 head only fedvls." in section
    assert "## Sweep pretrained" not in page


def test_results_are_those_of_the_records(folder: Path) -> None:
    sweeps = read_sweeps(folder)
    results = {result.start: result for result in start_results(sweeps)}
    records = RecordsFile(folder / "grids" / "pretrained-dnn.jsonl").read()
    scratch = next(r for r in records if (r.config.train, r.config.method) == ("all", "fedavg"))
    assert results["scratch"].accuracy[0.3]["fedavg"] == pytest.approx(100 * scratch.curve[-1][1])
    assert results["scratch"].accuracy.keys() == {0.3, 5}
    assert results["head only"].accuracy[5].keys() == {"fedavg"}
    assert results["head only"].best(5) is None, "fedvls was not run there"
    assert results["head only"].best(0.3) in ("fedavg", "fedvls")
    assert closed_forms(sweeps)["dnn"].keys() == {"fedncm", "fed3r"}


def test_runs_are_found_without_the_weights_that_they_started_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["pretrain", "--data", "digits", "--model", "dnn", "--epochs", "1", "--out", "start", "--quiet"]) == 0
    grid = tmp_path / "grids" / "pretrained-dnn.yaml"
    grid.parent.mkdir()
    grid.write_text(STARTS.replace("{train: head}", "{init: start/weights.safetensors, train: head}"))
    tuned = [point for point in read_grid(grid, {"device": "cpu"}).points() if point.grid_values["start"] != "scratch"]
    for point in tuned[:2]:
        record = execute(point.job, SweepSettings(), lambda *_: None).record
        assert record is not None
        RecordsFile(grid.with_suffix(".jsonl")).append(record)
    (tmp_path / "start" / "weights.safetensors").unlink()
    (result,) = start_results(read_sweeps(tmp_path))
    assert (result.start, list(result.accuracy)) == ("head only", [0.3])


def test_the_loss_is_fedavgs_from_mild_to_severe_skew() -> None:
    accuracy = {0.05: {"fedavg": 40.0, "fedvls": 45.0}, 0.1: {"fedvls": 50.0}, 0.5: {"fedavg": 60.0}}
    result = StartResult("CNN", "all", "scratch", accuracy, methods=2)
    assert result.points_lost(0.5, 0.05) == 20
    assert result.points_lost(0.5, 0.1) is None, "FedAvg was not run at β 0.1"
    assert (result.best(0.05), result.best(0.5), result.best(1.0)) == ("fedvls", None, None)


def test_one_command_writes_page_and_picture(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert main(["results", "--results", str(folder), "--out", str(tmp_path / "RESULTS.md")]) == 0
    assert (folder / "pretrained.png").read_bytes().startswith(b"\x89PNG")
    assert not draw_pretrained(tmp_path), "there is no picture without records"


@pytest.mark.parametrize("grid", sorted((RESULTS / "grids").glob("pretrained-*.yaml")), ids=lambda path: path.stem)
def test_our_own_grids_have_the_axes_that_the_section_reads(grid: Path) -> None:
    points = read_grid(grid, {}).points()
    axes = [key for key in points[0].grid_values if key != "seed"]
    assert axes in (["federation", "partition.beta", "start", "method"], ["network", "method"])
