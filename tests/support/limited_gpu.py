"""A stand-in for Apple's GPU: a device whose tensors are computed on the CPU and refuse float64, as Metal does.

    python limited_gpu.py METHOD ...       # run each method on it and on the CPU, and print both results as JSON

It registers a backend for the whole process, so tests start it as a program. fedskew sees another device than `mps`, so
`main` tells it that this device has no float64 either.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "limited"
_setup_privateuseone_for_python_backend(NAME)
DEVICE = torch.device(NAME, 0)


class LimitedTensor(torch.Tensor):
    """A tensor on this device. Its values are in `host`."""

    host: torch.Tensor

    @staticmethod
    def __new__(cls, host: torch.Tensor) -> LimitedTensor:
        made: LimitedTensor = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, host.size(), strides=host.stride(), storage_offset=host.storage_offset(), dtype=host.dtype,
            device=DEVICE, requires_grad=host.requires_grad,
        )  # fmt: skip
        made.host = host
        return made

    def __repr__(self, **_: Any) -> str:
        return f"LimitedTensor({self.host!r})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return compute(func, args, kwargs or {})


class LimitedMode(TorchDispatchMode):
    """Within a `with` block, tensors can be made on this device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return compute(func, args, kwargs or {})


class MakeThenMove(TorchFunctionMode):
    """Makes a tensor of numbers on the CPU and then moves it, because `torch.tensor` does not consult other modes."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.tensor and kwargs.get("device") == DEVICE:
            return torch.tensor(*args, **{**kwargs, "device": None}).to(DEVICE)
        return func(*args, **kwargs)


COPIES = (torch.ops.aten._to_copy, torch.ops.aten.copy_)


def compute(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    leaves = tree_leaves((args, kwargs))
    devices = [leaf.type for leaf in leaves if isinstance(leaf, torch.device)]
    is_limited = devices[-1] == NAME if devices else any(isinstance(leaf, LimitedTensor) for leaf in leaves)
    hosts = [x for x in leaves if isinstance(x, torch.Tensor) and not isinstance(x, LimitedTensor) and x.dim()]
    if is_limited and hosts and func.overloadpacket not in COPIES:
        raise RuntimeError(f"{func}: expected all tensors to be on the same device, but found {NAME} and cpu")
    found = func(*tree_map(to_host, args), **tree_map(to_host, kwargs))
    return return_and_correct_aliasing(func, args, kwargs, tree_map(to_device, found)) if is_limited else found


def to_host(value: Any) -> Any:
    if isinstance(value, LimitedTensor):
        return value.host
    return torch.device("cpu") if isinstance(value, torch.device) else value


def to_device(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    if value.dtype == torch.float64:
        raise TypeError("this device has no float64")
    return LimitedTensor(value)


def main(methods: list[str]) -> None:
    import fedskew as fs
    from fedskew.accurate_sums import ACCURATE
    from fedskew.experiment.round import runtime

    ACCURATE[NAME] = ACCURATE["mps"]
    torch.backends.mps.is_available = lambda: True
    runtime.choose_devices = lambda name: (DEVICE if name == "mps" else torch.device(name),)
    federation = fs.federation("digits", fs.Dirichlet(4), seed=0)
    torch.__future__.set_swap_module_params_on_conversion(True)  # a parameter's data cannot become another class
    found = {}
    for method in methods:
        for device in ("mps", "cpu"):
            with LimitedMode(), MakeThenMove():
                run = fs.run(federation, method, rounds=2, local_epochs=1, device=device, engine="plain")
            found[f"{method} on {device}"] = [run.accuracy or 0.0, *(row.loss or 0.0 for row in run.history[1:])]
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])
