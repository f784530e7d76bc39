"""Every figure of the papers is drawn from runs, or says in one line which runs it wants."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from made_up_runs import made_up
from matplotlib.image import imread
from method_cases import only

from fedskew.cli import main
from fedskew.errors import UserError
from fedskew.experiment.config import PartitionConfig, with_values
from fedskew.report.charts.chart import Figure, Heat, Line, Lines
from fedskew.report.charts.matplotlib_view import save_figure
from fedskew.report.figures.catalogue import FIGURES, find_figure
from fedskew.results import Comparison, comparisons, load_run, load_runs

SWEEPS = [name for name, entry in FIGURES.items() if entry.draw.__module__.endswith("sweeps")]
FROM_ANY_RUNS = [name for name in FIGURES if name not in SWEEPS]


@pytest.fixture(scope="module")
def real(comparison: Path) -> list[Comparison]:
    return comparisons(load_runs([comparison]).runs)


@pytest.mark.parametrize("name", FROM_ANY_RUNS)
def test_a_figure_is_drawn_from_real_runs(name: str, real: list[Comparison]) -> None:
    figure = find_figure(name).draw(real)
    assert figure.charts
    assert all(chart.table().rows for chart in figure.charts)


@pytest.mark.parametrize("name", only(["fedlmd/2", "fedvls/9", "pkd/5"], FROM_ANY_RUNS))  # heat maps, bars and lines
def test_a_figure_from_real_runs_is_saved(name: str, real: list[Comparison], tmp_path: Path) -> None:
    save_figure(find_figure(name).draw(real), tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 5000


def test_every_figure_that_the_facts_list_is_there() -> None:
    listed = {
        "fedvls": "1 2 3 4 5 7 9 lambda ablation",
        "fedlmd": "2 4 5 6 7 8 9 10",
        "fedgr": "1 2 4 5",
        "pkd": "2 3 4 5 6 8 9",
    }
    assert {f"{paper}/{n}" for paper, numbers in listed.items() for n in numbers.split()} == FIGURES.keys()


def test_a_sweep_over_one_number_is_a_curve_for_each_method() -> None:
    weights = (0.05, 0.1, 0.5)
    runs = [made_up("fedvls", s, [w, 0.5], **{"method.distill_weight": w}) for w in weights for s in (0, 1)]
    (chart,) = find_figure("fedvls/lambda").draw(comparisons(runs)).charts
    assert isinstance(chart, Lines)
    (line,) = chart.lines
    assert list(line.x) == list(weights)
    assert line.y == pytest.approx([50 * (w + 0.5) for w in weights])


def test_a_sweep_over_two_numbers_is_a_grid() -> None:
    runs = [
        made_up("fedlmd", 0, [t / 10, b / 10], **{"method.temperature": float(t), "method.beta": float(b)})
        for t in (1, 3) for b in (2, 4, 8)
    ]  # fmt: skip
    (chart,) = find_figure("fedlmd/9").draw(comparisons(runs)).charts
    assert isinstance(chart, Heat)
    assert (chart.rows, chart.columns) == (["1", "3"], ["2", "4", "8"])
    assert chart.values[1][2] == pytest.approx(100 * (0.3 + 0.8) / 2)


def test_variants_and_rules_with_long_names_leave_room_for_their_bars(tmp_path: Path) -> None:
    """Matplotlib warns, which is an error here, where names squeeze a panel to nothing."""
    parts = [made_up("fedvls", s, [0.5, 0.5], **{f"method.{part}_weight": 0.0})
             for part in ("distill", "suppress") for s in (0, 1)]  # fmt: skip
    save_figure(find_figure("fedvls/ablation").draw(comparisons(parts)), tmp_path / "parts.png")
    rules = [made_up("fedavg", 0, [0.5, 0.5], partition=f"fedgr-{rule}") for rule in ("label", "quantity", "double")]
    save_figure(find_figure("fedgr/2").draw(comparisons(rules)), tmp_path / "rules.png")


def test_long_titles_of_panels_stay_inside_the_picture(tmp_path: Path) -> None:
    runs = [
        made_up("fedavg", 0, [0.5, 0.5], clients_per_round=clients, local_epochs=epochs)
        for clients in (3, 12) for epochs in (1, 3, 5)
    ]  # fmt: skip
    save_figure(find_figure("fedvls/4").draw(comparisons(runs)), tmp_path / "panels.png")
    picture = imread(tmp_path / "panels.png")[..., :3]
    assert (picture[:, :4] == 1).all()
    assert (picture[:, -4:] == 1).all()


def test_a_key_that_only_varies_together_with_others_gets_no_panel() -> None:
    alone = [made_up("fedvls", 0, [0.5, 0.5], lr=lr) for lr in (0.1, 0.2)]
    together = made_up("fedvls", 0, [0.5, 0.5], lr=0.3, local_epochs=7)
    assert [chart.title for chart in find_figure("fedlmd/7").draw(comparisons([*alone, together])).charts] == [
        "over lr"
    ]
    with pytest.raises(UserError, match="no two evaluated runs of a method differ only in one key"):
        find_figure("fedlmd/7").draw(comparisons([alone[0], together]))


def test_no_map_of_a_federation_across_machines_is_drawn() -> None:
    run = made_up("fedavg", 0, [0.5, 0.5])
    at_sites = replace(run.config, partition=PartitionConfig("sites", params={"names": ["north", "south"]}))
    with pytest.raises(UserError, match="is a federation across machines; no map of it is drawn"):
        find_figure("fedvls/7").draw(comparisons([replace(run, config=at_sites)]))


def test_labels_that_are_not_drawn_are_not_in_the_caption() -> None:
    run = made_up("fedavg", 0, [0.5, 0.5])
    without = replace(run, history=[replace(row, clients=[]) for row in run.history])
    captions = [find_figure("fedlmd/2").draw(comparisons([found])).caption for found in (run, without)]
    assert captions == ["Labels of the sampled clients and predictions", "Predictions"]


def test_best_and_worst_are_of_a_method_where_there_is_one() -> None:
    runs = [made_up("centralised", 0, [1.0, 0.9]), made_up("fedavg", 0, [0.9, 0.2])]
    (chart,) = find_figure("pkd/4").draw(comparisons(runs)).charts
    assert isinstance(chart, Lines)
    assert (chart.title, [line.y[-1] for line in chart.lines]) == ("fedavg", [90, 20])


def test_panels_name_their_setting_where_there_are_several() -> None:
    runs = [made_up("fedavg", 0, [0.5, 0.5], lr=lr) for lr in (0.2, 0.1)]
    assert [chart.title for chart in find_figure("pkd/6").draw(comparisons(runs)).charts] == [
        "lr=0.1: fedavg",
        "lr=0.2: fedavg",
    ]


def test_half_a_round_is_no_tick(tmp_path: Path) -> None:
    chart = Lines("l", "curves", "round", "accuracy %", [Line("a", [0, 1, 2], [10, 20, 30])])
    save_figure(Figure("f", "rounds", [chart]), tmp_path / "rounds.svg")
    texts = re.findall(r">([\d.]+)</text>", (tmp_path / "rounds.svg").read_text())
    assert [text for text in texts if "." not in text][:3] == ["0", "1", "2"]
    assert "0.5" not in texts


@pytest.mark.parametrize("name", ["fedvls/1", "fedvls/2"])
def test_local_figures_name_the_client(name: str, comparison: Path) -> None:
    run = load_run(comparison / "fedavg-0")
    (numbered,) = find_figure(name).draw(comparisons([run])).charts
    (client,) = re.findall(r"client (\d+)", numbered.title)
    names = [f"ward {letter}" for letter in "abcdefghijklmnopqrstuvwxyz"[: len(run.client_labels)]]
    named = replace(run, about={**run.about, "federation": {**(run.federation or {}), "client_names": names}})
    (chart,) = find_figure(name).draw(comparisons([named])).charts
    assert f"client {names[int(client)]}" in chart.title


def test_local_figures_want_local_tests() -> None:
    with pytest.raises(UserError, match="--eval-local"):
        find_figure("fedvls/1").draw(comparisons([made_up("fedavg", 0, [0.5, 0.5])]))


@pytest.mark.parametrize("name", ["fedvls/1", "fedvls/2", "fedvls/9"])
def test_local_figures_leave_bounds_out(name: str, comparison: Path) -> None:
    runs = [load_run(comparison / "fedavg-0"), load_run(comparison / "fedvls-0")]
    bound = replace(runs[0], config=with_values(runs[0].config, {"method": "centralised"}), history=[])
    alone = find_figure(name).draw(comparisons(runs)).charts
    assert find_figure(name).draw(comparisons([*runs, bound])).charts == alone
    with pytest.raises(UserError, match="centralised is a reference bound"):
        find_figure(name).draw(comparisons([bound]))


def test_the_figure_of_confusable_classes_wants_two_classes() -> None:
    with pytest.raises(UserError, match="the data have 1 class; this figure needs at least two"):
        find_figure("pkd/5").draw(comparisons([made_up("fedavg", 0, [1.0])]))


@pytest.mark.parametrize("name", ["fedlmd/2", "fedgr/5", "pkd/2", "pkd/5"])
def test_figures_want_an_evaluated_round(name: str) -> None:
    unevaluated = replace(made_up("fedavg", 0, [0.5, 0.5]), history=[], finished=False)
    with pytest.raises(UserError, match=r"no round (has been|was) evaluated"):
        find_figure(name).draw(comparisons([unevaluated]))


def test_a_local_matrix_wants_a_run_that_reached_its_last_round() -> None:
    run = made_up("fedavg", 0, [0.5, 0.5])
    local = [{"client": 0, "class_accuracy": [0.5, 0.5]}]
    stopped = replace(run, history=[*run.history[:-1], replace(run.history[-1], local=local)], stopped_early=True)
    with pytest.raises(UserError, match="expected a run that has reached its last round"):
        find_figure("fedvls/2").draw(comparisons([stopped]))


def test_sweep_figures_want_a_sweep() -> None:
    with pytest.raises(UserError, match="expected runs of a sweep"):
        find_figure("fedgr/4").draw(comparisons([made_up("fedgr", 0, [0.5, 0.5])]))
    with pytest.raises(UserError, match="expected at least two"):
        find_figure("fedlmd/9").draw(comparisons([made_up("fedlmd", 0, [0.5, 0.5])]))


def test_the_local_matrix_is_that_of_the_last_round(real: list[Comparison], comparison: Path) -> None:
    (fedavg, *_) = find_figure("fedvls/2").draw(real).charts
    assert isinstance(fedavg, Heat)
    assert all(sum(v for v in row if v) == pytest.approx(100, abs=1) for row in fedavg.values)


def test_the_command_lists_draws_and_refuses(
    comparison: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["figures", "--list"]) == 0
    assert "fedlmd/2" in capsys.readouterr().out
    assert main(["figures", "fedlmd/2", str(comparison)]) == 0
    assert Path("fedlmd-2.pdf").read_bytes().startswith(b"%PDF")
    assert main(["figures", "pkd/8", str(comparison), "-o", "numbers.csv"]) == 0
    assert Path("numbers.csv").read_text().startswith("series,round,")
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    (damaged / "config.yaml").write_text("{")
    assert main(["figures", "pkd/8", str(comparison), str(damaged), "-o", "numbers.csv"]) == 0
    assert "config.yaml: line 1" in capsys.readouterr().err
    assert main(["figures", "fedlmd/22", str(comparison)]) == 2
    assert "did you mean 'fedlmd/2'" in capsys.readouterr().err
    assert main(["figures", "fedlmd/2"]) == 2
    assert "needs runs" in capsys.readouterr().err
    assert main(["figures", "pkd/8", str(comparison), "-o", "numbers.txt"]) == 2
    assert "cannot save a figure as 'numbers.txt'; expected .pdf, .svg, .png, .csv" in capsys.readouterr().err


def test_a_whole_number_has_one_curve_with_and_without_a_decimal_point() -> None:
    runs = [made_up("fedprox", 0, [lr, 0.5], lr=lr, **{"method.mu": mu}) for lr, mu in ((0.1, 1), (0.2, 1.0))]
    (chart,) = find_figure("fedlmd/7").draw(comparisons(runs)).charts
    assert isinstance(chart, Lines)
    assert [(line.name, list(line.x)) for line in chart.lines] == [("fedprox", [0.1, 0.2])]


def test_keys_with_the_same_end_are_shown_whole() -> None:
    """The panels had one name, so the report drew one of them twice."""
    runs = [
        made_up("fedlmd", 0, [b, g / 5], **{"partition.beta": b, "method.beta": g}) for b in (0.1, 0.5) for g in (1, 2)
    ]
    runs += [made_up("fedavg", 0, [b, 0.2], **{"partition.beta": b}) for b in (0.1, 0.5)]
    charts = find_figure("fedlmd/7").draw(comparisons(runs)).charts
    assert [chart.key for chart in charts] == ["over-partition.beta", "over-method.beta"]
    assert isinstance(charts[0], Lines)
    assert [line.name for line in charts[0].lines] == ["fedlmd, method.beta=1", "fedlmd, method.beta=2", "fedavg"]
    (chart,) = find_figure("fedlmd/9").draw(comparisons(runs)).charts
    assert isinstance(chart, Heat)
    assert (chart.title, chart.row_label, chart.column_label) == ("fedlmd", "partition.beta", "method.beta")


def test_curves_of_several_settings_differ_in_name_and_style() -> None:
    runs = [made_up(m, 0, [0.1, 0.2], **{"partition.beta": b}) for m in ("fedavg", "pkd") for b in (0.1, 0.5)]
    for chart in find_figure("pkd/9").draw(comparisons(runs)).charts:
        assert isinstance(chart, Lines)
        assert [line.name for line in chart.lines] == [f"beta={b}: {m}" for b in (0.1, 0.5) for m in ("fedavg", "pkd")]
        assert len({line.style for line in chart.lines}) == 4
