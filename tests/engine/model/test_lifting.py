"""A lifted model does to every client what the model does to one."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import MethodType
from typing import Any

import numpy as np
import pytest
import torch
from own_gradient import Reversed
from torch import Tensor, nn
from torch.nn import functional

from fedskew.engine.model.lifting import lifted_model
from fedskew.engine.model.network import Network
from fedskew.engine.model.stacked_layers import RULES, StackedLayer

CLIENTS, ROWS = 3, 5


class Odd(nn.Module):
    """Functions without a rule, arithmetic, shapes, a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(4))
        self.convolution = nn.Conv2d(2, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.convolution(x)) * 0.5
        y = torch.cat([y, y[:, :2].flip(1)], dim=1)[:, :4] + y
        y = y * self.scale.view(1, -1, 1, 1)
        return y.view(y.size(0), y.shape[1], -1).mean(dim=2)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


def activated_norms() -> nn.Module:
    """What follows BatchNorm is done with it: values below 0, between, and above 6."""
    layers = [nn.BatchNorm2d(2), nn.ReLU6(), nn.BatchNorm2d(2), nn.ReLU()]
    for norm in (layers[0], layers[2]):
        nn.init.constant_(norm.weight, 5.0)
    return nn.Sequential(*layers, nn.Flatten())


def without_bias(layer: nn.Module) -> nn.Module:
    """Like the argument `bias=False`, which older versions of PyTorch lack."""
    layer.register_parameter("bias", None)
    return layer


class SharedActivation(nn.Module):
    """The ReLU before the pooling has another user, so the pooling must not apply it."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.pool = nn.Conv2d(2, 4, 3), nn.MaxPool2d(2)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.convolution(x))
        return torch.cat([self.pool(y).flatten(1), y.flatten(1)], dim=1)


class InPlaceActivation(nn.Module):
    """The ReLU changes the convolution's result, which is used once more after the pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.relu, self.pool = nn.Conv2d(2, 4, 3), nn.ReLU(inplace=True), nn.MaxPool2d(2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.convolution(x)
        return torch.cat([self.pool(self.relu(y)).flatten(1), y.flatten(1)], dim=1)


class AliasInPlace(InPlaceActivation):
    """The ReLU changes a view of the convolution's result, which is used once more after the pooling."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.convolution(x)
        return torch.cat([self.pool(self.relu(y.view(y.shape))).flatten(1), y.flatten(1)], dim=1)


class IdentityInPlace(InPlaceActivation):
    """The same, behind a layer that returns its input."""

    def __init__(self) -> None:
        super().__init__()
        self.identity = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = self.convolution(x)
        return torch.cat([self.pool(self.relu(self.identity(y))).flatten(1), y.flatten(1)], dim=1)


class ChangedLater(nn.Module):
    """A layer after the ReLU, which does not work in place, changes the storage that the ReLU read through a view."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.pool = nn.Conv2d(2, 4, 3), nn.MaxPool2d(2)
        self.squash = nn.Hardsigmoid(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.convolution(x)
        activated = torch.relu(y.view(y.shape))
        squashed = self.squash(y)
        return torch.cat([self.pool(activated).flatten(1), squashed.flatten(1)], dim=1)


class ChangedAfterACopy(nn.Module):
    """Changes what `reshape` may have copied. Nothing else uses it."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.squash = nn.Linear(8, 12), nn.Hardsigmoid(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.project(x).reshape(-1, 8, 2, 3, 4).permute(3, 0, 1, 2, 4)
        first, second = parts[0], parts[1]
        self.squash(first)
        return (first * second).flatten(1)


def frozen() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 4))
    model[0].weight.requires_grad_(False)
    return model


def doubled(layer: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    return 2 * output


def halved(layer: nn.Module, inputs: tuple[Tensor]) -> Tensor:
    return inputs[0] / 2


def hooked() -> nn.Module:
    """Forward hooks on layers that have a rule or are joined with the layer beside them."""
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(36, 3)
    )
    model[0].register_forward_pre_hook(halved)
    model[1].register_forward_hook(doubled)
    model[4].register_forward_hook(doubled)
    model[6].register_forward_hook(doubled)
    return model


def absolute(layer: nn.Linear, x: Tensor) -> Tensor:
    return functional.linear(x, layer.weight.abs(), layer.bias)


def own_forward() -> nn.Module:
    """A layer whose forward pass the user has replaced."""
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 4))
    model[2].forward = MethodType(absolute, model[2])
    return model


class Residual(nn.Module):
    """Adds with `+=` to a tensor that nothing else uses."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(2, 2, 3, padding=1), nn.BatchNorm2d(2)

    def forward(self, x: Tensor) -> Tensor:
        out = self.norm(self.convolution(x))
        out += x
        return out.flatten(1)


class Rescaled(nn.Module):
    """Changes a tensor whose shape and values were read before."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.gate = nn.Conv2d(2, 3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        out = self.convolution(x)
        gates = torch.sigmoid(self.gate(out.mean((2, 3))))
        out *= gates[:, :, None, None]
        activated = functional.gelu(out)
        activated += out
        return activated.flatten(1)


class Attention(nn.Module):
    """A transformer's block. Its attention layer also returns None in place of its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(9, 4), nn.LayerNorm(4)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.register_buffer("positions", torch.rand(1, 5, 4))

    def forward(self, x: Tensor) -> Tensor:
        out = self.table(x)
        out += self.positions[:, : x.size(1)]
        mixed, _ = self.attention(out, out, out, need_weights=False)
        mixed += out
        return self.norm(mixed).flatten(1)


class Halves(nn.Module):
    """Changes a number that comes from a shape."""

    def forward(self, x: Tensor) -> Tensor:
        width = half = x.shape[1]
        half //= 2
        half += 1
        return x[:, :half] * width


class FunctionalEmbedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.rand(9, 4))

    def forward(self, x: Tensor) -> Tensor:
        return functional.embedding(x, self.table, padding_idx=-9).flatten(1)


