"""Sites with tables of their own: one encoding for all, from the contract or from a file, and no row leaves a site."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from flwr.app import Context, RecordDict
from in_process import DirectGrid, run_config_of

import fedskew as fs
from fedskew.cli import main
from fedskew.experiment.config import Config, with_values
from fedskew.experiment.preparation import prepare
from fedskew.experiment.run import run_prepared
from fedskew.flower.contract import Contract
from fedskew.flower.planning import make_settings, read_app, resolve_config
from fedskew.flower.server_app import run_federation
from fedskew.flower.site import Site
from fedskew.flower.site_config import DataUnreadable, SiteConfig, load_site

RANDOM = np.random.default_rng(4)
NAMES = ["east", "north"]


def patients(rows: int) -> pd.DataFrame:
    y = RANDOM.integers(0, 3, rows)
    lactate = (y + RANDOM.normal(0, 0.4, rows)).round(2)
    return pd.DataFrame(
        {
            "age": (40 + 10 * y + RANDOM.normal(0, 6, rows)).round(1),
            "lactate": np.where(RANDOM.random(rows) < 0.15, np.nan, lactate),
            "ward": np.array(["a", "b", "icu"])[np.minimum(y + RANDOM.integers(0, 2, rows), 2)],
            "hospital": np.array(NAMES)[RANDOM.integers(0, 2, rows)],
            "ill": np.array(["no", "yes", "dead"])[y],
        }
    )


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    """All patients in one folder, and those of each hospital in another, in the hospital's own format."""
    train, test = patients(160), patients(60)
    (tmp_path / "whole").mkdir()
    train.to_csv(tmp_path / "whole" / "train.csv", index=False)
    test.to_csv(tmp_path / "whole" / "test.csv", index=False)
    for name in NAMES:
        (tmp_path / name / "data").mkdir(parents=True)
        for part, table in (("train", train), ("test", test)):
            own = table[table["hospital"] == name].drop(columns="hospital").iloc[:, ::-1]
            if name == "north":
                own = own.rename(columns={"age": "Alter"}).fillna({"lactate": -999})
            own.to_csv(tmp_path / name / "data" / f"{part}.csv", index=False, sep=";" if name == "north" else ",")
    return tmp_path / "whole"


OPTIONS: dict[str, dict[str, Any]] = {
    "east": {"label": "ill"},
    "north": {"label": "ill", "rename": {"Alter": "age"}, "missing": [-999], "delimiter": ";"},
}


def site(folder: Path, name: str) -> SiteConfig:
    return SiteConfig(folder / name, name, "data", OPTIONS[name], device="cpu", metrics="class")


def test_sites_with_their_own_tables_come_to_the_simulated_model(whole: Path, tmp_path: Path) -> None:
    fed = fs.federation(str(whole), fs.Column("hospital"), label="ill")
    values = {"method": "fedavg", "rounds": 2, "local_epochs": 1, "engine": "plain", "device": "cpu", "batch_size": 20}
    config = with_values(Config(), values)
    contract = Contract.from_dataset(fed.dataset)
    own = {"folder": str(tmp_path / "run"), "minimum": 2, "site_metrics": "class"}
    settings = make_settings(NAMES, own)
    agreed = resolve_config(config, contract, NAMES)
    context = Context(1, 0, {}, RecordDict(), run_config_of(settings, contract, agreed))
    grid = DirectGrid({name: Site(site(tmp_path, name)) for name in NAMES})
    apart = run_federation(grid, context)
    together = run_prepared(prepare(config, fed))
    for name, tensor in together.model.state_dict().items():
        torch.testing.assert_close(apart.model.state_dict()[name], tensor, rtol=0, atol=1e-6)
    assert apart.evaluation == together.evaluation
    assert apart.inputs["encoding"] == together.inputs["encoding"]
    assert not any(b"icu" in sent.payload or "icu" in str(sent.facts) for sent in grid.sent)


def test_a_site_with_one_class_takes_the_classes_of_the_contract(whole: Path, tmp_path: Path) -> None:
    contract = Contract.from_dataset(fs.load(whole, label="ill", site="hospital"))
    for part in ("train", "test"):
        path = tmp_path / "east" / "data" / f"{part}.csv"
        table = pd.read_csv(path)
        table[table["ill"] == "yes"].to_csv(path, index=False)
    with pytest.raises(fs.UserError, match="has one class"):
        site(tmp_path, "east").federation()
    federation = site(tmp_path, "east").federation(contract)
    assert federation.dataset.classes == contract.classes == ("dead", "no", "yes")
    assert set(federation.dataset.train.y.tolist()) == {2}
    assert contract.admit(federation.dataset).classes == contract.classes


