"""The reference engine against a few lines of ordinary PyTorch, and what it does with a user's own model."""

from __future__ import annotations

import copy
import random
import warnings
from types import MethodType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from toy_runs import (
    config,
    distance,
    finished,
    image_federation,
    linear,
    moved,
    norm_and_dropout,
    plan_round,
    same_bits,
    server,
    text_federation,
    trained,
)

from fedskew.data.federation import Federation
from fedskew.engine.data.batches import RoundKey, plan_batches
from fedskew.engine.model.lifting import host_random_streams
from fedskew.errors import UserError

BOTH = pytest.mark.parametrize("engine", ["plain", "stacked"])


def by_hand(
    federation: Federation, model: nn.Module, rounds: int, weights: np.ndarray | None = None, **settings: Any
) -> nn.Module:
    """FedAvg with torch.optim.SGD, on the batches that the plan names."""
    c = config(**settings)
    data, server_model = federation.dataset, copy.deepcopy(model).double()
    shares = federation.sizes / federation.sizes.sum() if weights is None else weights
    x = (torch.from_numpy(data.train.x).double() / 255 - 0.5) / 0.5
    y = torch.from_numpy(data.train.y)
    for round in range(rounds):
        total = {name: torch.zeros_like(t, dtype=torch.float64) for name, t in server_model.state_dict().items()}
        for client in range(federation.clients):
            local = copy.deepcopy(server_model).train()
            trainable = [p for p in local.parameters() if p.requires_grad]
            lr = c.lr * c.lr_decay**round
            optimiser = torch.optim.SGD(trainable, lr, momentum=c.momentum, weight_decay=c.weight_decay)
            plan = plan_batches(
                federation.indices[client], client, c.local_epochs, c.batch_size, 1, RoundKey(c.seed, 0, round)
            )
            for row in plan.indices:
                batch = row[row >= 0]
                optimiser.zero_grad()
                functional.cross_entropy(local(x[batch]), y[batch]).backward()
                if c.clip_norm is not None:
                    nn.utils.clip_grad_norm_(trainable, c.clip_norm)
                optimiser.step()
            for name, tensor in local.state_dict().items():
                total[name] += shares[client] * tensor.double()
        server_model.load_state_dict({n: t.to(server_model.state_dict()[n].dtype) for n, t in total.items()})
    return server_model


def norm_only() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(108, 4))


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"momentum": 0.0, "weight_decay": 0.0},
        {"lr_decay": 0.5, "batch_size": 100},
        {"clip_norm": 0.2},
        {"average": "uniform"},
    ],
)
def test_fedavg_is_torch_sgd_on_the_planned_batches(settings: dict[str, Any]) -> None:
    federation = image_federation()
    this = server(federation, "fedavg", norm_only(), rounds=3, **settings)
    state, rows = finished(this)
    weights = np.full(federation.clients, 1 / federation.clients) if settings.get("average") else None
    expected = by_hand(federation, norm_only(), 3, weights, **settings).state_dict()
    got = this.network.module(state.model).state_dict()
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        if name.endswith("num_batches_tracked"):
            assert abs(int(got[name]) - int(tensor)) <= 1  # a mean of whole numbers, rounded off
        else:
            tolerance = 1e-6 if "clip_norm" in settings else 1e-10  # torch adds 1e-6 to the norm
            torch.testing.assert_close(got[name], tensor, rtol=1e-10, atol=tolerance)
    assert [row.lr for row in rows] == pytest.approx([0.05 * settings.get("lr_decay", 1) ** t for t in range(3)])


def test_the_recorded_loss_is_the_mean_over_all_visits() -> None:
    federation = image_federation(((5, 3, 0, 1),))
    row = trained(federation, "fedavg", linear(), rounds=1, lr=1e-30, batch_size=4)[1][0]
    model = linear().double()
    x = (torch.from_numpy(federation.dataset.train.x).double() / 255 - 0.5) / 0.5
    expected = functional.cross_entropy(model(x), torch.from_numpy(federation.dataset.train.y))
    assert row.loss == pytest.approx(expected.item(), rel=1e-12)
    assert row.visits == 18


