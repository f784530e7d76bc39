"""A report of real runs: whole, half-finished, damaged or from before; every number on it is in a table."""

from __future__ import annotations

import base64
import gzip
import json
import re
import shutil
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import plotly.graph_objects as go
import pytest
from made_up_runs import made_up

import fedskew as fs
from fedskew.errors import UserError
from fedskew.experiment.storage.files import write_tensors
from fedskew.experiment.storage.run_folder import RunFolder
from fedskew.methods.pkd import weak_groups
from fedskew.report import model_outputs
from fedskew.report.document import Document, document
from fedskew.report.page.render import body, charts, packed_plotly, page, plotly_program
from fedskew.report.sections.section import Section
from fedskew.results import LoadedRuns, load_run, load_runs

ALL = ["results", "curves", "classes", "federation", "local", "scores", "confusion", "predictions", "features",
       "experts", "timing", "circumstances"]  # fmt: skip


@pytest.fixture(scope="module")
def whole(comparison: Path) -> Document:
    return document(load_runs([comparison]))


@pytest.fixture
def copy(comparison: Path, tmp_path: Path) -> Path:
    """The same runs, to be damaged."""
    return Path(shutil.copytree(comparison, tmp_path / "runs"))


def missing(report: Document) -> str:
    return "\n".join([*report.problems, *(line for section in report.sections for line in section.missing)])


def test_a_report_has_every_section_with_something_in_it(whole: Document) -> None:
    assert [section.key for section in whole.sections] == ALL
    assert all(section.figures or section.tables for section in whole.sections)
    assert missing(whole) == ""


def test_results_by_site_have_a_section(tmp_path: Path) -> None:
    fed = fs.federation("digits", fs.Dirichlet(clients=5, beta=0.3), 0)
    settings = {"rounds": 2, "local_epochs": 1, "client_test": 0.2}
    runs = [fs.run(fed, method, out=tmp_path / method, **settings) for method in ("fedavg", "local-only")]
    section = next(s for s in document(LoadedRuns(runs), with_features=False).sections if s.key == "sites")
    assert [figure.key for figure in section.figures] == ["site-accuracy", "worst-site"]
    fair, local, scored = section.tables
    assert [row[:4] for row in fair.rows if row[0] == "fedavg"] == [
        ["fedavg", 0, "accuracy", 5],
        ["fedavg", 0, "AUROC", 5],
    ]
    accuracies = [100 * score.accuracy for score in runs[0].site_scores.values()]
    assert fair.rows[0][4:7] == pytest.approx([np.mean(accuracies), np.std(accuracies), min(accuracies)], abs=0.01)
    assert [row[0] for row in local.rows] == ["fedavg"], "clients that train alone receive no model"
    assert [row[1] for row in scored.rows] == ["0", "1", "2", "3", "4"] * 2


