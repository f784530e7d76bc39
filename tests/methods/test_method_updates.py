"""Two rounds of each kind of method on a linear model, step by step, against numpy."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from linear_clients import (
    Array,
    Site,
    averaged,
    cross_entropy_slope,
    descend,
    federation,
    played,
    serve,
    settings,
    sites,
    softmax,
    theta,
)

Slope = Callable[[Array, Array, Site], Array]
"""∂L/∂z from the student's logits, the teacher's and the client."""


def close(found: Array, expected: Array) -> None:
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-13)


def trained(sent: Array, site: Site, slope: Slope, round_number: int) -> Array:
    teacher = site.x @ sent.T
    return descend(sent, lambda at: slope(site.x @ at.T, teacher, site).T @ site.x, settings(), round_number)


def plain(z: Array, teacher: Array, site: Site) -> Array:
    return cross_entropy_slope(z, site)


def restricted(z: Array, support: Array) -> Array:
    """Softmax over each row's support, 0 elsewhere."""
    weights = np.exp(z) * support
    return weights / np.maximum(weights.sum(axis=1, keepdims=True), 1e-300)


def margin(z: Array, teacher: Array, site: Site) -> Array:
    present = site.counts > 0
    shift = np.where(present, -0.5 * np.maximum(site.counts, 1) ** -0.25, 0.0)
    return (restricted(z + shift, np.tile(present, (len(z), 1))) - site.one_hot) / len(z)


def restricted_softmax(z: Array, teacher: Array, site: Site) -> Array:
    scale = np.where(site.counts > 0, 1.0, 0.7)
    return scale * (softmax(scale * z) - site.one_hot) / len(z)


def not_true(z: Array, teacher: Array, site: Site) -> Array:
    others, tau, beta = 1 - site.one_hot, 2.0, 0.7
    pull = restricted(z / tau, others) - restricted(teacher / tau, others)
    return cross_entropy_slope(z, site) + beta * tau**2 * pull / tau / len(z)


def label_masking(z: Array, teacher: Array, site: Site) -> Array:
    others = 1 - site.one_hot
    minority = others * (site.counts <= site.counts.sum() / len(site.counts))
    held = minority.any(axis=1, keepdims=True)
    return cross_entropy_slope(z, site) + held * (restricted(z, others) - restricted(teacher, minority)) / len(z)


def teacher_free(z: Array, teacher: Array, site: Site) -> Array:
    return label_masking(z, np.zeros_like(z), site)


def vacant_and_suppressed(z: Array, teacher: Array, site: Site) -> Array:
    n, p = len(z), site.counts / site.counts.sum()
    vacant = np.tile(site.counts == 0, (n, 1)).astype(float)
    calibrated = restricted(z, np.tile(p, (n, 1))) - site.one_hot
    distilled = restricted(z, vacant) - restricted(teacher, vacant)
    shifted = z - np.log(p + 1e-9) + math.log(1 / len(p) + 1e-9)
    pressed = np.exp(shifted * (1 - site.one_hot))
    suppressed = p * pressed * (1 - site.one_hot) / pressed.sum(axis=0)
    return calibrated / n + 0.1 * distilled / n + 0.005 * suppressed


def papers_suppression(z: Array, teacher: Array, site: Site) -> Array:
    """FedVLS as printed, with weights of 0.3 and 0.2."""
    n, p = len(z), site.counts / site.counts.sum()
    vacant = np.tile(site.counts == 0, (n, 1)).astype(float)
    calibrated = restricted(z, np.tile(p, (n, 1))) - site.one_hot
    distilled = restricted(z, vacant) - restricted(teacher, vacant)
    suppressed = p * restricted(z.T, 1 - site.one_hot.T).T
    return calibrated / n + 0.3 * distilled / n + 0.2 * suppressed


def unbalanced(z: Array, teacher: Array, site: Site) -> Array:
    present = site.counts > 0
    gamma = np.where(present, site.counts.sum() / np.maximum(site.counts, 1), 0.0)
    return gamma * (restricted(gamma * z, np.tile(present, (len(z), 1))) - site.one_hot) / len(z)


@pytest.mark.parametrize(
    ("method", "params", "slope"),
    [
        ("fedavg", {}, plain),
        ("fedlc", {}, margin),
        ("fedrs", {}, restricted_softmax),
        ("fedntd", {"beta": 0.7, "temperature": 2.0}, not_true),
        ("fedlmd", {}, label_masking),
        ("fedlmd-tf", {}, teacher_free),
        ("fedvls", {}, vacant_and_suppressed),
        (
            "fedvls",
            {"distill_weight": 0.3, "suppress_weight": 0.2, "suppress_variant": "paper"},
            papers_suppression,
        ),
        ("fedgr-client", {"gamma": "paper"}, unbalanced),
    ],
)
def test_objectives(method: str, params: dict[str, Any], slope: Slope) -> None:
    fed = federation()
    states, _ = played(serve(method, params, federation=fed))
    at, expected = sites(fed), theta(states[0])
    for round_number in range(2):
        expected = averaged([trained(expected, site, slope, round_number) for site in at], at)
        close(theta(states[round_number + 1]), expected)


