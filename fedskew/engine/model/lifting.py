"""Lift a model over clients. The result is one program that applies each client's parameters to that client's batch.

This happens once per model and mode. `torch.fx` takes the module apart. A layer with a rule (`stacked_layers`) becomes
one operation on all clients. Most other operations are lifted by `vmap`, one by one.
"""

from __future__ import annotations

import contextlib
import operator
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from fedskew.engine.kernels import Activation
from fedskew.engine.model.layers import KeyedDropout
from fedskew.engine.model.stacked_layers import (
    RULES,
    Operation,
    Rule,
    Stacked,
    StackedForward,
    StackedLayer,
    StackedModel,
    Values,
    attribute,
    batch_norm,
    functional_batch_norm,
    functional_embedding,
    has_own_forward,
    is_stacked,
    pooling,
    read_only,
)


class _Tracer(fx.Tracer):
    """Does not trace into layers that have a rule. Refuses what the recorded operations would not repeat."""

    proxy_buffer_attributes = True  # what is computed from a buffer must follow the buffer's value

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return type(m) in RULES or super().is_leaf_module(m, module_qualified_name)

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        if not torch.is_grad_enabled():
            raise ValueError("the model turns gradients off in a part of its forward pass")
        return super().create_node(*args, **kwargs)

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Proxy(node, self)


_CHANGES_SOURCE = "changes source"
"""The key of a node's metadata that marks an augmented assignment."""


