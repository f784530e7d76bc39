"""What decides which method is best."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from made_up_runs import made_up
from sklearn.metrics import roc_auc_score

import fedskew as fs
from fedskew.engine import DeviceSamples
from fedskew.errors import UserError
from fedskew.metrics.confusion import Evaluation
from fedskew.metrics.scores import Scores
from fedskew.report.verdict import verdict
from fedskew.results import Result, compare_runs, load_run
from fedskew.results.ranking import METRICS, find_metric


def imbalanced(method: str, seed: int, matrix: list[list[int]], auroc: float | None) -> Result:
    run = made_up(method, seed, [0.5, 0.5])
    tested = Evaluation(np.array(matrix), log_loss=0.3 if method == "fedavg" else 0.5)
    rows = [run.history[0], replace(run.history[1], evaluation=tested)]
    return replace(run, history=rows, scores=None if auroc is None else scores_with(auroc))


def scores_with(auroc: float) -> Scores:
    return Scores(
        auroc=auroc,
        auprc=auroc - 0.1,
        sensitivity=auroc - 0.2,
        specificity=1.5 - auroc,
        sensitivity_at_specificity=auroc - 0.3,
        brier=1 - auroc,
        calibration_error=0.3 - auroc / 4,
    )


@pytest.fixture
def runs() -> list[Result]:
    """FedAvg is right more often, FedVLS on the rare class and in the order of its probabilities."""
    accurate, fair = [[900, 0], [90, 10]], [[840, 60], [40, 60]]
    return [imbalanced(*run) for run in (("fedavg", 0, accurate, 0.7), ("fedvls", 0, fair, 0.9))]


@pytest.mark.parametrize(
    ("rank_by", "best"),
    [
        ("accuracy", "fedavg"),
        ("macro-f1", "fedvls"),
        ("worst-class", "fedvls"),
        ("balanced_accuracy", "fedvls"),
        ("AUROC", "fedvls"),
        ("auprc", "fedvls"),
        ("sensitivity", "fedvls"),
        ("specificity", "fedavg"),
        ("sensitivity-at-specificity", "fedvls"),
        ("kappa", "fedvls"),
        ("log-loss", "fedavg"),
        ("brier", "fedvls"),
        ("ece", "fedvls"),
    ],
)
def test_the_metric_decides_which_method_is_best(runs: list[Result], rank_by: str, best: str) -> None:
    found = compare_runs(runs, rank_by=rank_by)
    assert found.best is not None
    assert (found.best.label, found.to_json()["best"]) == (best, best)
    assert found.to_json()["rank_by"] == found.rank_by == find_metric(rank_by).name


def test_the_values_are_those_of_the_last_evaluation(runs: list[Result]) -> None:
    values = {name: metric.value(runs[1]) for name, metric in METRICS.items()}
    f1 = np.mean([2 * 840 / (900 + 880), 2 * 60 / (100 + 120)])
    assert values == pytest.approx(
        {
            "accuracy": 0.9,
            "macro-f1": f1,
            "worst-class": 0.6,
            "balanced-accuracy": (840 / 900 + 0.6) / 2,
            "auroc": 0.9,
            "auprc": 0.8,
            "sensitivity": 0.7,
            "specificity": 0.6,
            "sensitivity-at-specificity": 0.6,
            "kappa": (0.9 - 0.804) / (1 - 0.804),
            "log-loss": 0.5,
            "brier": 0.1,
            "ece": 0.075,
        }
    )
    assert METRICS["macro-f1"].curve(runs[1])[-1] == (1, pytest.approx(f1))


def test_a_lower_loss_leads() -> None:
    """The lead is positive, the table's bold value is the lowest, and the verdict says so."""
    runs = [
        imbalanced(method, seed, [[90, 10], [10, 90]], auroc)
        for method, auroc in (("fedavg", 0.7), ("fedvls", 0.9))
        for seed in range(3)
    ]
    found = compare_runs(runs, rank_by="brier")
    (lead,) = found.differences()
    assert lead is not None
    assert (found.best.label, lead.wins, lead.mean) == ("fedvls", 3, pytest.approx(0.2))
    table = found.table()
    assert "| **0.1000 ± 0.0000** |" in table
    assert table.index("fedvls") < table.index("fedavg")
    assert verdict(found)[0].startswith("fedvls is best here by Brier score: 0.100")
    assert "0.200" in verdict(found)[1]
    assert repr(found).endswith("Brier score: fedvls 0.100, fedavg 0.300>")


def test_of_two_runs_with_one_seed_the_finished_one_counts() -> None:
    """One run was stopped early, and another one with the same configuration did not get to its end."""
    short, longer = made_up("fedavg", 0, [0.5, 0.5]), made_up("fedavg", 0, [0.9, 0.9], finished=False)
    longer.history.append(replace(longer.history[-1], round=2, model_round=2))
    for runs in ([short, longer], [longer, short]):
        assert compare_runs(runs).methods[0].accuracy.mean == 0.5


def test_a_misspelt_metric_gets_the_nearest_one() -> None:
    with pytest.raises(UserError, match="unknown ranking metric 'macrof1'; did you mean 'macro-f1'"):
        find_metric("macrof1")