class Frozen(nn.Module):
    """A user's model: no encoder and head, one layer frozen, one weight used twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fixed = nn.Linear(64, 6)
        self.fixed.requires_grad_(False)
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.second.weight = self.first.weight
        self.out = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.relu(self.second(torch.relu(self.first(self.fixed(x.flatten(1)))))))


@BOTH
def test_frozen_and_tied_parameters(engine: str) -> None:
    with torch.random.fork_rng():
        model = Frozen()
    this = server(image_federation(), "fedvls", model, engine=engine, rounds=3)
    state, _ = finished(this)
    module = this.network.module(state.model)
    assert this.engine.notices == []
    assert torch.equal(module.fixed.weight, model.fixed.weight.double())
    assert module.first.weight is module.second.weight
    assert not torch.equal(module.first.weight, model.first.weight.double())
    expected = by_hand(image_federation(), model, 3)
    state, _ = trained(image_federation(), "fedavg", model, engine=engine, rounds=3)
    for name, tensor in this.network.module(state.model).state_dict().items():
        torch.testing.assert_close(tensor, expected.state_dict()[name], rtol=1e-10, atol=1e-12)


@BOTH
@pytest.mark.parametrize("method", ["fedvls", "fedlmd", "fedprox", "scaffold", "fedavgm", "fedgr-client"])
def test_methods_of_logits_alone_need_no_encoder(method: str, engine: str) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 4))
    start = {name: p.detach().double() for name, p in model.named_parameters()}
    state, rows = trained(image_federation(), method, model, engine=engine)
    assert moved(start, state.model.params) > 0
    assert rows[-1].diverged == []


class FunctionalDropout(nn.Module):
    """Draws from torch's own stream."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.out = nn.Linear(64, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(functional.dropout(x.flatten(1), 0.5, self.training))


@BOTH
def test_functional_dropout_is_reproducible_and_leaves_the_global_stream_alone(engine: str) -> None:
    with torch.random.fork_rng():
        model = FunctionalDropout()
    runs = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        this = server(image_federation(), "fedavg", model, engine=engine, clients_per_round=3)
        runs.append(finished(this)[0])
        assert torch.equal(torch.get_rng_state(), before)
        assert len(this.engine.notices) == (1 if engine == "stacked" else 0)
    assert same_bits(*runs)
    assert same_bits(runs[0], trained(image_federation(), "fedavg", model, clients_per_round=3)[0])
    other = trained(image_federation(), "fedavg", model, clients_per_round=3, seed=1)[0]
    assert not torch.equal(other.model.params["out.weight"], runs[0].model.params["out.weight"])


class OwnStatistics(nn.Module):
    """Assigns its running mean to a buffer, as many users' layers do."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(64))
        self.out = nn.Linear(64, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.mean(dim=0)
        return self.out(x - self.mean)


@BOTH
def test_a_buffer_that_the_model_assigns_is_kept(engine: str) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = OwnStatistics()
    expected = by_hand(image_federation(), model, rounds=2)
    state = trained(image_federation(), "fedavg", model, engine=engine)[0]
    assert float(expected.get_buffer("mean").abs().max()) > 0.1
    torch.testing.assert_close(state.model.buffers["mean"], expected.get_buffer("mean"), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(
        state.model.params["out.weight"], expected.get_parameter("out.weight"), rtol=1e-9, atol=1e-12
    )


class RandomDepth(nn.Module):
    """Skips a layer at random, by the generators of Python and numpy."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.out = nn.Linear(64, 64), nn.Linear(64, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        if self.training and random.random() < 0.5:
            x = x + torch.tanh(self.layer(x))
        return self.out(x) * (float(np.random.rand()) if self.training else 1.0)  # noqa: NPY002


def test_random_numbers_of_python_and_numpy_are_reproducible() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = RandomDepth()
    runs = []
    for seed, engine in ((1, "plain"), (2, "plain"), (3, "stacked"), (4, "pool")):
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002
        this = server(image_federation(), "fedavg", model, engine=engine)
        before = host_random_streams()
        runs.append(finished(this)[0])
        this.engine.close()
        if engine == "plain":
            assert host_random_streams() == before
    assert all(same_bits(runs[0], other) for other in runs[1:])


class ChangesInputs(nn.Module):
    """Normalises its inputs in place."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.in_place, self.out = in_place, nn.Linear(64, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = x.sub_(0.5).div_(2) if self.in_place else (x - 0.5) / 2
        return self.out(x.flatten(1))


@BOTH
@pytest.mark.parametrize("method", ["fedvls", "fedsam"])
def test_every_forward_pass_of_a_step_gets_the_same_inputs(method: str, engine: str) -> None:
    """A teacher, or a second gradient, sees the batch as it was."""
    with torch.random.fork_rng():
        runs = [trained(image_federation(), method, ChangesInputs(way), engine=engine)[0] for way in (True, False)]
    assert same_bits(*runs)


class SpatialDropout(nn.Dropout2d):
    """Drops whole features of a sequence: torch's layer, with a forward pass around it."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 2, 1).unsqueeze(-1)).squeeze(-1).permute(0, 2, 1)


