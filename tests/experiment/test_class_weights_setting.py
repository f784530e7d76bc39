"""The settings `class_weights` and `batches`: from files and flags to the trained model, on every engine."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import yaml
from findings import FINDINGS, findings_federation
from method_cases import only

import fedskew as fs
from fedskew.cli import main
from fedskew.errors import UserError
from fedskew.experiment.class_weights import resolve_class_weights
from fedskew.experiment.config import Config, with_values
from fedskew.experiment.config.keys import load_yaml

CLASSES = ("benign", "malignant", "unclear")
SETTINGS = {"rounds": 2, "local_epochs": 1, "batch_size": 20, "lr": 0.1, "device": "cpu", "precision": "float64"}
DIGITS = {str(c): 0.5 + c / 5 for c in range(10)}


@pytest.fixture(scope="module")
def digits() -> fs.Federation:
    """A few samples of the digits, whose classes have the names of the numbers."""
    whole = fs.load("digits")
    (x, y), test = ((part.x[:400], part.y[:400]) for part in (whole.train, whole.test))
    return fs.federation((x, y), fs.Dirichlet(clients=4, beta=0.3), seed=0, test=test)


# -- files ----------------------------------------------------------------------------------------------------

FILES = {
    "a.csv": "benign,1\nmalignant,5\nunclear,0\n",
    "b.csv": "class,weight\nunclear,0\nmalignant,5\nbenign,1\n",
    "c.csv": "diagnosis;Weights\nunclear;0\nmalignant; 5\nbenign;1e0\n",
    "d.json": '{"malignant": 5, "benign": 1, "unclear": 0}',
    "e.yaml": "malignant: 5\nbenign: 1\nunclear: 0.0\n",
    "f.yml": "{malignant: 5, benign: 1, unclear: 0}\n",
}


@pytest.mark.parametrize("name", FILES)
def test_files_are_read(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(FILES[name])
    found = resolve_class_weights(str(tmp_path / name), CLASSES)
    assert found == {"benign": 1.0, "malignant": 5.0, "unclear": 0.0}
    assert list(found) == list(CLASSES)


BAD = {
    "missing.csv": ("benign,1\nunclear,2\n", "no weight for 'malignant'; expected one for each of 3 classes"),
    "unknown.csv": ("benign,1\nmalignent,5\nunclear,2\n", "unknown class 'malignent'; did you mean 'malignant'?"),
    "negative.csv": ("benign,-1\nmalignant,5\nunclear,2\n", "weight of 'benign' is '-1'; expected a finite number of"),
    "nan.csv": ("benign,nan\nmalignant,5\nunclear,2\n", "weight of 'benign' is 'nan'; expected a finite number of at"),
    "infinite.json": ('{"benign": Infinity, "malignant": 5, "unclear": 2}', "weight of 'benign' is inf; expected a fi"),
    "zeros.yaml": ("{benign: 0, malignant: 0, unclear: 0}", "expected at least one weight above 0"),
    "empty.csv": ("", "expected at least one weight above 0"),
    "empty.yaml": ("", "expected a mapping of classes to weights, such as {benign: 1.5}"),
    "words.csv": ("benign,heavy\nmalignant,5\nunclear,2\n", "weight of 'benign' is 'heavy'; expected a finite number"),
    "twice.csv": ("benign,1\nbenign,5\nmalignant,2\nunclear,2\n", "class 'benign' is repeated; expected one weight"),
    "twice.json": ('{"benign": 1, "benign": 5}', "class 'benign' is repeated; expected one weight per class"),
    "twice.yaml": ("benign: 1\nbenign: 5\n", "the key 'benign' is repeated"),
    "three.csv": ("benign,1,2\n", "line 1 has 3 cells; expected two: class,weight"),
    "broken.json": ('{"benign": 1', "not JSON"),
    "list.json": ("[1, 2, 3]", "expected a mapping of classes to weights, such as {benign: 1.5}"),
    "yes.yaml": ("yes: 1\nbenign: 2\n", "a class is True; expected a name, in quotes if YAML reads it as"),
    "latin.csv": ("bénigne,1\n".encode("latin-1"), "not UTF-8"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_is_refused_in_one_line(name: str, tmp_path: Path) -> None:
    content, message = BAD[name]
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError, match=f"{name}.*{_literal(message)}") as caught:
        resolve_class_weights(str(tmp_path / name), CLASSES)
    assert "\n" not in str(caught.value)


def _literal(message: str) -> str:
    return message.replace("?", r"\?").replace("{", r"\{")


@pytest.mark.parametrize("name", ["none.csv", "none.json", "none.yaml"])
def test_a_file_that_does_not_exist_is_named(name: str) -> None:
    with pytest.raises(UserError, match=f"cannot read .*{name}"):
        resolve_class_weights(name, CLASSES)


def test_a_folder_is_not_called_missing(tmp_path: Path) -> None:
    (tmp_path / "weights.csv").mkdir()
    with pytest.raises(UserError, match=r"cannot read .*weights\.csv: it is not a file"):
        resolve_class_weights(str(tmp_path / "weights.csv"), CLASSES)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("balancd", "class_weights is 'balancd'; expected balanced, counts, a file .* did you mean 'balanced'?"),
        (3, "class_weights is 3; expected balanced, counts, a file"),
        ([1, 2], "class_weights is .*; expected balanced, counts, a file"),
        ({}, "class_weights is {}; expected at least one weight above 0"),
        ({"a": -1}, "class_weights: the weight of 'a' is -1; expected a finite number of at least 0"),
        ({1: 2, "1": 3}, "class '1' is repeated"),
    ],
)
def test_a_bad_setting_is_refused(value: object, message: str) -> None:
    with pytest.raises(UserError, match=message.replace("?", r"\?").replace("{", r"\{")):
        with_values(Config(), {"class_weights": value})


def test_classes_may_be_numpy_numbers() -> None:
    classes = np.unique(np.array([1, 0, 1]))
    weights = with_values(Config(), {"class_weights": dict(zip(classes, (1, 2.5), strict=True))}).class_weights
    assert weights == {"0": 1.0, "1": 2.5}


def test_batches_has_two_choices() -> None:
    with pytest.raises(UserError, match="batches is 'balance'; expected one of shuffled, balanced; did you mean 'bal"):
        with_values(Config(), {"batches": "balance"})


# -- runs -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("setting", ["balanced", "counts", DIGITS])
def test_one_step_is_the_gradient_of_pytorchs_weighted_loss(setting: object, digits: fs.Federation) -> None:
    rounds = {"rounds": 2, "batch_size": 10_000, "lr": 0.5, "momentum": 0.0, "local_epochs": 1}
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    result = fs.run(digits, "fedavg", model, **{**SETTINGS, **rounds}, class_weights=setting)
    expected = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10)).double()
    expected.load_state_dict(model.state_dict())
    x = (torch.tensor(digits.dataset.train.x).double() / 255 - digits.dataset.mean[0]) / digits.dataset.std[0]
    y, total = torch.tensor(digits.dataset.train.y), digits.sizes.sum()
    for number in range(2):
        loss = torch.zeros((), dtype=torch.float64)
        for rows, counts in zip(digits.indices, digits.label_counts, strict=True):
            found = _weights(setting, counts, digits.label_counts.sum(axis=0), number)
            weights = torch.tensor(found, dtype=torch.float64)
            loss = loss + F.cross_entropy(expected(x[rows]), y[rows], weights, reduction="sum") / total
        grads = torch.autograd.grad(loss, list(expected.parameters()))
        with torch.no_grad():
            for parameter, grad in zip(expected.parameters(), grads, strict=True):
                parameter -= 0.5 * grad
    for found, parameter in zip(result.model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(found, parameter, rtol=0, atol=1e-10)


def _weights(setting: object, own: np.ndarray, everyone: np.ndarray, number: int) -> list[float]:
    if isinstance(setting, dict):
        return list(setting.values())
    counts = own if setting == "balanced" else everyone
    if setting == "counts" and number == 0:
        return [1.0] * len(own)
    return [float(counts.sum() / ((counts > 0).sum() * n)) if n else 0.0 for n in counts]


WEIGHTINGS: list[dict[str, object]] = [
    {"class_weights": "balanced"}, {"class_weights": "counts"}, {"class_weights": DIGITS}, {"batches": "balanced"},
    {"class_weights": "balanced", "batches": "balanced", "clients_per_round": 3},
]  # fmt: skip


@pytest.mark.parametrize(
    ("method", "changed"),
    only(
        [
            *(("fedavg", weighting) for weighting in WEIGHTINGS),
            ("scaffold", WEIGHTINGS[-1]),
            ("fedvls+fpl", WEIGHTINGS[0]),
        ],
        itertools.product(("fedavg", "scaffold", "fedvls+fpl"), WEIGHTINGS),
    ),
)
def test_engines_agree(method: str, changed: dict[str, object], digits: fs.Federation) -> None:
    engines = ("plain", "stacked", "pool") if method == "scaffold" else ("plain", "stacked")
    runs = [fs.run(digits, method, engine=engine, **SETTINGS, **changed) for engine in engines]
    assert [run.engine for run in runs] == list(engines)
    unweighted = fs.run(digits, method, engine="plain", **SETTINGS)
    plain = runs[0].model.state_dict()
    for run in runs[1:]:
        for name, tensor in run.model.state_dict().items():
            torch.testing.assert_close(tensor, plain[name], rtol=1e-9, atol=1e-11)
    assert any((tensor != plain[name]).any() for name, tensor in unweighted.model.state_dict().items())


@pytest.mark.parametrize("setting", ["balanced", "counts", dict.fromkeys(FINDINGS, 2.0)])
def test_engines_agree_on_several_labels(setting: object) -> None:
    federation = findings_federation()
    runs = [
        fs.run(federation, "fedprox", engine=engine, class_weights=setting, **SETTINGS)  # type: ignore[arg-type]
        for engine in ("plain", "stacked", "pool")
    ]
    assert [run.engine for run in runs] == ["plain", "stacked", "pool"]
    for run in runs[1:]:
        for name, tensor in run.model.state_dict().items():
            torch.testing.assert_close(tensor, runs[0].model.state_dict()[name], rtol=1e-9, atol=1e-11)


def test_the_weight_of_a_label_is_negatives_over_positives() -> None:
    federation = findings_federation(clients=1)
    torch.manual_seed(0)
    model = torch.nn.Linear(6, 4)
    rounds = {**SETTINGS, "rounds": 1, "batch_size": 10_000}
    result = fs.run(federation, "fedavg", model, class_weights="balanced", **rounds)
    x, y = torch.tensor(federation.dataset.train.x).double(), torch.tensor(federation.dataset.train.y).double()
    logits = torch.nn.functional.linear(x, model.weight.double(), model.bias.double())
    ratio = (y == 0).sum(dim=0) / (y == 1).sum(dim=0)
    expected = F.binary_cross_entropy_with_logits(logits, y, pos_weight=ratio)
    assert result.history[-1].loss == pytest.approx(expected.item(), rel=1e-6)


def test_balanced_batches_need_one_label_per_sample() -> None:
    with pytest.raises(UserError, match="batches is 'balanced', but 'findings' has several labels per sample"):
        fs.run(findings_federation(), "fedavg", rounds=1, batches="balanced")


def test_balanced_is_weighted_ce(digits: fs.Federation) -> None:
    named = fs.run(digits, "weighted-ce+fedprox", **SETTINGS)
    set_ = fs.run(digits, "fedprox", class_weights="balanced", **SETTINGS)
    assert [row.loss for row in named.history] == [row.loss for row in set_.history]
    counted = [fs.run(digits, method, class_weights="counts", **SETTINGS) for method in ("weighted-ce", "fedavg")]
    assert [row.loss for row in counted[0].history] == [row.loss for row in counted[1].history]


def test_unfit_methods_are_refused_by_name(digits: fs.Federation) -> None:
    weights = {"method_params": {"weights": [1.0] * 10}}
    with pytest.raises(UserError, match="method 'weighted-ce' already has its own parameter 'weights'; expected one"):
        fs.run(digits, "weighted-ce", rounds=1, class_weights="balanced", **weights)
    with pytest.raises(UserError, match="nothing with method 'local-only'; expected balanced, or weights by class"):
        fs.run(digits, "local-only", rounds=1, class_weights="counts")
    fs.run(digits, "local-only", rounds=1, local_epochs=1, class_weights="balanced")


# -- the folder of a run, and the command line ------------------------------------------------------------------


def test_a_run_stores_the_weights_and_resumes_without_the_file(tmp_path: Path, digits: fs.Federation) -> None:
    path = tmp_path / "weights.json"
    path.write_text(json.dumps(DIGITS))
    folder = tmp_path / "run"
    settings = {**SETTINGS, "batches": "balanced", "rounds": 3}
    whole = fs.run(digits, "fedavg", class_weights=str(path), **settings)

    class Crash(fs.Callback):
        def on_round(self, row: object, *_: object) -> bool:
            if getattr(row, "round", 0) == 2:
                raise KeyboardInterrupt
            return False

    with pytest.raises(KeyboardInterrupt):
        fs.run(digits, "fedavg", class_weights=str(path), out=folder, callbacks=[Crash()], **settings)
    saved = yaml.safe_load((folder / "config.yaml").read_text())
    assert saved["class_weights"] == DIGITS
    assert saved["batches"] == "balanced"
    path.unlink()
    resumed = fs.run(digits, config=load_yaml(folder / "config.yaml"), out=folder)
    assert resumed.rounds == 3
    for name, tensor in whole.model.state_dict().items():
        assert torch.equal(tensor, resumed.model.state_dict()[name])


def test_other_weights_are_another_run(tmp_path: Path, digits: fs.Federation) -> None:
    fs.run(digits, "fedavg", class_weights="balanced", out=tmp_path, **SETTINGS)
    with pytest.raises(UserError, match="class_weights"):
        fs.run(digits, "fedavg", class_weights="counts", out=tmp_path, **SETTINGS)


def test_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    Path("weights.csv").write_text("class,weight\n" + "".join(f"{c},{1 + c}\n" for c in range(10)))
    short = ["--rounds", "1", "--local-epochs", "1", "--clients", "4", "--device", "cpu", "-q"]
    assert main(["run", "--method", "fedprox", "--class-weights", "weights.csv", "--out", "one", *short]) == 0
    assert "class weights" in capsys.readouterr().out
    assert yaml.safe_load(Path("one/config.yaml").read_text())["class_weights"]["9"] == 10
    both = ["--methods", "fedavg,fedntd", "--class-weights", "balanced", "--batches", "balanced"]
    assert main(["compare", *both, *short]) == 0
    assert "fedntd" in capsys.readouterr().out
    assert main(["run", "--class-weights", "weihgts", *short]) == 2
    error = capsys.readouterr().err.strip()
    assert "class_weights is 'weihgts'; expected balanced, counts, a file" in error
    assert len(error.splitlines()) == 1
