"""FedETF, FedGELA, FedNH and FedUV with the heads they choose, against plain PyTorch, in whole runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from linear_clients import federation, played, settings
from torch import Tensor, nn
from toy_runs import with_fitting_head

from fedskew.experiment.round.server import Server
from fedskew.methods import make_method
from fedskew.models import Classifier
from fedskew.models.heads import replace_head

Weights = dict[str, Tensor]
Loss = Callable[[Weights, Tensor, Tensor], Tensor]

COUNTS = np.array([[5, 2, 0, 0], [0, 3, 6, 0]])
"""Each client has a vacant class of its own, and nobody has the last class."""


def layered_model() -> Classifier:
    with torch.random.fork_rng():
        torch.manual_seed(2)
        return Classifier(nn.Sequential(nn.Linear(3, 5), nn.Tanh()), nn.Linear(5, 4))


# -- the same in plain PyTorch ----------------------------------------------------------------------------


def features(w: Weights, x: Tensor) -> Tensor:
    return (x @ w["encoder.0.weight"].T + w["encoder.0.bias"]).tanh()


def unit(rows: Tensor) -> Tensor:
    return rows / rows.norm(dim=1, keepdim=True)


def etf_logits(w: Weights, x: Tensor) -> Tensor:
    projected = features(w, x) @ w["head.projection.weight"].T + w["head.projection.bias"]
    return w["head.scale"] * unit(projected) @ w["head.frame"].T


def cross_entropy(z: Tensor, y: Tensor) -> Tensor:
    return (z.logsumexp(dim=1) - z[torch.arange(len(y)), y]).mean()


def label_counts(y: Tensor) -> Tensor:
    return y.bincount(minlength=4).double()


def fedetf(w: Weights, x: Tensor, y: Tensor) -> Tensor:
    return cross_entropy(etf_logits(w, x) + 0.7 * label_counts(y).clamp(min=1).log(), y)


def fedgela(w: Weights, x: Tensor, y: Tensor) -> Tensor:
    return cross_entropy(4 * label_counts(y) / len(y) * etf_logits(w, x), y)


def fednh(w: Weights, x: Tensor, y: Tensor) -> Tensor:
    return cross_entropy(w["head.scale"] * unit(features(w, x)) @ unit(w["head.directions"]).T, y)


def feduv(w: Weights, x: Tensor, y: Tensor) -> Tensor:
    h = features(w, x)
    z = h @ w["head.weight"].T + w["head.bias"]
    missing = (0.5 - z.softmax(dim=1).std(dim=0)).clamp(min=0).mean()
    distances = torch.pdist(h) ** 2  # no two samples are equal
    return cross_entropy(z, y) + 2 * missing + 0.4 * (-distances / distances.median()).exp().mean()


def prototype_head(w: Weights, x: Tensor, y: Tensor) -> Tensor:
    distances = ((features(w, x)[:, None] - w["head.prototypes"]) ** 2).sum(dim=2)
    return cross_entropy(-w["head.scale"] * distances / 2, y)


def moved_prototypes(w: Weights, trained: list[Weights], data: list[tuple[Tensor, Tensor]]) -> Tensor:
    """FedNH's server, with ρ = 0.6."""
    prototypes = w["head.directions"].clone()
    for c in range(4):
        pooled = torch.zeros(5, dtype=torch.float64)
        for own, (x, y) in zip(trained, data, strict=True):
            if (y == c).any():
                mean = unit(features(own, x[y == c])).mean(dim=0)
                pooled += (y == c).sum() * mean / mean.norm()
        if pooled.any():
            moved = 0.6 * prototypes[c] + 0.4 * pooled / pooled.norm()
            prototypes[c] = moved / moved.norm()
    return prototypes


def train(loss: Loss, start: Weights, fixed: str, x: Tensor, y: Tensor, number: int) -> Weights:
    """Three epochs of SGD on a client's whole data."""
    leaves = {name: t.clone().requires_grad_() for name, t in start.items() if name != fixed}
    optimiser = torch.optim.SGD(leaves.values(), 0.2 * 0.9**number, momentum=0.6, weight_decay=0.01)
    for _ in range(3):
        optimiser.zero_grad()
        loss({**start, **leaves}, x, y).backward()
        optimiser.step()
    return {**start, **{name: t.detach() for name, t in leaves.items()}}


def reference(loss: Loss, start: Weights, fixed: str) -> Weights:
    fed = federation(COUNTS)
    x, y = torch.from_numpy(fed.dataset.train.x).double(), torch.from_numpy(fed.dataset.train.y)
    data = [(x[rows], y[rows]) for rows in map(torch.from_numpy, fed.indices)]
    w = start
    for number in range(2):
        trained = [train(loss, w, fixed, *own, number) for own in data]
        mean = {name: (7 * trained[0][name] + 9 * trained[1][name]) / 16 for name in w}
        w = mean if loss is not fednh else mean | {fixed: moved_prototypes(w, trained, data)}
    return w


# -- fedskew's runs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["plain", "stacked"])
@pytest.mark.parametrize(
    ("loss", "params", "fixed"),
    [
        (fedetf, {"gamma": 0.7}, "head.frame"),
        (fedgela, {}, "head.frame"),
        (fednh, {"rho": 0.6}, "head.directions"),
        (feduv, {"variance": 2.0, "uniformity": 0.4}, ""),
    ],
)
def test_a_run_is_the_papers(loss: Loss, params: dict[str, Any], fixed: str, engine: str) -> None:
    method = make_method(loss.__name__, params)
    model = with_fitting_head(layered_model(), method)
    start = {name: t.double() for name, t in model.state_dict().items()}
    assert set(start) >= {fixed} - {""}
    states, _ = played(Server(federation(COUNTS), method, model, settings(engine=engine)))
    expected = reference(loss, start, fixed)
    found = states[-1].model.params
    assert found.keys() | {fixed} - {""} == expected.keys()
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=1e-12, msg=name)


@pytest.mark.parametrize("engine", ["plain", "stacked"])
def test_fedavg_trains_a_head_of_prototypes(engine: str) -> None:
    """The loss has the squared distances. fedskew's logits lack |h|²/2, which is the same for all classes."""
    model = replace_head(layered_model(), "prototype")
    start = {name: t.double() for name, t in model.state_dict().items()}
    states, _ = played(Server(federation(COUNTS), make_method("fedavg"), model, settings(engine=engine)))
    for name, expected in reference(prototype_head, start, "").items():
        torch.testing.assert_close(states[-1].model.params[name], expected, rtol=0, atol=1e-12, msg=name)
