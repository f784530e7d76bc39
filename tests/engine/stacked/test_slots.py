"""However few clients train at a time, and however their step is run, a round comes to the same."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
from method_cases import by_kind, only, slow
from torch import Tensor, nn
from toy_runs import (
    SKEWED,
    distance,
    finished,
    image_federation,
    linear,
    linear_layers,
    norm_and_dropout,
    plan_round,
    server,
    use_engine,
    with_fitting_head,
)

import fedskew.engine.stacked.engine
from fedskew.engine.stacked import execution
from fedskew.engine.stacked.engine import Slots, StackedEngine
from fedskew.engine.stacked.local_step import Program
from fedskew.errors import UserError
from fedskew.experiment.round.server import Server
from fedskew.experiment.round.state import RunState
from fedskew.losses import cross_entropy
from fedskew.methods import METHODS as CATALOGUE
from fedskew.methods import find, make_method
from fedskew.methods.parts import Client, Objective, Outputs
from fedskew.methods.stages import Notes, Schedule, Stage

METHODS = ["fedavg", "fedvls", "scaffold", "fedgr", "fedlmd+scaffold", "pkd"]
PARAMS: dict[str, dict[str, Any]] = {"pkd": {"groups": [[0, 1], [1, 2, 3]], "expert_rounds": 2}}


DECAY = {"lr": 0.01, "lr_decay": 0.5}
"""A learning rate that memory must be told anew each round."""


def stacked(
    method: str, rounds: int = 2, model: nn.Module | None = None, optimizer: str = "sgd", **options: Any
) -> Server:
    settings: dict[str, Any] = {**DECAY, "rounds": rounds, "optimizer": optimizer}
    this = server(image_federation(), method, model or norm_and_dropout(), PARAMS.get(method), **settings)
    use_engine(this, StackedEngine(this.network, this._runtimes.train_samples, 2, **options))
    return this


@cache
def plain(method: str, optimizer: str = "sgd") -> RunState:
    settings: dict[str, Any] = {**DECAY, "optimizer": optimizer}
    return finished(server(image_federation(), method, norm_and_dropout(), PARAMS.get(method), **settings))[0]


@pytest.mark.parametrize(
    ("method", "most"),
    only([("fedvls", 1), ("fedgr", 2), ("fedlmd+scaffold", 3), ("pkd", 2)], itertools.product(METHODS, [1, 2, 3])),
)
def test_fewer_slots_than_clients(method: str, most: int) -> None:
    this = stacked(method, max_slots=most)
    assert distance(finished(this)[0], plain(method)) < 1e-9


@pytest.mark.parametrize("window", [1, 3])
def test_batches_staged_in_several_windows(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fedskew.engine.stacked.engine, "STAGED_STEPS", window)
    assert distance(finished(stacked("fedvls"))[0], plain("fedvls")) < 1e-9


@pytest.mark.usefixtures("recorded_steps")
@pytest.mark.parametrize("window", [1, 3, *slow(4)])
def test_batches_staged_beside_the_steps_of_the_window_before(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where memory itself says which batch is next."""
    monkeypatch.setitem(fedskew.engine.stacked.engine._WINDOWS, "cpu", 2)
    monkeypatch.setattr(fedskew.engine.stacked.engine, "STAGED_STEPS", window)
    this = stacked("fedavg", rounds=3)
    state = finished(this)[0]
    program = next(iter(this.engine._slots[0][1]._programs.values()))  # type: ignore[index, union-attr, attr-defined]
    assert program.windows == 2
    monkeypatch.undo()
    reference = server(image_federation(), "fedavg", norm_and_dropout(), **{**DECAY, "rounds": 3})
    assert distance(state, finished(reference)[0]) < 1e-9


@pytest.fixture
def small_memory(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], list[int]]:
    """A device that has room for so many clients at a time; the numbers that were tried."""

    def of(most: int) -> list[int]:
        tried, real = [], Slots.train

        def train(self: Slots, work: Any, plans: Any, table: Any, width: int) -> Any:
            tried.append(table.slots)
            if table.slots > most:
                raise torch.OutOfMemoryError("no room")
            return real(self, work, plans, table, width)

        monkeypatch.setattr(Slots, "train", train)
        return tried

    return of


