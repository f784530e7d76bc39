"""Registers the kernels as PyTorch operations, so that autograd, `make_fx` and `torch.compile` can handle them.

`torch.library.custom_op` does the same, but the first call of its operations imports PyTorch's compiler. The import
takes three seconds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")

_LIBRARY: Any = torch.library.Library("fedskew", "FRAGMENT")  # type: ignore[no-untyped-call]


class Operation(Generic[P, R]):
    """An operation of PyTorch's `fedskew` namespace. It must not change its arguments."""

    def __init__(self, name: str, function: Callable[P, R]) -> None:
        self._name = f"fedskew::{name}"
        _LIBRARY.define(name + torch.library.infer_schema(function, mutates_args=()))
        _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
        self.overload: Any = getattr(torch.ops.fedskew, name).default

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        result: R = self.overload(*args, **kwargs)
        return result

    def register_fake(self, function: Callable[P, R]) -> Callable[P, R]:
        """Register a function that returns empty tensors of the right shapes. PyTorch calls it to trace a step."""
        torch.library.register_fake(self._name, function, lib=_LIBRARY)
        return function

    def register_autograd(self, backward: Callable[..., Any], setup_context: Callable[..., None]) -> None:
        torch.library.register_autograd(self._name, backward, setup_context=setup_context, lib=_LIBRARY)


def operation(name: str) -> Callable[[Callable[P, R]], Operation[P, R]]:
    """Register the decorated function as the operation `fedskew::name`."""
    return lambda function: Operation(name, function)
