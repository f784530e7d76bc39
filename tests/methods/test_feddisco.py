"""FedDisco's weights against numpy, in a whole run, combined with server rules, and what it refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from linear_clients import (
    Array,
    Site,
    cross_entropy_slope,
    descend,
    federation,
    final,
    linear_model,
    played,
    serve,
    settings,
    sites,
    theta,
)

from fedskew.errors import UserError
from fedskew.experiment.preparation import prepare
from fedskew.methods import Method, Tensors, Updates, Weighting, make_method
from fedskew.methods.fedavg import SampleWeights, UniformWeights
from fedskew.methods.feddisco import FedDisco


def weights_in_numpy(at: list[Site], a: float, b: float, distance: str, target: Array) -> Array:
    sizes = np.array([len(site.y) for site in at])
    shares = np.stack([site.counts / site.counts.sum() for site in at])
    if distance == "l2":
        apart = np.sqrt(((shares - target) ** 2).sum(axis=1))
    else:
        apart = np.array([sum(p * np.log(p / t) for p, t in zip(row, target, strict=True) if p > 0) for row in shares])
        apart = apart / apart.sum()
    raw = np.maximum(sizes / sizes.sum() - a * apart + b, 0)
    return raw / raw.sum()


def slope(at: Array, site: Site) -> Array:
    return cross_entropy_slope(site.x @ at.T, site).T @ site.x


@pytest.mark.parametrize("engine", ["plain", "stacked"])
@pytest.mark.parametrize(
    "params",
    [
        {},
        {"distance": "l2", "discrepancy_weight": 0.4},
        {"target": [0.4, 0.3, 0.2, 0.1], "bias": 0.0},
        {"discrepancy_weight": 0.9, "bias": 0.05},
    ],
)
@pytest.mark.parametrize("server", ["", "+fedavgm"])
def test_a_run_has_the_published_weights(params: dict[str, Any], server: str, engine: str) -> None:
    fed, rounds = federation(), 3
    momentum = {"server_momentum": 0.7} if server else {}
    states, _ = played(serve(f"feddisco{server}", params | momentum, federation=fed, rounds=rounds, engine=engine))
    at, expected, velocity = sites(fed), theta(states[0]), np.zeros((4, 4))
    target = np.array(params.get("target", [0.25] * 4))
    weights = weights_in_numpy(
        at, params.get("discrepancy_weight", 0.5), params.get("bias", 0.1), params.get("distance", "kl"), target
    )
    assert np.abs(weights - [7 / 16, 6 / 16, 3 / 16]).max() > 0.03
    for t in range(rounds):
        models = np.stack([descend(expected, lambda v, s=s: slope(v, s), settings(), t) for s in at])
        mean = np.tensordot(weights, models, axes=1)
        velocity = (0.7 * velocity if server else 0) + expected - mean
        expected = expected - velocity
        np.testing.assert_allclose(theta(states[t + 1]), expected, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("engine", ["plain", "stacked"])
def test_without_discrepancy_and_bias_it_is_fedavg(engine: str) -> None:
    found = final("feddisco", {"discrepancy_weight": 0.0, "bias": 0.0}, engine=engine)
    np.testing.assert_allclose(found, final("fedavg", engine=engine), rtol=1e-13, atol=1e-15)


def test_a_large_bias_makes_the_weights_equal() -> None:
    found = final("feddisco", {"bias": 1e9})
    np.testing.assert_allclose(found, final("fedavg", average="uniform"), rtol=1e-7, atol=1e-9)


def updates(distances: list[float], weights: list[float]) -> Updates:
    uplink = {"label_distance": 1 + torch.tensor(distances, dtype=torch.float64)}
    return Updates({}, torch.tensor(weights, dtype=torch.float64), uplink, 0.1, 1.0)


def test_a_far_client_has_no_weight_and_equal_clients_keep_theirs() -> None:
    far = FedDisco(bias=0.0).weigh({}, updates([0.0, 1.0], [0.8, 0.2]), {})
    assert far.tolist() == pytest.approx([0.8, 0.0])
    alike = FedDisco(bias=0.0).weigh({}, updates([0.0, 0.0], [0.8, 0.2]), {})
    assert alike.tolist() == pytest.approx([0.8, 0.2])


def test_if_no_weight_is_positive_samples_count() -> None:
    found = FedDisco(discrepancy_weight=9.0, bias=-1.0).weigh({}, updates([1.0, 2.0], [0.8, 0.2]), {})
    assert found.tolist() == [0.8, 0.2]


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"discrepancy_weight": -1.0}, "discrepancy_weight is -1.0; expected a number ≥ 0"),
        ({"target": [0.5, 0.6]}, "expected a positive share for each class, with the sum 1"),
        ({"target": [1.0, 0.0]}, "expected a positive share for each class, with the sum 1"),
        ({"distance": "kll"}, "did you mean 'kl'"),
    ],
)
def test_impossible_values_are_refused(params: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as refusal:
        make_method("feddisco", params)
    assert message in str(refusal.value)


def test_shares_for_another_number_of_classes_are_refused() -> None:
    with pytest.raises(UserError, match="expected 4 shares, one for each class"):
        make_method("feddisco", {"target": [0.5, 0.5]}).weighting.check({}, 4)  # type: ignore[union-attr]


# -- weightings -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("weighting", "average"), [(SampleWeights(), "samples"), (UniformWeights(), "uniform")])
def test_average_names_a_weighting(weighting: Weighting, average: str) -> None:
    assert np.array_equal(final(Method("by-hand", weighting=weighting)), final("fedavg", average=average))


def test_a_method_that_sets_the_weights_refuses_an_average() -> None:
    config = settings(method="feddisco", average="uniform")
    with pytest.raises(UserError, match="average is 'uniform', but method 'feddisco' sets the weights itself"):
        prepare(config, given=federation(), model=linear_model())


class NoVector(Weighting):
    def weigh(self, sent: Tensors, updates: Updates, state: Tensors) -> Any:
        return torch.ones(2)


def test_a_wrong_number_of_weights_is_refused() -> None:
    with pytest.raises(
        UserError, match=r"weigh\(\) of NoVector returned a float32 tensor of shape 2; expected a tensor of 3"
    ):
        final(NoVector())
