"""Layers over stacked clients, and the forward pass of a model that is made of them.

A stacked layer processes the values of all clients at once. A value has the shape [K, B, …], one batch per client. Its
memory order depends on the layer that computed it. After a grouped convolution, the clients' channels lie side by side:
[B, K·C, H, W]. After the GPU kernels (`kernels`), the channels come last. Most other layers keep the order of their
input.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_map

from fedskew.engine import kernels
from fedskew.engine.kernels import Activation
from fedskew.engine.model.layers import Between, KeyedDropout, ValidBatchNorm
from fedskew.methods.parts import Tensors
from fedskew.models.heads import CosineHead, ETFHead, PersonalHead, RetrainedHead, personal_logits
from fedskew.randomness import fold, uniform


@dataclass
class StackedForward:
    """One forward pass over stacked clients: their tensors, and the new statistics of their layers."""

    clients: int
    tensors: Callable[[str], Tensor | None]
    """Returns a parameter or buffer of all clients by its qualified name, or None for an unknown name."""
    valid: Tensor | None
    """[K, B]: False for rows of padding. None if there is no padding."""
    keys: Tensor | None
    """[K]: the keys of the dropout masks."""
    between: Between | None = None
    """Changes the features of all clients between encoder and head."""
    dropouts: int = 0
    """Number of dropout masks drawn so far. A layer may be called more than once."""
    statistics: Tensors = field(default_factory=dict)
    """New running statistics of BatchNorm."""
    activation: Activation = "none"
    """The activation directly after a BatchNorm layer or before a max-pooling layer. That layer applies it. GPU
    kernels do so in the same pass over memory."""

    def tensor(self, layer: str, name: str) -> Tensor | None:
        qualified = f"{layer}.{name}" if layer else name
        return self.statistics[qualified] if qualified in self.statistics else self.tensors(qualified)


Rule = Callable[[StackedForward, str, Any, Tensor], Tensor]
"""Computes a layer, given by its name and module, for a value of all clients."""

RULES: dict[type[nn.Module], Rule] = {}


def rule(*kinds: type[nn.Module]) -> Callable[[Rule], Rule]:
    """Make the decorated function the rule for these classes of layers."""

    def add(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(kinds, function))
        return function

    return add


def has_own_forward(layer: nn.Module) -> bool:
    """Return whether the user has replaced the forward pass of this layer, but not its class."""
    forward = vars(layer).get("forward")
    return forward is not None and not isinstance(getattr(forward, "__self__", None), ValidBatchNorm)


@dataclass(frozen=True)
class Stacked:
    """A value with a leading axis of clients, [K, …]. Other values are the same for all clients."""

    tensor: Tensor


Values = dict[fx.Node, Any]
"""The values computed so far in a forward pass, by the node that computed them."""

Operation = Callable[[StackedForward, Values], Any]
"""Computes the value of one node."""


@dataclass(frozen=True)
class StackedLayer:
    """The operation of a layer that has a rule."""

    rule: Rule
    name: str
    layer: nn.Module
    source: fx.Node
    activation: Activation
    otherwise: Operation
    """Used in place of the rule for an input that is the same for all clients."""

    def __call__(self, forward: StackedForward, values: Values) -> Any:
        value = values[self.source]
        if not isinstance(value, Stacked):
            return self.otherwise(forward, values)
        forward.activation = self.activation
        return Stacked(self.rule(forward, self.name, self.layer, value.tensor))


class StackedModel:
    """A module, in train or eval mode, as one program over stacked clients. `lifting` makes it from the module."""

    def __init__(
        self, module: nn.Module, operations: Mapping[fx.Node, Operation], outputs: Any, canonical: Mapping[str, str]
    ) -> None:
        """`canonical` maps each name of a tensor to its first name. Tied tensors have several names."""
        self._module, self._operations, self._outputs, self._canonical = module, operations, outputs, canonical

    def __call__(
        self,
        tensors: Mapping[str, Tensor],
        x: Tensor,
        valid: Tensor | None,
        keys: Tensor | None,
        between: Between | None = None,
    ) -> tuple[Any, Tensors]:
        """Return the module's outputs with a leading axis of clients, and BatchNorm's new statistics."""

        def find(name: str) -> Tensor | None:
            name = self._canonical.get(name, name)
            if name in tensors:
                return tensors[name]
            own = attribute(self._module, name)  # a frozen parameter, or a constant tensor: the same for all clients
            return own.expand(len(x), *own.shape) if isinstance(own, Tensor) else None

        forward = StackedForward(len(x), find, valid, keys, between)
        values: Values = {}
        for node, operation in self._operations.items():
            values[node] = Stacked(x) if node.op == "placeholder" else operation(forward, values)
        outputs = fx.node.map_arg(self._outputs, values.__getitem__)
        unstacked = tree_map(lambda v: v.tensor if isinstance(v, Stacked) else v, outputs, is_leaf=is_stacked)
        return unstacked, forward.statistics


def is_stacked(value: Any) -> bool:
    return isinstance(value, Stacked)


def attribute(module: nn.Module, name: str) -> Any:
    """Return the module's attribute with this qualified name, or None."""
    owner, _, own = name.rpartition(".")
    return getattr(module.get_submodule(owner), own, None)