class _Proxy(fx.Proxy):
    """Marks augmented assignments, such as `x += y`, which torch.fx records as ordinary operations."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in ("tracer", "node"):
            raise ValueError("the model sets an attribute of a tensor")
        super().__setattr__(name, value)

    def _assign(self, function: Callable[..., Any], other: Any) -> fx.Proxy:
        changed = self.tracer.create_proxy("call_function", function, (self, other), {})
        changed.node.meta[_CHANGES_SOURCE] = True
        return changed


def _augmented(function: Callable[..., Any]) -> Callable[[_Proxy, Any], fx.Proxy]:
    return lambda proxy, other: proxy._assign(function, other)


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift"):
    setattr(_Proxy, f"__i{_name}__", _augmented(getattr(operator, f"__{_name}__")))


def _is_in_place(node: fx.Node) -> bool:
    """Return whether an operation changes its arguments in place, which a stack of clients does not allow."""
    name = _called_name(node)
    has_in_place_name = (name.endswith("_") and not name.endswith("__")) or name in (
        "setitem",
        "iadd",
        "isub",
        "imul",
        "itruediv",
    )
    return has_in_place_name or bool(node.kwargs.get("inplace"))


def _called_name(node: fx.Node) -> str:
    """Return the name of the function or method that a node calls, or nothing."""
    if node.op not in ("call_method", "call_function"):
        return ""
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")


class UnstackableError(RuntimeError):
    """The model must not be stacked, not even by `vmap`: its stack would compute something else than its clients do."""


def lifted_model(module: nn.Module) -> StackedModel | None:
    """Return the program of a module in its current mode, or None if the module cannot be lifted in this way."""
    try:
        return _lift(module)
    except UnstackableError:
        raise
    except Exception:  # a user's code may fail in any way when it is traced
        return None


def _lift(module: nn.Module) -> StackedModel:
    before = host_random_streams(), torch.get_rng_state().tolist()
    with torch.enable_grad(), _refusing_unrecorded(), _with_attributes_restored(module):
        graph = _Tracer().trace(module)
    if before != (host_random_streams(), torch.get_rng_state().tolist()):
        raise ValueError("the model draws random numbers, which would be the same in each call of the program")
    _refuse_changed_copies(graph, module)
    if any(_is_in_place(node) or _changes_shared_tensor(node, module) for node in graph.nodes):
        raise ValueError("the model changes tensors in place")
    *nodes, output = graph.nodes
    if output.op != "output":
        raise ValueError("the model returns nothing")
    activations, fused = _fused_activations(graph, module)
    operations = {
        node: _AlreadyApplied(node) if node in fused else _operation(node, module, activations.get(node, "none"))
        for node in nodes
    }
    return StackedModel(module, operations, output.args[0], _canonical_names(module))


def host_random_streams() -> tuple[object, ...]:
    """Return the states of the global random streams of Python and numpy."""
    state: Any = np.random.get_state(legacy=False)  # noqa: NPY002 - users' code may draw from it
    return random.getstate(), state["state"]["key"].tobytes(), state["state"]["pos"]


@contextlib.contextmanager
def _with_attributes_restored(module: nn.Module) -> Iterator[None]:
    """Restore what the model's code assigns to its attributes while torch.fx traces it.

    Refuse code that assigns to buffers, or that changes the mode (train or eval) of layers.
    """
    attributes = [(layer, dict(vars(layer)), dict(layer._buffers)) for layer in module.modules()]
    is_changed = False
    try:
        yield
    finally:
        for layer, values, buffers in attributes:
            is_changed |= any(buffer is not buffers.get(name) for name, buffer in layer._buffers.items())
            is_changed |= layer.training != values["training"]
            vars(layer).update(values)
            layer._buffers.update(buffers)
    if is_changed:
        raise ValueError("the model assigns to its buffers, or changes the mode of its layers")


@contextlib.contextmanager
def _refusing_unrecorded() -> Iterator[None]:
    """Refuse functions with a gradient of their own, and a part in another number format.

    torch.fx would record neither the gradient nor the format.
    """

    def refuse(*_: Any, **__: Any) -> None:
        raise ValueError("the model has a function with a gradient of its own, or a part with its own autocast")

    replaced = [(owner, name, vars(owner)[name]) for owner, name in _UNRECORDED]
    for owner, name, _ in replaced:
        setattr(owner, name, refuse)
    try:
        yield
    finally:
        for owner, name, original in replaced:
            setattr(owner, name, original)


_UNRECORDED: tuple[tuple[type, str], ...] = ((torch.autograd.Function, "apply"), (torch.autocast, "__enter__"))
"""Methods that `_refusing_unrecorded` replaces."""


def _changes_shared_tensor(node: fx.Node, module: nn.Module) -> bool:
    """Return whether an augmented assignment may change a tensor that is used elsewhere.

    The program computes a new tensor instead, so the change would be lost.
    """
    source = node.args[0] if _CHANGES_SOURCE in node.meta else None
    return isinstance(source, fx.Node) and not _is_size(source) and _is_seen(node, source, node, module)


def _is_size(node: fx.Node) -> bool:
    """Return whether the value is a tensor's shape, or a number that comes from one."""
    source = node.args[0] if node.args else None
    if node.target == "size" or (node.target is getattr and node.args[1] == "shape"):
        return True
    is_computed = node.target is operator.getitem or _CHANGES_SOURCE in node.meta
    return is_computed and isinstance(source, fx.Node) and _is_size(source)


def _is_seen(change: fx.Node, source: fx.Node, user: fx.Node, module: nn.Module) -> bool:
    """Return whether the assignment `change`, which writes into the memory of `source`, may affect another node.

    `user` is the node between `source` and the change, or the change itself. A node that computed a new tensor from
    `source` before the change is not affected.
    """
    others = [node for node in source.users if node is not user and (node.users or node.op == "output")]
    if source.op == "get_attr" or not all(node < change and _makes_tensor(node, module) for node in others):
        return True
    return not _makes_tensor(source, module) and any(
        _is_seen(change, argument, source, module) for argument in source.all_input_nodes
    )


def _refuse_changed_copies(graph: fx.Graph, module: nn.Module) -> None:
    """Refuse a change in place that reaches another tensor only if an operation has made no copy.

    Whether the operation copies depends on the order in memory, and a stack has another order than one client.
    """
    changes = [
        node
        for node in graph.nodes
        if _CHANGES_SOURCE in node.meta or _is_in_place(node) or _works_in_place(node, module)
    ]
    for copy in (node for node in graph.nodes if changes and _may_copy(node, module)):
        original = copy.args[0]
        sides = _aliases(original, copy, module), _aliases(copy, original, module)
        for change in (node for node in changes if copy < node):
            for changed, other in (sides, sides[::-1]):
                if change.args[0] in changed and any(change < user for node in other for user in node.users):
                    name = _called_name(copy) or copy.target
                    raise UnstackableError(f"the model changes a tensor in place, which {name!r} may have copied")


