"""A run that goes on from its saved state is the run that never stopped, bit for bit."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from method_cases import only
from toy_runs import (
    advance,
    everything,
    finished,
    image_federation,
    norm_and_dropout,
    same_bits,
    server,
    timeless,
    with_fitting_head,
)

from fedskew.experiment.round.state import ClientStates, RunState
from fedskew.experiment.storage.checkpoints import ClientFiles
from fedskew.experiment.storage.files import read_tensors, write_tensors
from fedskew.methods import METHODS, Method, make_method

RUNS: dict[str, dict[str, Any]] = {
    "fedavg": {},
    "fedavgm": {},
    "centralised": {},
    "local-only": {},
    "fedconcat+fedavgm": {"clusters": 2, "encoder_rounds": 1},
    "fedconcat+scaffold": {"clusters": 2, "encoder_rounds": 2, "head_rounds": 3, "head_start": "joined"},
    "scaffold": {},
    "fedadagrad": {},
    "fedadam": {},
    "fedyogi": {},
    "feddyn": {},
    "mofedsam": {},
    "fedcm": {},
    "fedacg": {},
    "fedlesam": {},
    "fedsmoo": {},
    "creff": {"features_per_class": 5, "match_steps": 5, "head_epochs": 5},
    "logit-adjustment": {},
    "fedgf": {"threshold": 0.0, "window": 2},
    "moon+scaffold": {"mu": 1.0},
    "fedlmd+fedcurv+fedavgm": {},
    "fpl+fedvls": {},
    "fedmr-inter": {"nu": 1.0},
    "fedper+scaffold": {},
    "fedrep+fedavgm": {"head_epochs": 2},
    "fedbn": {},
    "ditto": {},
    "balancefl+fpl+scaffold": {},
    "fedlmd-switch+scaffold": {},
    "fedlmd-switch": {"switch_round": 1},
    "pkd+fedavgm": {"warmup_rounds": 1, "expert_rounds": 2},
    "pkd+scaffold": {"groups": [[0, 1], [1, 2, 3]], "warmup_rounds": 2, "expert_rounds": 1},
}

FAST = (
    "fedavg",
    "fedconcat+fedavgm",
    "moon+scaffold",
    "fedlmd+fedcurv+fedavgm",
    "fpl+fedvls",
    "pkd+scaffold",
    "fedrep+fedavgm",
)
"""One for each kind of state: none, a server's, a client's and a model kept by it, gradients, prototypes, stages, and
personal tensors."""

CPU = torch.device("cpu")


def test_every_method_that_keeps_something_is_among_them() -> None:
    def keeps_something(method: Method) -> bool:
        params = dict(with_fitting_head(norm_and_dropout(), method).named_parameters())
        return any(part.client_state(params) or part.server_state(params) for part in method.parts)

    keeping = {name for name in METHODS if keeps_something(make_method(name))}
    assert {"scaffold", "moon", "fpl"} <= keeping <= {name for joined in RUNS for name in joined.split("+")}


def on_disk(path: Path) -> ClientStates:
    return ClientFiles(path / "clients").resume({}, "a run")


def through_files(state: RunState, path: Path) -> RunState:
    """What is read back after `path` was left to itself."""
    write_tensors(path / "state", state.tensors(), state.meta())
    clients = ClientFiles(path / "clients").resume(state.clients.versions, "a run")
    return RunState.restore(*read_tensors(path / "state"), clients, CPU)


def assert_same_state(state: RunState, again: RunState) -> None:
    assert same_bits(state, again)
    assert json.loads(json.dumps(state.meta())) == json.loads(json.dumps(again.meta()))
    assert list(again.model.params) == list(state.model.params)


@pytest.mark.parametrize("method", only(FAST, RUNS))
def test_a_state_in_float64_comes_back_from_a_file_as_it_was(method: str, tmp_path: Path) -> None:
    this = server(image_federation(), method, norm_and_dropout(), RUNS[method], rounds=2, local_epochs=1)
    state = finished(this, this.start(on_disk(tmp_path)))[0]
    assert_same_state(state, through_files(state, tmp_path))


@pytest.mark.parametrize(
    ("method", "engine"),
    only(
        [*((method, "plain") for method in FAST), ("moon+scaffold", "stacked"), ("pkd+scaffold", "stacked")],
        itertools.product(RUNS, ["plain", "stacked"]),
    ),
)
def test_a_run_goes_on_from_any_round(method: str, engine: str, tmp_path: Path) -> None:
    def fresh() -> Any:
        return server(
            image_federation(), method, norm_and_dropout(), RUNS[method], engine=engine, rounds=3, local_epochs=1,
            clients_per_round=3, precision="float32", clip_norm=0.5, lr_decay=0.9,
        )  # fmt: skip

    this = fresh()
    undisturbed = finished(this)[0]
    state, states, rows = this.start(on_disk(tmp_path)), [], []
    while this.next_stage(state) is not None:
        states.append(state)
        state, row = advance(this, state)
        rows.append(row)
    assert len(rows) >= 3
    assert_same_state(undisturbed, through_files(state, tmp_path))
    for done, earlier in reversed(list(enumerate(states))):
        resumed, rest = finished(fresh(), through_files(earlier, tmp_path))
        assert same_bits(resumed, undisturbed)
        assert list(map(timeless, rest)) == list(map(timeless, rows[done:]))


def test_advancing_leaves_the_earlier_state_alone() -> None:
    this = server(image_federation(), "fedlmd+scaffold", norm_and_dropout(), engine="stacked", rounds=3)
    state, _ = advance(this, this.start())
    kept = {name: tensor.clone() for name, tensor in everything(state).items()}
    meta = json.dumps(state.meta())
    finished(this, state)
    assert json.dumps(state.meta()) == meta
    assert all(torch.equal(tensor, kept[name]) for name, tensor in everything(state).items())
