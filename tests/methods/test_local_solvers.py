"""Local solvers on a linear model against numpy, their special cases, and what they refuse."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from linear_clients import (
    Array,
    Site,
    averaged,
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
from toy_runs import plan_round

from fedskew.data import Federation
from fedskew.engine.data.batches import half_targets
from fedskew.errors import UserError
from fedskew.experiment.round.server import Server
from fedskew.experiment.round.state import RunState
from fedskew.losses import IGNORE
from fedskew.methods import Client, Tensors, Updates, make_method
from fedskew.methods.fedgf import PerturbedMean
from fedskew.methods.fedsam import ascend
from fedskew.methods.parts import LossPart
from fedskew.methods.perfedavg import PerFedAvg
from fedskew.models import Classifier


def slope(at: Array, site: Site) -> Array:
    return cross_entropy_slope(site.x @ at.T, site).T @ site.x


def ascend_in_numpy(at: Array, site: Site, rho: float) -> Array:
    g = slope(at, site)
    return at + rho * g / np.sqrt((g**2).sum())


def close(found: Array, expected: Array) -> None:
    np.testing.assert_allclose(found, expected, rtol=1e-11, atol=1e-13)


def path_length(steps: int, momentum: float) -> float:
    return sum(momentum**i for step in range(steps) for i in range(step + 1))


# -- FedSAM and MoFedSAM --------------------------------------------------------------------------------


def test_fedsam_takes_the_gradient_at_the_worst_point_nearby() -> None:
    fed = federation()
    states, _ = played(serve("fedsam", {"rho": 0.3}, federation=fed))
    at, expected = sites(fed), theta(states[0])
    for t in range(2):
        models = [descend(expected, lambda v, s=s: slope(ascend_in_numpy(v, s, 0.3), s), settings(), t) for s in at]
        expected = averaged(models, at)
        close(theta(states[t + 1]), expected)


@pytest.mark.parametrize("engine", ["plain", "stacked"])
@pytest.mark.parametrize(
    ("method", "params", "other", "its"),
    [
        ("fedsam", {"rho": 0.0}, "fedavg", {}),
        ("mofedsam", {"beta": 1.0, "rho": 0.2}, "fedsam", {"rho": 0.2}),
        ("mofedsam", {"beta": 1.0, "rho": 0.0}, "fedavg", {}),
        ("fedcm", {"alpha": 1.0}, "fedavg", {}),
        ("fedcm", {"alpha": 0.3}, "mofedsam", {"beta": 0.3, "rho": 0.0}),
        ("fedacg", {"server_momentum": 0.0, "mu": 0.3}, "fedprox", {"mu": 0.3}),
        ("fedacg", {"server_momentum": 0.0, "mu": 0.0}, "fedavg", {}),
        ("fedlesam", {"rho": 0.0}, "fedavg", {}),
        ("fedgf", {"threshold": 1e9}, "fedsam", {}),
        ("fedgf", {"threshold": 1e9, "rho": 0.0}, "fedavg", {}),
        ("pfedme", {"inner_steps": 1, "pull": 20.0, "personal_lr": 0.05}, "fedavg", {}),
    ],
)
def test_special_cases_equal_another_method(
    method: str, params: dict[str, Any], other: str, its: dict[str, Any], engine: str
) -> None:
    found = final(method, params, batch_size=2, engine=engine)
    np.testing.assert_allclose(found, final(other, its, batch_size=2, engine=engine), rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize(
    "method", ["fedsam", "mofedsam", "fedlesam", "fedacg", "feddyn", "fedgf", "pfedme", "perfedavg"]
)
def test_with_its_defaults_it_differs_from_fedavg(method: str) -> None:
    assert np.abs(final(method) - final("fedavg")).max() > 1e-6


def test_a_zero_gradient_perturbs_nothing() -> None:
    params = {"w": torch.tensor([1.0, 2.0])}
    assert torch.equal(ascend(params, {"w": torch.zeros(2)}, 0.5)["w"], params["w"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_gradient_of_rounding_errors_perturbs_nothing(dtype: torch.dtype) -> None:
    params = {"w": torch.tensor([3.0, 4.0], dtype=dtype)}
    limit = 5 * torch.finfo(dtype).eps
    for norm, moved in ((0.9 * limit, 0.0), (1.1 * limit, 0.5)):
        after = ascend(params, {"w": torch.tensor([norm, 0.0], dtype=dtype)}, 0.5)
        assert (after["w"] - params["w"]).norm() == pytest.approx(moved, abs=1e-6)
    assert ascend(params, {"w": torch.tensor([torch.nan, 0.0])}, 0.5)["w"].isnan().all()


@pytest.mark.parametrize("momentum", [0.0, 0.6])
def test_mofedsam_mixes_in_the_mean_direction_of_the_last_round(momentum: float) -> None:
    fed, rounds, beta = federation(), 3, 0.4
    changed = {"momentum": momentum, "weight_decay": 0.0}
    states, _ = played(serve("mofedsam", {"beta": beta, "rho": 0.3}, federation=fed, rounds=rounds, **changed))
    config, at, expected = settings(**changed), sites(fed), theta(states[0])
    common = np.zeros_like(expected)
    for t in range(rounds):

        def direction(v: Array, s: Site, common: Array = common) -> Array:
            return beta * slope(ascend_in_numpy(v, s, 0.3), s) + (1 - beta) * common

        models = [descend(expected, lambda v, s=s, d=direction: d(v, s), config, t) for s in at]
        lr = config.lr * config.lr_decay**t
        mean = averaged(models, at)
        common = (expected - mean) / (path_length(config.local_epochs, momentum) * lr)
        expected = mean
        close(theta(states[t + 1]), expected)


@pytest.mark.parametrize("engine", ["plain", "stacked"])
@pytest.mark.parametrize("momentum", [0.0, 0.6])
def test_fedcm_mixes_in_the_mean_direction_of_the_last_round(momentum: float, engine: str) -> None:
    fed, rounds, alpha = federation(), 3, 0.4
    changed = {"momentum": momentum, "weight_decay": 0.0, "engine": engine}
    states, _ = played(serve("fedcm", {"alpha": alpha}, federation=fed, rounds=rounds, **changed))
    config, at, expected = settings(**changed), sites(fed), theta(states[0])
    common = np.zeros_like(expected)
    for t in range(rounds):
        models = [
            descend(expected, lambda v, s=s, c=common: alpha * slope(v, s) + (1 - alpha) * c, config, t) for s in at
        ]
        mean = averaged(models, at)
        common = (expected - mean) / (path_length(config.local_epochs, momentum) * config.lr * config.lr_decay**t)
        expected = mean
        close(theta(states[t + 1]), expected)


def test_a_mean_direction_of_one_step_is_the_mean_gradient() -> None:
    fed = federation()
    one_step = {"local_epochs": 1, "weight_decay": 0.0, "rounds": 1}
    states, _ = played(serve("mofedsam", {"beta": 1.0, "rho": 0.0}, federation=fed, **one_step))
    gradient = averaged([slope(theta(states[0]), s) for s in sites(fed)], sites(fed))
    kept = states[1].models["global"].server_state["common_direction/head.weight"].numpy()
    np.testing.assert_allclose(kept, gradient[:, :-1], rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("method", ["mofedsam", "fedcm"])
def test_a_client_without_a_step_adds_nothing_to_the_mean_direction(method: str) -> None:
    """Two clients with 0 and 4 steps: half of a change of −2 in 4 steps of 0.1 is a direction of 2.5."""
    rule, sent = make_method(method).server, {"w": torch.zeros(1)}
    steps = {"local_steps": torch.tensor([0.0, 4.0])}
    updates = Updates({"w": torch.tensor([[0.0], [-2.0]])}, torch.tensor([0.5, 0.5]), steps, lr=0.1, participation=1.0)
    params, state = rule.aggregate(sent, updates, rule.server_state(sent))
    assert float(params["w"]) == -1
    assert float(state["common_direction/w"]) == pytest.approx(2.5)


# -- FedLESAM -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["plain", "stacked"])
@pytest.mark.parametrize("momentum", [0.0, 0.6])
def test_fedlesam_perturbs_towards_the_model_that_the_client_received_before(momentum: float, engine: str) -> None:
    fed, rounds, rho = federation(), 6, 0.3
    changed = {"momentum": momentum, "engine": engine, "clients_per_round": 2, "rounds": rounds}
    states, rows = played(serve("fedlesam", {"rho": rho}, federation=fed, **changed))
    config, at, expected = settings(**changed), sites(fed), theta(states[0])
    received: dict[int, Array] = {}
    last_round: dict[int, int] = {}
    gaps = set()
    for t, row in enumerate(rows):
        models = []
        for k in row.clients:
            back = received.get(k, expected) - expected
            step = rho * back / np.sqrt((back**2).sum()) if k in received else back
            models.append(descend(expected, lambda v, k=k, e=step: slope(v + e, at[k]), config, t))
            gaps.add(t - last_round.get(k, t))
            received[k], last_round[k] = expected, t
        expected = averaged(models, [at[k] for k in row.clients])
        close(theta(states[t + 1]), expected)
    assert gaps >= {0, 1, 2}  # new clients, clients of the round before, and clients that missed a round


# -- FedACG ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["plain", "stacked"])
@pytest.mark.parametrize("momentum", [0.0, 0.6])
def test_fedacg_trains_from_the_point_ahead(momentum: float, engine: str) -> None:
    """The reference sends s = w + λ·m and averages the models, as the paper does."""
    fed, rounds, ahead, mu = federation(), 4, 0.7, 0.3
    changed = {"momentum": momentum, "weight_decay": 0.0, "engine": engine, "clients_per_round": 2, "rounds": rounds}
    states, rows = played(serve("fedacg", {"server_momentum": ahead, "mu": mu}, federation=fed, **changed))
    config, at, expected = settings(**changed), sites(fed), theta(states[0])
    velocity = np.zeros_like(expected)
    for t, row in enumerate(rows):
        sent, chosen = expected + ahead * velocity, [at[k] for k in row.clients]
        models = [descend(sent, lambda u, s=s, c=sent: slope(u, s) + mu * (u - c), config, t) for s in chosen]
        expected = averaged(models, chosen)
        velocity = ahead * velocity + (expected - sent)
        close(theta(states[t + 1]), expected)


# -- FedDyn ---------------------------------------------------------------------------------------------


def test_feddyn_with_partial_participation() -> None:
    fed, rounds, alpha = federation(), 4, 0.3
    changed = {"clients_per_round": 2, "rounds": rounds}
    states, rows = played(serve("feddyn", {"alpha": alpha}, federation=fed, **changed))
    at, expected = sites(fed), theta(states[0])
    h, own = np.zeros_like(expected), [np.zeros_like(expected) for _ in at]  # the paper's h, which is α times ours
    for t, row in enumerate(rows):
        sent, models = expected, {}
        for k in row.clients:

            def direction(v: Array, k: int = k, sent: Array = sent) -> Array:
                return slope(v, at[k]) - own[k] + alpha * (v - sent)

            models[k] = descend(sent, direction, settings(**changed), t)
        for k, w in models.items():
            own[k] = own[k] - alpha * (w - sent)
        h = h - alpha / len(at) * sum(w - sent for w in models.values())
        expected = averaged(list(models.values()), [at[k] for k in models]) - h / alpha
        close(theta(states[t + 1]), expected)


def test_the_clients_linear_terms_add_up_to_the_servers() -> None:
    states, _ = played(serve("feddyn", {"alpha": 0.3}, clients_per_round=1, rounds=4))
    last = states[-1]
    met = list(last.clients.versions["global"])
    total = sum(state["linear_term/head.weight"] for state in last.clients.read("global", met))
    kept = last.models["global"].server_state["correction/head.weight"]
    np.testing.assert_allclose(0.3 * kept.numpy(), total.numpy() / 3, rtol=1e-11)


def test_with_a_vanishing_alpha_clients_train_as_in_fedavg_and_the_server_goes_twice_as_far() -> None:
    alike = {"average": "uniform", "rounds": 1}
    start = theta(played(serve("fedavg", **alike))[0][0])
    mean = final("fedavg", **alike)
    np.testing.assert_allclose(final("feddyn", {"alpha": 1e-14}, **alike), mean + (mean - start), rtol=1e-10)


def test_feddyn_keeps_the_state_of_a_client_that_takes_no_step() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Classifier(nn.BatchNorm1d(3), linear_model().head)
    fed = federation(np.array([[5, 2, 0, 0], [0, 0, 1, 0]]))
    states, _ = played(Server(fed, make_method("feddyn"), model, settings(rounds=2)))
    assert (states[-1].clients.read("global", [1])[0]["linear_term/head.weight"] == 0).all()
    assert states[-1].clients.read("global", [0])[0]["linear_term/head.weight"].abs().max() > 0


# -- FedGF ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("decay", "drifted"), [(0.01, 0.0), (30.0, 1.0)])
def test_fedgfs_threshold_is_scaled_to_how_long_clients_train(decay: float, drifted: float) -> None:
    """0.3 was published for 8 steps of 0.01; a path k times longer may drift k times farther."""
    fed = federation()
    changed = {"rounds": 1, "lr": 0.01, "weight_decay": decay}
    states, _ = played(serve("fedgf", {"rho": 0.0, "global_rho": 0.0}, federation=fed, **changed))
    start, config = theta(states[0]), settings(**changed)
    models = [descend(start, lambda v, s=s: slope(v, s), config, 0) for s in sites(fed)]
    drift = np.mean([np.sqrt(((start - w) ** 2).sum()) for w in models])
    rho, steps = config.momentum, config.local_epochs
    path = config.lr * (steps - rho * (1 - rho**steps) / (1 - rho)) / (1 - rho)
    flag = float(states[1].models["global"].server_state["drifted"][-1])
    assert flag == float(drift > 0.3 * path / (8 * 0.01))
    assert flag == drifted


def test_fedgfs_threshold_is_that_of_the_mean_number_of_steps() -> None:
    """Two clients with 1 and 9 steps: the threshold is 3.75 · 0.1 · 5 = 1.875. Both drifted by 2."""
    rule, sent = PerturbedMean(), {"w": torch.zeros(1)}
    steps = {"local_steps": torch.tensor([1.0, 9.0])}
    updates = Updates({"w": torch.full((2, 1), 2.0)}, torch.tensor([0.5, 0.5]), steps, lr=0.1, participation=1.0)
    _, state = rule.aggregate(sent, updates, rule.server_state(sent))
    assert state["drifted"].sum() == 1


def test_fedgf_weighs_the_servers_point_by_how_often_clients_drifted() -> None:
    fed, rounds, rho, back, window = federation(), 6, 0.3, 0.2, 3
    start = theta(played(serve("fedgf", federation=fed, rounds=1))[0][0])
    drifts, shares, flags = [], [], []
    threshold = 0.8
    method = {"rho": rho, "global_rho": back, "threshold": threshold, "window": window}
    states, _ = played(serve("fedgf", method, federation=fed, rounds=rounds))
    at, expected, perturbed = sites(fed), start, start
    for t in range(rounds):
        recent = flags[-window:]
        c = sum(recent) / len(recent) if recent else 0.0
        shares.append(c)

        def direction(v: Array, s: Site, c: float = c, perturbed: Array = perturbed) -> Array:
            return slope(c * perturbed + (1 - c) * ascend_in_numpy(v, s, rho), s)

        models = [descend(expected, lambda v, s=s, d=direction: d(v, s), settings(), t) for s in at]
        drifts.append(float(np.mean([np.sqrt(((expected - w) ** 2).sum()) for w in models])))
        flags.append(drifts[-1] > threshold)
        mean = averaged(models, at)
        back_there = expected - mean
        perturbed = mean + back * back_there / np.sqrt((back_there**2).sum())
        expected = mean
        close(theta(states[t + 1]), expected)
    assert len(set(shares)) > 2, drifts  # the threshold lies between the drifts


# -- pFedMe ---------------------------------------------------------------------------------------------


def test_pfedme_steps_towards_approximate_personal_optima() -> None:
    fed, pull, inner, kappa, beta = federation(), 4.0, 0.1, 3, 0.7
    method = {"pull": pull, "personal_lr": inner, "inner_steps": kappa, "server_lr": beta}
    states, _ = played(serve("pfedme", method, federation=fed))
    at, expected = sites(fed), theta(states[0])

    def direction(v: Array, s: Site) -> Array:
        personal = v
        for _ in range(kappa):
            personal = personal - inner * (slope(personal, s) + pull * (personal - v))
        return pull * (v - personal)

    for t in range(2):
        models = [descend(expected, lambda v, s=s: direction(v, s), settings(), t) for s in at]
        expected = (1 - beta) * expected + beta * averaged(models, at)
        close(theta(states[t + 1]), expected)


# -- PerFedAvg ------------------------------------------------------------------------------------------


def in_order(fed: Federation, server: Server, state: RunState) -> list[list[Site]]:
    """Each client's batches of the round: here all its data, in the order of each epoch."""
    x, y = fed.dataset.train.x.astype(np.float64), fed.dataset.train.y
    whole = np.concatenate([x, np.ones((len(x), 1))], axis=1)
    plans = plan_round(server, state).work.batch_plans(1)
    rows = [[batch[batch >= 0] for batch in plan.indices] for plan in plans]
    return [[Site(whole[r], y[r], np.bincount(y[r], minlength=fed.classes)) for r in batches] for batches in rows]


