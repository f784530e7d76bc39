"""Passes over clients' data: what they see, that engines agree on it, and hooks that cannot be stacked."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from method_cases import only
from parallel_engines import spread
from torch import Tensor, nn
from toy_runs import distance, finished, image_federation, linear, norm_and_dropout, server, use_engine

import fedskew as fs
from fedskew.data.federation import Federation
from fedskew.engine import Engine, PlainEngine, RoundResult, RoundWork, StackedEngine
from fedskew.engine.data.batches import RoundKey, plan_batches
from fedskew.experiment.round.server import Server
from fedskew.losses import IGNORE, class_masks, cross_entropy
from fedskew.methods import Client, Outputs, Seen, Tensors, Trained
from fedskew.models import Classifier


@dataclass(frozen=True)
class Witness(fs.Solver):
    """Sends what its passes saw."""

    needs_gradient = True

    def opening(self, seen: Seen, client: Client) -> Tensors:
        return self._sums(seen, client)

    def closing(self, seen: Seen, client: Client) -> Tensors:
        rows = (seen.y != IGNORE).sum()
        gradient = {f"gradient/{name}": rows * g for name, g in seen.gradient.items()}
        return {**self._sums(seen, client), **gradient, "batches": (rows > 0).double()}

    def _sums(self, seen: Seen, client: Client) -> Tensors:
        members = class_masks(seen.y, len(client.label_counts)).double()
        keys = torch.where(seen.y != IGNORE, seen.keys, 0).sum()
        return {"logits": members.T @ seen.out.logits, "seen": members.sum(dim=0), "keys": keys}

    def uplink(self, trained: Trained, client: Client) -> Tensors:
        opened = {f"opened {name}": t for name, t in client.opening.items()}
        return opened | {f"closed {name}": t for name, t in trained.closing.items()}


class Recording(Engine):
    """The engine it is given, with every result kept."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.name, self.notices = engine.name, engine.notices
        self.rounds: list[tuple[RoundWork, RoundResult]] = []

    def train(self, work: RoundWork) -> RoundResult:
        result = self._engine.train(work)
        self.rounds.append((work, result))
        return result


def recorded(this: Server) -> list[tuple[RoundWork, RoundResult]]:
    recording = use_engine(this, Recording(this.engine))
    finished(this)
    assert recording.notices == []
    return recording.rounds


def logits_by_class(model: nn.Module, fed: Federation, client: int) -> Tensor:
    dataset, rows = fed.dataset, fed.indices[client]
    mean, std = (torch.tensor(v, dtype=torch.float64).view(-1, 1, 1) for v in (dataset.mean, dataset.std))
    x = (torch.from_numpy(dataset.train.x[rows]).double() / 255 - mean) / std
    with torch.no_grad():
        logits: Tensor = model.double().eval()(x)
    return class_masks(torch.tensor(dataset.train.y[rows]), len(dataset.classes)).double().T @ logits


