"""A hook that returns the wrong thing is refused in one line that names it, on every engine and on Flower."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from linear_clients import federation, linear_model, settings

from fedskew.errors import UserError
from fedskew.experiment.preparation import prepare
from fedskew.experiment.run import run_prepared
from fedskew.losses import cross_entropy
from fedskew.methods import METHODS, Objective, Part, Regulariser, ServerRule, Solver, method

ENGINES = ("plain", "stacked", "pool", "pool-stacked")


class Entropy(Objective):
    """The usual loss, for objectives whose other hooks are wrong."""

    def loss(self, out: Any, y: Any, client: Any) -> Any:
        return cross_entropy(out.logits, y)


def wrong(kind: type[Part], hook: str, function: Any, name: str = "Wrong", **others: Any) -> Part:
    """A part of this kind with one hook that returns what `function` returns."""
    made = dataclass(frozen=True)(type(name, (kind,), {hook: function, **others}))
    part: Part = made()
    return part


def sums(tensors: Any) -> Any:
    return {name: t.sum() for name, t in tensors.items()}


def aggregate(function: Any) -> Part:
    return wrong(ServerRule, "aggregate", lambda self, sent, updates, state: function(updates, state))


def loss(function: Any, **others: Any) -> Part:
    return wrong(Objective, "loss", lambda self, out, y, client: function(out, y), **others)


CLIENT_HOOKS = {
    "loss None": (loss(lambda out, y: None), r"loss\(\) of Wrong returned None; expected a tensor with one number"),
    "loss float": (
        loss(lambda out, y: 0.5),
        r"loss\(\) of Wrong returned a float; expected a tensor with one number, such as a mean",
    ),
    "loss vector": (
        loss(lambda out, y: out.logits.sum(dim=-1)),
        r"loss\(\) of Wrong returned a tensor of shape \d+; expected one number, such as a mean",
    ),
    "loss constant": (
        loss(lambda out, y: torch.zeros(())),
        r"loss\(\) of Wrong returned a number without a gradient; expected one that is computed from `out.logits`",
    ),
    "teacher": (
        loss(lambda out, y: cross_entropy(out.logits, y) + out.teacher.logits.mean()),
        r"out.teacher is used, but companions\(\) of the objective does not name it; expected companions\(\) to return",
    ),
    "companion": (
        loss(lambda out, y: cross_entropy(out.logits, y), companions=lambda self: {"techer": "eval"}),
        r"companions\(\) of Wrong names 'techer'; did you mean 'teacher'\?",
    ),
    "companion in state": (
        loss(lambda out, y: cross_entropy(out.logits, y), companions=lambda self: {"state/last": "eval"}),
        r"companions\(\) of Wrong names 'state/last', but clients keep no model 'last'; expected client_state\(\)",
    ),
    "teacher in a term": (
        wrong(Regulariser, "term", lambda self, out, y, client: out.teacher.logits.mean()),
        r"out.teacher is used, but companions\(\) of the objective does not name it",
    ),
    "term": (
        wrong(Regulariser, "term", lambda self, out, y, client: None),
        r"term\(\) of Wrong returned None; expected a tensor with one number",
    ),
    "tally None": (
        wrong(Entropy, "tally", lambda self, out, y: None),
        r"tally\(\) of Wrong returned None; expected a dict of tensors by name",
    ),
    "tally vector": (
        wrong(Entropy, "tally", lambda self, out, y: {"right": out.logits.argmax(-1)[:2]}),
        r"tally\(\) of Wrong returned a int64 tensor of shape 2 as 'right'; expected one number",
    ),
    "perturbed": (
        wrong(Entropy, "perturbed", lambda self, features, y, client, key: features[:, :1]),
        r"perturbed\(\) of Wrong returned a float\d+ tensor of shape \d+×1; expected a float\d+ tensor of shape \d+×",
    ),
    "direction None": (
        wrong(Solver, "direction", lambda self, gradient, params, client: gradient(params) and None),
        r"direction\(\) of Wrong returned None; expected a dict with a tensor for each parameter",
    ),
    "direction incomplete": (
        wrong(Solver, "direction", lambda self, gradient, params, client: {"head.bias": gradient(params)["head.bias"]}),
        r"direction\(\) of Wrong returned no '\S+'; expected a tensor for each of the parameters",
    ),
    "direction of another shape": (
        wrong(Solver, "direction", lambda self, gradient, params, client: sums(gradient(params))),
        r"direction\(\) of Wrong returned a float\d+ tensor of shape \(\) as '\S+'; expected a float\d+ tensor of",
    ),
    "direction without a gradient": (
        wrong(Solver, "direction", lambda self, gradient, params, client: dict(params)),
        r"direction\(\) of Wrong did not call gradient\(\); expected gradient\(params\) at least once",
    ),
    "uplink float": (
        wrong(Entropy, "uplink", lambda self, trained, client: 0.5, sends="a number"),
        r"uplink\(\) of Wrong returned a float; expected a dict of tensors by name, which may be empty",
    ),
    "uplink of floats": (
        wrong(Entropy, "uplink", lambda self, trained, client: {"steps": 3.0}, sends="a number"),
        r"uplink\(\) of Wrong returned a float as 'steps'; expected a dict of tensors by name",
    ),
    "next_state None": (
        wrong(Entropy, "next_state", lambda self, trained, client: None),
        r"next_state\(\) of Wrong returned None; expected a dict of tensors by name",
    ),
    "next_state undeclared": (
        wrong(Entropy, "next_state", lambda self, trained, client: {"rounds": torch.ones(())}),
        r"next_state\(\) of Wrong returned 'rounds'; expected only names that client_state\(\) returns",
    ),
    "client_state": (
        wrong(Entropy, "client_state", lambda self, params: {"rounds": 0}),
        r"client_state\(\) of Wrong returned a int as 'rounds'; expected a dict of tensors by name",
    ),
    "opening": (
        wrong(Entropy, "opening", lambda self, seen, client: None),
        r"opening\(\) of Wrong returned None; expected a dict of tensors by name",
    ),
    "closing": (
        wrong(Entropy, "closing", lambda self, seen, client: {"seen": 1}),
        r"closing\(\) of Wrong returned a int as 'seen'; expected a dict of tensors by name",
    ),
}  # fmt: skip
SERVER_HOOKS = {
    "aggregate without state": (
        aggregate(lambda updates, state: updates.mean()),
        r"aggregate\(\) of Wrong returned a dict; expected two: the next parameters and the state",
    ),
    "aggregate None": (aggregate(lambda updates, state: None), r"aggregate\(\) of Wrong returned None; expected two"),
    "aggregate with three values": (
        aggregate(lambda updates, state: (updates.mean(), state, 1)),
        r"aggregate\(\) of Wrong returned 3 values; expected two",
    ),
    "aggregate without parameters": (
        aggregate(lambda updates, state: (None, state)),
        r"aggregate\(\) of Wrong returned None as the next parameters; expected a dict of tensors by name",
    ),
    "aggregate incomplete": (
        aggregate(lambda updates, state: ({"head.bias": updates.mean()["head.bias"]}, state)),
        r"aggregate\(\) of Wrong returned no '\S+'; expected a tensor for each of the parameters",
    ),
    "aggregate of another shape": (
        aggregate(lambda updates, state: (sums(updates.params), state)),
        r"aggregate\(\) of Wrong returned a float\d+ tensor of shape \(\) as '.*'; expected a float\d+ tensor of shape",
    ),
    "aggregate with a stranger": (
        aggregate(lambda updates, state: (updates.mean() | {"head.wieght": torch.ones(())}, state)),
        r"aggregate\(\) of Wrong returned 'head.wieght', which is not a parameter; did you mean 'head.weight'\?",
    ),
    "aggregate with a wrong state": (
        aggregate(lambda updates, state: (updates.mean(), None)),
        r"aggregate\(\) of Wrong returned None as the next state; expected a dict of tensors by name",
    ),
    "server_state": (
        wrong(Entropy, "server_state", lambda self, params: None),
        r"server_state\(\) of Wrong returned None; expected a dict of tensors by name",
    ),
    "downlink": (
        wrong(Entropy, "downlink", lambda self, state: {"round": 1}),
        r"downlink\(\) of Wrong returned a int as 'round'; expected a dict of tensors by name",
    ),
    "next_server_state": (
        wrong(Entropy, "next_server_state", lambda self, updates, state: 1.0),
        r"next_server_state\(\) of Wrong returned a float; expected a dict of tensors by name",
    ),
}  # fmt: skip
HOOKS = CLIENT_HOOKS | SERVER_HOOKS


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("case", HOOKS)
def test_a_wrong_result_is_one_line_on_every_engine(case: str, engine: str) -> None:
    part, message = HOOKS[case]
    prepared = prepare(settings(engine=engine), federation(), part, linear_model())
    with pytest.raises(UserError, match=message) as error:
        run_prepared(prepared)
    assert "\n" not in str(error.value)


@pytest.fixture
def registered(request: pytest.FixtureRequest) -> Iterator[str]:
    """The name under which the part is registered while the test runs."""
    part, _ = HOOKS[request.param]
    method("wrong-hook")(type(part))
    yield request.param
    del METHODS["wrong-hook"]


@pytest.mark.parametrize("registered", HOOKS, indirect=True)
def test_a_wrong_result_is_one_line_on_flower(registered: str, tmp_path: Path) -> None:
    """A site refuses the round with the line, and the server's log has it. The server raises its own."""
    pytest.importorskip("flwr")
    from in_process import case, small_data

    from fedskew.data import Dirichlet
    from fedskew.data import federation as split
    from fedskew.experiment.config import Config, with_values
    from fedskew.flower.server_app import run_federation

    data = small_data(tmp_path)
    values = {"method": "wrong-hook", "rounds": 1, "local_epochs": 1, "device": "cpu", "partition.clients": 3}
    sites = split(str(data), Dirichlet(beta=0.5, clients=3), seed=0)
    here = case(tmp_path, sites, data, with_values(Config(), values), attempts=1)
    with pytest.raises(UserError) as error:
        run_federation(here.grid, here.context)
    lines = [str(error.value), *(sent.facts["refused"] for sent in here.grid.sent if "refused" in sent.facts)]
    assert any(re.search(HOOKS[registered][1], line) for line in lines), lines


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (["teacher"], r"companions\(\) of Wrong returned a list; expected a dict such as {'teacher': 'eval'}"),
        ({"teacher": "test"}, r"companions\(\) of Wrong returned 'test' as 'teacher'; expected 'eval' or 'train'"),
    ],
)
def test_companions_are_checked_before_the_run(returned: Any, message: str) -> None:
    part = wrong(Entropy, "companions", lambda self: returned)
    with pytest.raises(UserError, match=message):
        prepare(settings(), federation(), part, linear_model())


def test_numbers_that_are_finite_but_wrong_are_refused_after_the_first_round() -> None:
    """`aggregate` is checked in every round, because it may depend on the state."""

    def later(updates: Any, state: Any) -> Any:
        return (updates.mean(), {"round": torch.ones(())}) if "round" not in state else updates.mean()

    prepared = prepare(settings(), federation(), aggregate(later), linear_model())
    with pytest.raises(UserError, match="expected two"):
        run_prepared(prepared)
