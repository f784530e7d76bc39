"""Steps are compiled if the user says so, or if the run is long and the model is deep."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn
from toy_runs import image_federation, linear, server

from fedskew.engine import worth_compiling
from fedskew.experiment.round import runtime


@pytest.mark.parametrize(
    ("wish", "steps", "compiled"),
    [
        ("auto", 199_999, False),
        ("auto", 200_000, True),
        ("never", 1e9, False),
        ("always", 1, True),
    ],
)
def test_when_steps_are_compiled(wish: str, steps: float, compiled: bool) -> None:
    two_layers = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2))
    assert worth_compiling(wish, steps, two_layers) is compiled


@pytest.mark.parametrize(("rounds", "compiled"), [(10, False), (100_000, True)])
def test_a_run_s_local_steps_count(rounds: int, compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients of 8 samples in batches of 5 take two steps in each of two epochs."""
    told: list[bool] = []
    real = runtime.make_engine

    def make_engine(*given: Any) -> Any:
        told.append(given[-1])
        return real(*given)

    monkeypatch.setattr(runtime, "make_engine", make_engine)
    server(image_federation(((2, 2, 2, 2),) * 3), "fedavg", linear(), rounds=rounds, engine="stacked")
    assert told == [compiled]
