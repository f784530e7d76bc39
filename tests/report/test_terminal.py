"""Results as tables and pictures."""

from __future__ import annotations

import io
import re
from dataclasses import replace

import numpy as np
import pytest
from made_up_runs import made_up
from matplotlib.figure import Figure
from rich.console import Console

import fedskew as fs
from fedskew.errors import UserError
from fedskew.metrics.confusion import lost_classes
from fedskew.report.comparison_figure import draw_curves, save_comparison
from fedskew.report.terminal import class_accuracy_table, comparison_table, run_summary
from fedskew.results import Comparison, MethodRuns, compare_runs
from fedskew.results.ranking import METRICS


@pytest.fixture(scope="module")
def comparison() -> Comparison:
    feds = [fs.federation("digits", fs.Dirichlet(clients=6, beta=0.5), seed) for seed in (0, 1)]
    settings = {"rounds": 2, "local_epochs": 1}
    return compare_runs([fs.run(fed, method, **settings) for method in ("fedavg", "pkd") for fed in feds])


def printed(renderable: object, width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(renderable)
    return console.file.getvalue()


def test_a_lost_class_is_one_below_five_percent():
    assert lost_classes([0.0, 0.049, 0.05, None, 1.0]) == [0, 1]


def test_the_comparison_has_mean_and_spread(comparison):
    text = printed(comparison_table(comparison))
    accuracies = [100 * r.accuracy for r in comparison.methods[0].runs]
    assert f"{np.mean(accuracies):.1f} ± {np.std(accuracies, ddof=1):.1f}" in text
    assert "mean ± sample standard deviation of 2 seeds" in text
    assert "on own" not in text


def test_the_comparison_has_the_accuracy_on_the_clients_own_samples():
    """Ditto has a global model and the clients' own, so its two accuracies on the same samples differ."""
    feds = [fs.federation("digits", fs.Dirichlet(clients=6, beta=0.3), seed) for seed in (0, 1)]
    settings = {"rounds": 2, "local_epochs": 1, "client_test": 0.2}
    compared = compare_runs([fs.run(fed, method, **settings) for method in ("fedavg", "ditto") for fed in feds])
    text = printed(comparison_table(compared))
    for method in compared.methods:
        kind = {"fedavg": "accuracy", "ditto": "personal"}[method.label]
        found = [np.mean([tests[kind] for tests in run.client_tests.values()]) for run in method.runs]
        cell = f"{100 * np.mean(found):.1f} ± {100 * np.std(found, ddof=1):.1f}"
        assert cell in text
        (listed,) = [entry for entry in compared.to_json()["methods"] if entry["method"] == method.label]
        assert listed["client_accuracy"]["mean"] == pytest.approx(np.mean(found))
    assert "on own" in text
    assert "classes lost" in text
    assert all("…" not in line for line in text.splitlines())


def test_a_long_name_leaves_room_for_the_lost_classes(comparison):
    named = MethodRuns("my_package.my_methods:WithALongName", comparison.methods[0].runs)
    text = printed(comparison_table(Comparison("digits", (named,))), 80)
    assert "classes" in text
    assert "…" not in text


def test_a_bound_cannot_win(comparison):
    fed = fs.federation("digits", fs.Dirichlet(clients=6, beta=0.5), 0)
    bound = MethodRuns("centralised", (fs.run(fed, "centralised", rounds=2, local_epochs=1),))
    method = MethodRuns("fedavg", comparison.methods[0].runs[:1])
    text = printed(comparison_table(Comparison("digits", (bound, method))), 100)
    assert bound.accuracy.mean > method.accuracy.mean
    assert "fedavg *" in text
    assert "centralised *" not in text
    assert "reference bounds aside" in text


def test_of_more_classes_than_fit_the_worst_are_shown(comparison):
    text = printed(class_accuracy_table(comparison, 30), 30)
    mean = np.mean([[a or 0 for a in m.class_accuracy] for m in comparison.methods], axis=0)
    shown = [int(c) for c in next(line for line in text.splitlines() if "method" in line).split()[1:]]
    assert 0 < len(shown) < 10
    assert max(mean[shown]) <= min(mean[[c for c in range(10) if c not in shown]])


def test_the_summary_tells_of_updates_left_out(comparison):
    result = comparison.methods[0].runs[0]
    assert "diverged" not in printed(run_summary(result))
    result = replace(result, history=[*result.history[:-1], replace(result.history[-1], diverged=[3, 4])])
    assert "diverged           2" in (text := printed(run_summary(result)))
    assert "try a lower --lr" in " ".join(text.split())


@pytest.mark.parametrize(("clients", "discarded"), [([3], "1 client update was"), ([3, 4], "2 client updates were")])
def test_the_comparison_tells_of_updates_left_out(clients, discarded):
    run = made_up("fedavg", 0, [0.5, 0.5])
    run.history[1] = replace(run.history[1], diverged=clients)
    text = " ".join(printed(comparison_table(compare_runs([run]))).split())
    assert f"{discarded} discarded: an update, or the server's step with it, was not finite; try a lower --lr" in text


def test_the_summary_has_the_metrics_of_a_classifier(comparison):
    result = comparison.methods[0].runs[0]
    text = printed(run_summary(result))
    for line in (
        f"balanced accuracy  {100 * result.evaluation.mean_class:.1f} %",
        f"Cohen's κ          {result.evaluation.kappa:.3f}",
        f"log loss           {result.evaluation.log_loss:.3f}",
        f"specificity        {result.scores.specificity:.3f}   at threshold 0.5",
    ):
        assert line in text


@pytest.mark.parametrize(
    ("seeds", "title", "bands"),
    [
        ((1, 1), "accuracy over the rounds", 0),
        ((1, 2), "mean of 1 to 2 seeds, band from lowest to highest", 1),
        ((2, 1), "mean of 1 to 2 seeds, band from lowest to highest", 1),
        ((2, 2), "mean of 2 seeds, band from lowest to highest", 2),
    ],
)
def test_methods_with_different_numbers_of_seeds_have_a_band_each_and_one_title(comparison, seeds, title, bands):
    shown = compare_runs([run for m, n in zip(comparison.methods, seeds, strict=True) for run in m.runs[:n]])
    axes = Figure().subplots()
    draw_curves(shown, axes)
    assert (axes.get_title(), len(axes.collections)) == (title, bands)


@pytest.mark.parametrize("suffix", [".png", ".svg", ".pdf"])
def test_the_comparison_as_a_picture(comparison, suffix, tmp_path):
    target = tmp_path / "new folder" / f"comparison{suffix}"
    save_comparison(comparison, target)
    start = {".png": b"\x89PNG", ".svg": b"<?xml", ".pdf": b"%PDF"}[suffix]
    assert target.read_bytes().startswith(start)


def test_a_picture_of_another_kind_is_refused(comparison, tmp_path):
    with pytest.raises(UserError, match=r"comparison\.gif"):
        save_comparison(comparison, tmp_path / "comparison.gif")


def test_class_names_are_not_mathematics(comparison, tmp_path):
    about = {"federation": {"classes": [f"${c}_{{" for c in range(10)]}}
    odd = compare_runs([replace(run, about=about) for run in comparison.runs])
    assert odd.classes[0] == "$0_{"
    save_comparison(odd, tmp_path / "odd.png")
    assert (tmp_path / "odd.png").stat().st_size > 0


def test_the_best_log_loss_is_that_of_a_finite_round() -> None:
    run = made_up("fedavg", 0, [0.5, 0.5])
    first, last = run.history
    known = replace(last, evaluation=replace(last.required_evaluation, log_loss=0.7))
    text = printed(run_summary(replace(run, history=[first, known]), METRICS["log-loss"]))
    assert re.search(r"best +0.700 +after round 1", text)