@pytest.mark.parametrize("engine", ["plain", "stacked"])
def test_each_sample_is_seen_once_as_it_is_by_the_model_received_and_by_the_model_trained(engine: str) -> None:
    fed = image_federation(((9, 4, 0, 6), (3, 2, 2, 4), (0, 11, 0, 0)), shape=(3, 20, 20))
    model = nn.Sequential(nn.Conv2d(3, 2, 5), nn.BatchNorm2d(2), nn.Flatten(), nn.Dropout(0.5), nn.Linear(512, 4))
    this = server(fed, Witness(), model, engine=engine, augment=("crop", "flip"))
    for work, result in recorded(this):
        received = this.network.module(work.sent)
        for row in range(3):
            trained = type(work.sent)(
                *({n: t[row] for n, t in part.items()} for part in (result.trained.params, result.trained.buffers))
            )
            after = this.network.module(trained)
            counts = torch.tensor(fed.label_counts[row]).double()
            for when, by in (("opened", received), ("closed", after)):
                assert torch.equal(result.uplink[f"{when} seen"][row].double(), counts)
                torch.testing.assert_close(result.uplink[f"{when} logits"][row], logits_by_class(by, fed, row))
            assert result.uplink["closed batches"][row] == -(-fed.sizes[row] // 5)
            assert int(result.uplink["opened keys"][row]) != int(result.uplink["closed keys"][row])


def test_the_gradient_is_that_of_the_cross_entropy() -> None:
    fed = image_federation(((9, 4, 0, 6), (3, 2, 2, 4)))
    ((_, result),) = recorded(server(fed, Witness(), linear(), rounds=1, engine="stacked"))
    for row, rows in enumerate(fed.indices):
        leaf = result.trained.params["head.weight"][row].clone().requires_grad_()
        bias = result.trained.params["head.bias"][row]
        mean, std = fed.dataset.mean[0], fed.dataset.std[0]
        x = ((torch.from_numpy(fed.dataset.train.x[rows]).double() / 255 - mean) / std).flatten(1)
        loss = cross_entropy(x @ leaf.T + bias, torch.from_numpy(fed.dataset.train.y[rows])) * len(rows)
        (expected,) = torch.autograd.grad(loss, leaf)
        torch.testing.assert_close(result.uplink["closed gradient/head.weight"][row], expected)


def uplinks(this: Server) -> list[Tensors]:
    return [result.uplink for _, result in recorded(this)]


def assert_same(some: list[Tensors], others: list[Tensors]) -> None:
    for one, other in zip(some, others, strict=True):
        assert one.keys() == other.keys()
        for name, tensor in one.items():
            torch.testing.assert_close(tensor, other[name], rtol=1e-9, atol=1e-9, msg=name)


def test_every_engine_sees_the_same() -> None:
    """One sample is too few for a batch with BatchNorm: nothing is seen of that client."""

    def fresh(**settings: Any) -> Server:
        return server(image_federation(), Witness(), norm_and_dropout(), **settings)

    plain = uplinks(fresh())
    assert not plain[0]["closed seen"][1].any()
    assert not plain[0]["closed gradient/head.weight"][1].any()
    assert_same(uplinks(fresh(engine="stacked")), plain)
    few = fresh(engine="stacked")
    use_engine(few, StackedEngine(few.network, few._runtimes.train_samples, 2, max_slots=2))
    assert_same(uplinks(few), plain)
    for kind in (PlainEngine, StackedEngine):
        this = fresh()
        two = spread(this, norm_and_dropout(), kind)
        assert_same(uplinks(this), plain)
        two.close()


@pytest.mark.parametrize("engine", ["plain", "stacked"])
def test_a_client_with_too_few_samples_for_a_norm_without_running_statistics(engine: str) -> None:
    norm = nn.BatchNorm1d(6, track_running_stats=False)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 6), norm, nn.Linear(6, 4))
    seen = uplinks(server(image_federation(), Witness(), model, engine=engine))[0]["closed seen"]
    assert seen.any(dim=1).tolist() == [True, False, True, True, True]


@pytest.mark.parametrize(
    ("most", "method"),
    only(
        [(2, "fedlmd+fedcurv"), (1, "balancefl+fpl+fedsam")],
        itertools.product([1, 2], ["fedlmd+fedcurv", "fpl+fedvls", "balancefl+fpl+fedsam"]),
    ),
)
def test_methods_with_passes_in_fewer_slots_than_clients(method: str, most: int) -> None:
    plain = finished(server(image_federation(), method, norm_and_dropout(), lr=0.02))[0]
    this = server(image_federation(), method, norm_and_dropout(), lr=0.02, engine="stacked")
    use_engine(this, StackedEngine(this.network, this._runtimes.train_samples, 2, max_slots=most))
    assert distance(finished(this)[0], plain) < 1e-9
    assert this.engine.notices == []


