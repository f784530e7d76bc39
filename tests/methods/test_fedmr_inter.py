"""FedMR's inter-class term against its formula, sample by sample and round by round."""

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
from fedskew.losses import IGNORE, class_decorrelation, prototype_margin
from fedskew.methods import make_method
from fedskew.models import Classifier

NAMES = ("encoder.0.weight", "encoder.0.bias", "head.weight", "head.bias")
COUNTS = np.array([[5, 2, 0, 0], [0, 1, 4, 1], [3, 0, 0, 0], [2, 2, 0, 0], [1, 3, 2, 0]])


def margin(features: Tensor, y: Tensor, prototypes: dict[int, Tensor]) -> Tensor:
    """The formula, pair by pair."""
    terms = []
    for label in sorted(set(y.tolist()) & prototypes.keys()):
        own = features[y == label].mean(dim=0)
        for other, g in prototypes.items():
            if other != label:
                terms.append((torch.dist(prototypes[label], g) - torch.dist(own, g)).clamp(min=0))
    return torch.stack(terms).mean() if terms else features.sum() * 0


def drawn(*shape: int) -> Tensor:
    return torch.from_numpy(np.random.default_rng(sum(shape)).normal(size=shape))


def table(prototypes: dict[int, Tensor]) -> tuple[Tensor, Tensor]:
    values, known = torch.full((4, 5), 9.0, dtype=torch.float64), torch.zeros(4, dtype=torch.bool)
    for label, g in prototypes.items():
        values[label], known[label] = g, True
    return values, known


@pytest.mark.parametrize("labels", [(0, 1, 2, 3), (0, 2), (1,), ()])
def test_the_term_matches_the_formula(labels: tuple[int, ...]) -> None:
    prototypes = {label: drawn(label + 1, 5)[label] for label in labels}
    features, y = (0.3 * drawn(7, 5)).requires_grad_(), torch.tensor([0, 0, 1, 2, 2, 2, 0])
    found, expected = prototype_margin(features, y, *table(prototypes)), margin(features, y, prototypes)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(*(torch.autograd.grad(loss, features)[0] for loss in (found, expected)))
    assert (found > 0) == (len(labels) > 1)
    longer, padded = torch.cat([features, drawn(2, 5)]), torch.cat([y, torch.full((2,), IGNORE)])
    torch.testing.assert_close(prototype_margin(longer, padded, *table(prototypes)), found)


def test_at_the_prototype_of_another_class_the_gradient_is_finite() -> None:
    prototypes = {0: torch.zeros(5, dtype=torch.float64), 1: torch.ones(5, dtype=torch.float64)}
    features = torch.ones(2, 5, dtype=torch.float64, requires_grad=True)
    loss = prototype_margin(features, torch.tensor([0, 0]), *table(prototypes))
    assert loss.item() == pytest.approx(5**0.5)
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
    """With three of five clients per round, some classes are absent from some rounds and keep their prototypes."""
    changed: dict[str, Any] = {"rounds": 4, "clients_per_round": 3, "engine": engine}
    mu, nu = 0.05, 0.7
    states, rows = recorded("fedmr-inter", {"mu": mu, "nu": nu}, **changed)
    config, at = settings(**changed), sites(federation(COUNTS))
    weights = [states[0].model.params[name] for name in NAMES]
    prototypes: dict[int, Tensor] = {}

    def outputs(weights: list[Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
        features = torch.tanh(x @ weights[0].T + weights[1])
        return features @ weights[2].T + weights[3], features

    for t, row in enumerate(rows):
        made: list[list[Tensor]] = []
        means: list[dict[int, Tensor]] = []
        for k in row.clients:
            x, y = torch.from_numpy(at[k].x[:, :-1]), torch.from_numpy(at[k].y)
            own = [w.clone().requires_grad_() for w in weights]
            optimizer = torch.optim.SGD(
                own, config.lr * config.lr_decay**t, config.momentum, weight_decay=config.weight_decay
            )
            for _ in range(config.local_epochs):
                logits, features = outputs(own, x)
                loss = cross_entropy(logits, y) + mu * class_decorrelation(features, y)
                optimizer.zero_grad()
                (loss + nu * margin(features, y, prototypes)).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
            made.append([w.detach() for w in own])
            features = outputs(made[-1], x)[1]
            means.append({label: features[y == label].mean(dim=0) for label in set(y.tolist())})
        for label in range(4):
            points = [m[label] for m in means if label in m]
            if points:
                prototypes[label] = torch.stack(points).mean(dim=0)
        sizes = torch.tensor([float(len(at[k].y)) for k in row.clients], dtype=torch.float64)
        weights = [torch.tensordot(sizes / sizes.sum(), torch.stack(ws), 1) for ws in zip(*made, strict=True)]
        for name, expected in zip(NAMES, weights, strict=True):
            torch.testing.assert_close(states[t + 1].model.params[name], expected, rtol=1e-9, atol=1e-11)
    kept = states[-1].models["global"].server_state
    assert kept["prototype_known"].tolist() == [label in prototypes for label in range(4)]


def test_without_the_inter_term_and_in_the_first_round_it_is_fedmr() -> None:
    for params, rounds in (({"mu": 0.1, "nu": 0.0}, 3), ({"mu": 0.1, "nu": 1.0}, 1)):
        both = recorded("fedmr-inter", params, rounds=rounds)[0][-1].model.params
        intra = recorded("fedmr", {"mu": 0.1}, rounds=rounds)[0][-1].model.params
        assert all(torch.equal(both[name], intra[name]) for name in NAMES)


@pytest.mark.parametrize("name", ["mu", "nu"])
def test_negative_weights_are_refused(name: str) -> None:
    with pytest.raises(UserError, match=f"{name} is -1"):
        make_method("fedmr-inter", {name: -1})