def _aliases(node: fx.Node, excluded: fx.Node, module: nn.Module) -> set[fx.Node]:
    """Return the nodes whose results may share memory with the result of this node, not by way of `excluded`."""
    found: set[fx.Node] = set()
    ahead = [node]
    while ahead:
        node = ahead.pop()
        if node not in found and node is not excluded:
            found.add(node)
            ahead += [user for user in node.users if not _makes_tensor(user, module)]
            ahead += [] if _makes_tensor(node, module) else node.all_input_nodes
    return found


def _may_copy(node: fx.Node, module: nn.Module) -> bool:
    """Return whether the result shares memory with the input only if the input's order in memory permits it."""
    is_layer = _is_layer(node, module, nn.Flatten)
    return is_layer or _called_name(node) in ("contiguous", "reshape", "reshape_as", "flatten", "ravel")


_TENSOR_MAKERS = {
    "add", "sub", "mul", "truediv", "neg", "exp", "log", "sqrt", "rsqrt", "square", "mean", "sum", "cat", "stack",
    "matmul", "mm", "bmm", "linear", "conv1d", "conv2d", "embedding", "scaled_dot_product_attention", "avg_pool2d",
    "adaptive_avg_pool2d", "relu", "gelu", "silu", "elu", "tanh", "sigmoid", "softmax", "log_softmax", "batch_norm",
    "layer_norm", "group_norm", "normalize", "size", "dim",
}  # fmt: skip
"""Functions and methods whose result never shares memory with their arguments."""
_TENSOR_MAKING_LAYERS = (
    nn.Linear, nn.Conv1d, nn.Conv2d, nn.BatchNorm1d, nn.BatchNorm2d, nn.GroupNorm, nn.LayerNorm, nn.Embedding,
    nn.MultiheadAttention, nn.RNNBase, nn.AvgPool2d, nn.MaxPool2d, nn.AdaptiveAvgPool2d,
)  # fmt: skip
"""Layers whose result never shares memory with their input."""
_PLAIN_ATTRIBUTES = ("shape", "dtype", "device", "ndim")
"""Attributes of a tensor that are not tensors."""


def _makes_tensor(node: fx.Node, module: nn.Module) -> bool:
    if node.op == "call_module":
        return isinstance(module.get_submodule(str(node.target)), _TENSOR_MAKING_LAYERS)
    return _called_name(node) in _TENSOR_MAKERS or (node.target is getattr and node.args[1] in _PLAIN_ATTRIBUTES)


def _operation(node: fx.Node, module: nn.Module, activation: Activation) -> Operation:
    operation = _AnyOperation(node, module)
    if node.op != "call_module":
        return operation
    name = str(node.target)
    layer = module.get_submodule(name)
    if not node.kwargs and len(node.args) == 1 and isinstance(node.args[0], fx.Node) and (rule := _rule_for(layer)):
        return StackedLayer(rule, name, layer, node.args[0], activation, operation)
    if any(_needs_rule(part) for part in layer.modules()):
        raise ValueError("without their rules, BatchNorm counts rows of padding, and dropout has no key")
    return operation


def _needs_rule(layer: nn.Module) -> bool:
    """Return whether the layer computes statistics of the batch or draws masks."""
    if isinstance(layer, KeyedDropout):
        return layer.training and layer.p > 0
    return isinstance(layer, _BatchNorm) and (layer.training or layer.running_mean is None)


def _rule_for(layer: nn.Module) -> Rule | None:
    """Return the layer's rule. An altered layer has none, because a rule would ignore what the user added."""
    return None if _is_altered(layer) else RULES.get(type(layer))


def _is_altered(layer: nn.Module) -> bool:
    return has_own_forward(layer) or bool(layer._forward_hooks or layer._forward_pre_hooks)


