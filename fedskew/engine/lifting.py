"""A model lifted over clients: one program that applies every client's own parameters to its own batch.

The module is taken apart by `torch.fx`. Each layer becomes one operation on all clients: a convolution a grouped
convolution, a linear layer a batched matrix product, BatchNorm one with clients × channels channels. What has no rule
here is lifted by `vmap`, layer by layer.

Values are in one of two layouts. `clients`: [K, B, …], the batch of each client. `channels`: [B, K·C, H, W], the
clients side by side in the channel axis, as a grouped convolution wants them; values stay in it until a layer needs
the other.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_map

from fedskew.engine.layers import KeyedDropout
from fedskew.methods.parts import Tensors
from fedskew.randomness import fold, uniform

Layout = Literal["clients", "channels"]


@dataclass(frozen=True)
class Stacked:
    """A value of all clients."""

    tensor: Tensor
    layout: Layout = "clients"


@dataclass
class Pass:
    """One pass of the program: the clients' tensors, and what the layers leave behind."""

    clients: int
    tensors: Callable[[str], Tensor | None]
    """A parameter or buffer of all clients by its qualified name; None if there is none of that name."""
    valid: Tensor
    """[K, B]: rows that do not pad the batch."""
    keys: Tensor | None
    """[K]: for dropout."""
    dropouts: int = 0
    """How many masks were drawn: a layer may be called more than once."""
    statistics: Tensors = field(default_factory=dict)
    """New running statistics of BatchNorm."""

    def of(self, layer: str, name: str) -> Tensor | None:
        qualified = f"{layer}.{name}" if layer else name
        return self.statistics[qualified] if qualified in self.statistics else self.tensors(qualified)

    def as_clients(self, value: Stacked) -> Tensor:
        if value.layout == "clients":
            return value.tensor
        batch, channels, *rest = value.tensor.shape
        return value.tensor.view(batch, self.clients, channels // self.clients, *rest).transpose(0, 1)

    def as_channels(self, value: Stacked) -> Tensor:
        if value.layout == "channels":
            return value.tensor
        return value.tensor.transpose(0, 1).flatten(1, 2)


Rule = Callable[[Pass, str, Any, Stacked], Stacked]
"""What a layer, by its name and module, makes of a value."""

RULES: dict[type[nn.Module], Rule] = {}


def _rule(*kinds: type[nn.Module]) -> Callable[[Rule], Rule]:
    def enter(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(kinds, function))
        return function

    return enter


class _Tracer(fx.Tracer):
    """Stops at the layers that have a rule."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return type(m) in RULES or super().is_leaf_module(m, module_qualified_name)


def _writes(node: fx.Node) -> bool:
    """Whether an operation changes its arguments: between clients that share a stack, nothing may."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    called = node.op in ("call_method", "call_function")
    in_place = (name.endswith("_") and not name.endswith("__")) or name in (
        "setitem",
        "iadd",
        "isub",
        "imul",
        "itruediv",
    )
    return called and (in_place or bool(node.kwargs.get("inplace")))


def lifted_model(module: nn.Module) -> LiftedModel | None:
    """The program of a module in its present mode; None if it cannot be taken apart."""
    try:
        return LiftedModel(module)
    except (TypeError, ValueError, RuntimeError, AttributeError, NameError, fx.proxy.TraceError):
        return None


class LiftedModel:
    """A module, as it is in train or in eval mode, as one program over stacked clients."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._graph = _Tracer().trace(module)
        if any(_writes(node) for node in self._graph.nodes):
            raise ValueError("the model changes tensors in place")
        self._canonical = _canonical_names(module)
        """Tied tensors have several names; the clients' tensors go by the first."""

    def __call__(
        self, tensors: Mapping[str, Tensor], x: Tensor, valid: Tensor, keys: Tensor | None
    ) -> tuple[Any, Tensors]:
        """What the module returns, each tensor with a leading axis of clients; and BatchNorm's new statistics."""

        def find(name: str) -> Tensor | None:
            name = self._canonical.get(name, name)
            if name in tensors:
                return tensors[name]
            own = _attribute(self._module, name)  # a parameter that the user froze is the same for all
            return own.expand(len(x), *own.shape) if isinstance(own, Tensor) else None

        this = Pass(len(x), find, valid, keys)
        values: dict[fx.Node, Any] = {}
        for node in self._graph.nodes:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
            if node.op == "output":
                outputs = tree_map(lambda v: this.as_clients(v) if _is_stacked(v) else v, args[0], is_leaf=_is_stacked)
                return outputs, this.statistics
            values[node] = Stacked(x) if node.op == "placeholder" else self._apply(this, node, args, kwargs)
        raise ValueError("the model returns nothing")

    def _apply(self, this: Pass, node: fx.Node, args: Any, kwargs: Any) -> Any:
        target: Any = node.target
        if node.op == "get_attr":
            found = this.of("", target)
            return _attribute(self._module, target) if found is None else Stacked(found)
        if node.op == "call_module":
            return self._layer(this, target, args, kwargs)
        if node.op == "call_method":
            return _function(this, getattr(Tensor, target), args, kwargs)
        return _function(this, target, args, kwargs)

    def _layer(self, this: Pass, name: str, args: Any, kwargs: Any) -> Any:
        layer = self._module.get_submodule(name)
        rule = RULES.get(type(layer))
        if rule is not None and not kwargs and len(args) == 1 and isinstance(args[0], Stacked):
            return rule(this, name, layer, args[0])
        own = {n: Stacked(t) for n in _tensor_names(layer) if (t := this.of(name, n)) is not None}
        return _by_vmap(this, lambda t, *a, **k: torch.func.functional_call(layer, t, a, k), (own, *args), kwargs)


# -- rules -------------------------------------------------------------------------------------------------


@_rule(nn.Conv2d)
def _convolution(this: Pass, name: str, layer: nn.Conv2d, value: Stacked) -> Stacked:
    weight, bias = this.of(name, "weight"), this.of(name, "bias")
    assert weight is not None
    x, padding = this.as_channels(value), layer.padding
    if layer.padding_mode != "zeros":
        x, padding = F.pad(x, layer._reversed_padding_repeated_twice, layer.padding_mode), (0, 0)
    flat_bias = None if bias is None else bias.flatten()
    groups = layer.groups * this.clients
    out = F.conv2d(x, weight.flatten(0, 1), flat_bias, layer.stride, padding, layer.dilation, groups)
    return Stacked(out, "channels")


@_rule(nn.Linear)
def _linear(this: Pass, name: str, layer: nn.Linear, value: Stacked) -> Stacked:
    weight, bias = this.of(name, "weight"), this.of(name, "bias")
    assert weight is not None
    x = this.as_clients(value)
    rows, matrices = x.flatten(1, -2), weight.transpose(1, 2)
    out = torch.bmm(rows, matrices) if bias is None else torch.baddbmm(bias.unsqueeze(1), rows, matrices)
    return Stacked(out.view(*x.shape[:-1], layer.out_features))


@_rule(nn.Embedding)
def _embedding(this: Pass, name: str, layer: nn.Embedding, value: Stacked) -> Stacked:
    weight = this.of(name, "weight")
    assert weight is not None
    if layer.padding_idx is not None or layer.max_norm is not None:
        own = {"weight": Stacked(weight)}
        lifted = _by_vmap(this, lambda t, x: torch.func.functional_call(layer, t, (x,)), (own, value), {})
        assert isinstance(lifted, Stacked)
        return lifted
    tokens = this.as_clients(value)
    first = torch.arange(this.clients, device=tokens.device) * layer.num_embeddings
    return Stacked(F.embedding(tokens + first.view(-1, *(1,) * (tokens.dim() - 1)), weight.flatten(0, 1)))


@_rule(nn.BatchNorm1d, nn.BatchNorm2d)
def _batch_norm(this: Pass, name: str, layer: nn.BatchNorm2d, value: Stacked) -> Stacked:
    """Each client's statistics over its valid rows: the clients' channels are so many channels of one batch."""
    x = value.tensor.unsqueeze(-1) if value.layout == "clients" and value.tensor.dim() == 3 else None
    wide = this.as_channels(value if x is None else Stacked(x))
    dtype = wide.dtype
    wide = wide.to(torch.promote_types(dtype, torch.float32))  # as PyTorch's own does under autocast
    running = [this.of(name, statistic) for statistic in ("running_mean", "running_var")]
    if layer.training or running[0] is None or running[1] is None:
        mean, var, count = _valid_statistics(this, wide)
        if layer.training and layer.track_running_stats:
            _remember(this, name, layer, mean, var * count / (count - 1))
    else:
        mean, var = running[0].flatten(), running[1].flatten()
    scale, bias = (var + layer.eps).rsqrt(), this.of(name, "bias")
    if (weight := this.of(name, "weight")) is not None:
        scale = scale * weight.flatten()
    shape = (1, -1) + (1,) * (wide.dim() - 2)
    normed = (wide - mean.view(shape)) * scale.view(shape)
    out = Stacked((normed if bias is None else normed + bias.flatten().view(shape)).to(dtype), "channels")
    return out if x is None else Stacked(this.as_clients(out).squeeze(-1))


def _valid_statistics(this: Pass, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, variance and number of values of each client's channels [K·C]."""
    per_client = x.shape[1] // this.clients
    rows = this.valid.t().to(x.dtype).repeat_interleave(per_client, dim=1)
    rows = rows.view(*rows.shape, *(1,) * (x.dim() - 2))
    axes = (0, *range(2, x.dim()))
    count = rows.sum(axes) * x[0, 0].numel()
    mean = (x * rows).sum(axes) / count
    centred = (x - mean.view(1, -1, *(1,) * (x.dim() - 2))) * rows
    return mean, centred.square().sum(axes) / count, count


def _remember(this: Pass, name: str, layer: nn.BatchNorm2d, mean: Tensor, var: Tensor) -> None:
    seen = this.of(name, "num_batches_tracked")
    assert seen is not None
    factor = 1 / (seen + 1).to(mean.dtype).unsqueeze(-1) if layer.momentum is None else layer.momentum
    for statistic, value in (("running_mean", mean), ("running_var", var)):
        before = this.of(name, statistic)
        assert before is not None
        this.statistics[f"{name}.{statistic}"] = before + factor * (value.detach().view_as(before) - before)
    this.statistics[f"{name}.num_batches_tracked"] = seen + 1


@_rule(nn.GroupNorm)
def _group_norm(this: Pass, name: str, layer: nn.GroupNorm, value: Stacked) -> Stacked:
    weight, bias = (None if t is None else t.flatten() for t in (this.of(name, "weight"), this.of(name, "bias")))
    groups = layer.num_groups * this.clients
    return Stacked(F.group_norm(this.as_channels(value), groups, weight, bias, layer.eps), "channels")


@_rule(KeyedDropout)
def _dropout(this: Pass, name: str, layer: KeyedDropout, value: Stacked) -> Stacked:  # noqa: ARG001
    """Each client's masks."""
    if not layer.training or layer.p == 0:
        return value
    if layer.p == 1:
        return replace(value, tensor=torch.zeros_like(value.tensor))
    if this.keys is None:
        raise RuntimeError("a network with dropout was run in train mode without a key")
    this.dropouts += 1
    shape = this.as_clients(value).shape
    if layer.whole_channels:
        shape = shape[:3] + (1,) * (len(shape) - 3)
    positions = torch.arange(shape[1:].numel(), device=value.tensor.device)
    drawn = uniform(fold(this.keys, this.dropouts).unsqueeze(-1), positions)
    kept = Stacked((drawn >= layer.p).view(shape))
    mask = this.as_channels(kept) if value.layout == "channels" else kept.tensor
    return replace(value, tensor=value.tensor * mask.to(value.tensor.dtype) / (1 - layer.p))


@_rule(nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d)
def _pooling(this: Pass, name: str, layer: nn.Module, value: Stacked) -> Stacked:  # noqa: ARG001
    return Stacked(layer(this.as_channels(value)), "channels")


@_rule(nn.ReLU, nn.ReLU6, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.ELU, nn.LeakyReLU, nn.Hardswish, nn.Identity)
def _elementwise(this: Pass, name: str, layer: nn.Module, value: Stacked) -> Stacked:  # noqa: ARG001
    return replace(value, tensor=layer(value.tensor))


@_rule(nn.Flatten)
def _flatten(this: Pass, name: str, layer: nn.Flatten, value: Stacked) -> Stacked:  # noqa: ARG001
    first, last = (d + 1 if d >= 0 else d for d in (layer.start_dim, layer.end_dim))
    return Stacked(this.as_clients(value).flatten(first, last))


# -- functions, and what has no rule -----------------------------------------------------------------------

_ELEMENTWISE = {operator.add, operator.sub, operator.mul, operator.truediv, torch.add, torch.mul, torch.relu, F.relu}


def _function(this: Pass, function: Any, args: Any, kwargs: Any) -> Any:
    given = [a for a in args if isinstance(a, Stacked)]
    if function in (getattr, Tensor.size, Tensor.dim) and given:
        return function(this.as_clients(args[0])[0], *args[1:])
    if not given and not any(isinstance(v, Stacked) for v in kwargs.values()) and not _holds_stacked(args):
        return function(*args, **kwargs)
    if function in _ELEMENTWISE and not kwargs and _alike(args):
        tensor = function(*(a.tensor if isinstance(a, Stacked) else a for a in args))
        return Stacked(tensor, given[0].layout)
    return _by_vmap(this, function, args, kwargs)


def _holds_stacked(args: Any) -> bool:
    found: list[Stacked] = []
    tree_map(lambda v: found.append(v) if isinstance(v, Stacked) else None, args, is_leaf=_is_stacked)
    return bool(found)


def _is_stacked(value: Any) -> bool:
    return isinstance(value, Stacked)


def _alike(args: Any) -> bool:
    """Whether an elementwise function of these is the same in any layout."""
    given = [a for a in args if isinstance(a, Stacked)]
    same = all(a.layout == given[0].layout and a.tensor.shape == given[0].tensor.shape for a in given)
    return same and all(isinstance(a, Stacked | int | float) for a in args)


@dataclass(frozen=True)
class _Slot:
    """The place of a tensor among those that `vmap` maps over."""

    index: int


def _by_vmap(this: Pass, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Lift any function of one client's values."""
    tensors: list[Tensor] = []

    def take(value: Any) -> Any:
        if not isinstance(value, Stacked):
            return value
        tensors.append(this.as_clients(value))
        return _Slot(len(tensors) - 1)

    structure = tree_map(take, (args, kwargs), is_leaf=_is_stacked)

    def call(*given: Tensor) -> Any:
        filled = tree_map(lambda v: given[v.index] if isinstance(v, _Slot) else v, structure)
        return function(*filled[0], **filled[1])

    out = torch.func.vmap(call)(*tensors)
    return tree_map(lambda t: Stacked(t) if isinstance(t, Tensor) else t, out)


def _tensor_names(layer: nn.Module) -> list[str]:
    return [name for name, _ in (*layer.named_parameters(), *layer.named_buffers())]


def _attribute(module: nn.Module, name: str) -> Any:
    owner, _, attribute = name.rpartition(".")
    return getattr(module.get_submodule(owner), attribute, None)


def _canonical_names(module: nn.Module) -> dict[str, str]:
    first: dict[int, str] = {}
    both = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
    return {name: first.setdefault(id(tensor), name) for name, tensor in both}
