"""Clients of several runs in one stack: every run is what it is by itself."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from method_cases import JOINED, KEEP_MOVES, PARAMS, TOLERANCE
from torch import Tensor, nn
from toy_runs import config, distance, finished, image_federation, linear, moved, norm_and_dropout

from fedskew.data.federation import Federation
from fedskew.engine import RoundWork, StackedEngine, joinable, joint_work, shared_out
from fedskew.engine.stacked.engine import NotTogetherError
from fedskew.engine.stacked.slots import Slots
from fedskew.experiment.round.server import Server
from fedskew.experiment.round.state import RunState
from fedskew.experiment.storage.history import Row
from fedskew.losses import cross_entropy
from fedskew.methods import METHODS, Client, Method, Objective, Outputs, Part, make_method

Given = str | Method | Part


def federation_of(seed: int) -> Federation:
    """The same data, split anew for each seed; clients have other sizes, too."""
    first = image_federation()
    samples = np.roll(np.concatenate(first.indices), 7 * seed)
    ends = np.cumsum(np.roll(first.sizes, seed))[:-1]
    return replace(first, indices=tuple(np.sort(part) for part in np.split(samples, ends)), seed=seed)


def model_of(model: nn.Module, seed: int) -> nn.Module:
    """Each run begins with weights of its own."""
    other, generator = copy.deepcopy(model), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in other.parameters():
            p += 0.05 * seed * torch.randn(p.shape, generator=generator)
    return other


def servers(
    method: Given,
    model: nn.Module,
    params: dict[str, Any] | None = None,
    *,
    runs: int = 2,
    shared: bool = True,
    numbers: Sequence[dict[str, Any]] = (),
    **settings: Any,
) -> list[Server]:
    """Runs that differ in their seed, hence in split, first model, clients and batches, and perhaps in `numbers` of
    their method; on one workbench or each on its own."""
    found: list[Server] = []
    for seed in range(runs):
        own, part = config(engine="stacked", seed=seed, **settings), numbers[seed] if numbers else params
        first = found[0] if found and shared else None
        found.append(Server(federation_of(seed), make_method(method, part), model_of(model, seed), own, first))
    return found


Ended = tuple[RunState, list[Row]]


def alone(servers: list[Server]) -> list[Ended]:
    return [finished(one) for one in servers]


def together(servers: list[Server]) -> tuple[list[Ended], int]:
    """The states at the end with the rows on the way, and how many rounds were joined."""
    states, joined = [one.start() for one in servers], 0
    rows: list[list[Row]] = [[] for _ in servers]
    while servers[0].stage(states[0]) is not None:
        begun = [one.begin(state) for one, state in zip(servers, states, strict=True)]
        works = [one.work for one in begun]
        assert works[0].key != works[1].key
        if begun[0].engine is begun[1].engine:
            assert joinable(*works)
            joined += 1
            results = shared_out(servers[0].train(replace(begun[0], work=joint_work(works))), works)
        else:
            results = [one.train(this) for one, this in zip(servers, begun, strict=True)]
        done = [one.finish(*both, 0.0) for one, *both in zip(servers, begun, results, strict=True)]
        states = [state for state, _ in done]
        for told, (_, row) in zip(rows, done, strict=True):
            told.append(row)
    assert all(one.stage(state) is None for one, state in zip(servers, states, strict=True))
    return list(zip(states, rows, strict=True)), joined


def assert_same(one: Ended, other: Ended) -> None:
    """The same run: its tensors, and what is recorded of it."""
    assert distance(one[0], other[0]) < TOLERANCE["float64"]
    for row, also in zip(one[1], other[1], strict=True):
        assert row["loss"] == pytest.approx(also["loss"], rel=1e-9)
        assert row["tally"] == pytest.approx(also["tally"])
        for key in ("clients", "visits", "bytes", "compute", "evaluation", "client_accuracy", "notes"):
            assert row.get(key) == also.get(key), key


@pytest.mark.parametrize("method", [*METHODS, *JOINED])
def test_every_method(method: str) -> None:
    lr = 0.07 if any(name in method for name in KEEP_MOVES) else 0.01
    settings: dict[str, Any] = {"clients_per_round": 3, "local_epochs": 1, "lr": lr}
    apart = alone(servers(method, norm_and_dropout(), PARAMS.get(method), shared=False, **settings))
    ran = servers(method, norm_and_dropout(), PARAMS.get(method), **settings)
    ended, joined = together(ran)
    assert ran[0].engine.notices == []
    assert joined >= 2
    assert moved(apart[0][0].model.params, apart[1][0].model.params) > 1e-3
    for one, other in zip(apart, ended, strict=True):
        assert_same(one, other)


def numbers_of(method: str) -> dict[str, Any]:
    params = make_method(method, PARAMS.get(method)).params
    return {name: value for name, value in params.items() if isinstance(value, float)}


@pytest.mark.parametrize("method", [method for method in (*METHODS, *JOINED) if numbers_of(method)])
def test_every_method_with_other_numbers(method: str) -> None:
    """Hyper-parameters may differ, too, for every method computes with them and looks at none."""
    given = PARAMS.get(method, {})
    numbers = [given, {**given, **{name: 0.8 * value for name, value in numbers_of(method).items()}}]
    lr = 0.07 if any(name in method for name in KEEP_MOVES) else 0.01
    settings: dict[str, Any] = {"clients_per_round": 3, "local_epochs": 1, "lr": lr, "numbers": numbers}
    ran = servers(method, norm_and_dropout(), **settings)
    ended, joined = together(ran)
    assert joined >= 2
    apart = alone(servers(method, norm_and_dropout(), shared=False, **settings))
    for one, other in zip(apart, ended, strict=True):
        assert_same(one, other)


def test_a_number_that_is_zero_may_be_joined_with_others() -> None:
    """FedLC without a margin, which is FedAvg with vacant classes in, beside FedLC with one, which leaves them out."""
    settings: dict[str, Any] = {"lr": 0.05, "numbers": [{"tau": 0.0}, {"tau": 0.5}]}
    ended, joined = together(servers("fedlc", norm_and_dropout(), **settings))
    assert joined == 2
    for one, other in zip(alone(servers("fedlc", norm_and_dropout(), shared=False, **settings)), ended, strict=True):
        assert_same(one, other)


def differences(method: Given, model: nn.Module, **settings: Any) -> tuple[float, list[str]]:
    """Between runs together and apart, and what the engine said meanwhile."""
    apart, ran = alone(servers(method, model, shared=False, **settings)), servers(method, model, **settings)
    ended, _ = together(ran)
    return max(distance(a[0], b[0]) for a, b in zip(apart, ended, strict=True)), ran[0].engine.notices


def test_more_clients_than_fit_the_memory_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StackedEngine, "_most_clients", lambda *_: 3)
    assert differences("scaffold", norm_and_dropout(), lr=0.07)[0] < 1e-9
    assert differences("fedcurv", norm_and_dropout(), lr=0.01)[0] < 1e-9
    assert differences("fedlmd", norm_and_dropout(), lr=0.01)[0] < 1e-9


@pytest.mark.parametrize("room", [4, 5])
def test_runs_are_joined_where_at_least_the_clients_of_one_fit_the_memory(
    room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StackedEngine, "_fitting", lambda *_: room)
    ran = servers("fedavg", norm_and_dropout(), lr=0.01)
    assert {len(one.begin(one.start()).work.assignments) for one in ran} == {5}
    if room == 4:
        with pytest.raises(NotTogetherError, match="4 of their clients fit the memory at a time, and a run has 5"):
            together(ran)
    else:
        assert together(ran)[1] == 2


def test_a_memory_that_turns_out_too_small_for_several_runs_is_left_to_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """It fits by the estimate, and then it does not."""
    tried: list[int] = []

    def full(self: StackedEngine, work: RoundWork, _: object, capacity: int) -> Slots:
        tried.append(capacity)
        raise torch.OutOfMemoryError

    monkeypatch.setattr(StackedEngine, "_slots_for", full)
    with pytest.raises(NotTogetherError):
        together(servers("fedavg", linear()))
    assert len(tried) == 1
    assert tried[0] > 5


def test_clients_without_samples_return_what_their_own_server_sent() -> None:
    """BatchNorm cannot train on one sample: that client takes no step, in either run."""
    ran = servers("fedavg", norm_and_dropout())
    begun = [one.begin(one.start()) for one in ran]
    works = [one.work for one in begun]
    for this, result in zip(
        works, shared_out(ran[0].train(replace(begun[0], work=joint_work(works))), works), strict=True
    ):
        idle = next(row for row, a in enumerate(this.assignments) if len(a.samples) == 1)
        assert result.visits[idle] == 0
        assert all(torch.equal(t[idle], this.sent.params[name]) for name, t in result.trained.params.items())
        assert all(torch.equal(t[idle], this.sent.buffers[name]) for name, t in result.trained.buffers.items())


@dataclass(frozen=True)
class ReadsWhatWasSent(Objective):
    """Looks at a number that the server sent, which a stack can only where it is the same for all."""

    def loss(self, out: Outputs, y: Tensor, client: Client) -> Tensor:
        weight = 1.0 + min(float(next(iter(client.received.values())).abs().max()), 1.0)
        return weight * cross_entropy(out.logits, y)


def test_what_only_one_run_s_clients_can_be_stacked_for_is_refused_together() -> None:
    ran = servers(ReadsWhatWasSent(), linear())
    with pytest.raises(NotTogetherError):
        together(ran)
    assert finished(ran[0])[1][-1]["diverged"] == []
    assert ran[0].engine.notices == []


def test_a_run_that_is_left_alone_needs_no_second_run() -> None:
    (this,) = servers("fedlmd", norm_and_dropout(), runs=1)
    begun = this.begin(this.start())
    (result,) = shared_out(this.train(replace(begun, work=joint_work([begun.work]))), [begun.work])
    usual = this.train(begun)
    assert moved(usual.trained.params, result.trained.params) < 1e-12
    assert np.array_equal(usual.visits, result.visits)


def test_rounds_that_differ_in_more_than_numbers_are_not_joined() -> None:
    def work(method: str = "fedprox", params: dict[str, Any] | None = None, **settings: Any) -> RoundWork:
        (this,) = servers(method, linear(), params, runs=1, **settings)
        return this.begin(this.start()).work

    usual = work()
    assert joinable(usual, work())
    assert not joinable(usual, work("fedavg"))
    assert not joinable(work("fedgr"), work("fedgr", params={"reduction": "mean"}))
    assert not joinable(usual, work(lr=0.5))
    assert not joinable(usual, work(local_epochs=7))
    assert not joinable(usual, work(precision="float32"))
    assert not joinable(work("local-only"), replace(work("local-only"), assignments=usual.assignments))