def every_other(site: Site, first: int) -> Site:
    return Site(site.x[first::2], site.y[first::2], site.counts) if len(site.y) > 1 else site


@pytest.mark.parametrize("variant", ["first-order", "hessian-free"])
def test_perfedavg_steps_by_the_second_half_after_a_trial_step_by_the_first(variant: str) -> None:
    fed, alpha, delta = federation(np.array([[5, 2, 0, 0], [0, 1, 4, 1], [1, 0, 0, 0]])), 0.4, 1e-2
    server = serve("perfedavg", {"alpha": alpha, "delta": delta, "variant": variant}, federation=fed)
    states, _ = played(server)
    expected = theta(states[0])

    def direction(v: Array, batch: Site) -> Array:
        first, second = every_other(batch, 0), every_other(batch, 1)
        d = slope(v - alpha * slope(v, first), second)
        if variant == "first-order":
            return d
        return d - alpha * (slope(v + delta * d, first) - slope(v - delta * d, first)) / (2 * delta)

    for t in range(2):
        models = []
        for batches in in_order(fed, server, states[t]):
            left = iter(batches)
            models.append(descend(expected, lambda v, left=left: direction(v, next(left)), settings(), t))
        expected = averaged(models, sites(fed))
        close(theta(states[t + 1]), expected)


