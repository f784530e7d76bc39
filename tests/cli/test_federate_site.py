"""`fedskew federate site`: what it checks before it connects."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from in_process import small_data

from fedskew.cli import main
from fedskew.flower.credentials import make_credentials


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


def test_data_that_keep_the_contract_are_accepted(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _connect(site, "--check", _app(site, "--data", str(site / "digits.npz"))) == 2
    output = capsys.readouterr()
    assert re.search(r"north: 180 training samples", output.out)
    assert "error: localhost:1 cannot be reached" in output.err
