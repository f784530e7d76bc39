"""FedSMOO and FedSOL against plain loops over a linear model's tensors, and solvers whose state changes by step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, kl_div, log_softmax, normalize, softmax
from toy_runs import distance, finished, image_federation, linear, norm_and_dropout, server, trained

from fedskew.engine.stacked.engine import StackedEngine
from fedskew.errors import UserError
from fedskew.methods import METHODS, Solver, make_method
from fedskew.methods.parts import STATE, Client, Gradient, Tensors, Trained, pack

WHOLE: dict[str, Any] = {"batch_size": 50, "momentum": 0.0, "weight_decay": 0.0, "lr": 0.1, "local_epochs": 3}
"""One step per epoch, of plain SGD."""

Loss = Callable[[Tensor], Tensor]
ENGINES = pytest.mark.parametrize("engine", ["plain", "stacked"])


def theta(params: Tensors) -> Tensor:
    return torch.cat([params["head.weight"], params["head.bias"].unsqueeze(-1)], dim=1)


def gradient(loss: Loss, at: Tensor) -> Tensor:
    leaf = at.clone().requires_grad_()
    (found,) = torch.autograd.grad(loss(leaf), [leaf])
    return found


def samples(this: Any, federation: Any, client: int) -> tuple[Tensor, Tensor]:
    rows = federation.indices[client]
    x = this._runtimes.train_samples.inputs(torch.from_numpy(rows)).flatten(1)
    return torch.cat([x, torch.ones_like(x[:, :1])], dim=1), torch.from_numpy(federation.dataset.train.y[rows])


@ENGINES
def test_fedsmoo_is_that_of_its_authors_program(engine: str) -> None:
    federation, rho, lamb = image_federation(), 0.1, 0.1
    this = server(federation, "fedsmoo", linear(), rounds=3, clients_per_round=3, engine=engine, **WHOLE)
    start = this.start()
    state, rows = finished(this, start)
    w = theta(start.model.params)
    h, mu = torch.zeros(5, *w.shape).double(), torch.zeros(5, *w.shape).double()
    s = torch.zeros_like(w)
    for row in rows:
        models = []
        for client in row.clients:
            x, y = samples(this, federation, client)
            loss = lambda at, x=x, y=y: cross_entropy(x @ at.T, y)  # noqa: E731
            v = w.clone()
            for _ in range(3):
                corrected = gradient(loss, v) - mu[client] - s
                e = rho * corrected / corrected.norm()
                mu[client] += e - s
                v = v - 0.1 * (gradient(loss, v + e) + lamb * (v + h[client] - w))
            h[client] += v - w
            models.append(v)
        mean = mu[row.clients].mean(dim=0)
        s = rho * mean / mean.norm()
        share = torch.from_numpy(federation.sizes[row.clients] / federation.sizes[row.clients].sum())
        w = torch.einsum("k,kij->ij", share, torch.stack(models)) + h.mean(dim=0)
    torch.testing.assert_close(theta(state.model.params), w, rtol=0, atol=1e-12)


@pytest.mark.parametrize("adaptive", [True, False])
@ENGINES
def test_fedsol_is_that_of_its_authors_program(engine: str, adaptive: bool) -> None:
    federation = image_federation()
    params = {"adaptive": adaptive, "rho": 0.5}
    this = server(federation, "fedsol", linear(), params, rounds=2, engine=engine, **WHOLE)
    start = this.start()
    state, _ = finished(this, start)
    share = torch.from_numpy(federation.sizes / federation.sizes.sum())
    w = theta(start.model.params)
    for _ in range(2):
        models = []
        for client in range(5):
            (x, y), v = samples(this, federation, client), w.clone()
            for _ in range(3):
                teacher = softmax(x @ w.T / 3, dim=1)
                near = lambda at, x=x, t=teacher: kl_div(log_softmax(x @ at.T / 3, dim=1), t, reduction="batchmean")  # noqa: E731
                g = gradient(near, v)
                weight, bias = ((v - w).abs()[:, :-1], (v - w).abs()[:, -1])
                scale = torch.cat([normalize(weight, dim=0), normalize(bias, dim=0).unsqueeze(-1)], dim=1)
                at = v + 0.5 * (scale if adaptive else 1.0) * g / (g.norm() if g.norm() > 1e-15 else torch.inf)
                v = v - 0.1 * gradient(lambda p, x=x, y=y: cross_entropy(x @ p.T, y), at)
            models.append(v)
        w = torch.einsum("k,kij->ij", share, torch.stack(models))
    torch.testing.assert_close(theta(state.model.params), w, rtol=0, atol=1e-12)


@dataclass(frozen=True)
class Alternating(Solver):
    """Counts its steps in the client's state, and goes half as far in every other one."""

    def client_state(self, params: Tensors) -> Tensors:
        return {"taken": torch.zeros((), dtype=next(iter(params.values())).dtype)}

    def changes_state(self) -> bool:
        return True

    def direction(self, gradient: Gradient, params: Tensors, client: Client) -> Tensors:
        taken = client.state["taken"]
        scale = torch.where(taken % 2 == 1, 0.5, 1.0)
        return {name: scale * g for name, g in gradient(params).items()} | pack(STATE, {"taken": taken + 1})

    def next_state(self, trained: Trained, client: Client) -> Tensors:
        return {"taken": client.state["taken"]}


def test_a_state_that_changes_by_step_is_each_clients_own_in_every_engine() -> None:
    settings: dict[str, Any] = {"rounds": 2, "clip_norm": 1.0}
    plain, _ = trained(image_federation(), Alternating(), norm_and_dropout(), **settings)
    this = server(image_federation(), Alternating(), norm_and_dropout(), engine="stacked", **settings)
    few = server(image_federation(), Alternating(), norm_and_dropout(), engine="stacked", **settings)
    object.__setattr__(
        few._base_runtime, "engine", StackedEngine(few.network, few._runtimes.train_samples, 2, max_slots=2)
    )
    for other in (this, few):
        assert distance(finished(other)[0], plain) < 1e-9
        assert not other.engine.notices
    taken = [float(kept["taken"]) for kept in plain.clients.read("global", range(5))]
    assert taken == [2 * 2 * 4, 0, 2 * 2 * 2, 2 * 2 * 2, 2 * 2 * 2], "BatchNorm leaves out a batch of one sample"


def test_what_they_send_and_where_they_do_not_fit() -> None:
    assert METHODS["fedsmoo"].sends == "model, sample count, dual variable (the size of one model)"
    assert METHODS["fedsol"].sends == "model, sample count"
    assert make_method("fedsol+fedavgm").name == "fedsol+fedavgm"
    assert make_method("fedvls+fedsmoo").name == "fedvls+fedsmoo"
    with pytest.raises(UserError, match=r"rho is 0\.0; expected a number > 0"):
        make_method("fedsmoo", {"rho": 0})

    @dataclass(frozen=True)
    class Proximal(Solver):
        def direction(self, gradient: Gradient, params: Tensors, client: Client) -> Tensors:
            return gradient(params, "proximal")

    with pytest.raises(UserError, match=r"CrossEntropy has no proximal\(\), but the solver needs it"):
        trained(image_federation(), Proximal(), linear())