@contextlib.contextmanager
def read_only(buffers: Iterable[Tensor]) -> Iterator[None]:
    """Raise an error after a `with` block if a model's code has written into these buffers."""
    versions = [(buffer, buffer._version) for buffer in buffers]
    yield
    if any(buffer._version != version for buffer, version in versions):
        raise RuntimeError("the model writes into its buffers")


# -- orders in memory --------------------------------------------------------------------------------------


def _channels_adjoin(x: Tensor) -> bool:
    """Return whether the clients' channels lie side by side."""
    return x.dim() > 2 and x.stride(0) == x.shape[2] * x.stride(2)


def _as_channels(x: Tensor) -> Tensor:
    """Return the clients' channels as channels of one batch: [B, K·C, …]."""
    return x.transpose(0, 1).flatten(1, 2)


def _from_channels(x: Tensor, clients: int) -> Tensor:
    return _split(x, 1, (clients, -1)).transpose(0, 1)


def _split(x: Tensor, axis: int, sizes: Sequence[int]) -> Tensor:
    return x.view(*x.shape[:axis], *sizes, *x.shape[axis + 1 :])


def _per_channel(tensor: Tensor, x: Tensor) -> Tensor:
    """Reshape a tensor [K, C], so that it broadcasts over x."""
    return tensor.view(len(tensor), 1, -1, *(1,) * (x.dim() - 3))


# -- rules -------------------------------------------------------------------------------------------------


@rule(nn.Conv2d)
def _convolution(forward: StackedForward, name: str, layer: nn.Conv2d, x: Tensor) -> Tensor:
    weight, bias, padding = forward.tensor(name, "weight"), forward.tensor(name, "bias"), layer.padding
    assert weight is not None
    if layer.padding_mode != "zeros":
        padded = F.pad(x.flatten(0, 1), layer._reversed_padding_repeated_twice, layer.padding_mode)
        x, padding = _split(padded, 0, x.shape[:2]), (0, 0)
    if not isinstance(padding, str) and layer.dilation == (1, 1) and kernels.supported(x, weight):
        stride, padding = (layer.stride[0], layer.stride[1]), (padding[0], padding[1])
        if layer.groups == 1 and layer.kernel_size == (1, 1) and (stride, padding) == ((1, 1), (0, 0)):
            return _pointwise(x, weight, bias)
        if layer.groups == 1:
            return kernels.stacked_conv2d(x, weight, bias, stride, padding)
        if layer.groups == layer.in_channels == layer.out_channels:
            return kernels.stacked_depthwise_conv2d(x, weight, bias, stride, padding)
    if forward.clients == 1:
        own = None if bias is None else bias[0]
        out = F.conv2d(x[0], weight[0], own, layer.stride, padding, layer.dilation, layer.groups)
        return out.unsqueeze(0)
    flat_bias = None if bias is None else bias.flatten()
    groups = layer.groups * forward.clients
    out = F.conv2d(_as_channels(x), weight.flatten(0, 1), flat_bias, layer.stride, padding, layer.dilation, groups)
    return _from_channels(out, forward.clients)


