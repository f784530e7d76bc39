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
from fedskew.methods import (
    METHODS,
    Objective,
    Part,
    Regulariser,
    Schedule,
    ServerRule,
    Solver,
    Stage,
    Weighting,
    method,
    parts,
)
from fedskew.methods.fedavg import CrossEntropy

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


def next_state(function: Any) -> Part:
    """An objective that declares four float32 numbers, and returns others."""
    declared = {"client_state": lambda self, params: {"seen": torch.zeros(4)}}
    return wrong(Entropy, "next_state", lambda self, trained, client: function(client), **declared)


def uplink(function: Any) -> Part:
    return wrong(Entropy, "uplink", lambda self, trained, client: function(client.label_counts), sends="counts")


def weigh(function: Any) -> Part:
    return wrong(Weighting, "weigh", lambda self, sent, updates, state: function(updates.weights))


def stages(*returned: Any, **others: Any) -> Part:
    """A schedule that returns these stages, or this one thing that is no list."""
    (one, *_) = found = list(returned) or [[]]
    given = found if isinstance(one, Stage) else one
    return wrong(Schedule, "stages", lambda self, rounds, local_epochs, notes: given, **others)


def conclude(returned: Any) -> Part:
    counts = "label counts"
    hook = {"conclude": lambda self, stage, survey: returned}
    surveyed = Stage("count", 1, CrossEntropy(), survey="labels")
    return stages(surveyed, Stage("rest", 1, CrossEntropy()), sends=counts, reveals=counts, **hook)


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
    "next_state of another shape": (
        next_state(lambda client: {"seen": torch.zeros(3)}),
        r"next_state\(\) of Wrong returned a float32 tensor of shape 3 as 'seen'; expected a float32 tensor of shape "
        r"4, as client_state\(\) returns",
    ),
    "next_state of another type": (
        next_state(lambda client: {"seen": torch.zeros(4, dtype=torch.int64)}),
        r"next_state\(\) of Wrong returned a int64 tensor of shape 4 as 'seen'; expected a float32 tensor of shape 4",
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
    "weigh negative": (
        weigh(lambda weights: weights - 0.5),
        r"weigh\(\) of Wrong returned -\S+ as the weight of participant \d; expected finite numbers of 0 or more, with",
    ),
    "weigh zero": (
        weigh(lambda weights: 0 * weights),
        r"weigh\(\) of Wrong returned weights whose sum is 0; expected finite numbers of 0 or more, with at least",
    ),
    "weigh NaN": (
        weigh(lambda weights: weights * float("nan")),
        r"weigh\(\) of Wrong returned nan as the weight of participant 0; expected finite numbers of 0 or more",
    ),
}  # fmt: skip
HOOKS = CLIENT_HOOKS | SERVER_HOOKS
DIFFERENT = {
    "uplink of another shape": (
        uplink(lambda counts: {"own": counts[counts > 0]}),
        r"uplink\(\) of Wrong returned a int64 tensor of shape 2 as 'own' for client 0, but a int64 tensor of shape \d "
        r"for client \d; expected the same shape and type for all clients",
    ),
    "uplink of another type": (
        uplink(lambda counts: {"own": counts if int(counts[1]) else counts.double()}),
        r"uplink\(\) of Wrong returned a int64 tensor of shape 4 as 'own' for client 0, but a float64 tensor of shape",
    ),
    "uplink with other names": (
        uplink(lambda counts: {"own": counts} if int(counts[1]) else {}),
        r"uplink\(\) of Wrong returned 'own' for client 0, but not for client 2; expected the same names for all",
    ),
    "next_state with other names": (
        next_state(lambda client: {"seen": torch.zeros(4)} if int(client.label_counts[1]) else {}),
        r"next_state\(\) of Wrong returned 'seen' for client 0, but not for client 2; expected the same names for all",
    ),
}  # fmt: skip
"""Hooks whose results differ by client. A federation's server discards the updates of the sites with the rarer form."""
STAGES = {
    "None": (stages(None), r"stages\(\) of Wrong returned None; expected a list of at least one fedskew.Stage"),
    "empty": (stages(), r"stages\(\) of Wrong returned an empty list; expected a list of at least one fedskew.Stage"),
    "one": (stages("all"), r"stages\(\) of Wrong returned a str; expected a list of at least one fedskew.Stage"),
    "text": (
        stages(Stage("first", 1, CrossEntropy()), "last"),
        r"stages\(\) of Wrong returned a list with a str; expected a list of at least one fedskew.Stage",
    ),
    "objective": (
        stages(Stage("all", 1, "fedavg")),  # type: ignore[arg-type]
        r"stages\(\) of Wrong returned the stage 'all' with the objective 'fedavg'; expected a fedskew.Objective",
    ),
    "rounds": (
        stages(Stage("all", 1.5, CrossEntropy())),  # type: ignore[arg-type]
        r"stages\(\) of Wrong returned the stage 'all' with rounds 1.5; expected a whole number",
    ),
    "companions": (
        stages(Stage("all", 1, wrong(Entropy, "companions", lambda self: {1: "eval"}))),  # type: ignore[arg-type]
        r"companions\(\) of Wrong names 1; expected the name of a model as text, such as 'teacher'",
    ),
    "conclude None": (conclude(None), r"conclude\(\) of Wrong returned None; expected a dict of conclusions by name"),
    "conclude a tensor": (
        conclude({"rare": torch.zeros(2)}),
        r"conclude\(\) of Wrong returned a float32 tensor of shape 2 as 'rare'; expected a dict of conclusions by name",
    ),
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("case", HOOKS | DIFFERENT)
def test_a_wrong_result_is_one_line_on_every_engine(case: str, engine: str) -> None:
    part, message = (HOOKS | DIFFERENT)[case]
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
        (
            {"teacher": ["eval"]},
            r"companions\(\) of Wrong returned \['eval'\] as 'teacher'; expected 'eval' or 'train'",
        ),
        ({1: "eval"}, r"companions\(\) of Wrong names 1; expected the name of a model as text, such as 'teacher'"),
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


@pytest.mark.parametrize("case", STAGES)
def test_wrong_stages_are_one_line(case: str) -> None:
    """Those of the first stages are refused before the run. Conclusions are refused when a stage ends."""
    part, message = STAGES[case]
    with pytest.raises(UserError, match=message) as error:
        run_prepared(prepare(settings(rounds=2), federation(), part, linear_model()))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("case", ["weigh negative", "weigh zero", "weigh NaN"])
def test_wrong_weights_on_a_gpu_are_found_without_waiting_for_it(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They make the server's step NaN. The check of that step finds it, and then the weights are read."""
    monkeypatch.setattr(parts, "_is_on_host", lambda _: False)
    part, message = SERVER_HOOKS[case]
    updates = parts.Updates({"w": torch.ones(2, 1)}, torch.tensor([0.4, 0.6]), {}, 0.1, 1.0)
    assert isinstance(part, Weighting)
    assert parts.weigh_updates(part, {}, updates, {}).weights.isnan().all()
    with pytest.raises(UserError, match=message):
        run_prepared(prepare(settings(), federation(), part, linear_model()))


def test_right_weights_are_the_same_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    updates = parts.Updates({"w": torch.ones(3, 1)}, torch.tensor([0.2, 0.3, 0.5]), {}, 0.1, 1.0)
    part = weigh(lambda weights: weights.square() * torch.tensor([1, 0, 1]))
    assert isinstance(part, Weighting)
    on_host = parts.weigh_updates(part, {}, updates, {}).weights
    monkeypatch.setattr(parts, "_is_on_host", lambda _: False)
    assert torch.equal(on_host, parts.weigh_updates(part, {}, updates, {}).weights)
    assert on_host.tolist() == pytest.approx([4 / 29, 0, 25 / 29])