@dataclass(frozen=True)
class _AlreadyApplied:
    """The node of an activation that the layer before or after it applies. The node returns its input."""

    node: fx.Node

    def __call__(self, forward: StackedForward, values: Values) -> Any:  # noqa: ARG002
        return fx.node.map_arg(self.node.args[0], values.__getitem__)


@dataclass(frozen=True)
class _AnyOperation:
    """An operation done without a rule. `vmap` lifts it, unless it can be called directly with all clients' values."""

    node: fx.Node
    module: nn.Module

    def __call__(self, forward: StackedForward, values: Values) -> Any:
        target: Any = self.node.target
        args, kwargs = fx.node.map_arg((self.node.args, self.node.kwargs), values.__getitem__)
        if self.node.op == "get_attr":
            found = forward.tensor("", target)
            return attribute(self.module, target) if found is None else Stacked(found)
        if self.node.op == "call_module":
            return self._layer(forward, target, args, kwargs)
        function = getattr(Tensor, target) if self.node.op == "call_method" else target
        return _call_lifted(_LIFTABLE.get(function, function), args, kwargs)

    def _layer(self, forward: StackedForward, name: str, args: Any, kwargs: Any) -> Any:
        layer = self.module.get_submodule(name)
        own = {n: Stacked(t) for n in _tensor_names(layer) if (t := forward.tensor(name, n)) is not None}
        with vmap_of_a_model(own[n].tensor for n, _ in layer.named_buffers() if n in own):
            return _by_vmap(lambda t, *a, **k: torch.func.functional_call(layer, t, a, k), (own, *args), kwargs)


_ACTIVATIONS: dict[Any, Activation] = {nn.ReLU: "relu", nn.ReLU6: "relu6", F.relu: "relu", torch.relu: "relu"}


def _fused_activations(graph: fx.Graph, module: nn.Module) -> tuple[dict[fx.Node, Activation], set[fx.Node]]:
    """Find the layers that can apply the activation beside them, and the nodes of these activations.

    A BatchNorm layer can apply an activation after it, if nothing else uses the layer's result. A max-pooling layer can
    apply a ReLU before it, if nothing else uses the ReLU's result or its input. If a layer of the model works in place,
    the ReLU must also follow an operation that makes a new tensor: other results may share memory with a tensor that is
    used or changed elsewhere.
    """
    layers: dict[fx.Node, Activation] = {}
    fused: set[fx.Node] = set()
    is_changed_in_place = any(_works_in_place(node, module) for node in graph.nodes)
    for node in graph.nodes:
        source = node.args[0] if node.args else None
        layer = module.get_submodule(node.target) if node.op == "call_module" else None
        kind = node.target if layer is None else type(layer)
        if kind not in _ACTIVATIONS or not isinstance(source, fx.Node) or (layer is not None and _is_altered(layer)):
            continue
        user = next(iter(node.users), node)
        if len(source.users) > 1:
            continue
        if _has_rule(source, module, batch_norm):
            layers[source] = _ACTIVATIONS[kind]
            fused.add(node)
        elif (
            _ACTIVATIONS[kind] == "relu"
            and len(node.users) == 1
            and _is_max_pooling(user, module)
            and (_makes_tensor(source, module) or not is_changed_in_place)
        ):
            layers[user] = "relu"
            fused.add(node)
    return layers, fused


def _is_layer(node: fx.Node, module: nn.Module, kind: type[nn.Module]) -> bool:
    return node.op == "call_module" and isinstance(module.get_submodule(str(node.target)), kind)


def _works_in_place(node: fx.Node, module: nn.Module) -> bool:
    """Return whether a layer writes its result over its input."""
    return node.op == "call_module" and bool(getattr(module.get_submodule(str(node.target)), "inplace", False))


def _has_rule(node: fx.Node, module: nn.Module, rule: Rule) -> bool:
    return node.op == "call_module" and _rule_for(module.get_submodule(str(node.target))) is rule


