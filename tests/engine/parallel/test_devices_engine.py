"""Clients spread over several devices give the run of one; two CPU "devices" stand for GPUs."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import pytest
import torch
from method_cases import PARAMS, only
from parallel_engines import CPU, spread
from torch import Tensor, nn
from toy_runs import advance, distance, finished, image_federation, linear, norm_and_dropout, same_bits, server

from fedskew.engine import PlainEngine, RoundResult, RoundWork, StackedEngine
from fedskew.engine.choice import choose_devices
from fedskew.engine.model.lifting import host_random_streams
from fedskew.errors import UserError
from fedskew.experiment.round.server import Server

METHODS = ("fedvls", "scaffold", "fedgr", "pkd", "fpl+fedcurv")


@pytest.mark.parametrize(
    ("method", "engine"),
    only(
        [*((method, PlainEngine) for method in METHODS), ("scaffold", StackedEngine), ("fpl+fedcurv", StackedEngine)],
        itertools.product(METHODS, [PlainEngine, StackedEngine]),
    ),
)
def test_two_devices_agree_with_one(method: str, engine: type[PlainEngine] | type[StackedEngine]) -> None:
    settings: dict[str, Any] = {"clients_per_round": 3, "lr": 0.02, "batch_size": 5, "rounds": 3}

    def fresh() -> Server:
        return server(image_federation(), method, norm_and_dropout(), PARAMS.get(method), **settings)

    this = fresh()
    two = spread(this, norm_and_dropout(), engine)
    state, _ = finished(this)
    two.close()
    assert two.name == engine.name
    assert two.notices == []
    one = finished(fresh())[0]
    assert same_bits(state, one) if engine is PlainEngine else distance(state, one) < 1e-9


def test_a_device_s_error_is_raised_here_and_global_generators_are_left_alone() -> None:
    this = server(image_federation(), "fedavg", linear())
    two = spread(this, linear(), PlainEngine)
    train = two._engines[1].train

    def with_another_threads_seed(work: RoundWork) -> RoundResult:
        result = train(work)
        random.seed(1)
        np.random.seed(1)  # noqa: NPY002
        torch.default_generator.manual_seed(1)
        return result

    two._engines[1].train = with_another_threads_seed  # type: ignore[method-assign]
    before = torch.get_rng_state(), host_random_streams()
    state, _ = advance(this, this.start())
    assert torch.equal(torch.get_rng_state(), before[0])
    assert host_random_streams() == before[1]
    two._engines[1].train = lambda work: 1 / 0  # type: ignore[method-assign, assignment, return-value]
    with pytest.raises(ZeroDivisionError):
        advance(this, state)
    two.close()


class ChangesInputs(nn.Module):
    """Writes into its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(64, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x.sub_(0.5).flatten(1))


def test_a_model_that_writes_into_its_inputs_is_noticed_on_every_device(monkeypatch: pytest.MonkeyPatch) -> None:
    model = ChangesInputs()
    one = finished(server(image_federation(), "fedvls", model))[0]
    monkeypatch.setattr("fedskew.experiment.round.runtime.choose_devices", lambda _: (CPU, CPU))
    this = server(image_federation(), "fedvls", model)
    two = finished(this)[0]
    this.close()
    assert same_bits(one, two)


def test_devices_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    names = {"cpu": "cpu", "auto": "cuda", "cuda": "cuda", "cuda:1": "cuda:1", "cuda:all": "cuda:0,cuda:1"}
    for name, devices in (names | {"cuda:1,cuda:0": "cuda:1,cuda:0"}).items():
        assert ",".join(map(str, choose_devices(name))) == devices
    with pytest.raises(
        UserError,
        match=r"device is .cuda:2., but 2 CUDA devices are available; expected cuda:0, cuda:1, cpu or auto$",
    ):
        choose_devices("cuda:0,cuda:2")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(UserError, match=r"1 CUDA device is available; expected cuda:0, cpu or auto$"):
        choose_devices("cuda:1")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    with pytest.raises(UserError, match=r"expected cuda:0 to cuda:7, cpu or auto$"):
        choose_devices("cuda:8")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_devices("auto") == (CPU,)
    with pytest.raises(UserError, match=r"device is .cuda:all., but no CUDA device is available"):
        choose_devices("cuda:all")
    with pytest.raises(UserError, match=r"device is .cuda:1., but no CUDA device is available; expected cpu or auto$"):
        choose_devices("cuda:1")
