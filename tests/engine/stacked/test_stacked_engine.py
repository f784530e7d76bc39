"""What the stacked engine does with models and methods that stacking does not suit."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from types import MethodType
from typing import Any

import numpy as np
import pytest
import torch
from own_gradient import Reversed
from torch import Tensor, nn
from torch.nn import functional
from toy_runs import (
    distance,
    finished,
    image_federation,
    linear,
    moved,
    norm_and_dropout,
    server,
    text_federation,
)

import fedskew.engine.stacked.engine
from fedskew.engine import Network
from fedskew.experiment.round.state import RunState
from fedskew.losses import cross_entropy
from fedskew.methods import Client, Method, Objective, Outputs, ServerRule, Tensors, Trained, Updates
from fedskew.methods.parts import Part
from fedskew.models import Classifier


def run(method: Part | Method | str, model: nn.Module, engine: str, **settings: Any) -> tuple[RunState, list[str]]:
    this = server(image_federation(), method, model, engine=engine, **settings)
    return finished(this)[0], this.engine.notices


def notices(method: Part | Method | str, model: nn.Module, **settings: Any) -> list[str]:
    """What the stacked engine had to say; its result must be the plain engine's."""
    plain, nothing = run(method, model, "plain", **settings)
    stacked, notices = run(method, model, "stacked", **settings)
    start = Network(model, torch.float64).state().params
    assert moved(start, plain.model.params) > 0
    assert nothing == []
    assert distance(plain, stacked) < 1e-9
    return notices


@dataclass(frozen=True)
class CountsAllRows(Objective):
    """Knows nothing of padded rows."""

    weight: float = 1.0

    def loss(self, out: Outputs, y: Tensor, client: Client) -> Tensor:
        return cross_entropy(out.logits, y) + self.weight * out.logits.square().mean()


@dataclass(frozen=True)
class DividesByAllRows(Objective):
    """Leaves padded rows out of the sum, but not of the number."""

    def loss(self, out: Outputs, y: Tensor, client: Client) -> Tensor:
        return functional.cross_entropy(out.logits, y, reduction="none", ignore_index=-100).mean()


@dataclass(frozen=True)
class AsksForNumbers(Objective):
    """Branches on a value."""

    def loss(self, out: Outputs, y: Tensor, client: Client) -> Tensor:
        loss = cross_entropy(out.logits, y)
        return loss * 2 if loss.item() > 1 else loss


@dataclass(frozen=True)
class SendsANumber(ServerRule):
    """Branches on a value at the end of the local training."""

    def uplink(self, trained: Trained, client: Client) -> Tensors:
        return {"large": torch.tensor(float(client.label_counts.sum().item() > 10))}

    def aggregate(self, sent: Tensors, updates: Updates, state: Tensors) -> tuple[Tensors, Tensors]:
        return updates.mean(), {}


@pytest.mark.parametrize("objective", [CountsAllRows(), CountsAllRows(1e-3), DividesByAllRows()])
@pytest.mark.parametrize("model", [linear(), norm_and_dropout()], ids=["linear", "norm"])
def test_an_objective_that_counts_padded_rows_sees_none(objective: Objective, model: nn.Module) -> None:
    told = notices(objective, model, rounds=3)
    assert len(told) == 1
    assert "rows of padding" in told[0]


@dataclass(frozen=True)
class Draws(Objective):
    """Draws a random number."""

    draw: Callable[[], float]

    def loss(self, out: Outputs, y: Tensor, client: Client) -> Tensor:
        return cross_entropy(out.logits, y) * (1 + self.draw())


@pytest.mark.parametrize("draw", [lambda: random.random(), lambda: float(np.random.rand())])  # noqa: NPY002
def test_an_objective_that_draws_random_numbers_draws_them_for_each_client(draw: Callable[[], float]) -> None:
    told = notices(Draws(draw), linear())
    assert len(told) == 1
    assert "generators of Python or numpy" in told[0]


