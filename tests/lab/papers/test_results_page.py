"""A tiny cell rerun from end to end, and the page that is made of all records."""

from __future__ import annotations

import gzip
import re
from pathlib import Path

import numpy as np
import pytest

from fedskew.cli import main
from fedskew.lab.papers.cells import Cell, CellChoice, make_job, table_cells
from fedskew.lab.papers.map import FederationResult, draw_maps, federation_results, guide
from fedskew.lab.papers.results_page import results_page
from fedskew.lab.sweep.execution import execute
from fedskew.lab.sweep.grid import read_grid
from fedskew.lab.sweep.job import SweepSettings
from fedskew.lab.sweep.records import Record, Records, RecordsFile, read_folder


def idx(array: np.ndarray) -> bytes:
    header = bytes([0, 0, 8, array.ndim]) + b"".join(size.to_bytes(4, "big") for size in array.shape)
    return header + array.astype(np.uint8).tobytes()


@pytest.fixture
def little_mnist(tmp_path: Path) -> Path:
    """Files like MNIST's, of 800 and 100 images that can be told apart."""
    rng = np.random.default_rng(0)
    folder = tmp_path / "mnist"
    folder.mkdir()
    for part, n in (("train", 800), ("t10k", 100)):
        labels = np.arange(n) % 10
        images = rng.integers(0, 80, (n, 28, 28))
        images[np.arange(n), labels * 2, :] = 255
        (folder / f"{part}-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(images)))
        (folder / f"{part}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx(labels)))
    return tmp_path


def test_a_cell_is_rerun_kept_and_not_run_again(
    little_mnist: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(little_mnist)
    arguments = [
        "reproduce", "fedvls/table1", "--dataset", "mnist", "--split", "dirichlet:0.5", "--methods", "fedavg,fedvls",
        "--seeds", "2", "--rounds", "1", "--data-dir", ".", "--device", "cpu", "--workers", "1",
    ]  # fmt: skip
    assert main(arguments) == 0
    said = capsys.readouterr()
    assert "98.96" in said.out
    assert "(1 of 50 rounds)" in said.out
    assert "of 1 pair in the paper's order" in said.out
    assert "changed from the paper: rounds 1\n" in said.out
    records = list(read_folder("results"))
    assert {(r.config.method, r.config.seed, r.rounds) for r in records} == {
        (method, seed, 1) for method in ("fedavg", "fedvls") for seed in (0, 1)
    }
    assert {r.config.local_epochs for r in records} == {5}
    assert all(r.content["command"] for r in records)
    before = Path("results/fedvls.jsonl").read_bytes()
    assert main(arguments) == 0
    assert "4 of 4 runs are already done" in capsys.readouterr().err
    assert Path("results/fedvls.jsonl").read_bytes() == before

    page = results_page("results")
    assert "## fedvls/table1: Dirichlet splits" in page
    assert "mnist dirichlet:0.5" in page
    fedavg = next(line for line in page.splitlines() if line.startswith("| FedAvg |"))
    assert "98.96 ± 0.00 → " in fedavg
    assert "(1 of 50 rounds)" in fedavg
    assert "Not rerun: " in page
    assert main(["results"]) == 0
    assert Path("RESULTS.md").read_text() == page


def test_our_own_page_is_what_its_generator_gives(request: pytest.FixtureRequest) -> None:
    root = request.config.rootpath
    assert (root / "RESULTS.md").read_text(encoding="utf-8") == results_page(root / "results")


def test_a_guide_names_all_that_come_close() -> None:
    federation = FederationResult("cifar10", 0.05, 0.1, {"FedAvg": 40.0, "FedVLS": 55.0, "FedLC": 54.2, "MOON": 39.0})
    assert federation.best == ["FedVLS", "FedLC"]
    assert federation.gain("MOON") == -1.0
    assert "| cifar10 | 0.05 | 10% | 40.0 | FedVLS, FedLC | +15.0 |" in guide([federation])


def record_of(cell: Cell, accuracy: float, seed: int = 0) -> Record:
    """Of a run that came to its end with that."""
    one = make_job(cell, seed, CellChoice())
    curve, rounds = [0.1, accuracy], [0, one.config.rounds]
    return Record({
        "format": 1, "experiment": one.identity, "config": one.config.to_mapping(), "rounds": rounds,
        "accuracy": curve, "macro_f1": curve, "worst_class": curve, "compute": rounds, "seconds": 1.0,
        "class_accuracy": [], "stages": {}, "local": None, "date": "2026-11-15", "command": "test",
        "machine": {"cpu": "a CPU", "cores": "2"}, "versions": {},
    })  # fmt: skip


@pytest.mark.parametrize("methods", [{"FedLMD"}, {"FedLMD", "FedAvg"}])
def test_a_run_alone_stands_in_the_first_of_its_tables(tmp_path: Path, methods: set[str]) -> None:
    cells = table_cells("fedlmd", "table3")
    wanted = [c for c in cells if c.setting == ("cifar10", "dirichlet:0.5", "") and c.metric == "best"]
    for cell in wanted:
        if cell.method in methods:
            RecordsFile(tmp_path / "fedlmd.jsonl").append(record_of(cell, 0.7))
    sections = re.findall(r"^## fedlmd/(\w+)", results_page(tmp_path), re.MULTILINE)
    assert "table3" in sections
    assert "table5" not in sections, "combinations, of which FedLMD is one"
    assert ("table7" in sections) == (len(methods) > 1), "the same runs, over several seeds"


def test_a_map_of_federations_with_other_methods_each_would_compare_nothing() -> None:
    cells = [cell for cell in table_cells("fedskew", "map") if cell.dataset == "cifar10"]
    here, there, *_ = {cell.setting: None for cell in cells}
    ran = {here: {"FedAvg", "FedVLS"}, there: {"FedAvg", "MOON"}}
    records = [record_of(cell, 0.5) for cell in cells if cell.method in ran.get(cell.setting, ())]
    assert federation_results(Records(records), [0]) == []


def test_the_map_compares_methods_over_the_seeds_that_all_of_them_have() -> None:
    cells = [cell for cell in table_cells("fedskew", "map") if cell.dataset == "cifar10"]
    place = cells[0].setting
    accuracy = {"FedAvg": [0.5, 0.7, None], "FedVLS": [0.6, 0.9, 0.1]}
    records = [
        record_of(cell, value, seed)
        for cell in cells
        if cell.setting == place and cell.method in accuracy
        for seed, value in enumerate(accuracy[cell.method])
        if value is not None
    ]
    (federation,) = federation_results(Records(records), [0, 1, 2])
    assert federation.accuracy == pytest.approx({"FedAvg": 60.0, "FedVLS": 75.0})


def test_the_map_is_drawn_from_its_records(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file = RecordsFile(tmp_path / "fedskew.jsonl")
    gains = {"FedAvg": 0.0, "FedVLS": 0.05, "MOON": -0.02}
    for cell in table_cells("fedskew", "map"):
        unfinished = cell.dataset == "fashion-mnist" and cell.method != "FedVLS"
        if (cell.dataset == "cifar10" or unfinished) and cell.method in gains:
            file.append(record_of(cell, 0.5 + gains[cell.method]))
    (picture,) = draw_maps(tmp_path)
    assert picture.name == "map-cifar10.png"
    assert picture.read_bytes().startswith(b"\x89PNG")
    page = results_page(tmp_path)
    assert "| cifar10 | 0.05 | 10% | 50.0 | FedVLS | +5.0 |" in page
    assert "| fashion-mnist | 0.05" not in page, "without all methods the best is not known"
    assert "not rerun" not in page.partition("## fedskew/map")[0].lower()
    assert "(results/map-cifar10.png)" in page
    assert page.index("## Which method for my federation") < page.index("## fedskew/map")


def test_a_sweep_and_what_is_still_to_do_have_their_sections(tmp_path: Path) -> None:
    grids = tmp_path / "grids"
    grids.mkdir()
    (grids / "tiny.yaml").write_text(
        "# Two methods and one that fails.\n#   fedskew sweep tiny.yaml\nrounds: 2\nlocal_epochs: 1\n"
        "partition: {rule: iid, clients: 3}\ngrid:\n  method: [fedavg, fedprox, fedlc]\n"
    )
    for point in read_grid(grids / "tiny.yaml", {"device": "cpu"}).points()[:2]:
        record = execute(point.job, SweepSettings(), lambda *_: None).record
        assert record is not None
        RecordsFile(grids / "tiny.jsonl").append(record)
    (tmp_path / "plan-x.yaml").write_text("- {tables: fedvls/table17, variant: cnn, rounds: 4}\n")
    page = results_page(tmp_path)
    assert "## Sweep tiny\n\nTwo methods and one that fails. [The grid](results/grids/tiny.yaml)." in page
    rows = [line.split(" | ") for line in page.splitlines() if line.startswith(("| fedavg |", "| fedprox |"))]
    assert len(rows) == 2
    assert float(rows[0][1]) >= float(rows[1][1])
    assert "Not run: fedlc." in page
    assert "- fedvls/table17; variant cnn; rounds 4; one seed: 0 of 4 runs done ([plan-x.yaml]" in page


def test_a_sweep_over_federations_has_a_column_per_method(tmp_path: Path) -> None:
    grids = tmp_path / "grids"
    grids.mkdir()
    (grids / "wide.yaml").write_text(
        "rounds: 2\nlocal_epochs: 1\nmodel: dnn\npartition: {rule: iid, clients: 3}\n"
        "grid:\n  lr: [0.1]\n  pace: {slow: {batch_size: 50}}\n  method: [fedavg, fedncm]\n"
    )
    for point in read_grid(grids / "wide.yaml", {"device": "cpu"}).points():
        record = execute(point.job, SweepSettings(), lambda *_: None).record
        assert record is not None
        RecordsFile(grids / "wide.jsonl").append(record)
    page = results_page(tmp_path)
    assert "| lr | pace | fedavg | fedncm | seeds |" in page
    (row,) = (line for line in page.splitlines() if line.startswith("| 0.1 | slow |"))
    assert row.count("**") == 2
    assert "of 2 rounds" not in row


def test_a_finding_about_no_table_is_refused(tmp_path: Path) -> None:
    (tmp_path / "findings.yaml").write_text("fedlmd/table33: it holds\n")
    with pytest.raises(Exception, match=r"unknown table or section 'fedlmd/table33'; did you mean 'fedlmd/table3'"):
        results_page(tmp_path)