def test_the_hessian_free_direction_is_the_gradient_of_the_loss_after_the_trial_step() -> None:
    """On a quadratic ½·(v − c)ᵀA(v − c), differences of gradients are exact."""
    generator = torch.Generator().manual_seed(0)
    root = torch.randn(4, 4, generator=generator, dtype=torch.float64)
    a, centre = root @ root.T, {"first": torch.ones(4).double(), "second": -torch.ones(4).double()}

    def gradient(at: Tensors, half: LossPart | None = None, /) -> Tensors:
        assert half is not None
        return {"v": a @ (at["v"] - centre[half])}

    v = torch.randn(4, generator=generator, dtype=torch.float64, requires_grad=True)
    tried = v - 0.05 * a @ (v - centre["first"])
    loss = 0.5 * (tried - centre["second"]) @ a @ (tried - centre["second"])
    (wanted,) = torch.autograd.grad(loss, v)
    solver = PerFedAvg(alpha=0.05, variant="hessian-free")
    found = solver.direction(gradient, {"v": v.detach()}, Client(torch.ones(1), {}))["v"]
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)


def test_the_halves_of_a_batch_are_disjoint_and_complete() -> None:
    y = torch.tensor([[3, 1, 2, 0], [1, 2, IGNORE, IGNORE], [2, IGNORE, IGNORE, IGNORE]])
    first, second = half_targets(y, "first", axis=1), half_targets(y, "second", axis=1)
    assert first.tolist() == [[3, IGNORE, 2, IGNORE], [1, *[IGNORE] * 3], [2, *[IGNORE] * 3]]
    assert second.tolist() == [[IGNORE, 1, IGNORE, 0], [IGNORE, 2, IGNORE, IGNORE], [2, *[IGNORE] * 3]]
    assert half_targets(y, None) is y


