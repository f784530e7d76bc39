"""Splits by the sites that the data name, and by a user's own rule."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import yaml

import fedskew as fs
from fedskew.cli import main
from fedskew.data.partitions.rule import make_partition

RANDOM = np.random.default_rng(0)
Y = np.arange(120) % 3
HOSPITALS = np.array(["ward 10", "ward 2", "north"])[RANDOM.integers(0, 3, 120)]


def frame(**changes: object) -> pd.DataFrame:
    columns = {"age": RANDOM.normal(size=120) + Y, "sex": np.array(["f", "m"])[Y % 2], "hospital": HOSPITALS}
    return pd.DataFrame({**columns, "ill": np.array(["no", "yes", "dead"])[Y], **changes})


@pytest.fixture
def table(tmp_path: Path) -> Path:
    frame().to_csv(tmp_path / "patients.csv", index=False)
    return tmp_path / "patients.csv"


def test_every_value_of_the_column_is_a_client_and_the_column_is_no_input() -> None:
    table = frame()
    fed = fs.federation(table, fs.Column("hospital"), label="ill")
    assert fed.client_names == ("north", "ward 2", "ward 10")
    assert fed.dataset.columns == ("age", "sex=f", "sex=m")
    assert fed.unused == 0
    for name, rows in zip(fed.client_names, fed.indices, strict=True):
        assert {fed.dataset.sites[site] for site in fed.dataset.train.site[rows]} == {name}
    together = np.bincount(np.concatenate([fed.dataset.train.site, fed.dataset.test.site]))
    assert together.tolist() == [(table["hospital"] == name).sum() for name in fed.dataset.sites]
    assert fed.resplit(5).hash == fed.hash


def test_numbers_and_categories_name_sites_too() -> None:
    numbers = fs.federation(frame(hospital=Y * 5), fs.Column("hospital"), label="ill")
    assert numbers.client_names == ("0", "5", "10")
    categories = fs.federation(frame(hospital=pd.Categorical(HOSPITALS)), fs.Column("hospital"), label="ill")
    assert categories.client_names == ("north", "ward 2", "ward 10")


def test_names_that_differ_only_in_zeros_have_the_same_order_in_every_process() -> None:
    """The order of a set of texts differs between processes. With eight names, it is rarely the expected one."""
    wards = [f"ward {'0' * zeros}1" for zeros in range(8)]
    fed = fs.federation(frame(hospital=np.resize(wards, len(Y))), fs.Column("hospital"), label="ill")
    assert fed.client_names == tuple(sorted(wards))


def test_a_loaded_dataset_knows_its_sites() -> None:
    loaded = fs.load(frame(), label="ill", site="hospital")
    assert fs.federation(loaded, fs.Column()).hash == fs.federation(loaded, fs.Column("hospital")).hash
    other = fs.federation(loaded, fs.Dirichlet(clients=3, beta=1.0))
    assert other.dataset.columns == ("age", "sex=f", "sex=m")
    with pytest.raises(fs.UserError, match="the sites of dataframe come from 'hospital'; expected that column"):
        fs.federation(loaded, fs.Column("clinic"))
    with pytest.raises(fs.UserError, match="does not say which site a sample is from; load it with site='hospital'"):
        fs.federation(fs.load(frame(), label="ill"), fs.Column("hospital"))
    for rule in (fs.Column("hospital"), fs.Column()):
        with pytest.raises(
            fs.UserError, match="digits does not say which site a sample is from; expected data with sites,"
        ):
            fs.federation("digits", rule)


def test_a_site_with_only_test_samples_is_no_client() -> None:
    test = frame(hospital="far away")
    fed = fs.federation(frame(), fs.Column("hospital"), label="ill", test=test)
    assert fed.client_names == ("north", "ward 2", "ward 10")
    assert fed.notes == ("not clients, because they have no training samples: 'far away'",)


@pytest.mark.parametrize(
    ("changes", "column", "line"),
    [
        ({}, "hospitl", "unknown site column in DataFrame: 'hospitl'; did you mean 'hospital'?"),
        ({}, "ill", "site is 'ill', which is the label; expected another column"),
        ({"hospital": [None, *HOSPITALS[1:]]}, "hospital", "no value in the site column 'hospital', row 0"),
        ({}, "", "partition.column is ''; expected the name of a column"),
    ],
)
def test_mistakes_get_one_line(changes: dict[str, object], column: str, line: str) -> None:
    with pytest.raises(fs.UserError) as caught:
        fs.federation(frame(**changes), fs.Column(column), label="ill")
    assert line in str(caught.value)


def test_a_run_from_the_command_line_names_the_sites_and_repeats(
    table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = ["run", "--method", "fedavg", "--rounds", "1", "-q", "--device", "cpu"]
    split = ["--data", str(table), "--set", "data.label=ill", "--set", "partition.column=hospital"]
    assert main([*run, *split, "--out", str(tmp_path / "a")]) == 0
    recorded = yaml.safe_load((tmp_path / "a" / "config.yaml").read_text())
    assert recorded["partition"] == {"rule": "column", "clients": None, "seed": None, "column": "hospital"}
    about = json.loads((tmp_path / "a" / "about.json").read_text())["federation"]
    assert about["client_names"] == ["north", "ward 2", "ward 10"]
    assert main([*run, "-c", str(tmp_path / "a" / "config.yaml"), "--out", str(tmp_path / "b")]) == 0
    assert fs.load_run(tmp_path / "a").accuracy == fs.load_run(tmp_path / "b").accuracy
    capsys.readouterr()
    assert main(["partition", *split]) == 0
    assert "ward 10" in capsys.readouterr().out
    in_python = fs.federation(str(table), fs.Column("hospital"), label="ill")
    assert about["split"] == in_python.hash


OWN_RULE = '''
from dataclasses import dataclass

import numpy as np

import fedskew as fs


@dataclass(frozen=True)
class InOrder(fs.Partition):
    """The first client gets the first samples, and so on."""

    clients: int
    last: float = 1.0

    def draw(self, labels, seed):
        return np.array_split(np.arange(len(labels)), self.clients)


class Unfinished(fs.Partition):
    pass


class Undecorated(fs.Partition):
    clients: int

    def draw(self, labels, seed):
        return np.array_split(np.arange(len(labels)), self.clients)
'''


@pytest.fixture
def own_rule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "rules_of_test.py").write_text(OWN_RULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(__import__("sys").modules, "rules_of_test", raising=False)
    return "rules_of_test:InOrder"


def test_a_rule_of_ones_own_is_saved_in_the_configuration(own_rule: str, tmp_path: Path) -> None:
    rule = make_partition(own_rule, clients=4, last=2.0)
    assert rule.describe() == {"name": own_rule, "clients": 4, "last": 2.0}
    fed = fs.federation("digits", rule)
    assert fed.indices[0].tolist() == list(range(360))
    first = fs.run(fed, "fedavg", rounds=1, out=tmp_path / "a", device="cpu")
    recorded = yaml.safe_load((tmp_path / "a" / "config.yaml").read_text())["partition"]
    assert recorded == {"rule": own_rule, "clients": 4, "seed": None, "last": 2.0}
    assert main(["run", "-q", "-c", "a/config.yaml", "--out", "b"]) == 0
    assert fs.load_run(tmp_path / "b").accuracy == first.accuracy


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("rules_of_test:Missing", "partition 'rules_of_test:Missing' does not exist; expected a subclass of"),
        ("rules_of_test:np", "is a module; expected a subclass of fedskew.Partition"),
        ("rules_of_test:Unfinished", "is incomplete; expected a frozen dataclass with a method draw"),
        ("rules_of_test:Undecorated", "is incomplete; expected a frozen dataclass with a method draw"),
        ("no_such_module:Rule", "cannot import 'no_such_module'"),
        ("in-order", "unknown partition 'in-order'"),
    ],
)
def test_a_rule_that_is_none_gets_one_line(own_rule: str, name: str, line: str) -> None:
    with pytest.raises(fs.UserError) as caught:
        make_partition(name, clients=2)
    assert line in str(caught.value)