@BOTH
def test_a_dropout_layer_with_a_forward_pass_of_its_own_keeps_it(engine: str) -> None:
    masks = []

    class Seen(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            dropped = self[0](torch.ones_like(x[:, 0]))
            if self.training and not torch._C._functorch.is_batchedtensor(dropped):
                masks.append(dropped.detach())
            return self[1](dropped.flatten(1) * x.flatten(1))

    trained(image_federation(), "fedavg", Seen(SpatialDropout(0.5), nn.Linear(64, 4)), engine=engine, rounds=1)
    assert any((mask == 0).any() for mask in masks)
    assert all(bool((mask == mask[:, :1]).all()) for mask in masks), "a feature is dropped at every position"


@BOTH
def test_a_dropout_layer_whose_forward_pass_the_user_replaced_drops_nothing(engine: str) -> None:
    replaced = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(64, 4))
    usual = nn.Sequential(nn.Flatten(), nn.Identity(), copy.deepcopy(replaced[2]))
    replaced[1].forward = MethodType(lambda _, x: x, replaced[1])
    runs = [trained(image_federation(), "fedavg", model, engine=engine)[0] for model in (replaced, usual)]
    assert same_bits(*runs)


@BOTH
def test_a_teacher_keeps_its_parameters(engine: str) -> None:
    """An embedding with `max_norm` shortens the vectors that it looks up. The sent model is every client's teacher."""
    model = nn.Sequential(nn.Embedding(30, 5, max_norm=0.5), nn.Flatten(), nn.Linear(30, 4))
    this = server(text_federation(), "fedvls", model, engine=engine)
    work = plan_round(this, this.start()).work
    before = {name: p.clone() for name, p in work.sent.params.items()}
    this.engine.train(work)
    assert all(torch.equal(work.sent.params[name], p) for name, p in before.items())


@BOTH
def test_a_scripted_layer_trains(engine: str) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Flatten(), nn.Linear(64, 5)), nn.Linear(5, 4)
    usual = trained(image_federation(), "fedavg", nn.Sequential(*layers))[0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit is deprecated
        scripted = nn.Sequential(torch.jit.script(layers[0]), layers[1])
        state = trained(image_federation(), "fedavg", scripted, engine=engine)[0]
    assert distance(usual, state) < 1e-9


def test_embeddings_with_sparse_gradients() -> None:
    def run(sparse: bool) -> Any:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = nn.Sequential(nn.Embedding(30, 5, sparse=sparse), nn.Flatten(), nn.Linear(30, 4))
        return trained(text_federation(), "fedavg", model)[0]

    assert same_bits(run(sparse=True), run(sparse=False))


def test_layers_in_eval_mode_when_the_model_is_given_train_like_others() -> None:
    asleep = norm_and_dropout()
    asleep.eval()
    runs = [
        trained(image_federation(), "fedavg", model, clients_per_round=3)[0] for model in (norm_and_dropout(), asleep)
    ]
    assert same_bits(*runs)


@BOTH
def test_the_same_seed_gives_the_same_bits(engine: str) -> None:
    def once(seed: int) -> Any:
        return trained(image_federation(), "fedvls", norm_and_dropout(), engine=engine, seed=seed, clients_per_round=3)

    first, again, other = once(0), once(0), once(1)
    assert same_bits(first[0], again[0])
    assert first[1] == again[1]
    assert not torch.equal(first[0].model.params["head.weight"], other[0].model.params["head.weight"])


def test_a_batch_that_batch_norm_cannot_take_is_refused_before_training() -> None:
    with pytest.raises(UserError, match="batch_size is 1"):
        server(image_federation(), "fedavg", norm_and_dropout(), batch_size=1)
    trained(image_federation(), "fedavg", linear(), batch_size=1, rounds=1, local_epochs=1)


class Checkpointing(nn.Module):
    """Computes its features again in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.out = nn.Linear(64, 5), nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        features: Tensor = checkpoint(lambda rows: self.body(rows).tanh(), x.flatten(1), use_reentrant=False)
        return self.out(features)


def test_a_model_that_computes_its_features_again_is_refused() -> None:
    with pytest.raises(UserError, match=r"torch\.utils\.checkpoint"):
        server(image_federation(), "fedavg", Checkpointing())


class SavingElsewhere(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(64, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            return self.out(x.flatten(1))


def test_a_model_with_other_hooks_for_saved_tensors_is_refused() -> None:
    with pytest.raises(UserError, match="the model has hooks for tensors that are saved"):
        server(image_federation(), "fedavg", SavingElsewhere())
