"""Every site tests the global model on its own rows before and after local training, as a simulated client does."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Context, RecordDict
from in_process import DirectGrid, Meddle, run_config_of, small_data
from method_cases import slow

from fedskew.cli import main
from fedskew.data import Dirichlet, Federation, federation
from fedskew.errors import UserError
from fedskew.experiment.config import Config, with_values
from fedskew.experiment.preparation import prepare
from fedskew.experiment.result import Result
from fedskew.experiment.run import run_prepared
from fedskew.flower.contract import Contract
from fedskew.flower.planning import make_settings, read_app, resolve_config
from fedskew.flower.policy import LOCAL_TESTS, Policy
from fedskew.flower.request_checks import require_agreed_local_tests
from fedskew.flower.server_app import run_federation
from fedskew.flower.site import Site
from fedskew.flower.site_config import SiteConfig, load_site
from fedskew.flower.wire import Facts
from fedskew.methods import make_method

NAMES = ["site-0", "site-1", "site-2"]
ALLOWED = Policy(reveals=(LOCAL_TESTS, "label counts"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("clients")
    small_data(folder)
    return folder


@pytest.fixture(scope="module")
def split(folder: Path) -> Federation:
    """Simulated clients, and a file for each site with the same rows: those it trains on, and those it holds out."""
    split = federation(str(folder / "digits.npz"), Dirichlet(beta=0.5, clients=3), seed=0)
    x, y = split.dataset.train.x, split.dataset.train.y
    held = split.hold_out(0.3)
    for name, train, test in zip(NAMES, held.indices, held.held_out, strict=True):
        arrays = {"x_train": x[train], "y_train": y[train], "x_test": x[test], "y_test": y[test]}
        np.savez(folder / f"{name}.npz", **arrays, classes=np.array(split.dataset.classes))
    return split


def config(**changed: Any) -> Config:
    values = {"method": "fedavg", "rounds": 3, "local_epochs": 1, "engine": "plain", "device": "cpu", "batch_size": 20}
    return with_values(Config(), values | {"partition.clients": 3} | changed)


def run_apart(
    out: Path,
    folder: Path,
    split: Federation,
    run: Config,
    policies: Mapping[str, Policy] | None = None,
    meddle: Meddle | None = None,
    **own: Any,
) -> tuple[Result, DirectGrid]:
    contract = Contract.from_dataset(split.dataset)
    settings = make_settings(NAMES, {"folder": str(out), "minimum": 3, "local_tests": True, **own})
    sites = {}
    for name in NAMES:
        policy = (policies or {}).get(name, ALLOWED)
        data = str(folder / f"{name}.npz")
        sites[name] = Site(SiteConfig(out.parent / name, name, data, device="cpu", metrics="total", policy=policy))
    grid = DirectGrid(sites, meddle)
    values = run_config_of(settings, contract, resolve_config(run, contract, NAMES))
    return run_federation(grid, Context(1, 0, {}, RecordDict(), values)), grid


def reported(run: Result) -> list[dict[str, list[float | None]] | None]:
    """What every row has about the global model on the clients' own rows, without the results of personal models."""
    kinds = ("accuracy", "before", "after")
    return [tests and {kind: tests[kind] for kind in kinds} for tests in (row.client_tests for row in run.history)]


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"clients_per_round": 2},
        {"eval_every": 2},
        {"method": "scaffold"},
        {"method": "pkd", "rounds": 4},
        {"method": "fedper"},
        {"method": "ditto"},
        {"method": "fedbabu"},
        *slow({"method": "fedconcat", "rounds": 4}, {"method": "fedrep"}),
    ],
    ids=str,
)
def test_the_sites_report_what_simulated_clients_measure(
    changed: dict[str, Any], folder: Path, split: Federation, tmp_path: Path
) -> None:
    apart, _ = run_apart(tmp_path / "run", folder, split, config(**changed))
    together = run_prepared(prepare(config(**changed, client_test=0.3), split))
    assert reported(apart) == reported(together)
    assert any(tests is not None and "after" in tests for tests in reported(apart))
    assert apart.client_tests[NAMES[0]].items() <= together.client_tests["0"].items()
    assert apart.summary()["client_tests"].keys() == set(NAMES)


def test_by_default_neither_the_server_requests_them_nor_a_site_sends_them(
    folder: Path, split: Federation, tmp_path: Path
) -> None:
    unrequested, grid = run_apart(tmp_path / "run", folder, split, config(), local_tests=False)
    assert all("local_tests" not in message.facts for message in grid.sent)
    assert all(row.client_tests is None for row in unrequested.history)
    refused, grid = run_apart(tmp_path / "refused" / "run", folder, split, config(), dict.fromkeys(NAMES, Policy()))
    sent = [message.facts["local_tests"] for message in grid.sent if message.kind == "train"]
    assert all(list(found) == ["refused"] and "policy.reveals: [local tests]" in found["refused"] for found in sent)
    assert len(sent) == 9
    assert refused.site_rounds == dict.fromkeys(NAMES, 3)
    assert refused.client_tests.keys() == set(NAMES)
    assert not any("after" in found for found in refused.client_tests.values())


