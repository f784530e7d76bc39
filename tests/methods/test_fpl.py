"""FINCH against its equation, FPL's terms and rounds against the formula, and FPL in combinations."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from linear_clients import Array, federation, linear_model, played, settings, sites
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity, cross_entropy

from fedskew.data import Federation
from fedskew.errors import UserError
from fedskew.experiment.preparation import check_model
from fedskew.experiment.round.record import RoundRow
from fedskew.experiment.round.server import Server
from fedskew.experiment.round.state import RunState
from fedskew.losses import IGNORE, calibrated_cross_entropy, prototype_contrast, prototype_distance
from fedskew.methods import Client, Outputs, make_method
from fedskew.methods.clustering import finch
from fedskew.methods.fpl import FPL
from fedskew.models import Classifier

NAMES = ("encoder.0.weight", "encoder.0.bias", "head.weight", "head.bias")


# -- FINCH ------------------------------------------------------------------------------------------------


def adjacent(points: Array) -> npt.NDArray[np.bool_]:
    """The paper's equation: i and j are neighbours if one is the other's first, or if both have the same first."""
    n = len(points)
    first = []
    for i in range(n):
        similar = [
            -np.inf if j == i else points[i] @ points[j] / np.linalg.norm(points[i]) / np.linalg.norm(points[j])
            for j in range(n)
        ]
        first.append(int(np.argmax(similar)))
    return np.array(
        [[j == first[i] or first[j] == i or first[i] == first[j] for j in range(n)] for i in range(n)], dtype=bool
    )


def components(linked: Any) -> list[set[int]]:
    groups: list[set[int]] = []
    for i in range(len(linked)):
        touching = [g for g in groups if any(linked[i, j] for j in g)]
        groups = [g for g in groups if g not in touching] + [set.union({i}, *touching)]
    return groups


def partitions(points: Array) -> list[list[set[int]]]:
    """Every partition, from the first to the last with more than one cluster."""
    found = [components(adjacent(points))]
    while len(found[-1]) > 1:
        means = np.stack([points[sorted(g)].mean(axis=0) for g in found[-1]])
        found.append([set().union(*(found[-1][i] for i in group)) for group in components(adjacent(means))])
    return found if len(found) == 1 else found[:-1]


def as_groups(labels: Any) -> set[frozenset[int]]:
    return {frozenset(np.flatnonzero(labels == label).tolist()) for label in np.unique(labels)}


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 8, 13, 40])
@pytest.mark.parametrize("seed", range(5))
def test_finch_matches_its_equation(n: int, seed: int) -> None:
    points = np.random.default_rng(100 * n + seed).normal(size=(n, 3))
    expected = {frozenset(group) for group in partitions(points)[-1]} if n > 1 else {frozenset({0})}
    labels = finch(points)
    assert as_groups(labels) == expected
    assert sorted(set(labels.tolist())) == list(range(len(expected)))


def test_finch_ignores_the_lengths_of_points() -> None:
    points = np.array([[1.0, 0.1], [5.0, 0.2], [0.1, 1.0], [0.3, 9.0]])
    assert as_groups(finch(points)) == {frozenset({0, 1}), frozenset({2, 3})}


def test_equal_and_empty_points_are_one_cluster() -> None:
    assert finch(np.ones((4, 2))).tolist() == [0, 0, 0, 0]
    assert finch(np.zeros((3, 2))).tolist() == [0, 0, 0]


# -- the terms --------------------------------------------------------------------------------------------


def by_sample(features: Tensor, y: Tensor, prototypes: dict[int, Tensor], temperature: float) -> Tensor:
    """Sample by sample, as in the published program."""
    total = torch.zeros((), dtype=features.dtype)
    for f, label in zip(features, y.tolist(), strict=True):
        if label not in prototypes:
            continue
        every = torch.cat(list(prototypes.values()))
        near = torch.exp(cosine_similarity(f.unsqueeze(0), every) / temperature).sum()
        own = torch.exp(cosine_similarity(f.unsqueeze(0), prototypes[label]) / temperature).sum()
        total = total - torch.log(own / near) + (f - prototypes[label].mean(dim=0)).square().mean()
    return total / len(y)


def table(prototypes: dict[int, Tensor], classes: int, width: int) -> tuple[Tensor, Tensor]:
    values = torch.full((classes, width, next(iter(prototypes.values())).shape[-1]), 7.0, dtype=torch.float64)
    known = torch.zeros(classes, width, dtype=torch.bool)
    for label, rows in prototypes.items():
        values[label, : len(rows)], known[label, : len(rows)] = rows, True
    return values, known


def drawn(*shape: int) -> Tensor:
    return torch.from_numpy(np.random.default_rng(sum(shape)).normal(size=shape))


@pytest.mark.parametrize("known", [{0: 2, 1: 1, 3: 3}, {1: 1}, {2: 1, 3: 1}])
def test_the_terms_match_a_loop_over_samples(known: dict[int, int]) -> None:
    prototypes = {label: drawn(clusters, 5) for label, clusters in known.items()}
    values, mask = table(prototypes, 4, 4)
    features, y = drawn(6, 5).requires_grad_(), torch.tensor([0, 1, 1, 2, 3, 3])
    found = prototype_contrast(features, y, values, mask, 0.5) + prototype_distance(features, y, values, mask)
    expected = by_sample(features, y, prototypes, 0.5)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(*(torch.autograd.grad(loss, features)[0] for loss in (found, expected)))


def test_padding_is_ignored_and_a_class_without_prototype_has_no_term() -> None:
    values, mask = table({0: drawn(2, 5), 2: drawn(1, 5)}, 4, 2)
    features, y = drawn(3, 5), torch.tensor([0, 1, 2])
    longer, padded = torch.cat([features, drawn(2, 5)]), torch.cat([y, torch.full((2,), IGNORE)])
    for loss in (prototype_contrast, prototype_distance):
        torch.testing.assert_close(loss(longer, padded, values, mask), loss(features, y, values, mask))
        leaf = features.clone().requires_grad_()
        nothing = loss(leaf, y, values, torch.zeros_like(mask))
        assert nothing.item() == 0
        assert not torch.autograd.grad(nothing, leaf)[0].any()


# -- rounds -----------------------------------------------------------------------------------------------


def two_layers(classes: int = 4) -> Classifier:
    with torch.random.fork_rng():
        torch.manual_seed(4)
        return Classifier(nn.Sequential(nn.Linear(3, 5), nn.Tanh()), nn.Linear(5, classes))


COUNTS = np.array([[5, 2, 0, 0], [0, 1, 4, 1], [3, 0, 0, 0], [2, 2, 0, 0], [1, 3, 2, 0], [4, 1, 0, 0]])


def recorded(
    method: str, params: dict[str, Any] | None = None, fed: Federation | None = None, **changed: Any
) -> tuple[list[RunState], list[RoundRow]]:
    server = Server(fed or federation(COUNTS), make_method(method, params), two_layers(), settings(**changed))
    return played(server)


def outputs(weights: list[Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    features = torch.tanh(x @ weights[0].T + weights[1])
    return features @ weights[2].T + weights[3], features


@pytest.mark.parametrize("engine", ["plain", "stacked"])
@pytest.mark.parametrize("base", ["fedavg", "fedlc"])
def test_rounds_match_the_formula(engine: str, base: str) -> None:
    fed, rounds, temperature = federation(COUNTS), 4, 0.4
    changed: dict[str, Any] = {"rounds": rounds, "clients_per_round": 5, "engine": engine}
    method = "fpl" if base == "fedavg" else "fpl+fedlc"
    states, rows = recorded(method, {"temperature": temperature}, fed, **changed)
    config, at = settings(**changed), sites(fed)
    weights = [states[0].model.params[name] for name in NAMES]
    prototypes: dict[int, Tensor] = {}
    most = 0
    for t, row in enumerate(rows):
        lr = config.lr * config.lr_decay**t
        made, means = [], []
        for k in row.clients:
            x, y = torch.from_numpy(at[k].x[:, :-1]), torch.from_numpy(at[k].y)
            own = [w.clone().requires_grad_() for w in weights]
            optimizer = torch.optim.SGD(own, lr, config.momentum, weight_decay=config.weight_decay)
            for _ in range(config.local_epochs):
                logits, features = outputs(own, x)
                margin = torch.from_numpy(at[k].counts).double().pow(-0.25)
                loss = cross_entropy(logits if base == "fedavg" else logits - 0.5 * margin, y)
                if prototypes:
                    loss = loss + by_sample(features, y, prototypes, temperature)
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
            made.append([w.detach() for w in own])
            features = outputs(made[-1], x)[1]
            means.append({label: features[y == label].mean(dim=0) for label in set(y.tolist())})
        prototypes = {}
        for label in range(4):
            points = [m[label] for m in means if label in m]
            if points:
                array = torch.stack(points).numpy()
                groups = partitions(array)[-1] if len(points) > 1 else [{0}]
                prototypes[label] = torch.stack([torch.from_numpy(array[sorted(g)].mean(axis=0)) for g in groups])
                most = max(most, len(groups))
        sizes = torch.tensor([float(len(at[k].y)) for k in row.clients], dtype=torch.float64)
        shares = sizes / sizes.sum()
        weights = [torch.tensordot(shares, torch.stack(ws), 1) for ws in zip(*made, strict=True)]
        for name, expected in zip(NAMES, weights, strict=True):
            torch.testing.assert_close(states[t + 1].model.params[name], expected, rtol=1e-9, atol=1e-11)
    assert most > 1  # otherwise clusters are not tested


@pytest.mark.parametrize("method", ["fedavg", "fedvls", "fedlc"])
def test_in_the_first_round_it_equals_its_base(method: str) -> None:
    alone = recorded(method, rounds=1)[0][-1].model.params
    with_it = recorded("fpl" if method == "fedavg" else f"{method}+fpl", rounds=1)[0][-1].model.params
    assert all(torch.equal(with_it[name], alone[name]) for name in NAMES)
    alone, with_it = (recorded(m, rounds=2)[0][-1].model.params for m in (method, f"{method}+fpl"))
    assert any(not torch.allclose(with_it[name], alone[name]) for name in NAMES)


def test_combined_with_fedvls_both_losses_are_added() -> None:
    method = make_method("fpl+fedvls")
    (stage,) = method.stages(1, 1, {})
    logits, features, y = drawn(5, 4), drawn(5, 3), torch.tensor([0, 0, 1, 1, 1])
    values, mask = table({0: drawn(1, 3), 1: drawn(2, 3)}, 4, 2)
    client = Client(torch.tensor([4, 6, 3, 1]), {}, {"prototypes": values, "prototype_known": mask})
    out = Outputs(logits, features, {"teacher": Outputs(logits)})
    alone = stage.objective.loss(out, y, client) - FPL().term(out, y, client)
    torch.testing.assert_close(alone, method.objective.loss(out, y, client))  # type: ignore[union-attr]
    assert float(alone) > float(calibrated_cross_entropy(logits, y, client.label_counts)) - 1
    assert stage.objective.companions() == method.objective.companions()  # type: ignore[union-attr]


def test_the_table_of_prototypes_grows_with_the_clusters_and_never_shrinks() -> None:
    states, _ = recorded("fpl", rounds=3)
    widths = [state.models["global"].server_state["prototypes"].shape[1] for state in states]
    assert widths[0] == 1
    assert widths == sorted(widths)


def test_the_pass_costs_a_forward_of_each_sample() -> None:
    _, rows = recorded("fpl", local_epochs=2)
    assert [row.compute for row in rows] == pytest.approx([1 + 1 / 6] * 2)


def test_two_regularisers_and_models_without_a_head_are_refused() -> None:
    with pytest.raises(UserError, match="both set the regulariser"):
        make_method("fpl+fpl")
    with pytest.raises(UserError, match="linear layer 'head'"):
        check_model(make_method("fpl"), torch.nn.Linear(3, 4), 4)
    check_model(make_method("fpl"), linear_model(), 4)
    with pytest.raises(UserError, match="temperature"):
        make_method("fpl", {"temperature": 0})
