"""Report and live page at every moment of a run, a comparison and a race: no row yet, a row half written, interrupted.

Each moment is a copy of real files, cut where a run may have got to.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from method_cases import slow

import fedskew as fs
from fedskew.choose.trials import RaceWatcher
from fedskew.errors import UserError
from fedskew.live.state import LiveState
from fedskew.report.document import document
from fedskew.report.figures import heat_maps
from fedskew.report.figures.catalogue import FIGURES
from fedskew.report.page.render import charts, page
from fedskew.results import compare_runs, comparisons, load_run, load_runs_and_races
from fedskew.results.race import RACE, RaceRecord

WRITTEN_LAST = ("summary.json", "model.safetensors")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Runs of FedAvg, evaluated in every other round, and of PKD, whose stages train other models."""
    place = tmp_path_factory.mktemp("runs")
    tested = {"eval_every": 2, "eval_local": True, "client_test": 0.2}
    short: dict[str, Any] = {"local_epochs": 1, "device": "cpu", **tested}
    found = {}
    for seed in (0, 1):
        federation = fs.federation("synthetic", fs.Dirichlet(clients=3, beta=0.3), seed=seed, samples=300)
        for method, rounds in (("fedavg", 3), ("pkd", 4)):
            found[f"{method}-{seed}"] = place / f"{method}-{seed}"
            fs.run(federation, method, rounds=rounds, out=found[f"{method}-{seed}"], **short)
    return found


def cut(whole: Path, folder: Path, edges: bool = True) -> Iterator[str]:
    """Bring `folder` to every moment of the run in `whole`, in order, and name each.

    Without `edges`, no row is cut after its first byte or before its last.
    """
    folder.mkdir(parents=True)
    shutil.copy(whole / "config.yaml", folder)
    yield "only config.yaml"
    shutil.copy(whole / "about.json", folder)
    yield "no rounds.jsonl"
    written = b""
    for line in (whole / "rounds.jsonl").read_bytes().splitlines(keepends=True):
        for part in (1, len(line) // 2, len(line) - 1, len(line)) if edges else (len(line) // 2, len(line)):
            (folder / "rounds.jsonl").write_bytes(written + line[:part])
            yield f"{len(written) + part} bytes of rounds.jsonl"
        written += line
    (folder / "about.json").unlink()
    yield "no about.json and no summary.json"
    shutil.copy(whole / "about.json", folder)
    shutil.copy(whole / "summary.json", folder)
    yield "no model.safetensors"
    (folder / "rounds.jsonl").unlink()
    yield "finished, but no rounds.jsonl"
    shutil.rmtree(folder)
    shutil.copytree(whole, folder)
    yield "finished"


def show(places: list[Path]) -> None:
    """Build everything that shows these folders."""
    content = document(load_runs_and_races(places), with_features=False)
    assert page(content)
    for chart in charts(content)["charts"].values():
        assert chart["data"] is not None
    live = LiveState(places)
    assert live.current(0)["body"]
    assert live.current(0, ended=True)["status"]
    assert live.page()


def show_objects(folders: list[Path]) -> None:
    """Show the objects that Python users have, also those that need an evaluated round."""
    loaded = [load_run(folder) for folder in folders]
    compared = compare_runs(loaded)
    for shown in (*loaded, compared):
        assert repr(shown)
        assert shown._repr_html_()
        shown.to_frame()
    compared.to_json()
    _expect_value_or_one_line(compared.table)
    for run in loaded:
        for value in (lambda run=run: run.curve, run.summary, lambda run=run: run.accuracy):
            _expect_value_or_one_line(value)


def _expect_value_or_one_line(value: Callable[[], object]) -> None:
    try:
        value()
    except UserError as error:
        if "has been evaluated yet" not in str(error):
            raise


@pytest.mark.parametrize(("name", "edges"), [("fedavg-0", True), ("pkd-0", False), *slow(("pkd-0", True))])
def test_a_run(name: str, edges: bool, runs: dict[str, Path], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    for moment in cut(runs[name], folder, edges):
        try:
            show([folder])
            show_objects([folder])
        except Exception as error:
            raise AssertionError(moment) from error


@pytest.mark.parametrize("number_of_runs", [2, *slow(3)])
def test_a_comparison(number_of_runs: int, runs: dict[str, Path], tmp_path: Path) -> None:
    """Its runs follow one another: the earlier ones are finished, or were interrupted with them."""
    place = tmp_path / "runs"
    for number, name in enumerate(list(runs)[:number_of_runs]):
        for moment in cut(runs[name], place / name, edges=False):
            try:
                show([place])
                show_objects([place / earlier for earlier in list(runs)[: number + 1]])
            except Exception as error:
                raise AssertionError(f"{name}: {moment}") from error


def test_a_race(tmp_path: Path) -> None:
    """Every version of race.json that the race writes, and files cut by a full disk or a copy."""

    class Snapshots(RaceWatcher):
        def __init__(self) -> None:
            self.records: list[bytes] = []

        def look(self, *_: object) -> None:
            path = tmp_path / "race" / RACE
            if path.is_file() and (found := path.read_bytes()) not in self.records:
                self.records.append(found)

        on_round = on_trial = on_standings = look

        def on_trials(self, heading: str, trials: object) -> None:
            self.look()

    watcher = Snapshots()
    federation = fs.federation("synthetic", fs.Dirichlet(clients=4, beta=0.3), seed=0, samples=300)
    options: dict[str, Any] = {"rounds": 3, "local_epochs": 1, "workers": 1, "device": "cpu"}
    fs.choose(federation, ["fedprox"], "40r", out=tmp_path / "race", watcher=watcher, **options)
    watcher.look()
    assert len(watcher.records) >= 4
    copy = tmp_path / "copy"
    copy.mkdir()
    assert LiveState([copy]).current(0)["status"] == "waiting"
    for record in watcher.records:
        (copy / RACE).write_bytes(record)
        show([copy])
    assert LiveState([copy]).current(0, ended=True)["status"] == "finished"
    (copy / RACE).write_bytes(watcher.records[0])
    assert LiveState([copy]).current(0, ended=True)["status"] == "interrupted, race: 0 rungs done"
    (copy / RACE).write_bytes(watcher.records[-1][:-40])
    assert str(copy / RACE) in LiveState([copy]).current(0)["body"]


def test_the_live_page_follows_a_race_beside_a_run(runs: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(runs["fedavg-0"], tmp_path / "run")
    live = LiveState([tmp_path / "run", tmp_path / "race"])
    first = live.current(0)
    assert first["status"] == "finished"
    (tmp_path / "race").mkdir()
    record = RaceRecord(fs.Config().to_mapping(), ("fedavg",), "accuracy", "5m")
    (tmp_path / "race" / RACE).write_text(json.dumps(record.to_json()))
    second = live.current(first["version"])
    assert second["version"] == first["version"] + 1
    assert "The race is not finished" in second["body"]


def test_figures_of_papers_are_drawn_or_refused_in_one_line(runs: dict[str, Path], tmp_path: Path) -> None:
    needs_model = (heat_maps.embeddings, heat_maps.model_internals)
    for moment in cut(runs["pkd-0"], tmp_path / "run"):
        found = comparisons(load_runs_and_races([tmp_path / "run"]).runs)
        for entry in FIGURES.values():
            if entry.draw in needs_model and moment == "finished":
                continue  # they are drawn in the tests of figures, and take seconds
            try:
                figure = entry.draw(found)
            except UserError:
                continue
            except Exception as error:
                raise AssertionError(f"{entry.name}: {moment}") from error
            assert all(chart.table().columns for chart in figure.charts)