@pytest.mark.parametrize("engine", ["plain", "stacked"])
def test_perfedavg_without_a_trial_step_on_single_samples_is_fedavg(engine: str) -> None:
    single = {"batch_size": 1, "engine": engine}
    np.testing.assert_allclose(final("perfedavg", {"alpha": 0.0}, **single), final("fedavg", **single), rtol=1e-12)


@pytest.mark.parametrize("engine", ["plain", "stacked"])
def test_perfedavg_reports_the_loss_of_the_whole_batch(engine: str) -> None:
    """The loss of a model that does not move, and how many samples its experts teach, do not depend on the solver."""
    params = {"groups": [[0, 1], [1, 2, 3]], "expert_rounds": 1, "warmup_rounds": 1}
    still: dict[str, Any] = {"lr": 1e-12, "rounds": 3, "engine": engine, "batch_size": 3}
    rows, halved = (played(serve(name, params, **still))[1] for name in ("pkd", "pkd+perfedavg"))
    assert sum(row.tally.get("distilled", 0) for row in rows) > 0
    for row, other in zip(rows, halved, strict=True):
        assert (other.visits, other.tally) == (row.visits, row.tally)
        assert other.loss == pytest.approx(row.loss, rel=1e-9)


# -- all ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "params", "compute"),
    [
        ("fedavg", {}, 1),
        ("fedsam", {}, 2),
        ("fedlesam", {}, 1),
        ("fedacg", {}, 1),
        ("fedgf", {}, 2),
        ("pfedme", {"inner_steps": 3}, 3),
        ("feddyn", {}, 1),
        ("perfedavg", {}, 2),
        ("perfedavg", {"variant": "hessian-free"}, 4),
    ],
)
def test_every_gradient_of_a_step_is_counted(method: str, params: dict[str, Any], compute: float) -> None:
    _, rows = played(serve(method, params))
    assert [row.compute for row in rows] == [compute, compute]