IMAGE, ROW = (2, 8, 8), (6,)
MODELS = {
    "functions": (Odd, IMAGE),
    "tied": (Tied, ROW),
    "frozen": (frozen, ROW),
    "grouped convolutions": (
        lambda: nn.Sequential(nn.Conv2d(2, 4, 3, groups=2, stride=2, dilation=2), nn.Flatten()),
        IMAGE,
    ),
    "circular padding": (
        lambda: nn.Sequential(nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular"), nn.Flatten()),
        IMAGE,
    ),
    "same padding": (lambda: nn.Sequential(nn.Conv2d(2, 3, 3, padding="same", bias=False), nn.Flatten()), IMAGE),
    "batch norm": (
        lambda: nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Flatten(), nn.BatchNorm1d(108)),
        IMAGE,
    ),
    "batch norm and activation": (activated_norms, IMAGE),
    "batch norm without scale": (
        lambda: nn.Sequential(nn.BatchNorm2d(2, affine=False, momentum=None), nn.Flatten()),
        IMAGE,
    ),
    "group and layer norm": (
        lambda: nn.Sequential(nn.GroupNorm(2, 2), nn.GELU(), nn.LayerNorm([8, 8]), nn.Flatten()),
        IMAGE,
    ),
    "norms without bias": (
        lambda: nn.Sequential(
            *map(without_bias, (nn.LayerNorm([8, 8]), nn.BatchNorm2d(2), nn.GroupNorm(2, 2))), nn.Flatten()
        ),
        IMAGE,
    ),
    "pooling": (lambda: nn.Sequential(nn.MaxPool2d(2), nn.AvgPool2d(2), nn.AdaptiveAvgPool2d(1), nn.Flatten()), IMAGE),
    "activation before pooling": (
        lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        IMAGE,
    ),
    "activation with two users": (SharedActivation, IMAGE),
    "activation in place": (InPlaceActivation, IMAGE),
    "activation in place on a view": (AliasInPlace, IMAGE),
    "activation in place behind an identity": (IdentityInPlace, IMAGE),
    "view changed in place after the activation": (ChangedLater, IMAGE),
    "transposed convolution": (lambda: nn.Sequential(nn.ConvTranspose2d(2, 3, 2), nn.Flatten()), IMAGE),
    "dropout": (lambda: nn.Sequential(nn.Dropout2d(0.4), nn.Conv2d(2, 3, 3), nn.Dropout(0.3), nn.Flatten()), IMAGE),
    "sequence": (lambda: nn.Sequential(nn.Linear(8, 4), nn.Tanh(), nn.Flatten()), IMAGE),
    "volumes": (
        lambda: nn.Sequential(nn.Unflatten(1, (2, 1)), nn.Conv3d(2, 3, (1, 3, 3)), nn.BatchNorm3d(3), nn.Flatten()),
        IMAGE,
    ),
    "changed after a copy": (ChangedAfterACopy, IMAGE),
    "hooks": (hooked, IMAGE),
    "forward pass of a layer": (own_forward, ROW),
    "augmented assignment": (Residual, IMAGE),
    "augmented assignment after other uses": (Rescaled, IMAGE),
    "augmented assignment to a size": (lambda: nn.Sequential(nn.Linear(6, 4), Halves()), ROW),
    "bilinear": (lambda: nn.Sequential(nn.Unflatten(1, (2, 3)), nn.Flatten(), nn.Softmax(dim=1)), ROW),
}


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("name", MODELS)
def test_a_stack_is_its_clients(name: str, mode: str) -> None:
    make, shape = MODELS[name]
    torch.manual_seed(0)
    check(make(), torch.randn(CLIENTS, ROWS, *shape, dtype=torch.float64), mode)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Embedding(9, 4),
        lambda: nn.Embedding(9, 4, padding_idx=0),
        lambda: nn.Embedding(9, 4, sparse=True),
        FunctionalEmbedding,
        Attention,
    ],
)
def test_embeddings(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(make(), nn.Flatten(), nn.Linear(12, 3))
    tokens = torch.randint(0, 9, (CLIENTS, ROWS, 3))
    tokens[:, 0] = 0  # every client has padding
    check(model, tokens, "train")


@pytest.mark.parametrize("token", [-1, 9])
def test_an_unknown_token_reads_no_other_clients_row(token: int) -> None:
    network = Network(nn.Sequential(nn.Embedding(9, 4), nn.Flatten()), torch.float64)
    params = {n: p.expand(CLIENTS, *p.shape) for n, p in network.state().params.items()}
    x = torch.full((CLIENTS, ROWS, 3), token)
    valid = torch.ones(CLIENTS, ROWS, dtype=torch.bool)
    with pytest.raises(IndexError, match="out of range"):
        network.forward_stacked(params, {}, x, valid, "eval", torch.arange(CLIENTS))


def check(model: nn.Module, x: Tensor, mode: str) -> None:
    """Outputs, gradients and statistics of the stack against those of each client alone, on its valid rows."""
    network = Network(model, torch.float64)
    state = network.state()
    params = {n: (p + 0.1 * torch.randn(CLIENTS, *p.shape)).requires_grad_() for n, p in state.params.items()}
    buffers = {n: b.expand(CLIENTS, *b.shape).clone() for n, b in state.buffers.items()}
    keys = torch.arange(CLIENTS) + 7
    lengths = [5, 3, 4]
    valid = torch.arange(ROWS) < torch.tensor(lengths)[:, None]
    out, new = network.forward_stacked(params, buffers, x, valid, mode, keys)
    assert network._lifted[mode] is not None, "the model was not taken apart"
    weight = torch.randn_like(out.logits[0])
    loss = sum((out.logits[k, :n] * weight[:n]).sum() for k, n in enumerate(lengths))
    grads = gradients(loss, params)
    for k, n in enumerate(lengths):
        one = {name: p[k].detach().requires_grad_() for name, p in params.items()}
        own = {name: b[k].clone() for name, b in buffers.items()}
        alone = network.forward(one, own, x[k, :n], mode, keys[k])
        torch.testing.assert_close(out.logits[k, :n], alone.logits, rtol=1e-10, atol=1e-12)
        expected = (
            torch.autograd.grad((alone.logits * weight[:n]).sum(), list(one.values()), materialize_grads=True)
            if one
            else ()
        )
        for found, wanted in zip(grads, expected, strict=True):
            torch.testing.assert_close(found[k], wanted, rtol=1e-9, atol=1e-11)
        for name, buffer in own.items():
            torch.testing.assert_close(new[name][k], buffer, rtol=1e-10, atol=1e-12)


def gradients(loss: Tensor, params: dict[str, Tensor]) -> tuple[Tensor, ...]:
    return torch.autograd.grad(loss, list(params.values()), materialize_grads=True) if params else ()


class Branching(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if x.sum() > 0 else x


class Writing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mul(2).add_(1)


class Noisy(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.randn(6)


class Skipping(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if random.random() < 0.5 else 2 * x


class SkippingByNumpy(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if np.random.rand() < 0.5 else 2 * x  # noqa: NPY002


class WithoutGradients(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            return 2 * x


class OwnGradient(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return Reversed.apply(x)


class OwnFormat(nn.Module):
    """Computes a part in a number format of its own."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return 2 * x


class ReversedAlone(Reversed):
    """Its forward pass does nothing, so there is no operation that tracing could refuse."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x


class OwnGradientAlone(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * ReversedAlone.apply(x)


class ChangesAnAlias(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        out = 2 * x
        other = out[:, 1:]
        other += 1
        return out


class ReadsAfterTheChange(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        out = 2 * x
        before = out.mean(1, keepdim=True)
        changed = out
        changed += before
        return out + changed


class ChangesWhatItReturns(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        out = 2 * x
        kept = [out]
        out *= 3
        return torch.cat([*kept, out], dim=1)


class Counting(nn.Module):
    """Counts calls in a buffer, which has nothing to do with the inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x


class CountingByAnotherName(Counting):
    def forward(self, x: Tensor) -> Tensor:
        calls = self.calls
        calls += 1
        return x


class Replacing(nn.Module):
    """Replaces the values of a tensor that has two names."""

    def forward(self, x: Tensor) -> Tensor:
        out = kept = 2 * x
        out.data = x
        return kept


class Assigning(Counting):
    def forward(self, x: Tensor) -> Tensor:
        self.calls = self.calls + 1
        return x


class Asserting(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        assert isinstance(x, Tensor)
        return x


class LookingUp(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * {6: 1.0}[x.shape[1]]


@pytest.mark.parametrize(
    "kind",
    [
        Branching,
        Writing,
        Noisy,
        Skipping,
        SkippingByNumpy,
        WithoutGradients,
        OwnFormat,
        OwnGradient,
        OwnGradientAlone,
        ChangesAnAlias,
        ReadsAfterTheChange,
        ChangesWhatItReturns,
        Counting,
        CountingByAnotherName,
        Replacing,
        Assigning,
        Asserting,
        LookingUp,
    ],
)
def test_what_cannot_be_taken_apart_is_left_to_others(kind: type[nn.Module]) -> None:
    model = kind()
    before = {name: (buffer, buffer.clone()) for name, buffer in model.named_buffers()}
    assert lifted_model(model) is None
    for name, (buffer, value) in before.items():
        assert model.get_buffer(name) is buffer
        assert torch.equal(buffer, value)


def test_features_change_only_in_a_model_that_is_taken_apart() -> None:
    """torch.fx can trace the model, but the model changes a tensor in place."""
    network, x = Network(Writing()), torch.ones(CLIENTS, ROWS, 6)
    with pytest.raises(RuntimeError, match="a model whose layers can be stacked"):
        network.forward_stacked({}, {}, x, None, "eval", torch.arange(CLIENTS), between=torch.neg)


@pytest.mark.parametrize(
    ("norm", "inplace", "is_joined"),
    [(nn.GroupNorm(2, 4), True, True), (nn.Identity(), True, False), (nn.Identity(), False, True)],
)
def test_an_activation_in_place_is_joined_with_the_pooling_if_its_input_is_new(
    norm: nn.Module, inplace: bool, is_joined: bool
) -> None:
    model = nn.Sequential(nn.Conv2d(2, 4, 3), norm, nn.ReLU(inplace), nn.MaxPool2d(2), nn.Flatten())
    program = lifted_model(model)
    assert program is not None
    activations = {type(o.layer): o.activation for o in program._operations.values() if isinstance(o, StackedLayer)}
    assert activations[nn.MaxPool2d] == ("relu" if is_joined else "none")
    check(model, torch.randn(CLIENTS, ROWS, *IMAGE, dtype=torch.float64), "train")


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_a_layer_without_a_rule_is_lifted_if_it_draws_no_masks(dropout: float) -> None:
    network = Network(nn.TransformerEncoderLayer(4, 2, 8, dropout=dropout, batch_first=True))
    assert (network._lifted_in("train") is not None) == (dropout == 0)
    assert network._lifted_in("eval") is not None


def test_batch_norm_without_a_rule_is_lifted_if_it_uses_running_statistics() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))
    model[1].register_forward_hook(doubled)
    network = Network(model)
    assert network._lifted_in("train") is None
    assert network._lifted_in("eval") is not None
    check(model, torch.randn(CLIENTS, ROWS, 6, dtype=torch.float64), "eval")


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_dropout_inside_a_layer_without_a_rule_has_the_clients_masks() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.5, batch_first=True)
    layer.self_attn.dropout = 0.0
    network = Network(nn.Sequential(nn.Unflatten(1, (3, 2)), nn.Linear(2, 4), layer, nn.Flatten()), torch.float64)
    params = {n: p.expand(CLIENTS, *p.shape) for n, p in network.state().params.items()}
    x, keys = torch.randn(ROWS, 6, dtype=torch.float64), torch.arange(CLIENTS) + 7
    network.forward(network.state().params, {}, x, "train", torch.tensor(0))
    out, _ = network.forward_stacked(params, {}, x.expand(CLIENTS, -1, -1), None, "train", keys)
    for k in range(CLIENTS):
        alone = network.forward(network.state().params, {}, x, "train", keys[k])
        torch.testing.assert_close(out.logits[k], alone.logits, rtol=1e-10, atol=1e-12)


class Remembering(nn.Module):
    """Keeps what it computes in its first call."""

    def __init__(self) -> None:
        super().__init__()
        self.scale: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.scale is None:
            self.scale = torch.full_like(x, 2)
        return x * self.scale


def test_what_a_model_remembers_while_it_is_traced_is_forgotten() -> None:
    model = Remembering()
    for mode in (True, False):
        assert lifted_model(model.train(mode)) is not None
        assert model.scale is None


def test_what_is_computed_from_a_buffer_follows_the_buffer() -> None:
    class OwnNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("variance", torch.ones(6))

        def forward(self, x: Tensor) -> Tensor:
            return x / (self.variance + 1).sqrt()

    network = Network(OwnNorm(), torch.float64)
    x, valid, keys = torch.ones(2, 3, 6).double(), torch.ones(2, 3, dtype=torch.bool), torch.zeros(2, dtype=torch.int64)
    for value in (3.0, 8.0):
        buffers = {"variance": torch.full((2, 6), value, dtype=torch.float64)}
        out = network.forward_stacked({}, buffers, x, valid, "eval", keys)[0].logits
        assert torch.equal(out, x / (value + 1) ** 0.5)
    assert network._lifted["eval"] is not None


def test_attributes_that_are_tensors_are_each_client_s_own() -> None:
    class Turned(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.unsqueeze(1).mT.squeeze(-1) * x.shape[1]

    torch.manual_seed(0)
    check(nn.Sequential(nn.Linear(6, 4), Turned()), torch.randn(CLIENTS, ROWS, 6, dtype=torch.float64), "train")


def test_a_model_is_taken_apart_for_each_mode() -> None:
    class Moody(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2 if self.training else x

    network = Network(Moody(), torch.float64)
    x, valid, keys = torch.ones(2, 3, 4), torch.ones(2, 3, dtype=torch.bool), torch.zeros(2, dtype=torch.int64)
    for mode, factor in (("train", 2), ("eval", 1), ("train", 2)):
        assert torch.equal(network.forward_stacked({}, {}, x, valid, mode, keys)[0].logits, factor * x)


def test_a_subclass_has_no_rule() -> None:
    class Doubled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    assert Doubled not in RULES
    torch.manual_seed(0)
    check(nn.Sequential(Doubled(6, 4)), torch.randn(CLIENTS, ROWS, 6, dtype=torch.float64), "train")


def test_a_whole_model_under_vmap_may_have_a_batch_norm_without_bias() -> None:
    class Unlifted(nn.Module):
        """`torch.fx` cannot trace this."""

        def __init__(self) -> None:
            super().__init__()
            self.norm = without_bias(nn.BatchNorm1d(6))

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(x) * float(x.shape[0])

    torch.manual_seed(0)
    network = Network(Unlifted(), torch.float64)
    params = {n: torch.randn(CLIENTS, *p.shape, dtype=p.dtype) for n, p in network.state().params.items()}
    buffers = {n: b.expand(CLIENTS, *b.shape).clone() for n, b in network.state().buffers.items()}
    x, valid = torch.randn(CLIENTS, ROWS, 6, dtype=torch.float64), torch.ones(CLIENTS, ROWS, dtype=torch.bool)
    out, _ = network.forward_stacked(params, buffers, x, valid, "train", torch.arange(CLIENTS))
    assert network._lifted["train"] is None
    for k in range(CLIENTS):
        own = ({n: t[k].clone() for n, t in part.items()} for part in (params, buffers))
        torch.testing.assert_close(out.logits[k], network.forward(*own, x[k], "train", torch.tensor(k)).logits)


class Centred(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(dim=0)


@pytest.mark.parametrize(
    ("layer", "train", "eval_"),
    [
        (nn.Identity(), False, False),
        (nn.BatchNorm1d(6), True, False),
        (nn.BatchNorm1d(6, track_running_stats=False), True, True),
        (nn.LayerNorm(6), False, False),
        (nn.Dropout(0.01), True, False),
        (Centred(), True, True),
    ],
)
def test_whether_rows_are_mixed_is_known(layer: nn.Module, train: bool, eval_: bool) -> None:
    """A frozen model that does not may see all clients' batches as one."""
    torch.manual_seed(0)
    network = Network(nn.Sequential(nn.Linear(6, 6), layer, nn.Linear(6, 3)))
    samples = torch.randn(8, 6)
    assert (network.mixes_rows("train", samples), network.mixes_rows("eval", samples)) == (train, eval_)