def _is_max_pooling(node: fx.Node, module: nn.Module) -> bool:
    return _has_rule(node, module, pooling) and _is_layer(node, module, nn.MaxPool2d)


# -- operations without a rule -----------------------------------------------------------------------------

_ELEMENTWISE = {operator.add, operator.sub, operator.mul, operator.truediv, torch.add, torch.mul, torch.relu, F.relu}
"""Functions of single elements. They are called directly if `_needs_no_broadcast` holds."""

_LIFTABLE: dict[Any, Callable[..., Any]] = {F.embedding: functional_embedding, F.batch_norm: functional_batch_norm}
"""Functions that `vmap` would lift wrongly, and what replaces them."""


class _LiftableFunctions(TorchFunctionMode):
    """Replaces functions that `vmap` would lift wrongly, within a `with` block."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _LIFTABLE.get(function, function)(*args, **(kwargs or {}))


@contextlib.contextmanager
def vmap_of_a_model(buffers: Iterable[Tensor]) -> Iterator[None]:
    """Let `vmap` lift a model's or layer's code correctly within a `with` block, as long as it only reads `buffers`."""
    with read_only(buffers), _LiftableFunctions():
        yield


def _call_lifted(function: Any, args: Any, kwargs: Any) -> Any:
    """Call a function of one client's values for all clients."""
    given = [a for a in args if isinstance(a, Stacked)]
    if function in (getattr, Tensor.size, Tensor.dim) and given:
        one = function(args[0].tensor[0], *args[1:])
        # `x.mT` differs from client to client, but `x.shape` is the same for all of them.
        return _by_vmap(function, args, kwargs) if isinstance(one, Tensor) else one
    if not given and not any(isinstance(v, Stacked) for v in kwargs.values()) and not _holds_stacked(args):
        return function(*args, **kwargs)
    if function in _ELEMENTWISE and not kwargs and _needs_no_broadcast(args):
        return Stacked(function(*(a.tensor if isinstance(a, Stacked) else a for a in args)))
    return _by_vmap(function, args, kwargs)


def _holds_stacked(args: Any) -> bool:
    found: list[Stacked] = []
    tree_map(lambda v: found.append(v) if isinstance(v, Stacked) else None, args, is_leaf=is_stacked)
    return bool(found)


def _needs_no_broadcast(args: Any) -> bool:
    """Return whether all stacked arguments have one shape and all others are numbers, so that no axes are broadcast."""
    given = [a for a in args if isinstance(a, Stacked)]
    same = all(a.tensor.shape == given[0].tensor.shape for a in given)
    return same and all(isinstance(a, Stacked | int | float) for a in args)


@dataclass(frozen=True)
class _Placeholder:
    """Stands for a tensor that `vmap` maps over."""

    index: int


def _by_vmap(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Lift any function of one client's values over all clients."""
    tensors: list[Tensor] = []

    def take(value: Any) -> Any:
        if not isinstance(value, Stacked):
            return value
        tensors.append(value.tensor)
        return _Placeholder(len(tensors) - 1)

    structure = tree_map(take, (args, kwargs), is_leaf=is_stacked)

    result: Any = None

    def call(*given: Tensor) -> list[Tensor]:
        nonlocal result
        filled = tree_map(lambda v: given[v.index] if isinstance(v, _Placeholder) else v, structure)
        result = function(*filled[0], **filled[1])
        return [value for value in tree_leaves(result) if isinstance(value, Tensor)]

    found = iter(torch.func.vmap(call)(*tensors))
    # Values that are not tensors, such as the missing weights of an attention layer, are the same for all clients.
    return tree_map(lambda value: Stacked(next(found)) if isinstance(value, Tensor) else value, result)


def _tensor_names(layer: nn.Module) -> list[str]:
    return [name for name, _ in (*layer.named_parameters(), *layer.named_buffers())]


def _canonical_names(module: nn.Module) -> dict[str, str]:
    """Map each name of a parameter or buffer to its first name. Tied tensors have several names."""
    first: dict[int, str] = {}
    both = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
    return {name: first.setdefault(id(tensor), name) for name, tensor in both}
