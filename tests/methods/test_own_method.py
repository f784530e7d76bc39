"""A user's own method is as short as the docs promise and runs on both engines."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from linear_clients import federation, linear_model, played, serve, settings, theta
from torch import Tensor

import fedskew as fs
from fedskew.errors import UserError
from fedskew.experiment.preparation import prepare
from fedskew.methods import (
    METHODS,
    Client,
    Gradient,
    Method,
    Objective,
    Outputs,
    Personal,
    ServerRule,
    Solver,
    Tensors,
    Trained,
    Updates,
    Weighting,
    make_method,
)
from fedskew.methods import method as entered


def enter_focal() -> type[Objective]:
    @fs.method("focal", paper="Lin et al., ICCV 2017")
    @dataclass(frozen=True)
    class Focal(fs.Objective):
        """Cross entropy with less weight on samples that are classified well."""

        gamma: float = 2.0

        def loss(self, out: fs.Outputs, y: Tensor, client: fs.Client) -> Tensor:
            log_p = out.logits.log_softmax(-1).gather(-1, y.clamp(min=0).unsqueeze(-1)).squeeze(-1)
            return fs.losses.batch_mean(-((1 - log_p.exp()) ** self.gamma) * log_p, y)

    return Focal


@pytest.fixture
def focal() -> Iterator[type[Objective]]:
    yield enter_focal()
    del METHODS["focal"]


@pytest.mark.parametrize("engine", ["plain", "stacked"])
def test_a_loss_that_is_not_a_scalar_is_refused_by_name(engine: str) -> None:
    @dataclass(frozen=True)
    class Unreduced(Objective):
        def loss(self, out: Outputs, y: Tensor, client: Client) -> Tensor:
            return torch.nn.functional.cross_entropy(out.logits, y, reduction="none", ignore_index=-100)

    with pytest.raises(UserError, match=r"loss\(\) of Unreduced returned a tensor of shape \d+; expected one number"):
        fs.run(fs.federation("digits", fs.Dirichlet(beta=1.0, clients=3)), Unreduced(), rounds=1, engine=engine)


def test_it_takes_less_than_thirty_lines() -> None:
    assert len(inspect.getsource(enter_focal).splitlines()) < 30


def test_it_is_in_the_catalogue_like_any_other(focal: type[Objective]) -> None:
    entry = METHODS["focal"]
    assert entry.summary == "Cross entropy with less weight on samples that are classified well."
    assert fs.make_method("focal").params == {"gamma": 2.0}
    with pytest.raises(UserError, match="did you mean 'gamma'"):
        fs.make_method("focal", {"gama": 1.0})


@pytest.mark.parametrize("method", ["focal", "focal+scaffold", "focal+fedprox+fedavgm"])
def test_both_engines_run_it_alone_and_combined(focal: type[Objective], method: str) -> None:
    changed: dict[str, Any] = {"batch_size": 3, "clients_per_round": 2}
    plain, stacked = (serve(method, {"gamma": 1.5}, engine=engine, **changed) for engine in ("plain", "stacked"))
    found = [theta(played(server)[0][-1]) for server in (plain, stacked)]
    np.testing.assert_allclose(found[0], found[1], rtol=1e-10)
    assert stacked.engine.notices == []


def test_with_gamma_zero_it_is_fedavg(focal: type[Objective]) -> None:
    zero = theta(played(serve(focal(gamma=0.0)))[0][-1])
    np.testing.assert_allclose(zero, theta(played(serve("fedavg"))[0][-1]), rtol=1e-12)


def test_an_object_need_not_be_registered() -> None:
    result = fs.run(
        federation(), Halved(), linear_model(), rounds=2, local_epochs=1, precision="float64", engine="plain"
    )
    assert result.accuracy >= 0


# -- a solver and a server rule with every kind of state -----------------------------------------------------


@dataclass(frozen=True)
class Halved(ServerRule):
    """Half the way to the mean."""

    def aggregate(self, sent: Tensors, updates: Updates, state: Tensors) -> tuple[Tensors, Tensors]:
        mean = updates.mean()
        return {name: (w + mean[name]) / 2 for name, w in sent.items()}, state


@dataclass(frozen=True)
class Counting(Solver):
    """SGD scaled by what the server sends; counts its rounds and its steps, and sends the count."""

    def client_state(self, params: Tensors) -> Tensors:
        return {"rounds": torch.zeros(1)}

    def server_state(self, params: Tensors) -> Tensors:
        return {"scale": torch.full((1,), 0.5, dtype=torch.float64)}

    def downlink(self, server_state: Tensors) -> Tensors:
        return {"scale": server_state["scale"]}

    def direction(self, gradient: Gradient, params: Tensors, client: Client) -> Tensors:
        return {name: client.downlink["scale"] * g for name, g in gradient(params).items()}

    def next_state(self, trained: Trained, client: Client) -> Tensors:
        return {"rounds": client.state["rounds"] + 1}

    def uplink(self, trained: Trained, client: Client) -> Tensors:
        return {"steps": trained.steps}


@pytest.fixture
def counting() -> Iterator[None]:
    entered("counting", paper="-")(Counting)
    yield
    del METHODS["counting"]


@pytest.mark.parametrize("server_rule", ["fedavg", "fedavgm", "fedgr-server"])
@pytest.mark.parametrize("engine", ["plain", "stacked"])
def test_the_state_of_a_solver_works_with_any_server_rule(counting: None, server_rule: str, engine: str) -> None:
    states, rows = played(serve(f"counting+{server_rule}", engine=engine, clients_per_round=2, rounds=4))
    last = states[-1]
    times = {k: sum(k in row.clients for row in rows) for k in range(3)}
    counted = {k: int(last.clients.read("global", [k])[0]["rounds"]) for k in last.clients.versions["global"]}
    assert counted == {k: n for k, n in times.items() if n}
    assert last.models["global"].server_state["scale"].item() == 0.5


def test_half_the_gradient_is_half_the_learning_rate(counting: None) -> None:
    half = theta(played(serve("counting", weight_decay=0.0))[0][-1])
    np.testing.assert_allclose(half, theta(played(serve("fedavg", weight_decay=0.0, lr=0.1))[0][-1]), rtol=1e-12)


# -- what a part may refuse -------------------------------------------------------------------------------


def test_fedgr_refuses_a_model_without_a_linear_head_before_training() -> None:
    bare = torch.nn.Sequential(torch.nn.Linear(3, 4))
    with pytest.raises(UserError, match="needs a model that ends in a linear layer 'head'"):
        prepare(settings(method="fedgr"), federation(), model=bare)


def test_a_part_can_use_features_and_a_model_that_the_client_keeps() -> None:
    @dataclass(frozen=True)
    class Contrast(Objective):
        """Features far from those of the client's last model."""

        def companions(self) -> dict[str, Any]:
            return {"state/last": "eval"}

        def client_state(self, params: Tensors) -> Tensors:
            return {f"last/{name}": p.clone() for name, p in params.items()}

        def next_state(self, trained: Trained, client: Client) -> Tensors:
            return {f"last/{name}": p for name, p in trained.params.items()}

        def loss(self, out: Outputs, y: Tensor, client: Client) -> Tensor:
            last = out.companions["state/last"]
            assert out.features is not None
            assert last.features is not None
            return fs.losses.cross_entropy(out.logits, y) + 0.1 * fs.losses.batch_mean(
                (out.logits * last.logits).sum(-1), y
            )

    found = [theta(played(serve(Contrast(), engine=engine, batch_size=3))[0][-1]) for engine in ("plain", "stacked")]
    np.testing.assert_allclose(found[0], found[1], rtol=1e-10)