@pytest.mark.parametrize("method", [AsksForNumbers(), SendsANumber()])
def test_a_method_that_cannot_be_stacked_runs_one_client_after_another(method: Part) -> None:
    told = notices(method, linear(), rounds=3)
    assert len(told) == 1
    assert "one after another" in told[0]


class BatchCentred(nn.Module):
    """Mixes the rows of a batch."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(dim=0)


class OwnNorm(nn.BatchNorm2d):
    """A BatchNorm with a forward pass of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Counter(nn.Module):
    """Keeps count in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen += len(x)
        return x


def test_clients_that_run_one_after_another_are_not_said_to_train_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fedskew.engine.stacked.engine, "spare_bytes", lambda device: 1)
    told = notices(CountsAllRows(), linear())
    assert len(told) == 1
    assert "rows of padding" in told[0]


def test_a_model_that_mixes_rows_sees_no_padding() -> None:
    model = Classifier(nn.Sequential(nn.Flatten(), BatchCentred(), nn.Linear(64, 5), nn.Tanh()), nn.Linear(5, 4))
    assert len(notices("fedavg", model)) == 1


def test_a_model_that_mixes_rows_is_noticed_although_the_data_begin_and_end_alike() -> None:
    """The contents of rows of padding are tried. They must differ."""
    federation = image_federation()
    federation.dataset.train.x[-1] = federation.dataset.train.x[0]
    this = server(federation, "fedavg", nn.Sequential(nn.Flatten(), BatchCentred(), nn.Linear(64, 4)), engine="stacked")
    finished(this)
    assert "rows of padding" in this.engine.notices[0]


class SequenceFirst(nn.Module):
    """Drops entries of a tensor whose second axis is the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.drop, self.out = nn.Dropout(0.5), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.drop(x[:, 0].transpose(0, 1)).mean(dim=0))


def test_dropout_masks_that_rows_of_padding_would_move() -> None:
    told = notices("fedavg", SequenceFirst())
    assert len(told) == 1
    assert "rows of padding" in told[0]


class AssignedCounter(Counter):
    """Assigns to its buffer."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen = self.seen + 1
        return x + 0.1 * self.seen


class CallCounter(Counter):
    """Counts calls, whatever the inputs are."""

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        return x + 0.1 * self.seen


class FunctionalNorm(nn.Module):
    """Gives its running statistics to a function, which updates them."""

    def __init__(self, normalise: Callable[..., Tensor]) -> None:
        super().__init__()
        self.normalise = normalise
        self.register_buffer("mean", torch.zeros(1))
        self.register_buffer("variance", torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.normalise(x, self.mean, self.variance, None, None, True)


@pytest.mark.parametrize("method", ["fedavg", "fedvls"])
@pytest.mark.parametrize(
    "layer",
    [
        OwnNorm(1),
        Counter(),
        AssignedCounter(),
        CallCounter(),
        nn.InstanceNorm2d(1, track_running_stats=True),
        FunctionalNorm(functional.batch_norm),
        FunctionalNorm(functional.instance_norm),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_a_model_that_writes_into_its_buffers_runs_one_client_after_another(layer: nn.Module, method: str) -> None:
    model = nn.Sequential(layer, nn.Flatten(), nn.Linear(64, 4))
    told = notices(method, model)
    assert len(told) == 1
    assert "writes into its buffers" in told[0]


def halve(layer: nn.Module, gradients: Any, output_gradients: Any) -> Any:
    return tuple(g if g is None else g / 2 for g in gradients)


class FrozenBody(nn.Module):
    """Freezes its body in the forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.out = nn.Linear(64, 5), nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            features = self.body(x.flatten(1))
        return self.out(features)


class ReversedBody(FrozenBody):
    """Reverses the gradient between body and head."""

    def forward(self, x: Tensor) -> Tensor:
        return self.out(Reversed.apply(self.body(x.flatten(1))))


