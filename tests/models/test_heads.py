"""Heads besides the linear one: their formulas, both engines, saving and exporting, and FedETF's loss."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from method_cases import slow
from torch import nn

import fedskew as fs
from fedskew.errors import UserError
from fedskew.export import export_run
from fedskew.losses import IGNORE
from fedskew.methods.fedetf import FedETF
from fedskew.methods.fedgela import FedGELA
from fedskew.methods.fednh import SmoothedPrototypes
from fedskew.methods.parts import Client, Outputs, Seen, Trained, Updates
from fedskew.models import DataShape, make_model
from fedskew.models.heads import CosineHead, ETFHead, PrototypeHead, distant_directions, simplex_frame
from fedskew.results import load_run

DIGITS = DataShape((1, 8, 8), 10)
SETTINGS: dict[str, Any] = {"rounds": 2, "local_epochs": 1, "device": "cpu", "progress": False}


@pytest.fixture(scope="module")
def fed() -> fs.Federation:
    options = {"image": [1, 8, 8], "samples": 300, "test_samples": 100}
    return fs.federation("synthetic", fs.Dirichlet(clients=4, beta=0.3), **options)


@pytest.mark.parametrize(("classes", "width"), [(2, 2), (10, 10), (10, 64), (100, 128)])
def test_the_frame_is_a_simplex(classes: int, width: int) -> None:
    frame = simplex_frame(classes, width).double().numpy()
    cosines = np.full((classes, classes), -1 / (classes - 1))
    np.fill_diagonal(cosines, 1)
    np.testing.assert_allclose(frame @ frame.T, cosines, rtol=0, atol=1e-6)


@pytest.mark.parametrize("width", [10, 64])
def test_trained_directions_start_as_a_simplex_if_there_is_one(width: int) -> None:
    """Ten directions at equal angles need nine dimensions, and the frame is built in ten."""
    directions = distant_directions(10, width)
    cosines = (directions @ directions.T).numpy()
    np.testing.assert_allclose(cosines[~np.eye(10, dtype=bool)], -1 / 9, rtol=0, atol=1e-6)


def test_the_heads_follow_their_formulas() -> None:
    torch.manual_seed(0)
    x = torch.randn(5, 7)
    cosine, etf, prototype = CosineHead(7, 3), ETFHead(7, 9), PrototypeHead(7, 12)
    assert prototype.scale.tolist() == [1.0]
    nn.init.normal_(prototype.prototypes)
    nn.init.constant_(prototype.scale, 1.5)

    def cosines(h: np.ndarray[Any, Any], m: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return (h / np.linalg.norm(h, axis=1, keepdims=True)) @ (m / np.linalg.norm(m, axis=1, keepdims=True)).T

    with torch.no_grad():
        expected = 10 * cosines(x.numpy(), cosine.directions.numpy())
        np.testing.assert_allclose(cosine(x).numpy(), expected, rtol=0, atol=1e-5)
        projected = x.numpy() @ etf.projection.weight.numpy().T + etf.projection.bias.numpy()
        np.testing.assert_allclose(etf(x).numpy(), 10 * cosines(projected, etf.frame.numpy()), rtol=0, atol=1e-5)
        distances = ((x[:, None] - prototype.prototypes) ** 2).sum(dim=-1).numpy()
        logits = prototype(x).numpy()
        shifted = logits - 1.5 * x.square().sum(dim=-1, keepdim=True).numpy() / 2
        np.testing.assert_allclose(shifted, -1.5 * distances / 2, rtol=0, atol=1e-5)
        assert logits.argmax(axis=1).tolist() == distances.argmin(axis=1).tolist(), "the nearest prototype wins"
    assert etf.frame.shape == (9, 9), "a simplex of nine directions does not fit in seven dimensions"
    assert not etf.frame.requires_grad


@pytest.mark.parametrize(
    ("method", "model", "head"),
    [
        ("fedavg", "dnn", "cosine"), ("scaffold", "dnn", "etf"), ("fedavg", "resnet8", "etf"),
        ("scaffold", "dnn", "prototype"),
        *slow(("scaffold", "dnn", "cosine"), ("fedavg", "dnn", "etf"), ("fedavg", "resnet8", "cosine"),
              ("scaffold", "resnet8", "cosine"), ("scaffold", "resnet8", "etf"), ("fedavg", "resnet8", "prototype")),
    ],
)  # fmt: skip
def test_engines_agree(fed: fs.Federation, head: str, model: str, method: str) -> None:
    runs = [
        fs.run(fed, method, model, head=head, engine=engine, precision="float64", **SETTINGS)
        for engine in ("plain", "stacked")
    ]
    assert [run.engine for run in runs] == ["plain", "stacked"]
    for name, tensor in runs[0].model.state_dict().items():
        torch.testing.assert_close(runs[1].model.state_dict()[name], tensor, rtol=0, atol=1e-9)


@pytest.mark.parametrize("train", ["all", "head"])
def test_the_simplex_is_saved_and_never_trained(fed: fs.Federation, train: str, tmp_path: Path) -> None:
    run = fs.run(fed, "fedetf", "dnn", out=tmp_path / "run", train=train, **SETTINGS)
    state, start = run.model.state_dict(), make_model("dnn", DIGITS, 0, "etf").state_dict()
    assert run.config.head == "etf", "chosen by the method"
    assert torch.equal(state["head.frame"], start["head.frame"])
    assert not torch.equal(state["head.projection.weight"], start["head.projection.weight"])
    assert not torch.equal(state["head.scale"], start["head.scale"])
    x = torch.rand(3, 1, 8, 8)
    again = fs.run(fed, "fedetf", "dnn", out=tmp_path / "run", train=train, **SETTINGS)
    for model in (load_run(tmp_path / "run").model, again.model):
        assert torch.equal(model(x), run.model(x))
    file = str(tmp_path / "run" / "model.safetensors")
    continued = fs.run(fed, "fedetf", "dnn", init=file, seed=5, **SETTINGS)
    assert continued.history[0].evaluation == run.evaluation, "another seed, but the simplex of the file"


@pytest.mark.parametrize("head", ["cosine", "etf", "prototype"])
def test_the_exported_code_has_the_head(
    fed: fs.Federation, head: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = fs.run(fed, "fedavg", "dnn", head=head, out=tmp_path / "run", **SETTINGS)
    export_run(tmp_path / "run", tmp_path / "exported")
    spec = importlib.util.spec_from_file_location("exported_model", tmp_path / "exported" / "model.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "exported_model", module)
    spec.loader.exec_module(module)
    x = torch.rand(3, 1, 8, 8)
    torch.testing.assert_close(module.load().model(x), run.model(x))


@pytest.mark.parametrize("method", ["fedper", "fedrep", "ditto"])
def test_a_personal_head_may_have_a_simplex(fed: fs.Federation, method: str) -> None:
    runs = [
        fs.run(fed, method, "dnn", head="etf", engine=engine, precision="float64", **SETTINGS)
        for engine in ("plain", "stacked")
    ]
    assert runs[0].accuracy == runs[1].accuracy
    assert torch.equal(runs[0].model.state_dict()["head.frame"], runs[1].model.state_dict()["head.frame"])


def test_fedetfs_loss_shifts_logits_by_the_label_counts() -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(6, 4, dtype=torch.float64, generator=generator)
    y, counts = torch.tensor([0, 2, 2, 0, 3, IGNORE]), torch.tensor([7, 0, 40, 1])
    client = Client(counts, {})
    shifted = logits.numpy()[:5] + 0.5 * np.log(np.maximum(counts.numpy(), 1))
    log_p = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    expected = -log_p[np.arange(5), y.numpy()[:5]].mean()
    assert float(FedETF(gamma=0.5).loss(Outputs(logits), y, client)) == pytest.approx(expected, rel=1e-12)


def test_fedgelas_loss_scales_logits_by_the_label_shares() -> None:
    logits = torch.randn(5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    y, counts = torch.tensor([0, 2, 2, 0, 3]), torch.tensor([7, 0, 40, 1])
    scaled = logits.numpy() * 4 * counts.numpy() / 48
    log_p = scaled - np.log(np.exp(scaled).sum(axis=1, keepdims=True))
    expected = -log_p[np.arange(5), y.numpy()].mean()
    assert float(FedGELA().loss(Outputs(logits), y, Client(counts, {}))) == pytest.approx(expected, rel=1e-12)


def test_a_prototype_head_learns_where_the_classes_are(fed: fs.Federation) -> None:
    """It reaches about the accuracy of a linear head, and its prototypes and scale are trained."""
    longer = SETTINGS | {"rounds": 8}
    run, linear = (fs.run(fed, "fedavg", "dnn", head=head, **longer) for head in ("prototype", "linear"))
    assert run.accuracy > linear.accuracy - 0.1
    state, start = run.model.state_dict(), make_model("dnn", DIGITS, 0, "prototype").state_dict()
    for name in ("head.prototypes", "head.scale"):
        assert not torch.equal(state[name], start[name])
    assert torch.equal(start["head.prototypes"], make_model("dnn", DIGITS, 0, "cosine").state_dict()["head.directions"])


@pytest.mark.parametrize("features", [5, 20])
def test_a_cosine_heads_directions_start_with_norm_1(features: int) -> None:
    """FedNH's server averages them with class means of norm 1, so their length matters."""
    torch.testing.assert_close(CosineHead(features, 10).directions.norm(dim=1), torch.ones(10))


