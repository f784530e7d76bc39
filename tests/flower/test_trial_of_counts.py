"""A trial of named sites: a file of counts, or a column of the data, decides how many there are, and their names.

A user's own rule may also decide how many sites there are.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from fedskew.cli import federate, main
from fedskew.errors import UserError
from fedskew.experiment.config import Config, with_values
from fedskew.flower.planning import read_app
from fedskew.flower.site_config import load_site
from fedskew.flower.trial import plan_trial

COUNTS = "hospital,flu,cold\nRome,30,4\nOslo,5,60\n"


def counted(folder: Path, text: str, **data: object) -> Config:
    (folder / "sites.csv").write_text(text)
    values = {"partition": {"rule": "counts", "path": str(folder / "sites.csv")}, "rounds": 1}
    return with_values(Config(), {"data": {"name": "synthetic", **data}, **values})


def test_sites_of_a_trial_have_the_names_and_the_counts_of_the_file(tmp_path: Path) -> None:
    trial = plan_trial(tmp_path / "trial", counted(tmp_path, COUNTS, classes=["flu", "cold"]), {})
    assert list(trial.sites) == ["Rome", "Oslo"]
    held = load_site(trial.site_file("Oslo")).federation()
    assert held.label_counts.tolist() == [[5, 60]]
    assert yaml.safe_load(Path(trial.site_file("Oslo")).read_text())["name"] == "Oslo"


def test_names_that_no_folder_can_have_are_numbered(tmp_path: Path) -> None:
    config = counted(tmp_path, COUNTS.replace("Rome", "Rome north/2"), classes=["flu", "cold"])
    assert list(plan_trial(tmp_path / "trial", config, {}).sites) == ["site-1", "site-2"]


def test_data_with_other_classes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--data synthetic --set data\.classes=flu,cold"):
        plan_trial(tmp_path / "trial", counted(tmp_path, COUNTS), {})


def test_sites_of_a_trial_are_those_in_a_column_of_the_data(tmp_path: Path) -> None:
    rows = "".join(f"{i / 7:.2f},{'ab'[i % 2]},{('Rome', 'Oslo')[i % 3 > 0]},{i % 2}\n" for i in range(60))
    (tmp_path / "visits.csv").write_text("age,ward,hospital,y\n" + rows)
    config = with_values(Config(), {"data": str(tmp_path / "visits.csv"), "partition.column": "hospital", "rounds": 1})
    trial = plan_trial(tmp_path / "trial", config, {})
    assert list(trial.sites) == ["Oslo", "Rome"]
    held = load_site(trial.site_file("Rome")).federation(read_app(trial.app)[1])
    assert held.dataset.columns == ("age", "ward=a", "ward=b")
    assert held.sizes.tolist() == [int((held.dataset.train.site == 1).sum())]


HALVES = """
from dataclasses import dataclass
import numpy as np
import fedskew as fs

@dataclass(frozen=True)
class Halves(fs.Partition):
    def draw(self, labels, seed):
        return np.array_split(np.arange(len(labels)), 2)
"""


def test_a_rule_of_a_user_without_the_parameter_clients_sets_the_number_of_sites(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rule_of_halves.py").write_text(HALVES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(federate, "_start_trial", lambda *_: None)
    assert main(["federate", "up", "trial", "--partition", "rule_of_halves:Halves", "--json"]) == 0
    assert read_app("trial/app")[0].sites == ("site-1", "site-2")


@pytest.mark.parametrize(("flags", "sites"), [([], 3), (["-c", "c.yaml"], 2), (["-c", "c.yaml", "--sites", "4"], 4)])
def test_a_trial_has_the_configuration_s_number_of_sites_unless_a_flag_sets_it(
    flags: list[str], sites: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "c.yaml").write_text("partition: {rule: dirichlet, clients: 2}\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(federate, "_start_trial", lambda *_: None)
    assert main(["federate", "up", "trial", *flags, "--json"]) == 0
    assert read_app("trial/app")[0].sites == tuple(f"site-{i + 1}" for i in range(sites))


def test_the_configuration_of_a_real_federation_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.yaml").write_text("data: federation\npartition: {rule: sites, clients: 2}\n")
    monkeypatch.chdir(tmp_path)
    assert main(["federate", "up", "trial", "-c", "run.yaml"]) == 2
    assert "this configuration is for a federation across machines" in capsys.readouterr().err
