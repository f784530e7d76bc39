"""A federation's run folder is one like any other."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from in_process import Case, case, small_data

from fedskew.cli import main
from fedskew.data import Dirichlet, federation
from fedskew.experiment.config import Config, with_values
from fedskew.experiment.storage.run_folder import RunFolder
from fedskew.flower.server_app import run_federation
from fedskew.flower.sites import Sites
from fedskew.flower.wire import Facts
from fedskew.gaussian_privacy import epsilon


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = tmp_path_factory.mktemp("federation")
    data = small_data(folder)
    split = federation(str(data), Dirichlet(beta=0.5, clients=3), seed=0)
    config = with_values(
        Config(),
        {"method": "fedvls", "rounds": 2, "local_epochs": 1, "device": "cpu", "batch_size": 20, "partition.clients": 3},
    )
    here = case(folder, split, data, config, evaluation="sites", site_metrics="class", test_data=None)
    run_federation(here.grid, here.context)
    return here


@pytest.fixture(scope="module")
def run(here: Case) -> Path:
    return here.folder / "run"


def test_it_tells_of_its_sites_but_not_of_their_labels(run: Path) -> None:
    folder = RunFolder(run)
    assert folder.finished
    assert folder.config.partition.params == {"names": ["site-0", "site-1", "site-2"]}
    about = folder.about()
    assert about is not None
    assert about["federation"]["sites"] == ["site-0", "site-1", "site-2"]
    assert "label_counts" not in about["federation"]


def test_reports_are_made_of_it(run: Path, tmp_path: Path) -> None:
    assert main(["report", str(run), "--no-features", "-o", str(tmp_path / "page.html")]) == 0
    assert "fedvls" in (tmp_path / "page.html").read_text(encoding="utf-8")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "For a federation across machines, no map of the samples" in page
    assert "about.json is missing" not in page


def test_it_is_compared_with_a_simulated_run(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    here = [
        "--data",
        str(run.parent / "digits.npz"),
        "--clients",
        "3",
        "--rounds",
        "1",
        "--local-epochs",
        "1",
        "--quiet",
    ]
    assert main(["run", *here, "--method", "fedavg", "--engine", "plain", "--out", str(tmp_path / "simulated")]) == 0
    capsys.readouterr()
    assert main(["compare", str(run), str(tmp_path / "simulated"), "--json"]) == 0
    printed = capsys.readouterr()
    told = {each["method"]: each for each in json.loads(printed.out)["methods"]}
    assert told.keys() == {"fedvls", "fedavg"}
    assert told["fedvls"]["accuracy"]["mean"] == (RunFolder(run).summary() or {})["accuracy"]
    assert "partition.rule" in printed.err
    assert main(["compare", str(run), str(tmp_path / "simulated"), "--rank-by", "auroc"]) == 0
    assert re.search(r"^fed(vls|avg) is best here by AUROC", capsys.readouterr().out, re.MULTILINE)

    assert main(["compare", str(run), "--rounds", "3"]) == 2
    assert "expected no settings besides the run folders" in capsys.readouterr().err
    (tmp_path / "simulated" / "summary.json").unlink()
    assert main(["compare", str(run), str(tmp_path / "simulated")]) == 2
    assert "is not finished" in capsys.readouterr().err


def test_its_model_is_exported(run: Path, tmp_path: Path) -> None:
    assert main(["export", str(run), "-o", str(tmp_path / "model")]) == 0
    assert (tmp_path / "model" / "model.safetensors").exists()


def test_its_card_says_what_was_told(run: Path, tmp_path: Path) -> None:
    assert main(["export", str(run), "-o", str(tmp_path / "model")]) == 0
    card = (tmp_path / "model" / "README.md").read_text(encoding="utf-8")
    assert "reported their test results by class, which reveal the label counts of their test parts." in card
    assert "stayed at the sites" not in card
    assert "Training was not differentially private" in card


def test_a_run_tested_in_total_can_be_reported_compared_and_exported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = small_data(tmp_path)
    split = federation(str(data), Dirichlet(beta=0.5, clients=3), seed=0)
    values = {"method": "fedavg", "rounds": 2, "local_epochs": 1, "device": "cpu", "partition.clients": 3}
    own = {"evaluation": "sites", "site_metrics": "total", "test_data": None}
    here = case(tmp_path, split, data, with_values(Config(), values), **own)
    run_federation(here.grid, here.context)
    run = str(tmp_path / "run")
    assert main(["export", run, "-o", str(tmp_path / "model")]) == 0
    card = (tmp_path / "model" / "README.md").read_text(encoding="utf-8")
    assert "the label counts stayed at the sites" in card
    assert "| worst class | – |" in card
    assert main(["compare", run, run]) == 0
    assert main(["report", run, "-o", str(tmp_path / "report.html")]) == 0
    assert "nan" not in capsys.readouterr().out
    assert main(["compare", run, run, "--rank-by", "auroc"]) == 2
    assert "its sites reported total accuracy only" in capsys.readouterr().err


def test_only_sites_that_contributed_are_named_as_trained_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """site-1 is never let in, and site-2 leaves after the first round: rows, summary, card and last line say so."""
    data = small_data(tmp_path)
    split = federation(str(data), Dirichlet(beta=0.5, clients=3), seed=0)
    values = {"method": "fedavg", "rounds": 2, "local_epochs": 1, "device": "cpu", "partition.clients": 3}

    def meddle(site: str, asked: Facts, facts: Facts, answer: bytes) -> tuple[Facts, bytes]:
        if site == "site-1" and asked["kind"] == "hello":
            return {"refused": "other data"}, b""
        if site == "site-2" and asked.get("key", {}).get("round") == 1:
            return {"failed": "away"}, b""
        return facts, answer

    own = {"evaluation": "sites", "site_metrics": "total", "test_data": None, "minimum": 1, "begin_with": 2}
    here = case(tmp_path, split, data, with_values(Config(), values), meddle, **own)
    result = run_federation(here.grid, here.context)
    assert [row.absent for row in result.history] == [None, ["site-1"], ["site-1"]]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["sites"] == {"site-0": 2, "site-1": 0, "site-2": 1}
    assert summary["tested_by"] == ["site-0", "site-2"]
    assert "auroc" not in summary, "the probabilities of samples stay at the sites"
    assert "trained by 1 of 3 sites in every round, site-1 in no rounds, site-2 in 1 round;" in caplog.text
    assert main(["export", str(tmp_path / "run"), "-o", str(tmp_path / "model")]) == 0
    card = (tmp_path / "model" / "README.md").read_text(encoding="utf-8")
    assert "trained by federated learning on the data of 2 sites" in card
    assert "trained on the data of site-0 (2 of 2 rounds), site-2 (1 of 2 rounds)." in card
    assert "Sites that never contributed: site-1." in card
    assert "Sites that tested it: site-0, site-2." in card


def test_the_card_of_a_private_run_has_its_epsilon(tmp_path: Path) -> None:
    data = small_data(tmp_path)
    split = federation(str(data), Dirichlet(beta=0.5, clients=3), seed=0)
    values = {"method": "fedavg", "rounds": 2, "local_epochs": 1, "device": "cpu", "average": "uniform"}
    config = with_values(Config(), {**values, "partition.clients": 3})
    here = case(tmp_path, split, data, config, privacy="central", noise=4.0)
    run_federation(here.grid, here.context)
    assert main(["export", str(tmp_path / "run"), "-o", str(tmp_path / "model")]) == 0
    card = (tmp_path / "model" / "README.md").read_text(encoding="utf-8")
    assert f"ε = {epsilon(2, 4.0, 1e-5, sensitivity=2.0):.3g} at δ = 1e-05 for a whole site" in card
    assert "not differentially private" not in card
    assert "the label counts stayed at the sites" in card
    assert "reported" not in card


def test_a_finished_run_waits_for_no_site(here: Case, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`fedskew federate run` may be repeated after the sites have left."""
    monkeypatch.setattr(here.grid, "offline", set(here.names))
    monkeypatch.setattr(Sites, "wait_for", lambda *_: pytest.fail("it waits"))
    accuracy = (RunFolder(run).summary() or {})["accuracy"]
    assert run_federation(here.grid, here.context).accuracy == accuracy