def _pointwise(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute a 1×1 convolution as a matrix product over the channels, which come last in memory."""
    pixels = x.permute(0, 1, 3, 4, 2)
    out = _matrix_product(pixels.flatten(1, 3), weight.flatten(2), bias)
    return out.view(*pixels.shape[:-1], -1).permute(0, 1, 4, 2, 3)


def _matrix_product(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if rows.device.type == "cuda" and weight.dtype != torch.float64:
        return kernels.stacked_linear(rows, weight, bias)
    matrices = weight.transpose(1, 2)
    return torch.bmm(rows, matrices) if bias is None else torch.baddbmm(bias.unsqueeze(1), rows, matrices)


@rule(nn.Linear)
def _linear(forward: StackedForward, name: str, layer: nn.Linear, x: Tensor) -> Tensor:
    weight, bias = forward.tensor(name, "weight"), forward.tensor(name, "bias")
    assert weight is not None
    return _matrix_product(x.flatten(1, -2), weight, bias).view(*x.shape[:-1], layer.out_features)


@rule(CosineHead)
def _cosine_head(forward: StackedForward, name: str, layer: CosineHead, x: Tensor) -> Tensor:  # noqa: ARG001
    directions, scale = forward.tensor(name, "directions"), forward.tensor(name, "scale")
    assert directions is not None
    assert scale is not None
    similarities = _matrix_product(F.normalize(x, dim=-1), F.normalize(directions, dim=-1), None)
    return scale.unsqueeze(-1) * similarities


@rule(ETFHead)
def _etf_head(forward: StackedForward, name: str, layer: ETFHead, x: Tensor) -> Tensor:
    frame, scale = forward.tensor(name, "frame"), forward.tensor(name, "scale")
    assert frame is not None
    assert scale is not None
    projected = _linear(forward, f"{name}.projection", layer.projection, x)
    return scale.unsqueeze(-1) * (F.normalize(projected, dim=-1) @ frame.transpose(1, 2))


@rule(PersonalHead)
def _personal_head(forward: StackedForward, name: str, layer: PersonalHead, x: Tensor) -> Tensor:
    generic = _linear(forward, f"{name}.generic", layer.generic, x)
    if not layer.training:
        return generic + _linear(forward, f"{name}.personal", layer.personal, x)
    return personal_logits(generic, _linear(forward, f"{name}.personal", layer.personal, x.detach()))


@rule(RetrainedHead)
def _retrained_head(forward: StackedForward, name: str, layer: RetrainedHead, x: Tensor) -> Tensor:
    if layer.training:
        return _linear(forward, f"{name}.generic", layer.generic, x)
    return _linear(forward, f"{name}.retrained", layer.retrained, x)


@rule(nn.Embedding)
def _embedding(forward: StackedForward, name: str, layer: nn.Embedding, tokens: Tensor) -> Tensor:
    weight = forward.tensor(name, "weight")
    assert weight is not None
    _require_liftable(layer.max_norm, layer.scale_grad_by_freq)
    size = layer.num_embeddings
    start = (torch.arange(forward.clients, device=tokens.device) * size).view(-1, *(1,) * (tokens.dim() - 1))
    known = (tokens >= 0) & (tokens < size)
    # An unknown token must raise an error, as with a single table, instead of reading another client's row.
    outside = forward.clients * size
    vectors = F.embedding(torch.where(known, tokens + start, outside), weight.flatten(0, 1))
    return _without_gradient_of_padding(vectors, tokens, layer.padding_idx)


def functional_embedding(
    tokens: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,  # noqa: ARG001 - the arguments of F.embedding
    scale_grad_by_freq: bool = False,
    sparse: bool = False,  # noqa: ARG001
) -> Tensor:
    """Do the same as `F.embedding` for one client, under `vmap`.

    Under `vmap`, `F.embedding` respects `padding_idx` for the first client only. `max_norm` and `scale_grad_by_freq`
    are refused.
    """
    _require_liftable(max_norm, scale_grad_by_freq)
    padding = padding_idx if padding_idx is None or padding_idx >= 0 else len(weight) + padding_idx
    return _without_gradient_of_padding(F.embedding(tokens, weight), tokens, padding)


def functional_batch_norm(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Do the same as `F.batch_norm` for one client, under `vmap`.

    There, `F.batch_norm` either loses new running statistics or changes the buffers unnoticed by `read_only`. So a call
    that computes new running statistics is refused.
    """
    if training and running_mean is not None:
        raise RuntimeError("the model writes into its buffers")
    return F.batch_norm(x, running_mean, running_var, weight, bias, training, momentum, eps)


def _require_liftable(max_norm: float | None, scale_grad_by_freq: bool) -> None:
    if max_norm is not None:
        raise RuntimeError("an embedding with max_norm changes its weights")
    if scale_grad_by_freq:
        raise RuntimeError("an embedding with scale_grad_by_freq counts the tokens of the whole batch")


def _without_gradient_of_padding(vectors: Tensor, tokens: Tensor, padding: int | None) -> Tensor:
    if padding is None:
        return vectors
    return torch.where((tokens == padding).unsqueeze(-1), vectors.detach(), vectors)


@rule(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
def batch_norm(forward: StackedForward, name: str, layer: nn.BatchNorm2d, x: Tensor) -> Tensor:
    running = [t for s in ("running_mean", "running_var") if (t := forward.tensor(name, s)) is not None]
    if running and not layer.training:
        return _norm_by_running_statistics(forward, name, layer, x, running)
    if forward.valid is None and layer.momentum is not None and (x.dim() == 3 or _channels_adjoin(x)):
        return _full_batch_norm(forward, name, layer, x)
    if x.dim() == 5 and kernels.supported(x, x):
        weight, bias = forward.tensor(name, "weight"), forward.tensor(name, "bias")
        out, mean, var = kernels.stacked_batch_norm(x, weight, bias, forward.valid, layer.eps, forward.activation)
    else:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))  # like PyTorch's BatchNorm under autocast
        mean, var = _batch_statistics(forward, wide)
        out = _normed(forward, name, layer, wide, mean, var).to(x.dtype)
    if layer.training and layer.track_running_stats:
        count = _value_count(forward, x)
        _update_running_statistics(forward, name, layer, mean, var * count / (count - 1))
    return out


