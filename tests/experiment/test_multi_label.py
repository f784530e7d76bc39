"""Several labels per sample, from the labels to the report: engines agree, and softmax methods are refused by name."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from findings import FINDINGS, findings, findings_federation, findings_file
from method_cases import by_kind
from sklearn.metrics import cohen_kappa_score, f1_score, roc_auc_score
from torch import Tensor

import fedskew as fs
from fedskew.cli import main
from fedskew.errors import UserError
from fedskew.methods import METHODS, Client, Objective, Outputs

SETTINGS = {"rounds": 2, "local_epochs": 1, "batch_size": 16, "lr": 0.1}
FITTING = sorted(name for name, entry in METHODS.items() if all(part.multi_label for part in entry.parts))
REQUIRED = {
    "fedavg", "fedprox", "scaffold", "feddyn", "fedavgm", "fedadam", "fedyogi", "fedadagrad", "fednova", "fedsam",
}  # fmt: skip


def test_which_methods_fit() -> None:
    assert set(FITTING) >= REQUIRED
    assert {"fedvls", "fedlc", "fedrs", "fedntd", "fedgr", "pkd"}.isdisjoint(FITTING)


@pytest.mark.parametrize("method", by_kind(name for name in FITTING if name != "fedbn"))  # it needs BatchNorm layers
def test_engines_agree(method: str) -> None:
    federation = findings_federation()
    settings = {**SETTINGS, "precision": "float64", "server_data": 0.2}
    plain, stacked = (fs.run(federation, method, engine=engine, **settings) for engine in ("plain", "stacked"))
    assert stacked.engine == "stacked"
    for name, tensor in plain.model.state_dict().items():
        torch.testing.assert_close(stacked.model.state_dict()[name], tensor, rtol=1e-9, atol=1e-11)
    assert plain.evaluation == stacked.evaluation


def test_losses_are_the_binary_cross_entropy() -> None:
    federation = findings_federation(clients=1)
    torch.manual_seed(0)
    model = torch.nn.Linear(6, 4)
    rounds = {"rounds": 1, "local_epochs": 1, "batch_size": 10_000, "lr": 0.5, "momentum": 0.0}
    result = fs.run(federation, "fedavg", model, precision="float64", **rounds)
    x, y = federation.dataset.train.x, torch.tensor(federation.dataset.train.y).double()
    by_hand = torch.nn.Linear(6, 4).double()
    by_hand.load_state_dict(model.state_dict())
    loss = torch.nn.functional.binary_cross_entropy_with_logits(by_hand(torch.tensor(x).double()), y)
    loss.backward()
    assert result.history[-1].loss == pytest.approx(loss.item(), rel=1e-12)
    assert by_hand.weight.grad is not None
    torch.testing.assert_close(result.model.weight, by_hand.weight - 0.5 * by_hand.weight.grad, rtol=0, atol=1e-12)


def test_metrics_are_scikit_learns() -> None:
    federation = findings_federation()
    result = fs.run(federation, "fedavg", rounds=6, local_epochs=3, lr=0.1)
    test = federation.dataset.test
    with torch.no_grad():
        probabilities = result.model(torch.tensor(test.x)).double().sigmoid().numpy()
    predicted = (probabilities > 0.5).astype(int)
    evaluation, scores = result.evaluation, result.scores
    assert evaluation.samples == len(test)
    assert evaluation.accuracy == pytest.approx((predicted == test.y).mean())
    assert evaluation.macro_f1 == pytest.approx(f1_score(test.y, predicted, average="macro"))
    assert evaluation.micro_f1 == pytest.approx(f1_score(test.y, predicted, average="micro"))
    kappas = [cohen_kappa_score(test.y[:, c], predicted[:, c]) for c in range(4)]
    assert evaluation.kappa == pytest.approx(np.mean(kappas))
    sensitivity = [predicted[test.y[:, c] == 1, c].mean() for c in range(4)]
    assert evaluation.class_accuracy == pytest.approx(sensitivity)
    assert evaluation.class_samples == tuple(test.y.sum(axis=0))
    assert evaluation.predictions == tuple(predicted.sum(axis=0))
    assert scores is not None
    aurocs = [one.auroc for one in scores.classes]
    assert aurocs == pytest.approx([roc_auc_score(test.y[:, c], probabilities[:, c]) for c in range(4)])
    assert scores.auroc == pytest.approx(np.mean(aurocs))
    assert scores.auroc > 0.8
    assert scores.positive is None
    assert scores.brier == pytest.approx(((probabilities - test.y) ** 2).mean())
    assert sum(scores.reliability.samples) == 4 * len(test)
    log_loss = torch.nn.functional.binary_cross_entropy(torch.tensor(probabilities), torch.tensor(test.y).double())
    assert evaluation.log_loss == pytest.approx(log_loss.item(), rel=1e-5)


def test_clients_hold_out_samples_to_test_on() -> None:
    federation = findings_federation()
    result = fs.run(federation, "fedavg", rounds=4, local_epochs=3, lr=0.1, client_test=0.25)
    tests = result.history[-1].client_tests
    assert tests is not None
    held = federation.hold_out(0.25)
    for client, rows in enumerate(held.held_out):
        assert not np.isin(rows, held.indices[client]).any()
        samples = federation.dataset.train.select(rows)
        with torch.no_grad():
            probabilities = result.model(torch.tensor(samples.x)).double().sigmoid().numpy()
        score = result.site_scores[federation.client_labels[client]]
        assert score.accuracy == tests["accuracy"][client] == pytest.approx(((probabilities > 0.5) == samples.y).mean())
        known = [c for c in range(4) if 0 < samples.y[:, c].sum() < len(samples)]
        aurocs = [roc_auc_score(samples.y[:, c], probabilities[:, c]) for c in known]
        assert score.auroc == (pytest.approx(np.mean(aurocs)) if aurocs else None)
        assert score.brier == pytest.approx(((probabilities - samples.y) ** 2).mean(), rel=1e-5)


@pytest.mark.parametrize("name", sorted(METHODS.keys() - set(FITTING)))
def test_methods_with_a_softmax_are_refused_by_name(name: str) -> None:
    with pytest.raises(UserError, match=f"method '{name}' needs one class per sample.*expected .*fedavg") as error:
        fs.run(findings_federation(), name, **SETTINGS)
    assert "\n" not in str(error.value)


def test_a_combination_is_refused_by_its_unfit_part() -> None:
    with pytest.raises(UserError, match="method 'fedlc' needs one class per sample"):
        fs.run(findings_federation(), "fedlc+fedsam", **SETTINGS)
    assert fs.run(findings_federation(), "feddecorr+fedprox+fedavgm", **SETTINGS).finished


@dataclass(frozen=True)
class Weighted(Objective):
    """An objective of a user for several labels."""

    multi_label = True

    def loss(self, out: Outputs, y: Tensor, client: Client) -> Tensor:
        assert y.dim() == 2
        return fs.losses.binary_cross_entropy(out.logits, y) * client.label_counts.max() / client.label_counts.max()


def test_an_objective_of_ones_own_may_declare_itself() -> None:
    federation = findings_federation()
    own, usual = (fs.run(federation, method, **SETTINGS) for method in (Weighted(), "fedavg"))
    assert own.evaluation == usual.evaluation


def test_label_counts_count_every_label() -> None:
    federation = findings_federation()
    counts = np.stack([federation.dataset.train.y[part].sum(axis=0) for part in federation.indices])
    assert federation.label_counts.tolist() == counts.tolist()
    assert counts.sum() > len(federation.dataset.train) > federation.sizes.max()


@pytest.mark.parametrize(
    "rule",
    [
        fs.IID(clients=4),
        fs.Dirichlet(clients=4, beta=0.1),
        fs.Shards(clients=5, shards=2),
        fs.LabelsPerClient(clients=4, labels_per_client=2),
    ],
)
def test_partitions_split_by_the_rarest_label(rule: fs.Partition, tmp_path: Path) -> None:
    federation = fs.federation(findings(), rule, classes=FINDINGS)
    assert sum(map(len, federation.indices)) == len(federation.dataset.train)
    federation.save_split(tmp_path / "split.json")
    again = fs.federation(federation.dataset, fs.Saved(tmp_path / "split.json"))
    assert again.hash == federation.hash
    if isinstance(rule, fs.LabelsPerClient):
        groups, _ = federation.dataset.groups
        assert all(len(np.unique(groups[part])) <= 2 for part in federation.indices)


def test_the_holdout_has_a_fifth_of_every_finding() -> None:
    dataset = findings_federation().dataset
    shares = dataset.test.y.sum(axis=0) / (dataset.train.y.sum(axis=0) + dataset.test.y.sum(axis=0))
    assert shares == pytest.approx([0.2] * 4, abs=0.06)


def test_counts_cannot_split_several_labels(tmp_path: Path) -> None:
    (tmp_path / "counts.csv").write_text("cough,fever\n3,4\n5,6\n")
    with pytest.raises(UserError, match="a sample with several labels has no single class to count"):
        fs.federation(findings(), fs.Counts(tmp_path / "counts.csv"), classes=FINDINGS)


def test_the_task_may_be_stated_and_must_be_right() -> None:
    federation = findings_federation()
    stated = fs.run(federation, "fedavg", task="multi-label", **SETTINGS)
    assert stated.config.task == fs.run(federation, "fedavg", **SETTINGS).config.task == "multi-label"
    with pytest.raises(UserError, match="task is 'single-label', but the labels of 'findings' are multi-label"):
        fs.run(federation, "fedavg", task="single-label", **SETTINGS)
    digits = fs.federation("digits", fs.IID(clients=3))
    with pytest.raises(UserError, match="task is 'multi-label', but the labels of 'digits' are single-label"):
        fs.run(digits, "fedavg", task="multi-label", **SETTINGS)
    assert fs.run(digits, "fedavg", task="single-label", **SETTINGS).config.task == "auto"


def test_there_is_no_positive_class() -> None:
    x, y = findings()
    two = fs.federation((x, y[:, :2]), fs.IID(clients=2), classes=FINDINGS[:2])
    with pytest.raises(UserError, match="positive is 'fever'; expected no value, because the data have several labels"):
        fs.run(two, "fedavg", positive="fever", **SETTINGS)


def test_a_run_is_saved_loaded_and_resumed(tmp_path: Path) -> None:
    federation = findings_federation()
    whole = fs.run(federation, "scaffold", out=tmp_path / "run", save_predictions=True, eval_local=True, **SETTINGS)
    loaded = fs.load_run(tmp_path / "run")
    assert loaded.evaluation == whole.evaluation
    assert type(loaded.evaluation) is type(whole.evaluation)
    assert loaded.scores == whole.scores
    row = json.loads((tmp_path / "run" / "rounds.jsonl").read_text().splitlines()[-1])
    assert np.array(row["evaluation"]["confusion"]).shape == (4, 2, 2)
    assert fs.run(federation, "scaffold", out=tmp_path / "run", save_predictions=True, eval_local=True, **SETTINGS)
    pandas = pytest.importorskip("pandas")
    table = pandas.read_parquet(tmp_path / "run" / "predictions.parquet")
    named = [[FINDINGS[c] for c in np.flatnonzero(labels)] for labels in federation.dataset.test.y]
    assert [list(found) for found in table["true"]] == named


def test_the_command_line_compares_and_reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.chdir(tmp_path)
    data = ["--data", str(findings_file(tmp_path)), "--clients", "4"]
    short = ["--rounds", "2", "--local-epochs", "1", "--lr", "0.1"]
    assert main(["partition", *data]) == 0
    assert main(["diagnose", *data]) == 0
    compared = ["compare", "--methods", "fedavg,fedprox", *data, *short, "--rank-by", "macro-f1", "--out", "runs"]
    assert main(compared) == 0
    assert "macro F1" in capsys.readouterr().out
    assert main(["report", "runs", "--out", "by-accuracy.html"]) == 0
    assert "accuracy is the share of correct yes/no decisions" in (tmp_path / "by-accuracy.html").read_text()
    assert main(["report", "runs", "--out", "report.html"]) == 0
    page = (tmp_path / "report.html").read_text()
    assert "samples have several labels" in page
    assert "AUROC" in page
    assert "Each label is scored separately" in page
    capsys.readouterr()
    assert main(["run", "--method", "fedavg", *data, *short]) == 0
    assert "mean over the labels" in capsys.readouterr().out
    assert main(["run", "--method", "fedvls", *data, *short]) == 2
    assert "needs one class per sample" in capsys.readouterr().err


def test_export_says_sigmoid(tmp_path: Path) -> None:
    from fedskew.export import export_run

    data = str(findings_file(tmp_path))
    federation = fs.federation(data, fs.IID(clients=2))
    fs.run(federation, "fedavg", out=tmp_path / "run", **SETTINGS)
    export_run(tmp_path / "run", tmp_path / "model")
    card = (tmp_path / "model" / "README.md").read_text()
    assert "Sigmoid turns them into probabilities, one for each label" in card
    assert "argmax" not in card
