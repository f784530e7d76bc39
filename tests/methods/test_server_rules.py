"""Server rules on a linear model against numpy, their special cases, and what they refuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from linear_clients import (
    COUNTS,
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
from torch import nn

from fedskew.errors import UserError
from fedskew.experiment.round.server import Server
from fedskew.methods import ServerRule, Tensors, Updates, make_method
from fedskew.methods.fedexp import FedExP
from fedskew.methods.fedopt import FedAdagrad, FedAdam, FedYogi
from fedskew.methods.parts import server_step, weighted_mean
from fedskew.methods.robust import Median, NormClipping, TrimmedMean
from fedskew.models import Classifier

Rule = Callable[[Array, Array, Array], Array]
"""The next model, from the one sent, the clients' [M, C, d+1] and their weights."""


def trained(sent: Array, site: Site, round_number: int, steps: int | None = None, **changed: Any) -> Array:
    return descend(
        sent,
        lambda at: cross_entropy_slope(site.x @ at.T, site).T @ site.x,
        settings(**changed),
        round_number,
        steps,
    )


def follow(method: str, params: dict[str, Any], rule: Rule, rounds: int = 3, **changed: Any) -> None:
    """Play a run and repeat every server step with `rule`."""
    fed = federation()
    states, _ = played(serve(method, params, federation=fed, rounds=rounds, **changed))
    at, expected = sites(fed), theta(states[0])
    weights = np.array([len(site.y) for site in at]) / sum(len(site.y) for site in at)
    for round_number in range(rounds):
        models = np.stack([trained(expected, site, round_number, **changed) for site in at])
        expected = rule(expected, models, weights)
        np.testing.assert_allclose(theta(states[round_number + 1]), expected, rtol=1e-11, atol=1e-13)


def mean_change(sent: Array, models: Array, weights: Array) -> Array:
    return np.tensordot(weights, models - sent, axes=1)


# -- adaptive ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["fedadagrad", "fedyogi", "fedadam"])
def test_adaptive_rules_keep_two_moments(name: str) -> None:
    hyper = {"server_lr": 0.2, "tau": 0.01, "beta1": 0.8} | ({} if name == "fedadagrad" else {"beta2": 0.9})
    kept = {"m": np.zeros((4, 4)), "v": np.full((4, 4), 0.01**2)}

    def rule(sent: Array, models: Array, weights: Array) -> Array:
        change = mean_change(sent, models, weights)
        kept["m"] = 0.8 * kept["m"] + 0.2 * change
        kept["v"] = {
            "fedadagrad": kept["v"] + change**2,
            "fedyogi": np.where(kept["v"] > change**2, kept["v"] - 0.1 * change**2, kept["v"] + 0.1 * change**2),
            "fedadam": 0.9 * kept["v"] + 0.1 * change**2,
        }[name]
        return sent + 0.2 * kept["m"] / (np.sqrt(kept["v"]) + 0.01)

    follow(name, hyper, rule, rounds=4)


def test_without_adaptation_adagrad_is_fedavg() -> None:
    """√v + τ is 2τ while updates are small compared with τ."""
    found = final("fedadagrad", {"tau": 1e6, "server_lr": 2e6})
    np.testing.assert_allclose(found, final("fedavg"), rtol=1e-9)


@pytest.mark.parametrize("rule", [FedAdagrad(), FedYogi(), FedAdam()])
def test_an_adaptive_rule_stays_where_every_client_stays(rule: ServerRule) -> None:
    sent = {"w": torch.tensor([1.0, -2.0])}
    updates = Updates({"w": sent["w"].repeat(2, 1)}, torch.tensor([0.5, 0.5]).double(), {}, 0.1, 1.0)
    after, _ = rule.aggregate(sent, updates, rule.server_state(sent))
    assert torch.equal(after["w"], sent["w"])


def test_adagrad_never_steps_further_than_its_learning_rate() -> None:
    sent = {"w": torch.zeros(3)}
    updates = Updates({"w": torch.tensor([[1e6, -1.0, 1e-9]])}, torch.ones(1).double(), {}, 0.1, 1.0)
    after, _ = FedAdagrad(server_lr=0.1).aggregate(sent, updates, FedAdagrad().server_state(sent))
    assert after["w"].abs().max() <= 0.1


# -- FedNova ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("momentum", [0.0, 0.6])
def test_fednova_normalises_by_the_steps_taken(momentum: float) -> None:
    """One client has two equal batches per epoch, in any order, and the other has one."""
    fed, rounds = federation(np.array([[4, 0, 0, 0], [0, 1, 1, 0]])), 3
    changed = {"momentum": momentum, "batch_size": 2, "rounds": rounds}
    x = fed.dataset.train.x
    x[:4] = x[0]  # any two of the first client's samples make the same batch
    states, _ = played(serve("fednova", federation=fed, **changed))
    at, expected = sites(fed), theta(states[0])
    steps = [2 * settings().local_epochs, settings().local_epochs]
    paths = [sum(momentum**i for step in range(n) for i in range(step + 1)) for n in steps]
    weights = np.array([4, 2]) / 6
    for round_number in range(rounds):
        models = [trained(expected, s, round_number, n, **changed) for s, n in zip(at, steps, strict=True)]
        common = float(weights @ paths)
        mean = sum(a * (expected - w) / path for a, w, path in zip(weights, models, paths, strict=True))
        expected = expected - common * mean
        np.testing.assert_allclose(theta(states[round_number + 1]), expected, rtol=1e-11, atol=1e-13)
    assert np.abs(expected - final("fedavg", federation=fed, **changed)).max() > 1e-4


