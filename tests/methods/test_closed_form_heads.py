"""FedNCM, Fed3R and AFL against the same heads computed from all features in one place."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

import fedskew as fs
from fedskew.errors import UserError
from fedskew.losses import IGNORE
from fedskew.methods import make_method
from fedskew.methods.afl import AnalyticHead
from fedskew.methods.parts import Client, Outputs, Seen, Trained
from fedskew.models import Classifier, DataShape, make_model

Array = npt.NDArray[np.float64]
METHODS = ("fedncm", "fed3r", "afl")
SPLITS = (fs.Dirichlet(clients=7, beta=0.05, min_size=1), fs.Shards(clients=10, shards=1), fs.IID(clients=1))
SETTINGS: dict[str, Any] = {"device": "cpu", "precision": "float64", "engine": "plain", "progress": False}


@pytest.fixture(scope="module")
def model() -> Classifier:
    """A small model without features that are always zero."""
    made = make_model("dnn", DataShape((1, 8, 8), 10), 4)
    assert isinstance(made, Classifier)
    made.encoder = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 24), torch.nn.Tanh())
    made.head = torch.nn.Linear(24, 10)
    return made


@pytest.fixture(scope="module")
def data(model: Classifier) -> tuple[Array, npt.NDArray[np.int64]]:
    """The features of all training samples, and their labels."""
    digits = fs.load("digits")
    x = (torch.tensor(digits.train.x).double() / 255 - digits.mean[0]) / digits.std[0]
    with torch.no_grad():
        features = model.double().encoder(x).numpy()
    model.float()
    return features, digits.train.y


def head(method: str, model: Classifier, split: Any, data: Any = "digits", **settings: Any) -> tuple[Array, Array]:
    result = fs.run(fs.federation(data, split), method, model=model, **(SETTINGS | settings))
    state = result.model.state_dict()
    encoder = {name: t for name, t in state.items() if name.startswith("encoder")}
    assert all(torch.equal(t.float(), model.state_dict()[name].float()) for name, t in encoder.items())
    return state["head.weight"].numpy(), state["head.bias"].numpy()


def expected_head(method: str, z: Array, y: npt.NDArray[np.int64]) -> tuple[Array, Array]:
    """The formulas of the papers, on all data at once."""
    labels = np.eye(10)[y]
    if method == "fedncm":
        means = np.stack([z[y == c].mean(axis=0) for c in range(10)])
        return means / np.linalg.norm(means, axis=1, keepdims=True), np.zeros(10)
    if method == "afl":
        return np.linalg.lstsq(z, labels, rcond=None)[0].T, np.zeros(10)
    ones = np.hstack([z, np.ones((len(z), 1))])
    # ridge regression as least squares on data with √λ·I below
    rows = np.vstack([ones, np.sqrt(0.01) * np.eye(ones.shape[1])])
    solution = np.linalg.lstsq(rows, np.vstack([labels, np.zeros((ones.shape[1], 10))]), rcond=None)[0]
    norm = np.linalg.norm(solution[:-1], axis=0)
    return (solution[:-1] / norm).T, solution[-1] / norm


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("split", SPLITS, ids=["dirichlet", "one class each", "one client"])
def test_every_split_gives_the_head_of_all_data(
    method: str, split: Any, model: Classifier, data: tuple[Array, npt.NDArray[np.int64]]
) -> None:
    weight, bias = head(method, model, split)
    expected_weight, expected_bias = expected_head(method, *data)
    np.testing.assert_allclose(weight, expected_weight, rtol=0, atol=1e-9)
    np.testing.assert_allclose(bias, expected_bias, rtol=0, atol=1e-9)


def test_afl_does_not_depend_on_gamma(model: Classifier) -> None:
    heads = [head("afl", model, SPLITS[0], method_params={"gamma": gamma})[0] for gamma in (0.01, 1.0, 100.0)]
    for other in heads[1:]:
        np.testing.assert_allclose(other, heads[0], rtol=0, atol=1e-8)


def test_the_nearest_mean_by_distance(model: Classifier, data: tuple[Array, npt.NDArray[np.int64]]) -> None:
    z, y = data
    weight, bias = head("fedncm", model, SPLITS[0], method_params={"distance": "euclidean"})
    means = np.stack([z[y == c].mean(axis=0) for c in range(10)])
    nearest = ((z[:, None] - means[None]) ** 2).sum(axis=-1).argmin(axis=1)
    assert np.array_equal((z @ weight.T + bias).argmax(axis=1), nearest)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "settings", [{"engine": "stacked"}, {"engine": "pool"}, {"train": "head"}, {"clients_per_round": 2}], ids=str
)
def test_engines_cached_features_and_sampling_do_not_matter(
    method: str, settings: dict[str, Any], model: Classifier
) -> None:
    expected, found = head(method, model, SPLITS[0]), head(method, model, SPLITS[0], **settings)
    for some, other in zip(expected, found, strict=True):
        np.testing.assert_allclose(other, some, rtol=0, atol=1e-9)


@pytest.mark.parametrize("method", METHODS)
def test_batch_norm_keeps_its_statistics_and_no_sample_is_left_out(method: str) -> None:
    """A client whose last batch has one sample could not train BatchNorm on it, but can send its features."""
    model = make_model("resnet8", DataShape((1, 8, 8), 10), 1)
    assert isinstance(model, Classifier)
    digits = fs.load("digits").train
    few = fs.load((digits.x[:250], digits.y[:250]))
    assert any(fs.federation(few, SPLITS[0]).sizes % 7 == 1)
    heads = [head(method, model, split, few, batch_size=7, method_params={}) for split in (SPLITS[0], SPLITS[2])]
    np.testing.assert_allclose(heads[0][0], heads[1][0], rtol=0, atol=1e-6)


def test_one_round_without_training_is_recorded(model: Classifier) -> None:
    result = fs.run(
        fs.federation("digits", SPLITS[0]), "fed3r", model=model, rounds=30, clients_per_round=2, **SETTINGS
    )
    (row,) = result.history[1:]
    assert row.stage == "closed form"
    assert row.clients == list(range(7))
    assert row.loss is None
    assert row.visits == 0
    assert row.compute == pytest.approx(1 / 3 / 5), "a forward pass, relative to five local epochs"
    sums = 7 * 8 * (25 * 25 + 10 * 25)
    parameters = 7 * 8 * sum(p.numel() for p in model.parameters())
    assert row.bytes["up"] == parameters + sums


@pytest.mark.parametrize("method", METHODS)
def test_nothing_combines_with_them(method: str) -> None:
    for other in ("fedsam", "fedavgm", "fedprox", "feddisco", "fpl"):
        with pytest.raises(UserError, match=f"'{method}' trains no client, so it cannot be combined"):
            make_method(f"{method}+{other}")


@pytest.mark.parametrize("method", METHODS)
def test_bf16_is_replaced_by_float32(method: str, model: Classifier) -> None:
    fed = fs.federation("digits", SPLITS[0])
    exact, coarse = (
        fs.run(fed, method, model=model, **(SETTINGS | {"precision": precision})) for precision in ("float32", "bf16")
    )
    assert coarse.config.precision == "float32"
    assert coarse.evaluation == exact.evaluation


@pytest.mark.parametrize("method", METHODS)
def test_padding_adds_nothing_to_the_sums(method: str) -> None:
    rule, client = make_method(method).server, Client(torch.tensor([2, 1]), {})
    z, y = torch.randn(5, 3, dtype=torch.float64), torch.tensor([0, 1, 0])
    whole = rule.opening(Seen(Outputs(z[:3, :2], z[:3]), y, torch.zeros(3)), client)
    padded = rule.opening(Seen(Outputs(z[:, :2], z), torch.cat([y, torch.full((2,), IGNORE)]), torch.zeros(5)), client)
    torch.testing.assert_close(padded, whole)


def test_what_afls_clients_send_reveals_label_counts() -> None:
    """So AFL must declare them. The vector v has zᵀv = 1 for every sample, because the features are independent."""
    generator = torch.Generator().manual_seed(0)
    y = torch.tensor([0, 0, 0, 2, 2, 3])
    z = torch.randn(6, 8, dtype=torch.float64, generator=generator)
    method, client = AnalyticHead(gamma=0.5), Client(torch.bincount(y, minlength=4), {})
    opening = method.opening(Seen(Outputs(z[:, :4], z), y, torch.zeros(6)), client)
    sent = method.uplink(Trained({}, torch.ones(()), 0.1, 0.0, {}), replace(client, opening=opening))
    sums = sent["regularised_gram"] @ sent["own_head"]
    gram = sent["regularised_gram"] - 0.5 * torch.eye(8, dtype=torch.float64)
    v = torch.linalg.pinv(gram, hermitian=True, rtol=1e-10) @ sums.sum(dim=1)
    torch.testing.assert_close(sums.T @ v, client.label_counts.double(), rtol=0, atol=1e-8)
    assert "label counts" in AnalyticHead.reveals


@pytest.mark.parametrize(
    ("method", "params", "words"),
    [
        ("fed3r", {}, "Fed3R computes a bias, but the model's head has none; expected .* or method afl"),
        ("fedncm", {"distance": "euclidean"}, "'euclidean' computes a bias, .* or distance 'cosine'"),
    ],
)
def test_a_head_that_cannot_hold_the_computed_bias_is_refused(method: str, params: Any, words: str) -> None:
    """It would predict with the weights alone, which no formula means."""
    encoder = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 24), torch.nn.Tanh())
    without_bias = Classifier(encoder, torch.nn.Linear(24, 10, bias=False))
    fed = fs.federation("digits", SPLITS[0])
    with pytest.raises(UserError, match=words):
        fs.run(fed, method, model=without_bias, method_params=params, **SETTINGS)
    for other in ("afl", "fedncm"):  # what the messages advise
        assert fs.run(fed, other, model=without_bias, **SETTINGS).accuracy > 0.5


def test_mistakes_are_one_line() -> None:
    for method, params, words in (
        ("fed3r", {"ridge": 0}, "ridge is 0.0; expected a number > 0"),
        ("afl", {"gamma": -1}, "gamma is -1.0; expected a number > 0"),
        ("fedncm", {"distance": "cosin"}, "did you mean 'cosine'"),
    ):
        with pytest.raises(UserError, match=words):
            make_method(method, params)
    own = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    with pytest.raises(UserError, match="method 'fedncm' needs a model that ends in a linear layer 'head'"):
        fs.run(fs.federation("digits", SPLITS[0]), "fedncm", model=own, **SETTINGS)
