"""The report of a race."""

from __future__ import annotations

from pathlib import Path

import plotly.graph_objects as go
import pytest
from made_up_runs import made_up

import fedskew as fs
from fedskew.errors import UserError
from fedskew.report.document import document
from fedskew.report.page.render import charts, page
from fedskew.results import LoadedRuns, load_runs, load_runs_and_races
from fedskew.results.race import RACE, RaceRecord, load_race, save_race


@pytest.fixture(scope="module")
def race(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "race"
    federation = fs.federation("synthetic", fs.Dirichlet(clients=4, beta=0.3), seed=0, samples=300)
    fs.choose(federation, ["fedprox", "fedlmd"], "30r", rounds=2, local_epochs=1, out=folder, workers=1, device="cpu")
    return folder


def test_the_report_of_a_race_has_its_answer_its_final_and_every_candidate(race: Path) -> None:
    loaded = load_runs_and_races([race])
    found = document(loaded)
    record = loaded.races[0]
    assert list(found.chapters[0].verdict) == list(record.answer)
    final, *rungs = found.sections[0].tables
    assert [row[0] for row in final.rows] == [one.standing.label for one in record.final]
    assert [len(table.rows) for table in rungs] == [len(rung.standings) for rung in reversed(record.rungs)]
    for spec in charts(found)["charts"].values():
        assert len(go.Figure(spec).data) == 3
    assert "The race" in page(found)


def test_runs_and_races_share_a_page(race: Path, tmp_path: Path) -> None:
    federation = fs.federation("synthetic", fs.Dirichlet(clients=4, beta=0.3), seed=0, samples=300)
    fs.run(federation, "fedavg", rounds=2, local_epochs=1, out=tmp_path / "run")
    report = fs.write_report([race, tmp_path / "run"], tmp_path / "page.html", features=False)
    assert any(line.startswith("Use ") for line in report.answer)
    assert any("fedavg recognises" in line for line in report.answer)
    assert len(load_runs_and_races([race.parent]).races) == 1


def test_a_method_has_one_colour_in_races_and_runs(race: Path) -> None:
    record = load_race(race)
    assert record is not None
    report = document(LoadedRuns([made_up("fedlmd", 0, [0.5, 0.5])], races=[record, record]), with_features=False)
    lines = [line for figure in report.figures for chart in figure.charts for line in getattr(chart, "lines", ())]
    assert {(line.name, line.style) for line in lines} == {("fedlmd", 0), ("fedavg", 1), ("fedprox", 2)}


def test_a_race_that_is_not_finished_says_so_and_a_damaged_one_is_refused(race: Path, tmp_path: Path) -> None:
    whole = load_race(race)
    assert whole is not None
    save_race(tmp_path, RaceRecord(whole.config, whole.methods, whole.rank_by, whole.budget))
    assert document(load_runs_and_races([tmp_path])).chapters[0].verdict == ("The race is not finished.",)
    (tmp_path / RACE).write_text('{"format": 1, "rungs": 3}')
    with pytest.raises(UserError, match="damaged record of a race"):
        load_runs_and_races([tmp_path])
    (tmp_path / RACE).write_bytes(b'{"format": 1, "budget": "\xff')
    with pytest.raises(UserError, match=r"race\.json: 'utf-8' codec can't decode"):
        load_runs_and_races([tmp_path])


def test_the_runs_of_a_race_are_hidden_from_reports_of_runs(race: Path) -> None:
    with pytest.raises(UserError, match="no run in"):
        load_runs([race])