class Dropping(nn.Module):
    """Drops the batch's scale at random, by a generator of Python or numpy."""

    def __init__(self, draw: Any) -> None:
        super().__init__()
        self.draw, self.out = draw, nn.Linear(64, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x.flatten(1)) * (2 if self.training and self.draw() < 0.5 else 1)


class AddsToAnAlias(FrozenBody):
    """`+=` changes the features that the head uses, too."""

    def forward(self, x: Tensor) -> Tensor:
        features = self.body(x.flatten(1))
        more = features
        more += 1
        return self.out(features) + self.out(more)


class ChangesInputs(nn.Module):
    """Writes into its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(64, 4)

    def forward(self, x: Tensor) -> Tensor:
        x -= 0.5
        return self.out(x.div_(2).flatten(1))


class ChangesACopy(nn.Module):
    """Changes a tensor in place. Whether another one changes with it depends on its order in memory."""

    def __init__(self, copy: Callable[[Tensor], Tensor], change: nn.Module, later: nn.Module) -> None:
        super().__init__()
        self.copy, self.change, self.later = copy, change, later
        self.convolution, self.out = nn.Conv2d(1, 4, 3), nn.Linear(144, 4)

    def forward(self, x: Tensor) -> Tensor:
        features = self.convolution(x)
        other = self.change(self.copy(features))
        self.later(features)
        return self.out(features.flatten(1)) + other.reshape(features.shape[0], -1)[:, :4]


class AddOne(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x += 1
        return x.detach()


class FrozenStatistics(nn.Module):
    """Puts its BatchNorm layer into eval mode in the forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.norm, self.out = nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.Linear(108, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.norm.eval()
        return self.out(self.norm(self.convolution(x)).flatten(1))


def with_own_forward() -> nn.Module:
    """A BatchNorm layer whose forward pass the user has replaced."""
    model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(108, 4))
    model[1].forward = MethodType(lambda layer, x: 2 * nn.BatchNorm2d.forward(layer, x), model[1])
    return model


def with_backward_hook() -> nn.Module:
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 5), nn.ReLU(), nn.Linear(5, 4))
    model[3].register_full_backward_hook(halve)
    return model


def with_hooked_norm() -> nn.Module:
    model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(108, 4))
    model[1].register_forward_hook(lambda layer, inputs, output: output + 1)
    return model


ODD_MODELS: dict[str, Callable[[], nn.Module]] = {
    "no gradient in a part": FrozenBody,
    "a gradient of its own": ReversedBody,
    "hook of a BatchNorm layer": with_hooked_norm,
    "backward hook": with_backward_hook,
    "forward pass of a BatchNorm layer": with_own_forward,
    "Python's random numbers": lambda: Dropping(lambda: random.random()),
    "numpy's random numbers": lambda: Dropping(lambda: np.random.rand()),  # noqa: NPY002
    "augmented assignment to an alias": AddsToAnAlias,
    "changed inputs": ChangesInputs,
    "a layer that changes a possible copy": lambda: ChangesACopy(
        lambda x: x.contiguous(), nn.ReLU(inplace=True), nn.Identity()
    ),
    "a method that changes a possible copy": lambda: ChangesACopy(
        lambda x: x.reshape(-1).add_(1), nn.Identity(), nn.Identity()
    ),
    "augmented assignment to a possible copy": lambda: ChangesACopy(lambda x: x.contiguous(), AddOne(), nn.Identity()),
    "a change after a possible copy": lambda: ChangesACopy(
        lambda x: x.reshape(-1).detach(), nn.Identity(), nn.ReLU6(inplace=True)
    ),
    "mode of a layer": FrozenStatistics,
}


@pytest.mark.parametrize("method", ["fedavg", "fedvls", "fedsam"])
@pytest.mark.parametrize("name", ODD_MODELS)
def test_models_that_do_more_than_compute_an_output(name: str, method: str) -> None:
    assert len(notices(method, ODD_MODELS[name]())) <= 1


