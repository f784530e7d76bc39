"""Updates and server steps that are not finite are left out, and the row names whose they were."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor
from toy_runs import advance, finished, image_federation, linear, norm_and_dropout, server, trained

from fedskew.losses import cross_entropy
from fedskew.methods import Client, Objective, Outputs, ServerRule, Tensors, Updates, make_method

ENGINES = pytest.mark.parametrize("engine", ["plain", "stacked"])


@dataclass(frozen=True)
class Explosive(Objective):
    """Cross entropy, but not finite for clients without a sample of class 0."""

    value: float = float("nan")

    def loss(self, out: Outputs, y: Tensor, client: Client) -> Tensor:
        return cross_entropy(out.logits, y) * torch.where(client.label_counts[0] == 0, self.value, 1.0)


@ENGINES
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_diverged_client_is_left_out_and_named(engine: str, value: float) -> None:
    federation = image_federation()
    state, rows = trained(federation, Explosive(value), linear(), engine=engine)
    assert [row.diverged for row in rows] == [[1, 3], [1, 3]]
    assert all(torch.isfinite(t).all() for t in state.tensors().values())
    json.dumps([row.to_json() for row in rows], allow_nan=False)
    others = tuple(part if k in (0, 2, 4) else part[:0] for k, part in enumerate(federation.indices))
    expected, without = trained(replace(federation, indices=others), "fedavg", linear(), engine=engine)
    assert [row.loss for row in rows] == pytest.approx([row.loss for row in without])
    torch.testing.assert_close(state.model.params, expected.model.params, rtol=1e-9, atol=1e-12)


def test_too_large_a_learning_rate_leaves_the_model_finite() -> None:
    state, rows = trained(image_federation(), "fedavg", linear(), lr=1e30, precision="float32", rounds=4)
    assert any(row.diverged for row in rows)
    assert all(torch.isfinite(t).all() for t in state.tensors().values())
    json.dumps([row.to_json() for row in rows], allow_nan=False)


def test_numbers_too_large_to_add_up_are_finite_all_the_same() -> None:
    model = linear()
    model.register_buffer("scale", torch.full((4,), 3e38))
    state, rows = trained(image_federation(), "fedavg", model, precision="float32")
    assert [row.diverged for row in rows] == [[], []]
    assert torch.equal(state.model.buffers["scale"], torch.full((4,), 3e38))


@dataclass(frozen=True)
class Everyone(Objective):
    def loss(self, out: Outputs, y: Tensor, client: Client) -> Tensor:
        return cross_entropy(out.logits, y) * torch.nan


@ENGINES
def test_a_round_in_which_all_diverge_leaves_every_bit(engine: str) -> None:
    this = server(image_federation(), Everyone(), linear(), engine=engine)
    start = this.start()
    state, row = advance(this, start)
    assert row.diverged == [0, 1, 2, 3, 4]
    assert row.loss is None
    for name, tensor in start.tensors().items():
        assert torch.equal(state.tensors()[name], tensor)
    assert state.models["global"].rounds == 1


@dataclass(frozen=True)
class Overflowing(ServerRule):
    """A server step that is not finite though the updates are."""

    def aggregate(self, sent: Tensors, updates: Updates, state: Tensors) -> tuple[Tensors, Tensors]:
        return {name: w * float("inf") for name, w in updates.mean().items()}, {}


def test_a_server_step_that_overflows_is_not_taken() -> None:
    this = server(image_federation(), Overflowing(), norm_and_dropout())
    start = this.start()
    state, rows = finished(this, start)
    assert [row.diverged for row in rows] == [[0, 1, 2, 3, 4]] * 2
    assert all(torch.equal(tensor, state.tensors()[name]) for name, tensor in start.tensors().items())


def test_a_server_step_that_leaves_the_state_not_finite_is_not_taken() -> None:
    """The squares of updates overflow, and FedAdagrad stays where it is; so it would for ever."""
    this = server(
        image_federation(), "fedadagrad", linear(), precision="float32", lr=1e25, local_epochs=1, batch_size=99
    )
    start = this.start()
    state, row = advance(this, start)
    assert row.loss is None
    assert row.diverged == [0, 1, 2, 3, 4]
    assert all(torch.equal(tensor, state.tensors()[name]) for name, tensor in start.tensors().items())


def test_a_diverged_client_keeps_the_state_it_had() -> None:
    method = replace(make_method("scaffold"), objective=Explosive())
    state, rows = trained(image_federation(), method, linear())
    assert rows[0].diverged == [1, 3]
    assert state.clients.versions == {"global": {0: 2, 2: 2, 4: 2}}
