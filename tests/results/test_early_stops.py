"""Tables, exports and the conclusion say which runs were stopped early, and after how many rounds."""

from __future__ import annotations

import csv
import io
from dataclasses import replace

import pytest
from made_up_runs import made_up
from rich.console import Console

from fedskew.report.overview import overview
from fedskew.report.sections.results import results
from fedskew.report.terminal import comparison_table, run_summary
from fedskew.report.verdict import conclusion, verdict
from fedskew.results import Comparison, Result, compare_runs, comparisons

PLANNED = 4
LINE = "fedavg: stopped early, after 1 to 3 of 4 rounds"


def trained(method: str, seed: int, share: float, rounds: int) -> Result:
    """A run of up to four rounds. One with fewer was stopped."""
    run = made_up(method, seed, [share] * 2, rounds=PLANNED)
    rows = [replace(run.history[-1], round=r, model_round=r) for r in range(1, rounds + 1)]
    return replace(run, history=[run.history[0], *rows], stopped_early=rounds < PLANNED)


def runs(stopped: tuple[int, ...], others: tuple[int, ...]) -> list[Result]:
    """FedAvg with these numbers of rounds, and two better methods with others."""
    values = {"fedavg": (0.3, stopped), "fedvls": (0.7, others), "fedlmd": (0.69, others)}
    return [
        trained(method, seed, share + seed * seed / 100 * (method == "fedlmd"), rounds)
        for method, (share, counts) in values.items()
        for seed, rounds in enumerate(counts)
    ]


@pytest.fixture
def mixed() -> Comparison:
    return compare_runs(runs((1, 2, 3), (4, 4, 4)))


def printed(renderable: object) -> str:
    console = Console(file=io.StringIO(), width=120)
    console.print(renderable)
    return console.file.getvalue()


def test_tables_have_a_line(mixed: Comparison) -> None:
    assert LINE in printed(comparison_table(mixed))
    assert mixed.table("markdown").endswith(f"|\n\n{LINE}\n")
    end = f"\\bottomrule\n\\multicolumn{{6}}{{l}}{{{LINE}}} \\\\\n\\end{{tabular}}\n"
    assert mixed.table("latex").endswith(end)
    assert f"<p>{LINE}</p>" in mixed._repr_html_()
    assert LINE in results(mixed).paragraphs[1]
    assert f"{mixed.label}: {LINE}." in overview([mixed]).paragraphs
    assert f"{LINE}." in verdict(mixed)


def test_data_have_a_column(mixed: Comparison) -> None:
    rows = list(csv.DictReader(mixed.table("csv").splitlines()))
    assert {row["method"]: row["runs stopped early"] for row in rows} == {"fedavg": "3", "fedvls": "0", "fedlmd": "0"}
    frame = mixed.to_frame()
    assert frame["stopped_early"].tolist() == [True] * 3 + [False] * 6
    entry, *_ = mixed.to_json()["methods"]
    assert (entry["seeds"], entry["rounds"], entry["stopped_early"]) == ([0, 1, 2], [1, 2, 3], [True] * 3)
    unequal = {entry["against"]: entry["unequal_rounds"] for entry in mixed.to_json()["differences"]}
    assert unequal == {"fedavg": True, "fedvls": False}


def test_without_a_stop_nothing_is_said() -> None:
    whole = compare_runs(runs((4, 4, 4), (4, 4, 4)))
    for text in (printed(comparison_table(whole)), whole.table("latex"), whole.table(), *verdict(whole)):
        assert "stopped" not in text
        assert "rounds" not in text


def test_a_lead_over_a_stopped_method_is_called_one_after_different_numbers_of_rounds(mixed: Comparison) -> None:
    text = "\n".join(conclusion(mixed))
    assert "fedlmd is best here" in text
    assert "It leads fedvls by 0.7 points, better with" in text
    assert (
        "fedlmd gains 40.7 points over fedavg after different numbers of rounds, 4 against 1 to 3, better with" in text
    )
    _, table = results(mixed).tables
    found = {row[0]: row[6] for row in table.rows}
    assert found["fedavg"] == "significant, but after different numbers of rounds"
    assert found["fedvls"] == "not significant"


def test_the_best_method_may_be_the_stopped_one() -> None:
    stopped, whole = (trained("fedavg", 0, 0.9, 2), trained("fedvls", 0, 0.5, 4))
    text = "\n".join(conclusion(compare_runs([stopped, whole])))
    assert "It leads fedvls by 40.0 points after different numbers of rounds, 2 against 4 (one seed); a test" in text


def test_methods_that_all_stopped_early_are_compared() -> None:
    same = compare_runs(runs((2, 3, 3), (2, 3, 3)))
    assert "different numbers" not in "\n".join(verdict(same))
    assert printed(comparison_table(same)).count("stopped early, after 2 to 3 of 4 rounds") == 3
    other = compare_runs(runs((1, 1, 1), (2, 3, 4)))
    assert "fedvls: 2 of 3 runs stopped early, after 2 to 3 of 4 rounds" in printed(comparison_table(other))
    assert "fedlmd gains 40.7 points over fedavg after different numbers of rounds, 2 to 4 against 1" in (
        "\n".join(conclusion(other))
    )


def test_equal_and_unproven_methods_are_marked() -> None:
    equal = compare_runs([trained("fedavg", 0, 0.5, 1), trained("fedvls", 0, 0.5, 4)])
    assert "fedavg and fedvls are equally good here after different numbers of rounds: 50.0 %" in conclusion(equal)[0]
    shares = {"fedvls": ([0.71, 0.69, 0.74], 4), "fedlmd": ([0.70, 0.69, 0.72], 4), "fedrs": ([0.72, 0.63, 0.71], 2)}
    found = compare_runs([trained(m, s, a, rounds) for m, (each, rounds) in shares.items() for s, a in enumerate(each)])
    assert "Also not significantly different from fedvls: fedrs (after another number of rounds)." in conclusion(found)


def test_a_method_with_stages_has_no_planned_number() -> None:
    run = trained("pkd", 0, 0.5, 1)
    staged = replace(run, history=[run.history[0], replace(run.history[1], stage="warm-up")])
    assert "pkd: stopped early, after 1 round" in verdict(compare_runs([staged]))[0]
    assert staged.stopped_after == "after round 1"


def test_the_summary_of_a_run_says_where_it_was_stopped() -> None:
    assert "stopped early  " in printed(run_summary(trained("fedavg", 0, 0.5, 2)))
    assert "after round 2 of 4" in printed(run_summary(trained("fedavg", 0, 0.5, 2)))
    assert "stopped early" not in printed(run_summary(trained("fedavg", 0, 0.5, 4)))


def test_a_report_of_several_settings_names_the_setting_of_stopped_runs() -> None:
    found = comparisons(
        [replace(run, config=replace(run.config, lr=lr)) for lr in (0.1, 0.2) for run in runs((1,), (4,))]
    )
    lines = [line for line in overview(found).paragraphs if "stopped" in line]
    assert lines == [f"lr={lr}: fedavg: stopped early, after 1 of 4 rounds." for lr in (0.1, 0.2)]


def test_whole_runs_of_different_lengths_were_not_stopped_early() -> None:
    """PKD trains more rounds than FedAvg."""
    runs = [trained("fedavg", seed, 0.3, 3) for seed in range(3)] + [trained("pkd", seed, 0.7, 4) for seed in range(3)]
    whole = compare_runs([replace(run, stopped_early=False) for run in runs])
    assert [entry["unequal_rounds"] for entry in whole.to_json()["differences"]] == [False]
    assert "different numbers of rounds" not in " ".join(verdict(whole))