def _norm_by_running_statistics(
    forward: StackedForward, name: str, layer: nn.BatchNorm2d, x: Tensor, running: Sequence[Tensor]
) -> Tensor:
    if forward.clients > 1:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return _normed(forward, name, layer, wide, running[0], running[1]).to(x.dtype)
    weight, bias = (None if t is None else t[0] for t in (forward.tensor(name, "weight"), forward.tensor(name, "bias")))
    out = F.batch_norm(x[0], running[0][0], running[1][0], weight, bias, eps=layer.eps)
    return _activated(out, forward.activation).unsqueeze(0)


def _normed(forward: StackedForward, name: str, layer: nn.BatchNorm2d, x: Tensor, mean: Tensor, var: Tensor) -> Tensor:
    scale, bias = (var + layer.eps).rsqrt(), forward.tensor(name, "bias")
    if (weight := forward.tensor(name, "weight")) is not None:
        scale = scale * weight
    out = (x - _per_channel(mean, x)) * _per_channel(scale, x)
    return _activated(out if bias is None else out + _per_channel(bias, x), forward.activation)


def _activated(x: Tensor, activation: Activation) -> Tensor:
    if activation == "none":
        return x
    return F.relu(x) if activation == "relu" else F.relu6(x)


def _full_batch_norm(forward: StackedForward, name: str, layer: nn.BatchNorm2d, x: Tensor) -> Tensor:
    """Apply PyTorch's BatchNorm to batches without padding, with the clients' channels as channels of one batch."""
    updates = layer.training and layer.track_running_stats
    weight, bias = (
        None if t is None else t.flatten() for t in (forward.tensor(name, "weight"), forward.tensor(name, "bias"))
    )
    tracked = [forward.tensor(name, statistic) if updates else None for statistic in ("running_mean", "running_var")]
    new = [None if t is None else t.flatten().clone() for t in tracked]
    out = F.batch_norm(_as_channels(x), new[0], new[1], weight, bias, True, layer.momentum or 0.0, layer.eps)
    if updates:
        for statistic, value in zip(("running_mean", "running_var"), new, strict=True):
            assert value is not None
            forward.statistics[f"{name}.{statistic}"] = value.view(forward.clients, -1)
        _count_batch(forward, name)
    return _from_channels(_activated(out, forward.activation), forward.clients)


