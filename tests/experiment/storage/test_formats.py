"""Files say which version of their format they have. Folders of fedskew 0.1.0 are read; other formats are refused.

Two folders were written by fedskew 0.1.0, on digits with the model of tests/support/linear_model.py: `run-0.1/` by
SCAFFOLD, whose clients keep a state, and `run-0.1-stages/` by PKD, which trains several models in stages. Never write
them anew with a later version.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import fedskew as fs
from fedskew.errors import UserError
from fedskew.experiment.config import load_yaml
from fedskew.experiment.storage import checkpoints
from fedskew.experiment.storage.run_folder import FORMAT, RunFolder
from fedskew.lab.sweep.records import Record
from fedskew.results.race import RaceRecord

STORED = Path(__file__).parent / "run-0.1"
STAGES = Path(__file__).parent / "run-0.1-stages"


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A copy of the stored folder."""
    return shutil.copytree(STORED, tmp_path / "run")


def interrupt(folder: Path) -> None:
    """Leave what a kill in the last round leaves."""
    last = max(folder.glob("checkpoint/round-*.safetensors"))
    for path in (folder / "summary.json", folder / "model.safetensors", last):
        path.unlink()
    lines = (folder / "rounds.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    (folder / "rounds.jsonl").write_text("".join(lines[:-1]), encoding="utf-8")


@pytest.mark.parametrize(("stored", "rounds", "accuracy"), [(STORED, 4, 0.9136), (STAGES, 12, 0.9109)])
def test_a_finished_run_of_0_1_is_read_with_its_model(stored: Path, rounds: int, accuracy: float) -> None:
    result = fs.load_run(stored)
    assert result.finished
    assert [row.round for row in result.history] == list(range(rounds + 1))
    assert result.about["versions"]["fedskew"] == "0.1.0"
    summary = json.loads((stored / "summary.json").read_text(encoding="utf-8"))
    assert result.accuracy == summary["accuracy"] == pytest.approx(accuracy, abs=1e-4)
    weights = load_file(stored / "model.safetensors")
    assert any(torch.equal(p.detach().cpu(), w) for p in result.model.parameters() for w in weights.values())


@pytest.mark.parametrize(("stored", "clients"), [(STORED, 4), (STAGES, 3)])
def test_an_interrupted_run_of_0_1_resumes_and_ends_with_the_same_model(
    stored: Path, clients: int, tmp_path: Path
) -> None:
    old = shutil.copytree(stored, tmp_path / "run")
    interrupt(old)
    assert not fs.load_run(old).finished
    config = load_yaml(old / "config.yaml")
    federation = fs.federation("digits", fs.Dirichlet(beta=0.1, clients=clients), seed=0)
    result = fs.run(federation, config=config, out=old)
    assert [row.round for row in result.history] == [row.round for row in fs.load_run(stored).history]
    lines, before = ((folder / "rounds.jsonl").read_bytes().splitlines() for folder in (old, stored))
    assert lines[:-1] == before[:-1], "these rounds were not trained again"
    resumed, final = load_file(old / "model.safetensors"), load_file(stored / "model.safetensors")
    assert resumed.keys() == final.keys()
    for name, tensor in final.items():
        torch.testing.assert_close(resumed[name], tensor, rtol=0, atol=1e-5)


def test_a_new_folder_states_its_format(tmp_path: Path) -> None:
    federation = fs.federation("digits", fs.Dirichlet(beta=1.0, clients=2), seed=0)
    fs.run(federation, "fedavg", rounds=1, local_epochs=1, out=tmp_path / "new")
    about = json.loads((tmp_path / "new" / "about.json").read_text(encoding="utf-8"))
    assert about["format"] == FORMAT


def test_a_folder_of_a_newer_format_is_refused_by_name(old: Path) -> None:
    about = json.loads((old / "about.json").read_text(encoding="utf-8"))
    (old / "about.json").write_text(json.dumps(about | {"format": FORMAT + 1}), encoding="utf-8")
    expected = rf"run has format {FORMAT + 1}, and this version of fedskew reads format {FORMAT}; upgrade fedskew"
    with pytest.raises(UserError, match=expected):
        fs.load_run(old)
    with pytest.raises(UserError, match=expected):
        RunFolder(old).open(load_yaml(old / "config.yaml"))


@pytest.mark.parametrize(
    ("reads", "way_out"), [(1, "upgrade fedskew"), (3, "use the version of fedskew that wrote it")]
)
def test_checkpoints_of_another_format_are_refused_and_nothing_is_lost(
    old: Path, monkeypatch: pytest.MonkeyPatch, reads: int, way_out: str
) -> None:
    interrupt(old)
    with RunFolder(old).open(load_yaml(old / "config.yaml")) as folder:
        rows = folder.rounds()
        monkeypatch.setattr(checkpoints, "_FORMAT", reads)
        expected = rf"has format 2, and this version of fedskew reads format {reads}; {way_out}, or delete \S+ to start"
        with pytest.raises(UserError, match=expected):
            folder.load_checkpoint()
        assert folder.rounds() == rows


def test_records_of_another_format_are_refused_by_name() -> None:
    for record in (Record, RaceRecord):
        with pytest.raises(
            UserError, match="has format 9, and this version of fedskew reads format 1; upgrade fedskew"
        ):
            record.from_json({"format": 9})
        with pytest.raises(UserError, match=r"^not (a|the) record of a r"):
            record.from_json([])