def test_fedprox_pulls_every_step_towards_the_model_received() -> None:
    fed = federation()
    states, _ = played(serve("fedprox", {"mu": 0.5}, federation=fed))
    at, expected = sites(fed), theta(states[0])
    for round_number in range(2):
        sent, models = expected, []
        for site in at:

            def direction(now: Array, site: Site = site, sent: Array = sent) -> Array:
                return cross_entropy_slope(site.x @ now.T, site).T @ site.x + 0.5 * (now - sent)

            models.append(descend(sent, direction, settings(), round_number))
        expected = averaged(models, at)
        close(theta(states[round_number + 1]), expected)


@pytest.mark.parametrize("server_lr", [1.0, 0.1])
def test_fedavgm_keeps_a_velocity_on_the_server(server_lr: float) -> None:
    fed = federation()
    states, _ = played(serve("fedavgm", {"server_momentum": 0.7, "server_lr": server_lr}, federation=fed, rounds=3))
    at, expected = sites(fed), theta(states[0])
    velocity = np.zeros_like(expected)
    for round_number in range(3):
        mean = averaged([trained(expected, site, plain, round_number) for site in at], at)
        velocity = 0.7 * velocity + (expected - mean)
        expected = expected - server_lr * velocity
        close(theta(states[round_number + 1]), expected)


@pytest.mark.parametrize("momentum", [0.0, 0.6])
def test_scaffold_with_partial_participation(momentum: float) -> None:
    fed, rounds, server_lr = federation(), 4, 0.8
    changed = {"clients_per_round": 2, "momentum": momentum, "rounds": rounds}
    server = serve("scaffold", {"server_lr": server_lr}, federation=fed, **changed)
    states, rows = played(server)
    config, at, expected = settings(**changed), sites(fed), theta(states[0])
    common, own = np.zeros_like(expected), [np.zeros_like(expected) for _ in at]
    # momentum SGD goes 1, 1 + ρ, 1 + ρ + ρ², … times a constant gradient
    path = sum(momentum**i for step in range(config.local_epochs) for i in range(step + 1))
    for round_number, row in enumerate(rows):
        chosen, models, changes = row.clients, [], []
        for k in chosen:

            def direction(now: Array, k: int = k, common: Array = common) -> Array:
                return cross_entropy_slope(at[k].x @ now.T, at[k]).T @ at[k].x - own[k] + common

            models.append(descend(expected, direction, config, round_number))
            lr = config.lr * config.lr_decay**round_number
            new = own[k] - common + (expected - models[-1]) / (path * lr)
            changes.append((k, new))
        mean = averaged(models, [at[k] for k in chosen])
        common = common + len(chosen) / len(at) * np.mean([new - own[k] for k, new in changes], axis=0)
        for k, new in changes:
            own[k] = new
        expected = expected + server_lr * (mean - expected)
        close(theta(states[round_number + 1]), expected)


def test_the_servers_control_variate_is_the_mean_of_all_clients() -> None:
    server = serve("scaffold", clients_per_round=1, rounds=4)
    last = played(server)[0][-1]
    met = last.clients.versions["global"]
    assert len(met) > 1
    total = sum(state["control/head.weight"] for state in last.clients.read("global", list(met)))
    close(last.models["global"].server_state["control/head.weight"].numpy(), total.numpy() / len(sites(federation())))


def test_fedgr_corrects_each_head_before_the_mean() -> None:
    fed = federation()
    gravity = 0.5
    states, _ = played(serve("fedgr-server", {"gravity": gravity}, federation=fed))
    at, expected = sites(fed), theta(states[0])
    for round_number in range(2):
        heads = np.stack([trained(expected, site, plain, round_number) for site in at])
        lr = settings().lr * settings().lr_decay ** round_number
        pull = regulariser_slope(heads, np.stack([site.counts > 0 for site in at]))
        assert np.abs(pull).max() > 0.1
        expected = averaged(list(heads - gravity * lr * pull), at)
        close(theta(states[round_number + 1]), expected)


def regulariser_slope(u: Array, present: Array) -> Array:
    """∂Reg/∂U, the exact gradient, row by row."""
    slope = np.zeros_like(u)
    clients, classes, _ = u.shape
    for k in range(clients):
        for i in np.flatnonzero(present[k]):
            v = u[k, i]
            pairs = [(z, j) for z in range(clients) if z != k for j in range(classes) if present[z, j]]
            e = {pair: math.exp(u[pair] @ v) for pair in pairs}
            alike = sum(e[z, j] for z, j in pairs if j == i)
            d_a, d_r = sum(e.values()), math.exp(v @ v) + sum(e[z, j] for z, j in pairs if j != i)
            for z, j in pairs:
                if alike:
                    slope[z, j] += (e[z, j] / d_a - (j == i) * e[z, j] / alike) * v
                slope[z, j] += (j != i) * e[z, j] / d_r * v
    return slope


def test_fedgr_can_take_the_mean_of_its_terms_instead_of_the_sum() -> None:
    fed = federation()
    terms = sum(int((site.counts > 0).sum()) for site in sites(fed))
    summed = played(serve("fedgr-server", {"gravity": 0.5 / terms}, federation=fed))[0][-1]
    averaged_terms = played(serve("fedgr-server", {"gravity": 0.5, "reduction": "mean"}, federation=fed))[0][-1]
    close(theta(averaged_terms), theta(summed))


def test_clients_have_equal_weights_with_uniform_average() -> None:
    fed = federation()
    states, _ = played(serve("fedavg", federation=fed, average="uniform", rounds=1))
    models = [trained(theta(states[0]), site, plain, 0) for site in sites(fed)]
    close(theta(states[1]), np.mean(models, axis=0))