def _batch_statistics(forward: StackedForward, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean and variance of each client's channels [K, C] over its valid rows."""
    axes = (1, *range(3, x.dim()))
    if forward.valid is None:
        var, mean = torch.var_mean(x, axes, correction=0)
        return mean, var
    rows, count = forward.valid.to(x.dtype).view(*x.shape[:2], *(1,) * (x.dim() - 2)), _value_count(forward, x)
    mean = (x * rows).sum(axes) / count
    centred = (x - _per_channel(mean, x)) * rows
    return mean, centred.square().sum(axes) / count


def _value_count(forward: StackedForward, x: Tensor) -> Tensor | int:
    """Return the number of values per statistic: [K, 1], or one number if it is the same for all clients."""
    if forward.valid is None:
        return x[0, :, 0].numel()
    return forward.valid.sum(dim=1, keepdim=True) * x[0, 0, 0].numel()


def _update_running_statistics(
    forward: StackedForward, name: str, layer: nn.BatchNorm2d, mean: Tensor, var: Tensor
) -> None:
    seen = _count_batch(forward, name)
    factor = 1 / seen.to(mean.dtype).unsqueeze(-1) if layer.momentum is None else layer.momentum
    for statistic, value in (("running_mean", mean), ("running_var", var)):
        before = forward.tensor(name, statistic)
        assert before is not None
        forward.statistics[f"{name}.{statistic}"] = before + factor * (value.detach() - before)


def _count_batch(forward: StackedForward, name: str) -> Tensor:
    seen = forward.tensor(name, "num_batches_tracked")
    assert seen is not None
    forward.statistics[f"{name}.num_batches_tracked"] = seen + 1
    return seen + 1


@rule(nn.GroupNorm)
def _group_norm(forward: StackedForward, name: str, layer: nn.GroupNorm, x: Tensor) -> Tensor:
    weight, bias = forward.tensor(name, "weight"), forward.tensor(name, "bias")
    out = _split(F.group_norm(x.flatten(0, 1), layer.num_groups, eps=layer.eps), 0, x.shape[:2])
    if weight is not None:
        out = out * _per_channel(weight, x)
    return out if bias is None else out + _per_channel(bias, x)


@rule(KeyedDropout)
def _dropout(forward: StackedForward, name: str, layer: KeyedDropout, x: Tensor) -> Tensor:  # noqa: ARG001
    """Apply each client's dropout masks."""
    if not layer.training or layer.p == 0:
        return x
    if layer.p == 1:
        return torch.zeros_like(x)
    if forward.keys is None:
        raise RuntimeError("a network with dropout was run in train mode without a key")
    forward.dropouts += 1
    shape = x.shape[:3] + (1,) * (x.dim() - 3) if layer.whole_channels else x.shape
    positions = torch.arange(shape[1:].numel(), device=x.device)
    drawn = uniform(fold(forward.keys, forward.dropouts).unsqueeze(-1), positions)
    return x * (drawn >= layer.p).view(shape).to(x.dtype) / (1 - layer.p)


@rule(nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d)
def pooling(forward: StackedForward, name: str, layer: nn.Module, x: Tensor) -> Tensor:  # noqa: ARG001
    if isinstance(layer, nn.MaxPool2d) and kernels.pools_disjoint_windows(layer) and kernels.supported(x, x):
        return kernels.stacked_max_pool(x, layer, forward.activation == "relu")
    x = _activated(x, forward.activation)
    if _channels_adjoin(x):
        return _from_channels(layer(_as_channels(x)), forward.clients)
    return _split(layer(x.flatten(0, 1)), 0, x.shape[:2])


@rule(nn.ReLU, nn.ReLU6, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.ELU, nn.LeakyReLU, nn.Hardswish, nn.Identity)
def _elementwise(forward: StackedForward, name: str, layer: nn.Module, x: Tensor) -> Tensor:  # noqa: ARG001
    out: Tensor = layer(x)
    return out


@rule(nn.LayerNorm)
def _layer_norm(forward: StackedForward, name: str, layer: nn.LayerNorm, x: Tensor) -> Tensor:
    weight, bias = forward.tensor(name, "weight"), forward.tensor(name, "bias")
    out = F.layer_norm(x, layer.normalized_shape, eps=layer.eps)
    shape = (len(x), *(1,) * (x.dim() - 1 - len(layer.normalized_shape)), *layer.normalized_shape)
    if weight is not None:
        out = out * weight.view(shape)
    return out if bias is None else out + bias.view(shape)


@rule(nn.Flatten)
def _flatten(forward: StackedForward, name: str, layer: nn.Flatten, x: Tensor) -> Tensor:  # noqa: ARG001
    first, last = (d + 1 if d >= 0 else d for d in (layer.start_dim, layer.end_dim))
    return x.flatten(first, last)