def with_factors(learned: bool) -> Method:
    """A method whose server rule, weighting and start multiply by factors, which are constants or learned."""

    def factor(number: float) -> Tensor:
        return torch.tensor(number, requires_grad=learned)

    @dataclass(frozen=True)
    class Shrink(ServerRule):
        def server_state(self, params: Tensors) -> Tensors:
            return {"factor": torch.tensor(0.5)}

        def aggregate(self, sent: Tensors, updates: Updates, state: Tensors) -> tuple[Tensors, Tensors]:
            after = {"factor": state["factor"] * factor(0.5)}
            return {name: t * (1 - after["factor"]) for name, t in updates.mean().items()}, after

    @dataclass(frozen=True)
    class Uneven(Weighting):
        def weigh(self, sent: Tensors, updates: Updates, state: Tensors) -> Tensor:
            return updates.weights * factor(2.0) + 0.1

    @dataclass(frozen=True)
    class HalfHead(Personal):
        def keeps(self) -> tuple[str, ...]:
            return ("head",)

        def start(self, own: Tensors, received: Tensors) -> Tensors:
            return {name: t * factor(0.5) for name, t in own.items()}

    return replace(make_method("fedavg"), server=Shrink(), weighting=Uneven(), personal=HalfHead())


@pytest.mark.parametrize("engine", ["plain", "stacked"])
def test_hooks_that_learn_need_not_detach_what_they_return(engine: str) -> None:
    fed = fs.federation("digits", fs.Dirichlet(beta=1.0, clients=3))
    short: dict[str, Any] = {"rounds": 2, "local_epochs": 1, "batch_size": 200, "engine": engine}
    learned, constant = (fs.run(fed, with_factors(each), "resnet8", **short) for each in (True, False))
    assert learned.history[-1].loss == constant.history[-1].loss
    for name, tensor in constant.model.state_dict().items():
        assert torch.equal(learned.model.state_dict()[name], tensor)
        assert not learned.model.state_dict()[name].requires_grad