def test_fednova_with_equal_steps_is_fedavg() -> None:
    np.testing.assert_allclose(final("fednova"), final("fedavg"), rtol=1e-12, atol=1e-14)


def test_fednova_ignores_a_client_without_a_step() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Classifier(nn.BatchNorm1d(3), linear_model().head)
    fed = federation(np.array([[5, 2, 0, 0], [0, 0, 1, 0]]))
    states, _ = played(Server(fed, make_method("fednova"), model, settings(rounds=1)))
    alone, _ = played(Server(fed, make_method("fedavg"), model, settings(rounds=1)))
    moves = [run[1].model.params["head.weight"] - run[0].model.params["head.weight"] for run in (states, alone)]
    torch.testing.assert_close(moves[0], 7 / 8 * moves[1])  # a share of 7/8 of the steps, and of the mean update


# -- FedExP -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("average", ["samples", "uniform"])
def test_fedexp_extrapolates(average: str) -> None:
    steps = []

    def rule(sent: Array, models: Array, weights: Array) -> Array:
        if average == "uniform":
            weights = np.full(len(weights), 1 / len(weights))
        change = mean_change(sent, models, weights)
        lengths = ((models - sent) ** 2).sum(axis=(1, 2))
        steps.append(max(1.0, float(weights @ lengths) / (2 * (float((change**2).sum()) + 1e-4))))
        return sent + steps[-1] * change

    fed = federation(np.diag([8, 5, 4, 3]))
    states, _ = played(serve("fedexp", {"epsilon": 1e-4}, federation=fed, average=average, rounds=3))
    expected, at = theta(states[0]), sites(fed)
    for t in range(3):
        models = np.stack([trained(expected, site, t) for site in at])
        expected = rule(expected, models, np.array([8, 5, 4, 3]) / 20)
        np.testing.assert_allclose(theta(states[t + 1]), expected, rtol=1e-11, atol=1e-13)
    assert max(steps) > 1


def test_fedexp_never_steps_less_than_fedavg() -> None:
    np.testing.assert_allclose(final("fedexp", {"epsilon": 1e9}), final("fedavg"), rtol=1e-12, atol=1e-14)
    lone = federation(COUNTS[:1])
    np.testing.assert_allclose(final("fedexp", federation=lone), final("fedavg", federation=lone), rtol=1e-12)


def test_fedexp_survives_updates_that_cancel() -> None:
    sent = {"w": torch.zeros(2)}
    updates = Updates({"w": torch.tensor([[1.0, 0], [-1.0, 0]])}, torch.tensor([0.5, 0.5]).double(), {}, 0.1, 1.0)
    after, _ = FedExP().aggregate(sent, updates, {})
    assert torch.equal(after["w"], sent["w"])


# -- robust -----------------------------------------------------------------------------------------------


def aggregate_rows(rule: ServerRule, rows: list[list[float]], weights: list[float] | None = None) -> list[float]:
    stacked = torch.tensor(rows, dtype=torch.float64)
    share = torch.tensor(weights or [1 / len(rows)] * len(rows), dtype=torch.float64)
    sent = {"w": torch.zeros(len(rows[0]), dtype=torch.float64)}
    return rule.aggregate(sent, Updates({"w": stacked}, share, {}, 0.1, 1.0), {})[0]["w"].tolist()


def test_the_median_of_odd_and_even_numbers_of_clients() -> None:
    assert aggregate_rows(Median(), [[1, 9], [2, 8], [300, -7]]) == [2, 8]
    assert aggregate_rows(Median(), [[1.0, 0], [2, 0], [4, 1], [300, 1]]) == [3, 0.5]
    assert aggregate_rows(Median(), [[5.0]]) == [5]
    assert aggregate_rows(Median(), [[5.0], [7.0]]) == [6]


def test_the_median_over_rounds() -> None:
    follow("median", {}, lambda sent, models, weights: np.median(models, axis=0))


def test_the_trimmed_mean_over_rounds() -> None:
    follow("trimmed-mean", {"trim": 0.34}, lambda sent, models, weights: np.sort(models, axis=0)[1:-1].mean(axis=0))


@pytest.mark.parametrize(("trim", "left_out"), [(0.0, 0), (0.09, 0), (0.1, 1), (0.19, 1), (0.3, 3), (0.49, 4)])
def test_the_number_trimmed_of_ten(trim: float, left_out: int) -> None:
    values = [float(v**2) for v in range(10)]
    found = aggregate_rows(TrimmedMean(trim), [[v] for v in values])
    assert found == pytest.approx([np.mean(values[left_out : 10 - left_out])])