@pytest.mark.parametrize(
    ("options", "told"), [({"max_norm": 0.5}, 1), ({"scale_grad_by_freq": True}, 1), ({"padding_idx": 0}, 0)]
)
def test_options_of_embeddings(options: dict[str, Any], told: int) -> None:
    states, lines = [], []
    for engine in ("plain", "stacked"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(30, 5, **options), nn.Flatten(), nn.Linear(30, 4))
        this = server(text_federation(), "fedavg", model, engine=engine)
        states.append(finished(this)[0])
        lines += this.engine.notices
    assert distance(*states) < 1e-9
    assert len(lines) == told


def test_padding_of_an_embedding_in_a_model_that_torch_fx_cannot_trace() -> None:
    class Truncating(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            vectors = self[0](x).clone()
            vectors[:, 0] = 0
            return self[1](vectors.flatten(1))

    model = Truncating(nn.Embedding(30, 5, padding_idx=0), nn.Linear(30, 4))
    plain, stacked = (finished(server(text_federation(), "fedavg", model, engine=e))[0] for e in ("plain", "stacked"))
    assert distance(plain, stacked) < 1e-9


def test_one_notice_however_many_stages() -> None:
    model = nn.Sequential(Counter(), nn.Flatten(), nn.Linear(64, 4))
    this = server(image_federation(), "pkd", model, {"groups": [[0, 1], [1, 3]], "expert_rounds": 1}, engine="stacked")
    finished(this)
    assert len(this.engine.notices) == 1


class FrozenNorm(nn.Sequential):
    """Keeps its BatchNorm in eval mode, as one does when fine-tuning."""

    def train(self, mode: bool = True) -> FrozenNorm:
        super().train(mode)
        for layer in self.modules():
            if isinstance(layer, nn.BatchNorm2d):
                layer.eval()
        return self


def test_a_batch_norm_that_the_model_keeps_frozen_stays_frozen() -> None:
    model = FrozenNorm(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(108, 4))
    assert notices("fedavg", model) == []
    state, _ = run("fedavg", model, "stacked")
    assert torch.equal(state.model.buffers["1.running_mean"], torch.zeros(3, dtype=torch.float64))


class Scaled(Classifier):
    """A classifier whose forward is not just encoder and head."""

    def forward(self, x: Tensor) -> Tensor:
        return 0.1 * super().forward(x)


def test_a_classifier_s_own_forward_is_respected() -> None:
    torch.manual_seed(0)
    model = Scaled(nn.Flatten(), nn.Linear(64, 4))
    x = torch.rand(3, 1, 8, 8, dtype=torch.float64)
    this = server(image_federation(), "fedavg", model)
    state = this.start()
    logits = this.network.forward(state.model.params, state.model.buffers, x).logits
    torch.testing.assert_close(logits, model.double()(x))


class SharedLayers(nn.Module):
    """One dropout and one BatchNorm, each used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.out = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 4)
        self.norm, self.dropout = nn.BatchNorm1d(64), nn.Dropout(0.5)
        self.alias = nn.Sequential(self.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = self.dropout(self.norm(self.first(x.flatten(1))))
        return self.out(self.alias(self.norm(self.second(x))))


def test_layers_that_are_used_twice() -> None:
    torch.manual_seed(0)
    assert notices("fedavg", SharedLayers(), lr=0.01) == []


def test_constant_buffers_are_left_alone() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mask", torch.tensor([0.0, -torch.inf, 0.1]))
            self.register_buffer("places", torch.arange(64))
            self.out = nn.Linear(64, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(x.flatten(1)[:, self.places] * self.mask.exp()[1:].sum())

    torch.manual_seed(0)
    model = Masked()
    assert notices("fedavg", model, clients_per_round=3, rounds=4) == []
    state, _ = run("fedavg", model, "stacked", clients_per_round=3, rounds=4)
    assert torch.equal(state.model.buffers["places"], torch.arange(64))
    assert torch.equal(state.model.buffers["mask"], model.mask.double())
