"""FedLF against its formula, round by round, and the cases in which it equals another method."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from linear_clients import federation, played, settings, sites
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedskew.errors import UserError
from fedskew.experiment.round.record import RoundRow
from fedskew.experiment.round.server import Server
from fedskew.experiment.round.state import RunState
from fedskew.losses import IGNORE, centre_cross_entropy, decorrelation
from fedskew.methods import make_method
from fedskew.models import Classifier

NAMES = ("encoder.0.weight", "encoder.0.bias", "head.weight", "head.bias")
COUNTS = np.array([[5, 2, 0, 0], [0, 1, 4, 1], [3, 0, 0, 0], [2, 2, 0, 0], [1, 3, 2, 0]])


def centred(features: Tensor, y: Tensor, centres: Tensor, limit: float = 100.0) -> Tensor:
    """The formula, sample by sample and class by class."""
    gaps = [torch.dist(a, b) for a in centres for b in centres]
    margin = min(float(max(gaps)), limit)
    rows = [
        [-torch.dist(f, centre) - (margin if c == label else 0.0) for c, centre in enumerate(centres)]
        for f, label in zip(features, y.tolist(), strict=True)
    ]
    return cross_entropy(torch.stack([torch.stack(row) for row in rows]), y)


def drawn(*shape: int) -> Tensor:
    return torch.from_numpy(np.random.default_rng(sum(shape)).normal(size=shape))


@pytest.mark.parametrize("limit", [100.0, 1.5, 0.0])
def test_the_term_matches_the_formula(limit: float) -> None:
    features, centres, y = drawn(7, 5).requires_grad_(), drawn(4, 5), torch.tensor([0, 0, 1, 2, 3, 2, 0])
    centres[3] = 0
    found, expected = centre_cross_entropy(features, y, centres, limit), centred(features, y, centres, limit)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(*(torch.autograd.grad(loss, features)[0] for loss in (found, expected)))
    longer, padded = torch.cat([features, drawn(2, 5)]), torch.cat([y, torch.full((2,), IGNORE)])
    torch.testing.assert_close(centre_cross_entropy(longer, padded, centres, limit), found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_at_its_centre_and_for_equal_centres_the_gradient_is_finite(dtype: torch.dtype) -> None:
    point = drawn(3, 5).to(dtype)
    for centres in (point, point[:1].expand(3, 5), torch.zeros_like(point)):
        features = point.clone().requires_grad_()
        loss = centre_cross_entropy(features, torch.tensor([0, 1, 2]), centres)
        assert loss.isfinite()
        assert torch.autograd.grad(loss, features)[0].isfinite().all()


def recorded(
    method: str, params: dict[str, Any] | None = None, **changed: Any
) -> tuple[list[RunState], list[RoundRow]]:
    with torch.random.fork_rng():
        torch.manual_seed(4)
        model = Classifier(nn.Sequential(nn.Linear(3, 5), nn.Tanh()), nn.Linear(5, 4))
    return played(Server(federation(COUNTS), make_method(method, params), model, settings(**changed)))


@pytest.mark.parametrize("engine", ["plain", "stacked"])
def test_rounds_match_the_formula(engine: str) -> None:
    alpha, pull, apart = 0.4, 0.6, 0.2
    params = {"alpha": alpha, "centre_weight": pull, "decorrelation_weight": apart}
    changed: dict[str, Any] = {"rounds": 3, "clients_per_round": 3, "engine": engine}
    states, rows = recorded("fedlf", params, **changed)
    config, at = settings(**changed), sites(federation(COUNTS))
    weights = [states[0].model.params[name] for name in NAMES]

    def outputs(weights: list[Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
        features = torch.tanh(x @ weights[0].T + weights[1])
        return features @ weights[2].T + weights[3], features

    for t, row in enumerate(rows):
        made: list[list[Tensor]] = []
        for k in row.clients:
            x, y, n = (torch.from_numpy(a) for a in (at[k].x[:, :-1], at[k].y, at[k].counts))
            received = outputs(weights, x)[1].detach()
            centres = torch.stack([received[y == c].mean(dim=0) if n[c] else torch.zeros(5).double() for c in range(4)])
            scale = alpha + (1 - alpha) * n / n.max()
            own = [w.clone().requires_grad_() for w in weights]
            lr = config.lr * config.lr_decay**t
            optimiser = torch.optim.SGD(own, lr, config.momentum, weight_decay=config.weight_decay)
            for _ in range(config.local_epochs):
                logits, features = outputs(own, x)
                loss = cross_entropy(scale * logits, y) + pull * centred(features, y, centres)
                optimiser.zero_grad()
                (loss + apart * decorrelation(features, y)).backward()  # type: ignore[no-untyped-call]
                optimiser.step()
            made.append([w.detach() for w in own])
        sizes = torch.tensor([float(len(at[k].y)) for k in row.clients], dtype=torch.float64)
        weights = [torch.tensordot(sizes / sizes.sum(), torch.stack(ws), 1) for ws in zip(*made, strict=True)]
        for name, expected in zip(NAMES, weights, strict=True):
            torch.testing.assert_close(states[t + 1].model.params[name], expected, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize(
    ("params", "other", "its"),
    [
        ({"alpha": 1.0, "centre_weight": 0.0, "decorrelation_weight": 0.0}, "fedavg", {}),
        ({"centre_weight": 0.0, "decorrelation_weight": 0.0}, "fedrs", {"alpha": 0.25, "soft": True}),
        ({"alpha": 1.0, "centre_weight": 0.0, "decorrelation_weight": 0.2}, "feddecorr", {"beta": 0.2}),
        ({"centre_weight": 0.0}, "fedrs+feddecorr", {"alpha": 0.25, "soft": True, "beta": 0.01}),
    ],
)
def test_without_its_other_terms_it_equals_another_method(
    params: dict[str, Any], other: str, its: dict[str, Any]
) -> None:
    one, same = recorded("fedlf", params)[0][-1].model.params, recorded(other, its)[0][-1].model.params
    for name in NAMES:
        torch.testing.assert_close(one[name], same[name], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("off", [{"alpha": 1.0}, {"centre_weight": 0.0}, {"decorrelation_weight": 0.0}])
def test_with_its_own_defaults_each_term_counts(off: dict[str, float]) -> None:
    whole, less = (recorded("fedlf", params)[0][-1].model.params for params in ({}, off))
    assert max(float((less[name] - whole[name]).abs().max()) for name in NAMES) > 1e-7


@pytest.mark.parametrize("value", [-0.1, 1.5])
def test_a_scale_beyond_one_is_refused(value: float) -> None:
    with pytest.raises(UserError, match=f"alpha is {value}; expected a number from 0 to 1"):
        make_method("fedlf", {"alpha": value})


@pytest.mark.parametrize("name", ["centre_weight", "decorrelation_weight", "max_margin"])
def test_negative_numbers_are_refused(name: str) -> None:
    with pytest.raises(UserError, match=f"{name} is -1.0; expected a number ≥ 0"):
        make_method("fedlf", {name: -1})