def test_a_pass_has_an_order_of_its_own_and_leaves_nobody_out() -> None:
    samples = np.arange(100, 113)
    plans = [plan_batches(samples, client, 2, 5, 1, RoundKey(0, 0, 3)) for client in (4, 5)]
    first, other = (plan.pass_batches for plan in plans)
    assert first.shape == (3, 5)
    assert sorted(first[first >= 0].tolist()) == samples.tolist()
    assert not np.array_equal(first, other)
    assert not np.array_equal(first, plans[0].indices_between(0, 3))
    assert np.array_equal(plan_batches(samples, 4, 1, 5, 1, RoundKey(0, 0, 3)).pass_batches, first)
    assert plan_batches(samples[:1], 4, 2, 5, 2, RoundKey(0, 0, 3)).pass_batches.tolist() == [[-1] * 5]


# -- hooks that cannot be stacked -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Branching(Witness):
    """Branches on a value in one of its hooks."""

    where: str = "opening"

    def _sums(self, seen: Seen, client: Client) -> Tensors:
        opened = bool(client.opening) or self.where == "opening"
        if opened and seen.out.logits.sum() > 0:
            return super()._sums(seen, client)
        return {name: 2 * t for name, t in super()._sums(seen, client).items()}


@dataclass(frozen=True)
class CountsPadding(Witness):
    """Counts rows that only pad."""

    def _sums(self, seen: Seen, client: Client) -> Tensors:
        return {**super()._sums(seen, client), "seen": torch.ones_like(seen.y).sum()}


@pytest.mark.parametrize(
    ("solver", "words"),
    [
        (Branching("opening"), "cannot be stacked"),
        (Branching("closing"), "cannot be stacked"),
        (CountsPadding(), "depends on rows of padding"),
    ],
)
def test_a_hook_that_cannot_be_stacked_still_gives_the_right_sums(solver: Witness, words: str) -> None:
    this = server(image_federation(), solver, linear(), engine="stacked")
    recording = use_engine(this, Recording(this.engine))
    finished(this)
    assert len(recording.notices) == 1
    assert words in recording.notices[0]
    plain = uplinks(server(image_federation(), solver, linear()))
    assert_same([result.uplink for _, result in recording.rounds], plain)


class Steps(nn.Module):
    """An encoder with a loop over its input's rows, which cannot be taken apart, though it can be lifted."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 6)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.layer(row.flatten()).tanh() for row in x.unbind()])


def test_features_of_a_model_that_cannot_be_taken_apart_are_perturbed_one_client_after_another() -> None:
    model = Classifier(Steps(), nn.Linear(6, 4))
    this = server(image_federation(), "balancefl", model, engine="stacked")
    state, _ = finished(this)
    assert [line for line in this.engine.notices if "changes features" in line] == this.engine.notices != []
    plain = finished(server(image_federation(), "balancefl", model))[0]
    assert distance(state, plain) < 1e-9


def test_the_loss_finds_the_features_that_the_encoder_made() -> None:
    @dataclass(frozen=True)
    class Shifted(fs.Objective):
        """The head sees features twice as large."""

        needs_features = True

        def perturbed(self, features: Tensor, y: Tensor, client: Client, key: Tensor) -> Tensor:
            return 2 * features

        def loss(self, out: Outputs, y: Tensor, client: Client) -> Tensor:
            return cross_entropy(out.logits, y) + 0 * out.required_features.sum()

        def tally(self, out: Outputs, y: Tensor) -> Tensors:
            return {"features": torch.where((y != IGNORE).unsqueeze(-1), out.required_features, 0.0).square().sum()}

    tallies = []
    for engine in ("plain", "stacked"):
        settings: dict[str, Any] = {"engine": engine, "rounds": 1, "lr": 0.01}
        shifted, rows = finished(server(image_federation(), Shifted(), linear(), **settings))
        assert not torch.allclose(
            shifted.model.params["head.weight"],
            finished(server(image_federation(), "fedavg", linear(), **settings))[0].model.params["head.weight"],
        )
        tallies.append(rows[0].tally["features"])
    fed = image_federation()
    mean, std = fed.dataset.mean[0], fed.dataset.std[0]
    x = (fed.dataset.train.x.astype(np.float64) / 255 - mean) / std
    assert tallies == pytest.approx([2 * float((x**2).sum())] * 2)  # two epochs