def test_the_teacher_runs_once_per_step_whatever_the_number_of_gradients() -> None:
    _, rows = played(serve("fedntd+fedsam"))
    assert [row.compute for row in rows] == pytest.approx([2 + 1 / 3] * 2)


@pytest.mark.parametrize(
    ("name", "params", "expected"),
    [
        ("fedsam", {"rho": -1}, "rho is -1.0; expected a number ≥ 0"),
        ("mofedsam", {"beta": 0}, "beta is 0.0; expected a number > 0 and ≤ 1"),
        ("mofedsam", {"rho": -1}, "rho is -1.0; expected a number ≥ 0"),
        ("fedlesam", {"rho": -1}, "rho is -1.0; expected a number ≥ 0"),
        ("fedacg", {"mu": -1}, "mu is -1.0; expected a number ≥ 0"),
        ("fedacg", {"server_momentum": 1}, "server_momentum is 1.0; expected a number ≥ 0 and < 1"),
        ("feddyn", {"alpha": 0}, "alpha is 0.0; expected a number > 0"),
        ("fedgf", {"window": 0}, "window is 0; expected a whole number ≥ 1"),
        ("fedgf", {"threshold": -1}, "threshold is -1.0; expected a number ≥ 0"),
        ("fedgf", {"global_rho": -1}, "global_rho is -1.0; expected a number ≥ 0"),
        ("pfedme", {"pull": 0}, "pull is 0.0; expected a number > 0"),
        ("pfedme", {"inner_steps": 0}, "inner_steps is 0; expected a whole number ≥ 1"),
        ("pfedme", {"personal_lr": 0}, "personal_lr is 0.0; expected a number > 0"),
        ("perfedavg", {"alpha": -1}, "alpha is -1.0; expected a number ≥ 0"),
        ("perfedavg", {"delta": 0}, "delta is 0.0; expected a number > 0"),
        ("pfedme", {"server_lr": 0}, "server_lr is 0.0; expected a number > 0"),
    ],
)
def test_a_bad_hyper_parameter_is_refused_in_one_line(name: str, params: dict[str, Any], expected: str) -> None:
    with pytest.raises(UserError) as refusal:
        make_method(name, params)
    assert str(refusal.value) == expected


@pytest.mark.parametrize(
    "method", ["fedvls+fedsam", "fedvls+fedsam+fedexp", "fedlmd+mofedsam", "fedlmd+feddyn", "fedvls+perfedavg"]
)
@pytest.mark.parametrize("engine", ["plain", "stacked"])
def test_a_combination_runs(method: str, engine: str) -> None:
    states, rows = played(serve(method, engine=engine, clients_per_round=2))
    assert all(row.diverged == [] for row in rows)
    assert np.isfinite(theta(states[-1])).all()