def test_runs_without_auroc_are_refused_with_the_reason(runs: list[Result]) -> None:
    older = [*runs[:1], replace(runs[1], scores=None)]
    with pytest.raises(UserError, match=r"runs/fedvls-0 cannot be ranked by auroc: .*older version"):
        compare_runs(older, rank_by="auroc")
    with pytest.raises(UserError, match="AUROC is computed when a run is finished"):
        compare_runs([replace(older[1], finished=False)], rank_by="auroc")
    assert compare_runs(older).best is not None, "any other metric ranks them"


def test_a_run_that_was_stopped_between_evaluations_is_not_called_old(runs: list[Result]) -> None:
    *rows, last = runs[1].history
    stopped = replace(runs[1], history=[*rows, last, replace(last, round=2, evaluation=None)], stopped_early=True)
    with pytest.raises(UserError, match="by auroc: it was stopped after a round without an evaluation") as error:
        compare_runs([replace(stopped, scores=None)], rank_by="auroc")
    assert "version" not in str(error.value)


def test_a_method_without_a_global_model_is_not_sent_to_run_again() -> None:
    run = made_up("fedper", 0, [0.5, 0.5])
    run.history[1] = replace(run.history[1], client_accuracy=[0.5, 0.5])
    with pytest.raises(UserError, match="cannot be ranked by auroc: its method has no global model") as error:
        compare_runs([run], rank_by="auroc")
    assert "version" not in str(error.value)


@pytest.mark.parametrize("loss", [None, np.nan, np.inf])
def test_a_run_that_diverged_is_not_called_old(loss: float | None) -> None:
    run = made_up("fedavg", 0, [0.5, 0.5])
    tested = replace(run.history[1].required_evaluation, log_loss=loss)
    run.history[1] = replace(run.history[1], evaluation=tested, diverged=[0])
    with pytest.raises(UserError, match="cannot be ranked by log-loss: its training diverged") as error:
        compare_runs([run], rank_by="log-loss")
    assert "version" not in str(error.value)


def test_test_samples_of_one_class_do_not_define_kappa() -> None:
    run = imbalanced("fedavg", 0, [[900, 0], [0, 0]], None)
    with pytest.raises(UserError, match=r"it has no Cohen's κ: .* the test samples do not define this metric, or "):
        compare_runs([run], rank_by="kappa")


def test_a_federation_of_sites_has_no_auroc() -> None:
    run = made_up("fedvls", 0, [0.5, 0.5], partition={"rule": "sites", "names": ["north", "south"]})
    with pytest.raises(UserError, match="its federation did not record it"):
        compare_runs([run], rank_by="auroc")


def test_sites_that_report_totals_are_ranked_by_accuracy_only() -> None:
    run = made_up("fedvls", 0, [0.5, 0.5])
    blind = replace(run.history[1], evaluation=Evaluation(np.zeros((2, 2), int), totals=(30, 40)))
    run = replace(run, history=[run.history[0], blind])
    assert compare_runs([run]).methods[0].accuracy.mean == 0.75
    with pytest.raises(UserError, match="reported total accuracy only"):
        compare_runs([run], rank_by="macro-f1")


def test_a_bound_without_auroc_does_not_matter(runs: list[Result]) -> None:
    bound = made_up("local-only", 0, [0.1, 0.1])
    assert bound.auroc is None
    assert [m.label for m in compare_runs([bound, *runs], rank_by="auroc").ranking] == [
        "fedvls",
        "fedavg",
        "local-only",
    ]


def test_auroc_of_a_run_is_that_of_its_model_by_scikit_learn() -> None:
    fed = fs.federation("digits", fs.Dirichlet(clients=4, beta=0.5))
    run = fs.run(fed, "fedavg", rounds=2, local_epochs=1)
    test = fed.dataset.test
    normalised = DeviceSamples(fed.dataset, test, torch.device("cpu")).inputs(torch.arange(len(test.y)))
    with torch.no_grad():
        probabilities = run.model.eval()(normalised).double().softmax(dim=1).numpy()
    reference = roc_auc_score(test.y, probabilities, multi_class="ovr", average="macro")
    assert run.auroc == pytest.approx(reference, abs=1e-6), "batches of another size may round otherwise"


def test_a_run_that_was_stopped_early_has_auroc() -> None:
    fed = fs.federation("digits", fs.Dirichlet(clients=4, beta=0.5))
    stop = fs.EarlyStopping(patience=1, min_delta=1.0)
    run = fs.run(fed, "fedavg", rounds=5, local_epochs=1, callbacks=[stop])
    assert run.stopped_early
    assert run.auroc is not None


def test_runs_are_ranked_by_auroc_just_run_or_read(tmp_path: Path) -> None:
    rule = fs.Dirichlet(clients=4, beta=0.5)
    settings = {"rounds": 1, "local_epochs": 1, "partition": rule, "rank_by": "auroc"}
    found = fs.compare("digits", ["fedavg", "fedvls"], 1, out=tmp_path, **settings)
    assert found.best is not None
    assert found.best.runs[0].auroc == max(run.auroc for run in found.runs)
    for run in found.runs:
        assert 0.5 < run.auroc < 1
        assert run.summary()["auroc"] == run.auroc == load_run(run.folder).auroc
    again = fs.compare("digits", ["fedavg", "fedvls"], 1, out=tmp_path, **settings)
    assert again.to_json() == found.to_json()