def test_the_number_trimmed_does_not_suffer_from_rounding() -> None:
    """In floats, 0.29·100 is slightly less than 29."""
    values = [float(v**2) for v in range(100)]
    assert aggregate_rows(TrimmedMean(0.29), [[v] for v in values]) == pytest.approx([np.mean(values[29:71])])


def test_nothing_trimmed_is_the_plain_mean() -> None:
    found = final("trimmed-mean", {"trim": 0.0})
    np.testing.assert_allclose(found, final("fedavg", average="uniform"), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("rule", [Median(), TrimmedMean(0.2)])
def test_one_client_cannot_move_it_far_whatever_it_sends(rule: ServerRule) -> None:
    honest = [[1.0], [1.1], [0.9], [1.05]]
    for lie in (1e30, -1e30):
        assert 0.9 <= aggregate_rows(rule, [*honest, [lie]])[0] <= 1.1


def test_norm_clipping_over_rounds() -> None:
    cut = []

    def rule(sent: Array, models: Array, weights: Array) -> Array:
        change = models - sent
        scale = np.minimum(1, 1.0 / np.sqrt((change**2).sum(axis=(1, 2))))
        cut.extend(scale < 1)
        return sent + np.tensordot(weights * scale, change, axes=1)

    follow("norm-clipping", {"max_norm": 1.0}, rule)
    assert {True, False} <= set(cut)


def test_norm_clipping_with_a_bound_beyond_all_updates_is_fedavg() -> None:
    np.testing.assert_allclose(final("norm-clipping", {"max_norm": 1e6}), final("fedavg"), rtol=1e-12, atol=1e-14)


def test_a_clipped_update_has_the_largest_length_allowed() -> None:
    assert aggregate_rows(NormClipping(5.0), [[30.0, 40.0]]) == pytest.approx([3, 4])
    assert aggregate_rows(NormClipping(5.0), [[0.0, 0.0]]) == [0, 0]


# -- all ---------------------------------------------------------------------------------------------------


class Forgetful(ServerRule):
    """The mean. It returns no state."""

    def aggregate(self, sent: Tensors, updates: Updates, state: Tensors) -> tuple[Tensors, Tensors]:
        return updates.mean(), {}


def test_counters_are_rounded_to_the_nearest_number() -> None:
    stacked = {"batches": torch.tensor([3, 4]), "mean": torch.tensor([3.0, 4.0])}
    found = weighted_mean(stacked, torch.tensor([0.25, 0.75]).double())
    assert (found["batches"].item(), found["mean"].item()) == (4, 3.75)
    assert found["batches"].dtype == torch.int64


def test_the_server_keeps_state_that_the_rule_does_not_return() -> None:
    sent, kept = {"w": torch.zeros(2)}, {"prototypes": torch.ones(3)}
    updates = Updates({"w": torch.ones(1, 2)}, torch.ones(1).double(), {}, 0.1, 1.0)
    params, after = server_step(Forgetful(), (), sent, updates, kept)
    assert torch.equal(params["w"], torch.ones(2))
    assert after == kept


@pytest.mark.parametrize(
    ("name", "params", "expected"),
    [
        ("fedadam", {"server_lr": 0}, "server_lr is 0.0; expected a number > 0"),
        ("fedyogi", {"tau": 0}, "tau is 0.0; expected a number > 0"),
        ("fedadagrad", {"beta1": 1}, "beta1 is 1.0; expected a number ≥ 0 and < 1"),
        ("fedadam", {"beta2": -0.1}, "beta2 is -0.1; expected a number ≥ 0 and < 1"),
        ("fedexp", {"epsilon": 0}, "epsilon is 0.0; expected a number > 0"),
        ("trimmed-mean", {"trim": 0.5}, "trim is 0.5; expected a number ≥ 0 and < 0.5"),
        ("norm-clipping", {"max_norm": 0}, "max_norm is 0.0; expected a number > 0"),
    ],
)
def test_a_bad_hyper_parameter_is_refused_in_one_line(name: str, params: dict[str, Any], expected: str) -> None:
    with pytest.raises(UserError) as refusal:
        make_method(name, params)
    assert str(refusal.value) == expected


def test_adagrad_has_no_second_decay() -> None:
    with pytest.raises(UserError, match="has no parameter 'beta2'"):
        make_method("fedadagrad", {"beta2": 0.9})


@pytest.mark.parametrize(
    "name",
    ["fedadagrad", "fedyogi", "fedadam", "fednova", "fedexp", "median", "trimmed-mean", "norm-clipping"],
)
def test_it_combines_with_an_objective_and_a_solver(name: str) -> None:
    states, rows = played(serve(f"fedvls+fedprox+{name}", clients_per_round=2, engine="stacked"))
    assert all(row.diverged == [] for row in rows)
    assert np.isfinite(theta(states[-1])).all()
