"""Results as tables for papers and spreadsheets."""

from __future__ import annotations

import csv
from dataclasses import replace

import numpy as np
import pytest
from made_up_runs import made_up

from fedskew.errors import UserError
from fedskew.metrics.scores import Scores
from fedskew.results import Comparison, Result, compare_runs, comparisons
from fedskew.results.table import table_text


@pytest.fixture
def setting() -> Comparison:
    found = {"fedavg": (0.50, 0.56, 0.62), "fedvls": (0.70, 0.72, 0.77), "centralised": (0.9, 0.9, 0.9)}
    return compare_runs([made_up(name, s, [a, a]) for name, values in found.items() for s, a in enumerate(values)])


def test_markdown_has_mean_and_sample_deviation_and_the_best_is_bold(setting: Comparison) -> None:
    lines = setting.table("markdown").splitlines()
    assert "mean ± sample standard deviation over 3 seeds; best by accuracy first" in lines[0]
    heading, _, best, second, bound = lines[2:]
    assert heading.startswith("| method | accuracy (%) | macro F1 (%) | worst class (%) | balanced accuracy (%) |")
    assert heading.endswith("| training time (s) |")
    spread = np.std([70, 72, 77], ddof=1)
    assert best.startswith(f"| fedvls | **73.00 ± {spread:.2f}** |")
    assert second.startswith("| fedavg | 56.00 ± 6.00 |")
    assert bound.startswith("| centralised | 90.00 ± 0.00 |"), "a bound is never bold"


def test_latex_is_a_tabular_with_escaped_names(setting: Comparison) -> None:
    runs = [made_up("fedprox", 0, [0.5, a], **{"method.mu": mu}) for mu, a in ((0.1, 0.6), (1.0, 0.4))]
    text = table_text([setting, compare_runs(runs)], "latex")
    assert text.count("\\begin{tabular}{lrrrrr}") == text.count("\\end{tabular}") == 2
    assert "fedvls & \\textbf{73.00 $\\pm$ 3.61} & " in text
    assert "accuracy (\\%) & macro F1 (\\%)" in text
    assert "fedprox (mu=0.1) & \\textbf{55.00} & " in text
    wide = compare_runs([made_up("fedvls", 0, [0.5], **{"method.distill_weight": w}) for w in (0.1, 0.5)])
    assert "fedvls (distill\\_weight=0.1)" in wide.table("latex")
    body = [line for line in text.splitlines() if line.endswith("\\\\")]
    assert {line.count("&") for line in body} == {5}


def test_latex_has_no_character_that_pdflatex_refuses() -> None:
    runs = [made_up(method, 0, [a, a]) for method, a in (("fedavg", 0.5), ("fedvls", 0.4))]
    printed = [line for line in compare_runs(runs, rank_by="kappa").table("latex").splitlines() if line[0] != "%"]
    assert "method & Cohen's $\\kappa$ & " in printed[2]
    assert all(line.isascii() for line in printed)


def test_csv_has_numbers_for_every_setting() -> None:
    runs = [made_up("fedavg", s, [0.5 + s / 10, 0.5], lr=lr) for lr in (0.1, 0.2) for s in (0, 1)]
    runs += [made_up("fedvls", s, [0.8, 0.8 + s / 10], lr=lr) for lr in (0.1, 0.2) for s in (0, 1)]
    rows = list(csv.DictReader(table_text(comparisons(runs, "macro-f1"), "csv").splitlines()))
    assert [(row["setting"], row["method"], row["seeds"], row["best"]) for row in rows] == [
        (setting, *method)
        for setting in ("lr=0.1", "lr=0.2")
        for method in (("fedvls", "2", "yes"), ("fedavg", "2", "no"))
    ]
    assert list(rows[0])[4:6] == ["macro F1 %", "macro F1 sample deviation"], "what ranks comes first"
    assert float(rows[1]["accuracy %"]) == pytest.approx(52.5)
    assert float(rows[1]["accuracy sample deviation"]) == pytest.approx(100 * np.std([0.5, 0.55], ddof=1), abs=0.005)


def test_auroc_is_a_column_only_if_a_run_has_it(setting: Comparison, runs_with_auroc: list[Result]) -> None:
    assert "AUROC" not in setting.table()
    assert "| AUROC (%) |" in compare_runs(runs_with_auroc).table()


@pytest.fixture
def runs_with_auroc() -> list[Result]:
    return [replace(made_up(name, 0, [0.5, 0.5]), scores=Scores(auroc=0.8)) for name in ("fedavg", "fedvls")]


def test_mistakes_are_one_line(setting: Comparison) -> None:
    with pytest.raises(UserError, match="unknown format 'latx'; did you mean 'latex'"):
        setting.table("latx")
    empty = compare_runs([replace(made_up("fedavg", 0, [0.5]), history=[])])
    with pytest.raises(UserError, match=f"no run of '{empty.label}' has been evaluated yet"):
        empty.table()
    unfinished = replace(empty, label="another")
    with pytest.raises(UserError, match="no run of 'another' has been evaluated yet"):
        table_text([setting, unfinished], "csv")