def test_one_site_may_decline(
    folder: Path, split: Federation, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", logger="flwr"):
        result, _ = run_apart(tmp_path / "run", folder, split, config(), {"site-1": Policy(reveals=())})
    assert caplog.text.count("site-1 reports no local tests: the server requests the accuracy before and after") == 1
    assert "site-0 reports no local tests" not in caplog.text
    tests = result.history[-1].client_tests
    assert tests is not None
    assert [value is None for value in tests["after"]] == [False, True, False]
    assert [value is None for value in tests["accuracy"]] == [False, False, False]
    assert "after" not in result.client_tests["site-1"]


def test_only_totals_leave_the_site(folder: Path, split: Federation, tmp_path: Path) -> None:
    _, grid = run_apart(tmp_path / "run", folder, split, config())
    sent = [message.facts["local_tests"] for message in grid.sent if message.kind == "train"]
    assert all(found.keys() == {"before", "after"} for found in sent)
    assert all(totals.keys() == {"right", "tested"} for found in sent for totals in found.values())


@pytest.mark.parametrize("wrong", [None, 7, {"before": {"right": 1, "tested": 2}}, {"before": 1, "after": 2}, "over"])
def test_impossible_reports_are_left_out(wrong: Any, folder: Path, split: Federation, tmp_path: Path) -> None:
    def meddle(site: str, asked: Facts, facts: Facts, answer: bytes) -> tuple[Facts, bytes]:
        if site == "site-0" and asked["kind"] == "train":
            facts["local_tests"] = (
                facts["local_tests"] | {"after": {"right": 9, "tested": 3}} if wrong == "over" else wrong
            )
        return facts, answer

    result, _ = run_apart(tmp_path / "run", folder, split, config(rounds=1), meddle=meddle)
    tests = result.history[-1].client_tests
    assert tests is not None
    assert (tests["before"][0], tests["after"][0]) == (None, None)
    assert None not in tests["after"][1:]


def test_they_need_the_sites_tests() -> None:
    with pytest.raises(UserError, match=r"local_tests is true, but federation\.site_metrics is 'none'"):
        make_settings(NAMES, {"local_tests": True, "site_metrics": "none", "evaluation": "server", "test_data": "x"})


def test_the_report_the_card_and_the_check_say_so(
    folder: Path, split: Federation, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_apart(tmp_path / "run", folder, split, config(rounds=2))
    assert main(["report", str(tmp_path / "run"), "-o", str(tmp_path / "report.html"), "--no-features"]) == 0
    report = (tmp_path / "report.html").read_text()
    assert "Participants of the last evaluated round on their own samples, before and after local training" in report
    assert main(["export", str(tmp_path / "run"), "-o", str(tmp_path / "model")]) == 0
    card = (tmp_path / "model" / "README.md").read_text()
    assert "These sites also reported the accuracy before and after local training: site-0, site-1, site-2." in card
    data = str(folder / "site-0.npz")
    init = ["federate", "init", str(tmp_path / "app"), "--sites", ",".join(NAMES), "--data", data, "--method", "fedavg"]
    assert main([*init, "--federation", "local_tests=true"]) == 0
    (tmp_path / "site.yaml").write_text(f"name: site-0\ndata: {data}\n")
    capsys.readouterr()
    assert main(["federate", "site", str(tmp_path / "site.yaml"), "--check", str(tmp_path / "app")]) == 0
    shown = capsys.readouterr()
    assert "policy.reveals lists 'local tests', also how many predictions are correct before and after" in shown.out
    assert "this site's policy does not allow local tests" in shown.err
    assert "to report it, add policy: {reveals: [local tests]} and metrics: total" in " ".join(shown.err.split())
    advised = f"name: site-0\ndata: {data}\nmetrics: total\npolicy: {{reveals: [local tests]}}\n"
    (tmp_path / "site.yaml").write_text(advised)
    require_agreed_local_tests(make_method("fedavg"), load_site(tmp_path / "site.yaml"))
    assert main(["federate", "site", str(tmp_path / "site.yaml"), "--check", str(tmp_path / "app")]) == 0
    assert "will not" not in capsys.readouterr().err


def test_an_approval_without_them_does_not_allow_them(folder: Path, split: Federation, tmp_path: Path) -> None:
    data = str(folder / "digits.npz")
    init = ["federate", "init", str(tmp_path / "app"), "--sites", ",".join(NAMES), "--data", data, "--method", "fedavg"]
    assert main([*init, "--rounds", "1", "--federation", "minimum=2"]) == 0
    (tmp_path / "site-0").mkdir()
    (tmp_path / "site-0" / "site.yaml").write_text(
        f"name: site-0\ndata: {folder / 'site-0.npz'}\npolicy: {{reveals: [local tests]}}\n"
    )
    assert main(["federate", "approve", str(tmp_path / "app"), str(tmp_path / "site-0" / "site.yaml"), "--yes"]) == 0
    run = read_app(tmp_path / "app")[2]
    result, grid = run_apart(tmp_path / "run", folder, split, run, minimum=2, attempts=1)
    first = next(message for message in grid.sent if message.site == "site-0" and message.kind == "train")
    assert first.facts["refused"].endswith("differs from every app that this site approved: local_tests")
    assert result.site_rounds == {"site-0": 0, "site-1": 1, "site-2": 1}
