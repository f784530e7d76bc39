"""`fedskew federate site`: what it checks before it connects."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("flwr")

from in_process import small_data

from fedskew.cli import main
from fedskew.flower.credentials import make_credentials
from fedskew.flower.planning import read_app
from fedskew.flower.site import Site
from fedskew.flower.site_config import load_site


@pytest.fixture
def site(tmp_path: Path) -> Path:
    small_data(tmp_path)
    (tmp_path / "site.yaml").write_text("name: north\ndata: digits.npz\n")
    make_credentials(tmp_path / "keys", ["north"])
    return tmp_path


def _app(folder: Path, *options: str) -> str:
    assert main(["federate", "init", str(folder / "app"), "--sites", "north,south", *options]) == 0
    return str(folder / "app")


def _connect(folder: Path, *options: str) -> int:
    keys = str(folder / "keys" / "sites" / "north")
    site = str(folder / "site.yaml")
    return main(["federate", "site", site, "--superlink", "localhost:1", "--keys", keys, *options])


def test_a_site_connects_only_with_an_app_to_check(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _connect(site) == 2
    assert "error: --superlink needs --check; expected the federation's app" in capsys.readouterr().err


def test_data_that_break_the_contract_are_refused_before_connecting(
    site: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _connect(site, "--check", _app(site, "--classes", "cat,dog", "--shape", "1,8,8")) == 2
    assert "error: the data do not meet the federation's contract: classes '0'" in capsys.readouterr().err


def test_a_device_that_is_not_there_is_refused_before_connecting(
    site: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with (site / "site.yaml").open("a") as file:
        file.write("device: cuda:99\n")
    assert _connect(site, "--check", _app(site, "--data", str(site / "digits.npz")), "--log-format", "json") == 2
    (entry,) = map(json.loads, capsys.readouterr().err.splitlines()[1:])  # the first line is of `init`
    assert entry["level"] == "error"
    assert "device is 'cuda:99', but " in entry["message"]


def test_the_lines_of_a_check_that_crashes_are_errors_in_the_log(
    site: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    app = _app(site, "--data", str(site / "digits.npz"))
    crashed = subprocess.CompletedProcess([], 1, "", "Traceback (most recent call last):\nMemoryError\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: crashed)
    assert _connect(site, "--check", app, "--log-format", "json", "--log-level", "error") == 1
    entries = list(map(json.loads, capsys.readouterr().err.splitlines()[1:]))  # the first line is of `init`
    assert [entry["level"] for entry in entries] == ["error", "error"]
    assert entries[1]["message"].endswith("MemoryError")


def test_code_of_the_app_is_executed_only_if_the_user_agrees(
    site: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    app = Path(_app(site, "--data", str(site / "digits.npz"), "--method", "fedavg"))
    file, name = str(site / "site.yaml"), "federation_app.mine:Mine"
    code = "from pathlib import Path\nPath(__file__).with_name('ran').touch()\n"
    code += "from fedskew.methods.fedprox import FedProx\nclass Mine(FedProx): pass\n"
    (app / "federation_app" / "mine.py").write_text(code)
    settings = (app / "pyproject.toml").read_text()
    (app / "pyproject.toml").write_text(settings.replace('name = "fedavg"', f'name = "{name}"'))
    commands = (["federate", "site", file, "--check", str(app)], ["federate", "approve", str(app), file, "--yes"])
    for command in commands:
        assert main(command) == 2
        message = f"error: '{name}' is code of the app, which this command would execute; expected PYTHONPATH={app}"
        assert message in capsys.readouterr().err
    monkeypatch.chdir(app)
    assert _connect(site, "--check", ".") == 2, "being in the app's folder is no agreement"
    assert "is code of the app, which this command would execute" in capsys.readouterr().err
    assert not (app / "federation_app" / "ran").exists()
    monkeypatch.syspath_prepend(str(app))
    shutil.copytree(app, site / "other")
    monkeypatch.chdir(site / "other")  # the method would be imported from here
    for command in commands:
        assert main(command) == 2
        assert (
            "error: the current folder has another federation_app, which Python imports first"
            in capsys.readouterr().err
        )
    monkeypatch.chdir(site)
    for command in commands:
        assert main(command) == 0
    for module in ("federation_app", "federation_app.mine"):
        del sys.modules[module]
    assert f"{name} sends: model" in capsys.readouterr().out


def test_the_check_refuses_what_the_site_would_refuse_in_the_run(
    site: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (site / "hospital_models").mkdir()
    code = "from torch import nn\ndef make(inputs): return nn.Sequential(nn.Flatten(), nn.Linear(64, inputs.classes))\n"
    (site / "hospital_models" / "small.py").write_text(code)
    monkeypatch.syspath_prepend(str(site))
    app = _app(site, "--data", str(site / "digits.npz"), "--model", "hospital_models.small:make")
    check = ["federate", "site", str(site / "site.yaml"), "--check", app]
    assert main(check) == 2
    assert "error: this site does not run the model 'hospital_models.small:make'" in capsys.readouterr().err
    with (site / "site.yaml").open("a") as file:
        file.write("packages: [hospital_models]\n")
    assert main(check) == 0
    settings = Path(app, "pyproject.toml").read_text().replace('name = "fedvls"', 'name = "centralised"')
    Path(app, "pyproject.toml").write_text(settings)
    assert main(check) == 2
    assert "error: method 'centralised' " in capsys.readouterr().err


def test_the_check_refuses_columns_that_the_site_scales_itself_if_samples_are_private(
    site: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    numbers = np.random.default_rng(0)
    for name in ("agreed", "own"):
        np.savez(site / f"{name}.npz", x=numbers.normal(size=(60, 4)), y=np.arange(60) % 2)
    (site / "site.yaml").write_text("name: north\ndata: own.npz\n")
    data = str(site / "agreed.npz")
    settings = ["privacy=example", "attempts=1", "share_loss=false", "site_metrics=none", "evaluation=server"]
    federation = [part for value in (*settings, f"test_data={data}") for part in ("--federation", value)]
    noise = ["--set", "example_clip=1", "--set", "example_noise=4", "--method", "fedavg"]
    app = _app(site, "--data", data, *noise, *federation)
    assert main(["federate", "site", str(site / "site.yaml"), "--check", app]) == 2
    assert "error: the columns of this site's table are scaled with the site's own means" in capsys.readouterr().err


def test_data_that_keep_the_contract_are_accepted(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    app = _app(site, "--data", str(site / "digits.npz"))
    capsys.readouterr()
    assert _connect(site, "--check", app) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert f"checked {site / 'site.yaml'} and its data against {site / 'app'}" in shown.err
    assert "error: localhost:1 cannot be reached" in shown.err


def test_the_log_of_a_service_quotes_nothing_from_the_data(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Counts of labels, gaps, means and a value that is rare are shown only to those who check interactively."""
    rows = [f"{30 + number % 40},{'ab'[number % 2]},{('flu', 'cold')[number % 3 == 0]}" for number in range(60)]
    (site / "all.csv").write_text("\n".join(["age,ward,illness", *rows]) + "\n")
    own = [row.replace("3", "93", 1) for row in rows[:40]] + [",the mayor's,flu"]
    (site / "own.csv").write_text("\n".join(["age,ward,illness", *own]) + "\n")
    (site / "site.yaml").write_text("name: north\ndata: {name: own.csv, label: illness}\n")
    app = _app(site, "--data", str(site / "all.csv"), "--set", "data.label=illness")
    assert main(["federate", "site", str(site / "site.yaml"), "--check", app]) == 0
    shown = capsys.readouterr()
    assert re.search(r"north: \d+ training samples \(cold \d+, flu \d+\)", shown.out)
    assert "gaps in age (1)" in shown.err
    assert "(the mayor's); they become 0" in shown.err
    assert "column 'age' has mean" in shown.err
    assert _connect(site, "--check", app, "--log-format", "json") == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    entries = list(map(json.loads, shown.err.splitlines()))
    messages = {entry["message"]: entry["level"] for entry in entries}
    mentioned = "`fedskew federate site SITE.yaml --check APP` shows 3 warnings about this site's data"
    assert messages[mentioned] == "warning"
    assert messages[f"checked {site / 'site.yaml'} and its data against {app}"] == "info"
    _, contract, config = read_app(app)
    log: list[str] = []
    hello = {"kind": "hello", "terms": {"contract": contract.to_json(), "config": config.to_mapping()}}
    Site(load_site(site / "site.yaml"), log.append).answer(hello, b"")
    assert log == [f"warning: {mentioned}"], "the worker's lines are in the log, too"
    for quoted in ("flu", "cold", "mayor", "age", "samples"):
        assert not any(re.search(rf"\b{quoted}\b", message) for message in messages), quoted