def test_a_round_that_runs_out_of_memory_begins_again_with_fewer_clients(
    small_memory: Callable[[int], list[int]],
) -> None:
    tried = small_memory(1)
    this = stacked("scaffold")
    state = finished(this)[0]
    assert distance(state, plain("scaffold")) < 1e-9
    assert tried[0] > 1
    assert set(tried[-2:]) == {1}  # the second round knows what the first one learnt
    assert this.engine.notices == ["the round's clients do not all fit in memory; they train up to 1 at a time"]


def test_what_did_not_fit_is_gone_before_the_next_attempt(
    small_memory: Callable[[int], list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    small_memory(1)
    made: list[weakref.ref[Slots]] = []
    alive: list[int] = []
    real = Slots.__init__

    def init(self: Slots, *args: Any) -> None:
        alive.append(sum(before() is not None for before in made))
        made.append(weakref.ref(self))
        real(self, *args)

    monkeypatch.setattr(Slots, "__init__", init)
    finished(stacked("fedavg"))
    assert len(alive) > 1
    assert set(alive) == {0}


def test_the_first_round_s_clients_do_not_limit_the_next() -> None:
    this = stacked("fedavg")
    work = plan_round(this, this.start()).work
    this.engine.train(replace(work, assignments=work.assignments[:1]))
    _, clients = this.engine.bare_step(work)  # type: ignore[attr-defined]
    _, fresh = stacked("fedavg").engine.bare_step(work)  # type: ignore[attr-defined]
    assert clients == fresh > 1


class Scaled(Objective):
    """An objective whose number is not printed."""

    def __init__(self, factor: float) -> None:
        object.__setattr__(self, "factor", factor)

    def loss(self, out: Outputs, y: Tensor, client: Client) -> Tensor:
        return self.factor * cross_entropy(out.logits, y)


@dataclass(frozen=True)
class Twofold(Schedule):
    def stages(self, rounds: int, local_epochs: int, notes: Notes) -> list[Stage]:
        return [Stage("low", 2, Scaled(0.5)), Stage("high", 2, Scaled(2.0))]


@pytest.mark.parametrize("engine", ["stacked", "pool-stacked"])
def test_objectives_that_look_alike_are_told_apart(engine: str) -> None:
    states = [finished(server(image_federation(), Twofold(), linear(), engine=name))[0] for name in (engine, "plain")]
    assert distance(*states) < 1e-9


def test_a_client_that_does_not_fit_alone_is_refused(small_memory: Callable[[int], list[int]]) -> None:
    small_memory(0)
    with pytest.raises(UserError, match="does not fit in the memory of cpu, although clients train one at a time"):
        finished(stacked("fedavg"))


def test_how_many_fit_is_known_beforehand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fedskew.engine.stacked.engine, "spare_bytes", lambda device: 90_000)
    this = stacked("fedavg")
    tried: list[int] = []
    real = Slots.train
    monkeypatch.setattr(
        Slots, "train", lambda self, w, p, table, n: (tried.append(table.slots), real(self, w, p, table, n))[1]
    )
    state = finished(this)[0]
    assert 1 <= max(tried) < len(SKEWED)
    assert "at a time" in this.engine.notices[0]
    assert distance(state, plain("fedavg")) < 1e-9


@pytest.fixture
def recorded_steps(monkeypatch: pytest.MonkeyPatch) -> list[torch.fx.GraphModule]:
    """Steps run as the operations that the compiler is given, which are listed."""
    programs: list[torch.fx.GraphModule] = []

    def take(program: torch.fx.GraphModule, **options: Any) -> torch.fx.GraphModule:
        programs.append(program)
        return program

    monkeypatch.setattr(torch, "compile", take)

    def ready(self: Any, step: Any) -> Callable[[int], None]:
        run = execution.compiled(replace(step, use_kernel=False), self.memory)
        return lambda _: run(self.memory)  # memory itself says which batch is next

    monkeypatch.setattr(Program, "_prepare_step", ready)
    return programs


def assert_no_tensors_from_the_host(programs: list[torch.fx.GraphModule]) -> None:
    """A CUDA graph would copy from where they once were."""
    assert programs
    for program in programs:
        execution._expect_no_copies_from_the_host(program, torch.device("cuda"))


@pytest.mark.parametrize("method", ["fedvls", "fedlmd+scaffold", *slow("fedavg", "scaffold", "fedgr", "pkd")])
def test_what_is_compiled_is_the_step(method: str, recorded_steps: list[torch.fx.GraphModule]) -> None:
    assert distance(finished(stacked(method))[0], plain(method)) < 1e-9
    assert_no_tensors_from_the_host(recorded_steps)


@pytest.mark.parametrize(
    ("optimizer", "most"),
    only([("nesterov", 2), ("adamw", None)], itertools.product(["nesterov", "adam", "adamw"], [2, None])),
)
def test_what_is_compiled_of_an_optimiser_is_its_step(
    optimizer: str, most: int | None, recorded_steps: list[torch.fx.GraphModule]
) -> None:
    state = finished(stacked("fedavg", optimizer=optimizer, max_slots=most))[0]
    assert distance(state, plain("fedavg", optimizer)) < 1e-6
    assert_no_tensors_from_the_host(recorded_steps)


@pytest.mark.parametrize(  # FedConcat has frozen encoders
    "method", by_kind(m for m in CATALOGUE if m != "fedconcat" and find(m).trains_clients)
)
def test_no_method_makes_tensors_from_numbers_on_the_host(
    method: str, recorded_steps: list[torch.fx.GraphModule]
) -> None:
    """The methods' share of a step; the layers' share is in what is compiled above.

    All tensors are trained, because here a frozen one, such as a simplex, looks like numbers on the host.
    """
    chosen = make_method(method)
    model = with_fitting_head(linear() if chosen.personal is None else linear_layers(), chosen).requires_grad_(True)
    rounds = {"pkd": 3, "ccvr": 2}.get(method, 1)  # the last round of CCVR trains nothing
    finished(stacked(method, rounds=rounds, model=model))
    assert_no_tensors_from_the_host(recorded_steps)


def test_given_class_weights_are_not_copied_from_the_host(recorded_steps: list[torch.fx.GraphModule]) -> None:
    weights = {"weights": [1.0, 0.5, 2.0, 4.0]}
    this = server(image_federation(), "weighted-ce", linear(), weights, rounds=1)
    use_engine(this, StackedEngine(this.network, this._runtimes.train_samples, 2))
    finished(this)
    assert_no_tensors_from_the_host(recorded_steps)


def test_a_step_that_makes_tensors_from_numbers_on_the_host_is_not_compiled() -> None:
    def step(memory: execution.Memory) -> None:
        memory["params"]["x"].mul_(torch.tensor([2.0, 3.0]))

    memory = {"params": {"x": torch.ones(2)}}
    program = execution.make_fx(lambda x: step({"params": {"x": x}}), tracing_mode="fake")(memory["params"]["x"])
    with pytest.raises(RuntimeError, match="numbers on the host"):
        execution._expect_no_copies_from_the_host(program, torch.device("cuda"))


def test_bare_steps_train_the_round_s_clients() -> None:
    this = server(image_federation(), "fedavg", linear(), engine="stacked")
    work = plan_round(this, this.start()).work
    assert isinstance(this.engine, StackedEngine)
    step, clients = this.engine.bare_step(work)
    assert clients == 4  # the fifth, with one sample, shares a slot
    before = {kind: t.clone() for kind, t in this.engine._slots[0][1]._memory["params"].items()}  # type: ignore[index]
    for _ in range(30):
        step()
    after = this.engine._slots[0][1]._memory["params"]  # type: ignore[index]
    assert all(not torch.equal(after[kind], t) for kind, t in before.items())


@pytest.mark.parametrize("augment", [(), ("crop", "flip", "cutout"), ("crop-reflect", "autoaugment")])
def test_what_is_compiled_of_staging_makes_the_same_batches(
    augment: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And only augmentations that compute no new pixels are compiled at all."""
    monkeypatch.setattr(torch, "compile", lambda program, **options: program)
    federation = image_federation(shape=(3, 20, 20))
    this = server(federation, "fedavg", linear(features=1200), engine="stacked", augment=augment)
    finished(this)
    assert isinstance(this.engine, StackedEngine)
    program = next(iter(this.engine._slots[0][1]._programs.values()))  # type: ignore[index]
    inputs = program.memory["inputs"]
    program._staging(program.memory)
    made = {name: t.clone() for name, t in inputs.items()}
    inputs["x"].zero_()
    execution.compiled(program._staging, program.memory, 15)(program.memory)
    assert all(torch.equal(inputs[name], t) for name, t in made.items())
    assert made["x"].abs().sum() > 0
    assert this._runtimes.train_samples.compilable == ("autoaugment" not in augment)