@pytest.mark.parametrize(("label", "number"), [(3, 1), (7, 0)])
def test_numbers_as_labels_are_matched_by_name_not_by_position(tmp_path: Path, label: int, number: int) -> None:
    contract = Contract("table", ("7", "3"), (1,), (0.0,), (1.0,), columns=("age",))
    pd.DataFrame({"age": np.linspace(0, 1, 10), "y": label}).to_csv(tmp_path / "one.csv", index=False)
    dataset = SiteConfig(tmp_path, "east", "one.csv").federation(contract).dataset
    assert set(contract.admit(dataset).train.y.tolist()) == {number}


def test_a_label_that_no_site_has_is_refused_by_the_contract(tmp_path: Path) -> None:
    contract = Contract("table", ("well", "ill"), (1,), (0.0,), (1.0,), columns=("age",))
    pd.DataFrame({"age": np.linspace(0, 1, 10), "y": "dead"}).to_csv(tmp_path / "one.csv", index=False)
    dataset = SiteConfig(tmp_path, "east", "one.csv").federation(contract).dataset
    with pytest.raises(fs.UserError, match="classes 'dead' are not among 'well', 'ill'"):
        contract.admit(dataset)


def test_gaps_at_a_site_are_filled_with_the_contract_s_mean(tmp_path: Path) -> None:
    contract = Contract("table", ("a", "b"), (2,), (5.0, 1.0), (2.0, 1.0), columns=("age", "pulse"))
    (tmp_path / "own.csv").write_text("age,pulse,y\n" + "7,,a\n,2,b\n" * 5)
    federation = SiteConfig(tmp_path, "east", "own.csv").federation(contract)
    assert set(map(tuple, federation.dataset.train.x.tolist())) == {(1.0, 0.0), (0.0, 1.0)}
    assert federation.dataset.notes[0].startswith("own.csv: gaps in age (5), pulse (5)")


def test_other_columns_are_named_without_the_site_s_paths(whole: Path, tmp_path: Path) -> None:
    contract = Contract.from_dataset(fs.load(whole, label="ill", site="hospital"))
    wrong = replace(site(tmp_path, "north"), data_params={"label": "ill"})
    with pytest.raises(fs.UserError) as refused:
        wrong.federation(contract)
    assert "columns 'Alter' are not among 'age', 'lactate', 'ward'; columns 'age' are missing" in str(refused.value)
    assert str(tmp_path) not in str(refused.value)
    (tmp_path / "north" / "data" / "train.csv").write_text(
        "Alter;lactate;ward;ill\nold;1;a;no\n50;1;a;yes\n60;1;a;no\n"
    )
    with pytest.raises(DataUnreadable, match="'old' in column 'age', line 2"):
        site(tmp_path, "north").federation(contract)


ENCODING = """
columns:
- {name: age, mean: 50, std: 10}
- {name: lactate, mean: 1, std: 1, marks_gaps: true}
- {name: ward, categories: [a, b, icu]}
"""


def test_a_contract_from_a_file_needs_no_data(whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "encoding.yaml").write_text(ENCODING)
    init = ["federate", "init", str(tmp_path / "app"), "--sites", "east,north", "--method", "fedavg"]
    assert main([*init, "--encoding", str(tmp_path / "encoding.yaml")]) == 2
    assert "expected --classes with exactly one of --shape and --encoding" in capsys.readouterr().err
    assert main([*init, "--classes", "no,yes,dead", "--encoding", str(tmp_path / "encoding.yaml")]) == 0
    contract = read_app(tmp_path / "app")[1]
    assert contract.columns == ("age", "lactate", "lactate missing", "ward=a", "ward=b", "ward=icu")
    (tmp_path / "east" / "site.yaml").write_text("name: east\ndata: {name: data, label: ill}\n")
    assert main(["federate", "site", str(tmp_path / "east" / "site.yaml"), "--check", str(tmp_path / "app")]) == 0
    dataset = contract.admit(load_site(tmp_path / "east" / "site.yaml").federation(contract).dataset)
    raw = pd.read_csv(tmp_path / "east" / "data" / "train.csv")
    np.testing.assert_allclose(dataset.train.x[:, 0], (raw["age"] - 50) / 10, rtol=1e-6)
    np.testing.assert_array_equal(dataset.train.x[:, 2], raw["lactate"].isna())
    np.testing.assert_array_equal(dataset.train.x[:, 5], raw["ward"] == "icu")