def test_fednh_moves_prototypes_towards_the_class_means() -> None:
    rule, generator = SmoothedPrototypes(rho=0.7), torch.Generator().manual_seed(3)
    counts = torch.tensor([[4, 0, 1], [2, 0, 6]])
    features = [torch.randn(n, 5, dtype=torch.float64, generator=generator) for n in (5, 8)]
    labels = [torch.arange(3).repeat_interleave(c) for c in counts]
    sent = torch.nn.functional.normalize(torch.randn(3, 5, dtype=torch.float64, generator=generator))

    def unit(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return x / np.linalg.norm(x, axis=-1, keepdims=True)

    uplinks = []
    for h, y, n in zip(features, labels, counts, strict=True):
        out, client = Outputs(h[:, :3], h), Client(n, {})
        closing = rule.closing(Seen(out, y, torch.zeros(len(y))), client)
        uplinks.append(rule.uplink(Trained({}, torch.ones(()), 0.1, 0.0, closing), client))
    uplink = {name: torch.stack([one[name] for one in uplinks]) for name in uplinks[0]}
    params = {"head.directions": torch.zeros(2, 3, 5, dtype=torch.float64)}
    updates = Updates(params, torch.tensor([0.5, 0.5], dtype=torch.float64), uplink, 0.1, 1.0)
    moved = rule.aggregate({"head.directions": sent}, updates, {})[0]["head.directions"].numpy()
    for c in (0, 2):
        means = [unit(unit(h.numpy())[y.numpy() == c].mean(axis=0)) for h, y in zip(features, labels, strict=True)]
        pooled = unit(sum(n[c] * m for n, m in zip(counts.numpy(), means, strict=True)))
        np.testing.assert_allclose(moved[c], unit(0.7 * sent[c].numpy() + 0.3 * pooled), rtol=0, atol=1e-12)
    np.testing.assert_allclose(moved[1], sent[1].numpy(), rtol=0, atol=1e-12, err_msg="no participant has the class")


def test_fednh_keeps_the_prototype_of_an_absent_class_even_without_smoothing() -> None:
    sent = torch.eye(2, 3, dtype=torch.float64)
    uplink = {
        "class_counts": torch.tensor([[3, 0]]),
        "class_directions": torch.tensor([[[0.0, 0, 1], [0, 0, 0]]]).double(),
    }
    updates = Updates({"head.directions": sent.unsqueeze(0)}, torch.ones(1, dtype=torch.float64), uplink, 0.1, 1.0)
    moved = SmoothedPrototypes(rho=0.0).aggregate({"head.directions": sent}, updates, {})[0]["head.directions"]
    assert moved.tolist() == [[0, 0, 1], [0, 1, 0]]


def test_fednhs_clients_do_not_train_the_prototypes(fed: fs.Federation) -> None:
    run = fs.run(fed, "fednh", "dnn", method_params={"rho": 1.0}, weight_decay=0.01, **SETTINGS)
    start, end = make_model("dnn", DIGITS, 0, "cosine").state_dict(), run.model.state_dict()
    torch.testing.assert_close(end["head.directions"], start["head.directions"])
    assert not torch.equal(end["encoder.1.weight"], start["encoder.1.weight"])
    assert not torch.equal(end["head.scale"], start["head.scale"])


def test_a_head_that_does_not_fit_is_refused(fed: fs.Federation) -> None:
    with pytest.raises(UserError, match="head is 'linear', but method 'fedetf' is made for 'etf'; expected auto"):
        fs.run(fed, "fedetf", head="linear", **SETTINGS)
    with pytest.raises(UserError, match="head is 'etf', but the model is an object, which has its own"):
        fs.run(fed, "fedavg", nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), head="etf", **SETTINGS)
    with pytest.raises(UserError, match="head is 'retrained', but the model is an object, which has its own"):
        fs.run(fed, "fedrod", nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), head="retrained", **SETTINGS)
    with pytest.raises(UserError, match=r"head is 'eft'; expected one of .*; did you mean 'etf'"):
        fs.run(fed, "fedavg", head="eft", **SETTINGS)
    with pytest.raises(UserError, match="method 'fedncm' needs a model that ends in a linear layer 'head'"):
        fs.run(fed, "fedncm", head="cosine", **SETTINGS)


TEMPERED = """
import torch
from fedskew import Classifier

class Tempered(Classifier):
    def forward(self, x):
        return self.head(self.encoder(x)) / 2

def build(inputs):
    return Tempered(torch.nn.Flatten(), torch.nn.Linear(64, inputs.classes))
"""


def test_the_head_of_a_classifier_with_its_own_forward_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tempered.py").write_text(TEMPERED)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"the logits of model 'tempered:build' are not head\(encoder\(x\)\) with a"):
        make_model("tempered:build", DIGITS, head="cosine")
