"""Different versions at server and sites are found before anything is trained, and named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from in_process import answer_as_workers, case, small_data

from fedskew import __version__
from fedskew.cli import main
from fedskew.data import Dirichlet, federation
from fedskew.experiment.config import Config, with_values
from fedskew.experiment.storage.run_folder import RunFolder
from fedskew.flower.server_app import main as server_main
from fedskew.flower.versions import installed_versions, version_problem, version_warnings

MAJOR, MINOR, PATCH = map(int, __version__.split(".")[:3])
OTHER_PATCH, OTHER_MINOR = f"{MAJOR}.{MINOR}.{PATCH + 1}", f"{MAJOR}.{MINOR + 1}.0"


def test_minor_versions_must_be_equal() -> None:
    assert version_problem("0.3.1", "0.3.0") is None
    assert version_problem("0.3.0rc1", "0.3.0") is None
    assert version_problem("0.4.0", "0.3.0") == "it has fedskew 0.4.0; expected 0.3, as here (0.3.0)"
    assert version_problem("1.3.0", "0.3.0") is not None
    assert version_problem(None, "0.3.0") == "it does not report its version of fedskew; expected 0.3, as here (0.3.0)"
    ours = {"fedskew": "0.3.0", "torch": "2.13.0+cpu", "flwr": "1.41.0"}
    assert version_warnings({**ours, "torch": "2.13.1+cu130"}, ours) == []
    assert version_warnings({"fedskew": "0.3.1", "torch": "2.12.0", "flwr": "1.41.0"}, ours) == [
        "fedskew 0.3.1, here 0.3.0",
        "torch 2.12.0, here 2.13.0+cpu",
    ]


@pytest.mark.parametrize(
    ("version", "line", "trains"),
    [
        (OTHER_PATCH, f"warning: site-1 has fedskew {OTHER_PATCH}, here {__version__}", True),
        (
            OTHER_MINOR,
            f"site-1 is not admitted: it has fedskew {OTHER_MINOR}; expected {MAJOR}.{MINOR}, as here",
            False,
        ),
        (None, "site-1 is not admitted: it does not report its version of fedskew", False),
        (["9"], "site-1 is not admitted: it does not report its version of fedskew", False),
    ],
)
def test_a_site_with_another_version_is_named_before_it_trains(
    version: Any, line: str, trains: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The other sites train. The site itself is told the reason with the next greeting."""
    data = small_data(tmp_path)
    split = federation(str(data), Dirichlet(beta=0.5, clients=3), seed=0)
    values = {"method": "fedavg", "rounds": 1, "local_epochs": 1, "device": "cpu", "partition.clients": 3}

    def report_version(name: str, asked: Any, facts: Any, payload: bytes) -> Any:
        if name == "site-1" and asked["kind"] == "hello" and "versions" in facts:
            facts["versions"] = {**facts["versions"], "fedskew": version} if version is not None else {}
        return facts, payload

    here = case(tmp_path, split, data, with_values(Config(), values), report_version, minimum=2)
    answer_as_workers(here, data)
    with caplog.at_level("INFO", logger="flwr"):
        server_main(here.grid, here.context)
    assert caplog.text.count(line) == 1
    assert any(sent.kind == "train" and sent.site == "site-1" for sent in here.grid.sent) == trains
    (row,) = [row for row in RunFolder(tmp_path / "run").rounds() if row.round]
    assert row.clients == ([0, 1, 2] if trains else [0, 2])
    known = [entry.facts["versions"] for entry in here.grid.sent if entry.kind == "hello" and entry.site == "site-0"]
    assert known == [installed_versions()]


def test_an_app_of_another_version_is_named_by_the_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    app, project = tmp_path / "app", tmp_path / "app" / "pyproject.toml"
    site = tmp_path / "site.yaml"
    site.write_text("name: a\ndata: digits\n")
    assert main(["federate", "init", str(app), "--sites", "a,b", "--data", "digits"]) == 0
    text = project.read_text()
    assert f'[tool.fedskew]\nversion = "{__version__}"' in text

    def check(version: str) -> tuple[int, str, str]:
        project.write_text(text.replace(f'version = "{__version__}"  #', version))
        capsys.readouterr()
        return main(["federate", "site", str(site), "--check", str(app)]), *capsys.readouterr()

    status, shown, notices = check(f'version = "{__version__}"  #')
    assert (status, "was written by" in notices) == (0, False)
    assert f"versions: fedskew {__version__}, torch " in shown
    status, _, notices = check(f'version = "{OTHER_PATCH}"  #')
    assert status == 0
    assert f"warning: {project} was written by fedskew {OTHER_PATCH}; this is {__version__}" in notices
    status, _, notices = check(f'version = "{OTHER_MINOR}"  #')
    assert status == 2
    assert notices.startswith(f"error: {project} was written by fedskew {OTHER_MINOR}, but this is {__version__}; ")
    assert main(["federate", "run", str(app)]) == 2
    assert f"was written by fedskew {OTHER_MINOR}" in capsys.readouterr().err
    status, _, notices = check("#")
    assert status == 0
    assert "does not say which version of fedskew wrote it" in notices
