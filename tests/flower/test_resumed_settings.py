"""A federation's run goes on under the settings that it began with, and ε counts what a crash undid."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from in_process import Case, Meddle, case, run_config_of, small_data

from fedskew.cli import main
from fedskew.data import Dirichlet, Federation, federation
from fedskew.errors import UserError
from fedskew.experiment.config import Config, with_values
from fedskew.flower.contract import Contract
from fedskew.flower.run_record import NAME
from fedskew.flower.server_app import run_federation
from fedskew.flower.wire import Facts
from fedskew.gaussian_privacy import epsilon

CENTRAL: dict[str, Any] = {"privacy": "central", "noise": 2.0, "minimum": 3}
LOCAL: dict[str, Any] = {"privacy": "local", "noise": 2.0, "share_loss": False, "attempts": 1}


class Crash(Exception):
    """The server's process ends."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def split(data: Path) -> Federation:
    return federation(str(data), Dirichlet(beta=0.5, clients=3), seed=0)


def spent(releases: int) -> float:
    return epsilon(releases, 2.0, 1e-5, sensitivity=2.0)


def config() -> Config:
    values = {"method": "fedavg", "rounds": 2, "local_epochs": 1, "device": "cpu", "batch_size": 20}
    return with_values(Config(), {**values, "average": "uniform", "partition.clients": 3})


def crashing(round: int) -> Meddle:
    """While the sites train that round, counted from 0."""

    def meddle(site: str, asked: Facts, facts: Facts, answer: bytes) -> tuple[Facts, bytes]:
        if site == "site-1" and asked["kind"] == "train" and asked["key"]["round"] == round:
            raise Crash
        return facts, answer

    return meddle


def crashed(folder: Path, split: Federation, data: Path, round: int, **own: Any) -> None:
    here = case(folder, split, data, config(), crashing(round), **own)
    with pytest.raises(Crash):
        run_federation(here.grid, here.context)


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({"privacy": "none"}, 'federation.privacy = "central", not "none"'),
        ({"noise": 0.5}, "federation.noise = 2.0, not 0.5"),
        ({"clip": 9.0}, "federation.clip = 1.0, not 9.0"),
        ({"share_loss": False}, "federation.share_loss = true, not false"),
        ({"site_metrics": "class"}, 'federation.site_metrics = "none", not "class"'),
    ],
)
def test_other_settings_are_refused_with_the_difference(
    changed: dict[str, object], line: str, data: Path, split: Federation, tmp_path: Path
) -> None:
    crashed(tmp_path, split, data, 1, **CENTRAL)
    other = case(tmp_path, split, data, config(), **{**CENTRAL, **changed})
    with pytest.raises(UserError, match=line.replace(".", r"\.")):
        run_federation(other.grid, other.context)
    assert other.grid.sent == []


def test_another_contract_or_other_sites_are_refused(data: Path, split: Federation, tmp_path: Path) -> None:
    crashed(tmp_path, split, data, 1)
    again = case(tmp_path, split, data, config())
    contract = Contract.from_dataset(split.dataset)
    shifted = replace(contract, mean=(0.25,))
    with pytest.raises(UserError, match=r"contract\.mean = \[.*\], not \[0\.25\]"):
        _run(again, contract=shifted)
    with pytest.raises(UserError, match=r'federation\.sites = \["site-0", .*\], not \["site-2", '):
        _run(again, sites=("site-2", "site-0", "site-1"))


def _run(here: Case, contract: Contract | None = None, sites: tuple[str, ...] | None = None) -> None:
    settings = replace(here.settings, sites=sites or here.settings.sites)
    known = run_config_of(here.settings, contract, here.config) if contract else dict(here.context.run_config)
    here.context.run_config = known | {"federation.sites": ", ".join(settings.sites)}
    run_federation(here.grid, here.context)


def test_patience_may_change(data: Path, split: Federation, tmp_path: Path) -> None:
    crashed(tmp_path, split, data, 1, **CENTRAL)
    more = {**CENTRAL, "minimum": 2, "begin_with": 3, "round_timeout": 7.0, "attempts": 2}
    again = case(tmp_path, split, data, config(), **more)
    assert len(run_federation(again.grid, again.context).history) == 3


def test_a_finished_run_is_not_taken_for_one_with_privacy(data: Path, split: Federation, tmp_path: Path) -> None:
    plain = case(tmp_path, split, data, config())
    run_federation(plain.grid, plain.context)
    private = case(tmp_path, split, data, config(), **CENTRAL)
    with pytest.raises(UserError, match='not "central"'):
        run_federation(private.grid, private.context)


def test_rounds_of_unknown_settings_are_not_gone_on_with(data: Path, split: Federation, tmp_path: Path) -> None:
    crashed(tmp_path, split, data, 1)
    (tmp_path / "run" / NAME).unlink()
    again = case(tmp_path, split, data, config())
    with pytest.raises(UserError, match="the settings they were trained with are unknown"):
        run_federation(again.grid, again.context)
    (tmp_path / "run" / NAME).write_text("{")
    with pytest.raises(UserError, match="is damaged"):
        run_federation(again.grid, again.context)


def test_a_central_release_that_a_crash_undid_is_counted(data: Path, split: Federation, tmp_path: Path) -> None:
    """The first round's noisy model is on its way to the sites, with the second round's work, when the server dies."""
    own: dict[str, Any] = {**CENTRAL, "evaluation": "sites", "site_metrics": "class", "test_data": None}
    crashed(tmp_path, split, data, 1, **own)
    again = case(tmp_path, split, data, config(), **own)
    history = run_federation(again.grid, again.context).history
    assert [row.privacy["epsilon"] for row in history[1:]] == [spent(2), spent(3)]


def test_a_central_round_that_was_never_released_is_not(data: Path, split: Federation, tmp_path: Path) -> None:
    crashed(tmp_path, split, data, 0, **CENTRAL)
    again = case(tmp_path, split, data, config(), **CENTRAL)
    history = run_federation(again.grid, again.context).history
    assert [row.privacy["epsilon"] for row in history[1:]] == [spent(1), spent(2)]


def test_local_updates_that_a_crash_lost_are_counted(data: Path, split: Federation, tmp_path: Path) -> None:
    crashed(tmp_path, split, data, 0, **LOCAL)
    again = case(tmp_path, split, data, config(), **LOCAL)
    history = run_federation(again.grid, again.context).history
    assert [row.privacy["epsilon"] for row in history[1:]] == [spent(2), spent(3)]


def test_its_configuration_says_what_it_is(
    data: Path, split: Federation, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    here = case(tmp_path, split, data, config())
    run_federation(here.grid, here.context)
    file = tmp_path / "run" / "config.yaml"
    text = file.read_text(encoding="utf-8")
    assert text.startswith("# To repeat this run: flwr run, with the federation's app")
    assert "digits" not in text
    assert main(["run", "-c", str(file)]) == 2
    assert "a federation across machines, so the data are at its sites" in capsys.readouterr().err