def test_features_use_the_same_inputs_as_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The column of the sites is not an input. Data that have changed since the run are named, not drawn."""
    monkeypatch.chdir(tmp_path)
    rows = [f"{i % 7},{i % 5},{'ab'[i % 2]},{'xy'[i % 3 % 2]}" for i in range(60)]
    Path("visits.csv").write_text("\n".join(["age,pulse,hospital,label", *rows]) + "\n")
    fs.run(fs.federation("visits.csv", fs.Column("hospital")), "fedavg", rounds=1, local_epochs=1, out="run")
    report = document(load_runs(["run"]))
    assert next(section for section in report.sections if section.key == "features").figures
    model_outputs._dataset.cache_clear()
    Path("visits.csv").write_text("\n".join(["age,hospital,label", *(row.split(",", 1)[1] for row in rows)]) + "\n")
    assert "visits.csv has changed since the run: its inputs do not fit the model" in missing(
        document(load_runs(["run"]))
    )


def test_plotly_takes_every_chart_of_a_report(whole: Document) -> None:
    packed = charts(whole)
    for spec in packed["charts"].values():
        assert len(go.Figure(spec).data) > 0
    assert packed["charts"].keys() <= packed["tables"].keys(), "every chart has its numbers in a table"


def test_the_numbers_are_those_of_the_runs(whole: Document, comparison: Path) -> None:
    (final, *_) = whole.sections[0].tables
    accuracies = [json.loads((comparison / f"fedvls-{s}/summary.json").read_text())["accuracy"] for s in (0, 1)]
    row = next(row for row in final.rows if row[0] == "fedvls")
    assert str(row[2]).startswith(f"{50 * sum(accuracies):.2f} ± ")


def test_keys_are_used_once(whole: Document) -> None:
    keys = [chart.key for figure in whole.figures for chart in figure.charts]
    keys += [table.key for section in whole.sections for table in section.tables]
    assert len(keys) == len(set(keys))


def test_several_settings_are_kept_apart() -> None:
    runs = [made_up(m, s, [0.5, 0.5], lr=lr) for m in ("fedavg", "fedvls") for s in (0, 1) for lr in (0.1, 0.2)]
    report = document(LoadedRuns(runs, []), with_features=False)
    keys = [chart.key for figure in report.figures for chart in figure.charts]
    assert len(keys) == len(set(keys))
    assert [chapter.title for chapter in report.chapters] == ["lr=0.1", "lr=0.2"]
    assert report.summary is not None
    assert "8 runs, 8 finished, in 2 settings that differ in lr." in report.summary.paragraphs[0]


WEAK, STRONG = ({"method.distill_weight": weight} for weight in (0.1, 0.5))


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ([("fedavg", {}), ("fedvls", {})], [("fedvls", {})], 2),
        ([("fedavg", {}), ("fedvls", WEAK), ("fedvls", STRONG)], [("fedprox", {}), ("fedvls", STRONG)], 4),
        ([("fedvls", WEAK)], [("fedvls", STRONG)], 2),
    ],
)
def test_a_method_has_one_colour_in_all_settings(first: list[Any], second: list[Any], expected: int) -> None:
    runs = [made_up(m, 0, [0.5, 0.5], lr=lr, **v) for lr, found in ((0.1, first), (0.2, second)) for m, v in found]
    report = document(LoadedRuns(runs, []), with_features=False)
    legend = dict(re.findall(r'data-method="([^"]*)"><span class="swatch" style="background:(#\w+)"', body(report)))
    assert len(legend) == len(set(legend.values())) == expected
    traces = [trace for chart in charts(report)["charts"].values() for trace in chart["data"] if "marker" in trace]
    drawn = {(trace["meta"], trace["marker"]["color"]) for trace in traces if trace.get("meta") in legend}
    assert drawn == set(legend.items())


def test_the_overview_keeps_the_colours_if_a_method_has_no_result_yet() -> None:
    begun = replace(made_up("fedavg", 0, [0.5, 0.5], finished=False, lr=0.1), history=[])
    runs = [begun, *(made_up("fedvls", 0, [0.5, 0.5], lr=lr) for lr in (0.1, 0.2))]
    report = document(LoadedRuns(runs, []), with_features=False)
    lines = [line for figure in report.figures for chart in figure.charts for line in getattr(chart, "lines", ())]
    assert {(line.name, line.style) for line in lines} == {("fedvls", 1)}


def test_a_sweep_has_an_overview_and_no_chapters() -> None:
    runs = [made_up("fedavg", 0, [0.1 * k, 0.5], lr=k / 10) for k in range(1, 9)]
    report = document(LoadedRuns(runs, []))
    assert not report.chapters
    assert report.summary is not None
    (figure,) = report.summary.figures
    (line,) = figure.charts[0].lines  # type: ignore[attr-defined]
    assert line.x == [k / 10 for k in range(1, 9)]
    assert line.y == pytest.approx([100 * (0.1 * k + 0.5) / 2 for k in range(1, 9)])


def test_equal_methods_are_all_the_best_of_a_setting() -> None:
    shares = {("fedavg", 0.1): 0.5, ("fedvls", 0.1): 0.5, ("fedavg", 0.2): 0.3, ("fedvls", 0.2): 0.4}
    runs = [made_up(method, 0, [share, 0.5], lr=lr) for (method, lr), share in shares.items()]
    summary = document(LoadedRuns(runs, []), with_features=False).summary
    assert summary is not None
    assert "Highest mean accuracy by setting: fedvls in 2, fedavg in 1." in summary.paragraphs


def test_a_half_finished_run_is_drawn_as_far_as_it_came(copy: Path) -> None:
    run = copy / "fedvls-0"
    for name in ("summary.json", "model.safetensors"):
        (run / name).unlink()
    rows = (run / "rounds.jsonl").read_text().splitlines(keepends=True)
    (run / "rounds.jsonl").write_text("".join(rows[:3]) + rows[3][:50])
    report = document(load_runs([run]))
    told = missing(report)
    assert "unfinished: recorded up to round 2; if it no longer runs, repeat its command to resume" in told
    assert "no finished run, so there is no model" in told
    assert report.chapters[0].verdict[0].startswith("No run is finished; these are the results after round 2")
    assert len(report.figures) > 8


def test_a_run_without_any_round_is_named(copy: Path) -> None:
    (copy / "fedvls-0/rounds.jsonl").unlink()
    (copy / "fedvls-0/summary.json").unlink()
    told = missing(document(load_runs([copy / "fedvls-0"])))
    assert "no round was recorded" in told


def test_damage_in_the_middle_is_told(copy: Path) -> None:
    path = copy / "fedavg-0/rounds.jsonl"
    rows = path.read_text().splitlines(keepends=True)
    path.write_text(rows[0] + rows[1] + "{broken\n" + rows[3])
    assert "is damaged in line 3" in missing(document(load_runs([copy / "fedavg-0"]), with_features=False))


def test_a_run_from_before_says_what_it_lacks(copy: Path) -> None:
    run = copy / "fedavg-0"
    (run / "about.json").unlink()
    old = [json.loads(line) for line in (run / "rounds.jsonl").read_text().splitlines()]
    new = ("bytes", "time", "local", "local_before", "drift_diversity")
    rows = [{key: value for key, value in row.items() if key not in new} for row in old]
    (run / "rounds.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    report = document(load_runs([run]), with_features=False)
    told = missing(report)
    for what in ("about.json is missing", "did not count bytes", "time by part", "--eval-local"):
        assert what in told
    federation = next(section for section in report.sections if section.key == "federation")
    assert federation.figures, "the split is drawn again from the data"


def test_an_unreadable_run_does_not_hide_the_others(copy: Path) -> None:
    (copy / "pkd-0/config.yaml").write_text("rounds: many\n")
    gathered = load_runs([copy])
    assert len(gathered.runs) == 4
    assert "rounds" in gathered.unreadable[0]
    with pytest.raises(UserError, match="rounds"):
        load_runs([copy / "pkd-0"])


def test_a_folder_without_runs_is_refused(tmp_path: Path) -> None:
    (tmp_path / ".runs/hidden").mkdir(parents=True)
    (tmp_path / ".runs/hidden/config.yaml").touch()
    with pytest.raises(UserError, match=r"neither it nor a visible folder up to 3 levels below it has a config\.yaml"):
        load_runs([tmp_path])
    with pytest.raises(UserError, match="no run folder"):
        load_runs([tmp_path / "nothing"])


# -- PKD's experts -----------------------------------------------------------------------------------------


def experts_of(report: Document) -> Section:
    return next(section for section in report.sections if section.key == "experts")


def test_the_groups_are_those_that_stand_out_in_the_map(whole: Document, comparison: Path) -> None:
    (warm,) = [row for row in load_run(comparison / "pkd-0").history if row.survey]
    probability = np.array(warm.survey["probability"])
    heat = next(figure for figure in experts_of(whole).figures if figure.key == "similarity").charts[0]
    for i, row in enumerate(heat.values):  # type: ignore[attr-defined]
        for j, cell in enumerate(row):
            assert (
                cell is None
                if i == j
                else cell == pytest.approx(50 * (probability[i, j] + probability[j, i]), abs=1e-3)
            )
    (table,) = experts_of(whole).tables
    found = [[int(name) for name in str(row[3]).split(", ")] for row in table.rows]
    assert found == [list(group) for group in weak_groups(probability, 2.0)] == warm.notes["groups"]
    for group, row in zip(found, table.rows, strict=True):
        pairs = [heat.values[i][j] for i in group for j in group if i < j]  # type: ignore[attr-defined]
        assert row[4] == pytest.approx(sum(pairs) / len(pairs), abs=2e-3)


def test_experts_together_taught_what_each_did(whole: Document, comparison: Path) -> None:
    rows = [row for row in load_run(comparison / "pkd-0").history if "distilled" in row.tally]
    total, each = next(figure for figure in experts_of(whole).figures if figure.key == "activations").charts
    (line,) = total.lines  # type: ignore[attr-defined]
    assert list(line.x) == [row.model_round for row in rows]
    assert line.y == pytest.approx([100 * row.tally["distilled"] / row.visits for row in rows], abs=1e-3)
    summed = np.sum([one.y for one in each.lines], axis=0)  # type: ignore[attr-defined]
    assert summed == pytest.approx(line.y, abs=1e-2)
    (table,) = experts_of(whole).tables
    taught, visits = (sum(of(row) for row in rows) for of in (lambda r: r.tally["expert 0"], lambda r: r.visits))
    assert table.rows[0][5] == pytest.approx(100 * taught / visits, abs=1e-3)


def test_experts_of_a_run_from_before_are_drawn_as_far_as_it_tells(copy: Path) -> None:
    path = copy / "pkd-0/rounds.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:
        row.pop("survey", None)
        row["tally"] = {name: n for name, n in row.get("tally", {}).items() if name == "distilled"}
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    section = experts_of(document(load_runs([copy / "pkd-0"]), with_features=False))
    assert [figure.key for figure in section.figures] == ["warm-confusion", "activations"]
    assert [row[4:] for row in section.tables[0].rows] == [[None, None]] * len(section.tables[0].rows)
    label = "pkd (expert_rounds=1, warmup_rounds=1)"
    assert list(section.missing) == [
        f"{label}, seed 0: the mutual probabilities: not recorded by the version that made the run; repeat it",
        f"{label}, seed 0: how often each expert taught: not recorded by the version that made the run; repeat it",
    ]


def test_experts_of_a_federation_that_keeps_its_tallies_are_said_to_be_unknown(copy: Path) -> None:
    path = copy / "pkd-0/rounds.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(row | {"tally": {}}) + "\n" for row in rows))
    section = experts_of(document(load_runs([copy / "pkd-0"]), with_features=False))
    assert [figure.key for figure in section.figures] == ["similarity"]
    label = "pkd (expert_rounds=1, warmup_rounds=1)"
    assert list(section.missing) == [f"{label}, seed 0: how often experts taught: the sites do not share it"]


@pytest.mark.parametrize("known", [None, 0.1])
def test_a_survey_of_less_than_two_classes_is_no_map(copy: Path, known: float | None) -> None:
    path = copy / "pkd-0/rounds.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:
        if "survey" in row:
            row["survey"]["probability"] = [10 * [known], *(10 * [None] for _ in range(9))]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    section = experts_of(document(load_runs([copy / "pkd-0"]), with_features=False))
    assert "similarity" not in [figure.key for figure in section.figures]


# -- the page ----------------------------------------------------------------------------------------------


class _Addresses(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.found += [value or "" for name, value in attributes if name in ("src", "href", "action", "data", "srcset")]


def test_the_page_asks_nobody_for_anything(whole: Document) -> None:
    addresses = _Addresses()
    addresses.feed(page(whole))
    assert all(address.startswith(("#", "data:,")) for address in addresses.found)


def test_ten_runs_fit_in_five_megabytes(comparison: Path) -> None:
    gathered = load_runs([comparison])
    report = document(LoadedRuns([*gathered.runs, *gathered.runs], []))
    many = [made_up(m, s, [0.5] * 100, lr=0.3) for m in ("fedavg", "fedvls") for s in range(5)]
    of_hundred_classes = document(LoadedRuns(many, []), with_features=False)
    assert len(page(report).encode()) < 5_000_000
    assert len(page(of_hundred_classes).encode()) < 5_000_000


def test_what_is_packed_is_what_is_drawn(whole: Document) -> None:
    packed = re.search(r'<script type="text/plain" id="charts">([^<]*)</script>', page(whole))
    assert packed is not None
    assert json.loads(gzip.decompress(base64.b64decode(packed[1]))) == json.loads(json.dumps(charts(whole)))


def test_names_are_text_and_not_html() -> None:
    run = made_up("fedavg", 0, [0.5, 0.5])
    run.about["federation"]["classes"] = ["<script>alert(1)</script>", '"quoted" & more']
    html = page(document(LoadedRuns([run], []), with_features=False))
    assert "<script>alert" not in html
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in html


def test_every_chart_has_a_text_alternative(whole: Document) -> None:
    html = page(whole)
    drawn = sum(len(figure.charts) for figure in whole.figures)
    assert len(re.findall(r'role="img" aria-label="[^"]{20,}"', html)) == drawn


def test_a_run_under_way_has_a_line_of_its_own_beside_finished_ones() -> None:
    runs = [made_up("fedavg", 0, [0.5, 0.5]), made_up("fedavg", 1, [0.7, 0.7], finished=False)]
    report = document(LoadedRuns(runs, []), with_features=False)
    curves = next(figure for figure in report.figures if figure.key == "rounds").charts[0]
    names = [line.name for line in curves.lines]  # type: ignore[attr-defined]
    assert names == ["fedavg", "fedavg, seed 1, unfinished"]
    assert [line.y[-1] for line in curves.lines] == [50, 70]  # type: ignore[attr-defined]


def test_a_model_with_numbers_that_are_not_finite_is_told(copy: Path) -> None:
    folder = RunFolder(copy / "fedavg-0")
    tensors, meta = folder.load_model()
    write_tensors(folder.model_path, {name: t * float("nan") for name, t in tensors.items()}, meta)
    assert "fedavg: " in missing(document(load_runs([copy / "fedavg-0"])))
    assert "not finite" in missing(document(load_runs([copy / "fedavg-0"])))


def test_without_plotly_the_error_is_one_line(whole: Document, monkeypatch: pytest.MonkeyPatch) -> None:
    plotly_program.cache_clear()
    packed_plotly.cache_clear()
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(UserError, match=r"install fedskew\[report\]"):
        page(whole)
