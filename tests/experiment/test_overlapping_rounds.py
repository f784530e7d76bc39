"""Rounds that overlap, as on a GPU, are the rounds one after another, to the last bit, also where a guess is wrong."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from method_cases import only
from overlapping import ENGINES, RUNS, run_overlapping
from torch import Tensor
from toy_runs import finished, image_federation, linear, norm_and_dropout, same_bits, server, timeless

import fedskew as fs
from fedskew.engine import ModelState
from fedskew.experiment.round.evaluate import RowFields, TestSet
from fedskew.experiment.round.record import RoundRow
from fedskew.experiment.round.server import Server
from fedskew.experiment.round.state import RunState
from fedskew.losses import cross_entropy
from fedskew.methods import Client, Objective, Outputs, ServerRule, Tensors, Trained, Updates

pytestmark = pytest.mark.usefixtures("every_round_is_short")


def agreed(fresh: Callable[[], Server]) -> tuple[RunState, list[RoundRow]]:
    """What a run comes to whose rounds overlap: what it does one after another."""
    expected, expected_rows = finished(fresh())
    state, recorder = run_overlapping(fresh())
    rows = [timeless(row) for row in recorder.rows]
    assert recorder.states[-1] is state
    assert same_bits(state, expected)
    assert rows == expected_rows
    return state, rows


@pytest.mark.parametrize(
    ("method", "engine"),
    only(
        [*((method, "stacked") for method in RUNS), ("scaffold", "plain"), ("pkd", "plain")],
        itertools.product(RUNS, ["stacked", "plain"]),
    ),
)
def test_overlapping_rounds_are_the_rounds_one_after_another(method: str, engine: str) -> None:
    def fresh() -> Server:
        return server(
            image_federation(), method, norm_and_dropout(), RUNS[method], engine=engine, rounds=4, clients_per_round=3,
            precision="float32", lr_decay=0.9, local_epochs=1,
        )  # fmt: skip

    agreed(fresh)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("method", RUNS)
def test_they_are_on_a_gpu_too(method: str) -> None:
    def fresh() -> Server:
        return server(
            image_federation(), method, norm_and_dropout(), RUNS[method], engine="stacked", rounds=4, device="cuda",
            clients_per_round=3, precision="float32",
        )  # fmt: skip

    agreed(fresh)


@pytest.mark.parametrize("settings", [{"eval_every": 2}, {"eval_every": 9}, {"eval_local": True}])
def test_whatever_is_tested_and_when(settings: dict[str, Any]) -> None:
    def fresh() -> Server:
        return server(image_federation(), "fedvls", norm_and_dropout(), engine="stacked", rounds=5, **settings)

    agreed(fresh)


def test_the_wait_for_an_evaluation_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    begin = TestSet.begin_to_measure

    def begin_slowly(self: TestSet, model: ModelState, labels: Any = None) -> Callable[[], RowFields]:
        read = begin(self, model, labels)

        def wait() -> RowFields:
            time.sleep(0.1)
            return read()

        return wait

    monkeypatch.setattr(TestSet, "begin_to_measure", begin_slowly)
    _, recorder = run_overlapping(server(image_federation(), "fedavg", linear(), engine="stacked", rounds=4))
    rows = recorder.rows[1:]
    assert all(row.time["evaluate"] >= 0.1 for row in rows)
    assert sum(sum(row.time.values()) for row in rows) <= sum(row.seconds for row in rows)


# -- guesses that are wrong -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Explosive(Objective):
    """Cross entropy, but not finite for clients without a sample of class 0."""

    def loss(self, out: Outputs, y: Tensor, client: Client) -> Tensor:
        return cross_entropy(out.logits, y) * torch.where(client.label_counts[0] == 0, torch.nan, 1.0)


@dataclass(frozen=True)
class Overflowing(ServerRule):
    """A server step that is not finite though the updates are."""

    def aggregate(self, sent: Tensors, updates: Updates, state: Tensors) -> tuple[Tensors, Tensors]:
        return {name: w * torch.inf for name, w in updates.mean().items()}, {}


@dataclass(frozen=True)
class Particular(ServerRule):
    """A server step that refuses what is not finite."""

    def aggregate(self, sent: Tensors, updates: Updates, state: Tensors) -> tuple[Tensors, Tensors]:
        mean = updates.mean()
        if any(bool(w.isnan().any()) for w in mean.values()):
            raise RuntimeError("not a number")
        return mean, state


@ENGINES
@pytest.mark.parametrize("part", [Explosive(), Overflowing()])
def test_a_guess_that_was_wrong_is_undone(part: Objective | ServerRule, engine: str) -> None:
    def fresh() -> Server:
        return server(image_federation(), part, linear(), engine=engine, rounds=6, clients_per_round=2)

    _, rows = agreed(fresh)
    assert any(row.diverged for row in rows)


def test_a_server_rule_that_refuses_a_wrong_guess_is_asked_again() -> None:
    method = fs.methods.make_method(Explosive())
    both = fs.methods.Method(**{**vars(method), "server": Particular()})
    _, rows = agreed(lambda: server(image_federation(), both, linear(), rounds=3))
    assert [row.diverged for row in rows] == [[1, 3]] * 3


@dataclass(frozen=True)
class Burdened(Objective):
    """Cross entropy; clients without a sample of class 0 come to keep what is not finite, though all else is."""

    def loss(self, out: Outputs, y: Tensor, client: Client) -> Tensor:
        return cross_entropy(out.logits, y)

    def client_state(self, params: Tensors) -> Tensors:
        return {"kept": torch.zeros(())}

    def next_state(self, trained: Trained, client: Client) -> Tensors:
        return {"kept": torch.where(client.label_counts[0] == 0, torch.inf, client.state["kept"] + 1)}


@ENGINES
def test_a_client_whose_state_is_not_finite_is_left_out_too(engine: str) -> None:
    def fresh() -> Server:
        return server(image_federation(), Burdened(), linear(), engine=engine)

    state, rows = agreed(fresh)
    assert [row.diverged for row in rows] == [[1, 3]] * 2
    assert state.clients.versions == {"global": {0: 2, 2: 2, 4: 2}}


@dataclass(frozen=True)
class ParticularDownlink(ServerRule):
    """A server that sends nothing that is not finite."""

    def server_state(self, params: Tensors) -> Tensors:
        return {"mean": next(iter(params.values())).clone()}

    def aggregate(self, sent: Tensors, updates: Updates, state: Tensors) -> tuple[Tensors, Tensors]:
        mean = updates.mean()
        return mean, {"mean": next(iter(mean.values()))}

    def downlink(self, state: Tensors) -> Tensors:
        if not bool(state["mean"].isfinite().all()):
            raise RuntimeError("not finite")
        return state


class ParticularModel(fs.models.Classifier):
    """Refuses numbers that are not finite when it is tested."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = super().forward(x)
        if not self.training and not bool(out.isfinite().all()):
            raise RuntimeError("not finite")
        return out


@pytest.mark.parametrize("of", ["server", "model"])
def test_what_would_be_done_with_a_wrong_guess_may_fail(of: str) -> None:
    """Neither the next round, which is made ready on it, nor the test of it is the run's."""
    method, model = fs.methods.make_method(Explosive()), linear()
    if of == "server":
        method = fs.methods.Method(**{**vars(method), "server": ParticularDownlink()})
    else:
        model = ParticularModel(model.encoder, model.head)

    def fresh() -> Server:
        return server(image_federation(), method, model, rounds=3)

    _, rows = agreed(fresh)
    assert [row.diverged for row in rows] == [[1, 3]] * 3
