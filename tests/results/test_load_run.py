"""Runs read from disk are the runs that ended there."""

from __future__ import annotations

import errno
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import fedskew as fs
from fedskew.errors import UserError
from fedskew.experiment.result import describe_participation
from fedskew.results import Result, compare_runs, comparisons, load_run, load_runs, load_runs_and_races
from fedskew.results.checks import require_comparable, setting_differences


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Result]:
    folder = tmp_path_factory.mktemp("runs")
    feds = [fs.federation("digits", fs.Dirichlet(clients=4, beta=0.5), seed) for seed in (0, 1)]
    return [
        fs.run(fed, method, "dnn", rounds=2, local_epochs=1, out=folder / f"{method}-{fed.seed}")
        for method in ("fedavg", "pkd")
        for fed in feds
    ]


def test_the_participation_of_one_site_is_singular() -> None:
    assert describe_participation({"north": 2}, 2) == "the only site in every round"
    assert describe_participation({"north": 2, "south": 1}, 2) == "1 of 2 sites in every round, south in 1 round"


def test_a_run_on_disk_is_the_run_that_ended(runs: list[Result]) -> None:
    for ended in runs:
        assert ended.folder is not None
        read = load_run(ended.folder)
        assert read.summary() == ended.summary()
        assert read.history == ended.history
        assert (read.classes, read.engine, read.folder, read.finished) == (
            ended.classes, ended.engine, ended.folder, True,
        )  # fmt: skip
        assert (read.label_counts == ended.label_counts).all()
        assert read.model.state_dict().keys() == ended.model.state_dict().keys()
        assert all(torch.equal(t, ended.model.state_dict()[name]) for name, t in read.model.state_dict().items())


def test_the_model_is_read_when_it_is_first_used(runs: list[Result], tmp_path: Path) -> None:
    folder = shutil.copytree(str(runs[0].folder), tmp_path / "run")
    (folder / "model.safetensors").unlink()
    run = load_run(folder)
    assert run.accuracy == runs[0].accuracy
    with pytest.raises(UserError, match=r"has no model\.safetensors"):
        _ = run.model


def test_an_unfinished_run_is_read_as_far_as_it_got(runs: list[Result], tmp_path: Path) -> None:
    folder = shutil.copytree(str(runs[0].folder), tmp_path / "run")
    (folder / "summary.json").unlink()
    lines = (folder / "rounds.jsonl").read_text().splitlines(keepends=True)
    (folder / "rounds.jsonl").write_text("".join(lines[:2]))
    run = load_run(folder)
    assert (run.finished, run.rounds, run.last_round) == (False, 1, 1)
    assert "unfinished" in repr(run)
    (folder / "rounds.jsonl").write_text("")
    with pytest.raises(UserError, match="no round of run has been evaluated yet"):
        _ = load_run(folder).accuracy


def test_a_run_without_a_row_can_be_shown_beside_others(runs: list[Result], tmp_path: Path) -> None:
    (tmp_path / "begun").mkdir()
    shutil.copy(runs[2].folder / "config.yaml", tmp_path / "begun")  # type: ignore[operator]
    begun = load_run(tmp_path / "begun")
    compared = compare_runs([runs[0], begun]).to_json()["methods"]
    shown = [(m["method"], m["seeds"], len(m["class_accuracy"])) for m in compared]
    assert shown == [("fedavg", [0], 10), ("pkd", [], 0)]
    pytest.importorskip("pandas")
    assert begun.to_frame().empty
    assert list(begun.to_frame().columns) == list(runs[0].to_frame().columns)


def test_a_comparison_is_the_same_just_run_or_read(runs: list[Result]) -> None:
    ended, read = compare_runs(runs), compare_runs(load_runs([str(runs[0].folder.parent)]).runs)  # type: ignore[union-attr]
    assert ended.to_json() == read.to_json()
    assert repr(ended) == repr(read)
    assert [method.label for method in ended.methods] == ["fedavg", "pkd"]


def test_means_over_seeds_are_those_of_the_runs(runs: list[Result]) -> None:
    fedavg, _ = compare_runs(runs).methods
    accuracies = [run.accuracy for run in runs[:2]]
    assert fedavg.accuracy.mean == pytest.approx(sum(accuracies) / 2)
    assert fedavg.by_seed(lambda run: run.accuracy) == dict(enumerate(accuracies))


def test_frames_have_a_line_per_round_and_per_run(runs: list[Result]) -> None:
    pytest.importorskip("pandas")
    frame = runs[0].to_frame()
    assert list(frame.index) == [0, 1, 2]
    assert frame.accuracy.iloc[-1] == runs[0].accuracy
    assert list(frame.loss[1:]) == [row.loss for row in runs[0].history[1:]]
    compared = compare_runs(runs).to_frame()
    assert list(compared.method) == ["fedavg", "fedavg", "pkd", "pkd"]
    assert list(compared.seed) == [0, 1, 0, 1]
    assert list(compared.accuracy) == [run.accuracy for run in runs]


def test_notebooks_show_the_numbers_and_escape_names(runs: list[Result]) -> None:
    odd = replace(runs[0], about={"federation": {"classes": [f"<b>{c}" for c in range(10)]}})
    assert "&lt;b&gt;3" in odd._repr_html_()
    assert "<b>" not in odd._repr_html_()
    assert f"{100 * odd.accuracy:.2f} %" in odd._repr_html_()
    assert "pkd" in compare_runs(runs)._repr_html_()


def test_a_folder_without_permission_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> bool:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    (tmp_path / "private").mkdir()
    monkeypatch.setattr(Path, "is_file", refuse)
    with pytest.raises(UserError, match=r"cannot read .*config\.yaml: Permission denied"):
        load_runs([tmp_path])
    with pytest.raises(UserError, match=r"cannot read .*race\.json: Permission denied"):
        load_runs_and_races([tmp_path])


def test_runs_that_do_not_compare_are_refused(runs: list[Result]) -> None:
    with pytest.raises(UserError, match="is not finished; expected finished runs"):
        require_comparable([*runs[1:], replace(runs[0], finished=False)])
    with pytest.raises(UserError, match=r"method 'pkd' has seeds \[0\], but 'fedavg' has \[0, 1\]"):
        require_comparable(runs[:3])
    with pytest.raises(UserError, match="method 'fedavg' has two runs with seed 0"):
        require_comparable([*runs, replace(runs[0], engine="plain")])


def test_settings_are_kept_apart_and_their_differences_named(runs: list[Result]) -> None:
    other = [replace(run, config=replace(run.config, lr=0.5)) for run in runs]
    settings = comparisons([*other, *runs])
    assert [setting.label for setting in settings] == ["lr=0.05", "lr=0.5"]
    assert [len(setting.runs) for setting in settings] == [4, 4]
    assert setting_differences([runs[0], other[1]]) == ["besides their methods, the runs differ in lr"]
