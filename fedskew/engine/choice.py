"""Which engine, devices and number format a run uses."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

import torch
from torch import nn

from fedskew.engine.auto import AutoEngine, engine_of_name, usual_engine
from fedskew.engine.contract import Engine
from fedskew.engine.data.device_samples import DeviceSamples
from fedskew.engine.model.network import Network
from fedskew.engine.stacked.engine import StackedEngine
from fedskew.errors import UserError

_WORTH_COMPILING = 5_000
"""Local steps: compiling costs what a few thousand steps gain by it, or a second when it was done before."""
SHORT_RUN = 30.0
"""Estimated seconds below which no second is spent on finding the fastest engine."""


def choose_devices(name: str) -> tuple[torch.device, ...]:
    """`auto` is a GPU where there is one, `cuda:all` every GPU; a list names several."""
    found = torch.cuda.device_count()
    if name == "auto":
        return (torch.device("cuda" if torch.cuda.is_available() else "cpu"),)
    if name == "cuda:all":
        if not found:
            raise UserError("device 'cuda:all' is not there: no CUDA device found; choose cpu or auto")
        return tuple(torch.device("cuda", index) for index in range(found))
    devices = tuple(torch.device(part) for part in name.split(","))
    for device in devices:
        if device.type == "cuda" and (device.index or 0) >= found:
            raise UserError(f"device {str(device)!r} is not there: {found} CUDA devices found; choose cpu or auto")
    return devices


def choose_device(name: str) -> torch.device:
    """The one that holds the global model."""
    return choose_devices(name)[0]


def number_format(precision: str) -> tuple[torch.dtype, torch.dtype | None]:
    """The dtype of parameters, and that of autocast if the precision has one."""
    dtype = torch.float64 if precision == "float64" else torch.float32
    return dtype, torch.bfloat16 if precision == "bf16" else None


@contextlib.contextmanager
def arithmetic(precision: str) -> Iterator[None]:
    """On a GPU: TF32 for `tf32` and for what `bf16` leaves in float32, otherwise full float32; and only convolutions
    that give the same bits each time, for a run that is resumed must end as if it had not been interrupted."""
    allowed = precision in ("tf32", "bf16")
    cudnn, products = torch.backends.cudnn, torch.backends.cuda.matmul
    before = products.allow_tf32, cudnn.allow_tf32, cudnn.deterministic, cudnn.benchmark
    products.allow_tf32, cudnn.allow_tf32, cudnn.deterministic, cudnn.benchmark = allowed, allowed, True, False
    try:
        yield
    finally:
        products.allow_tf32, cudnn.allow_tf32, cudnn.deterministic, cudnn.benchmark = before


def choose_engine(name: str, model: nn.Module, device: torch.device, seconds: float = 0.0) -> str:
    """What `auto` comes to as far as it is known before the run, which is estimated to take so many `seconds`.

    A GPU stacks. On a CPU a short run takes the usual engine, and a long one measures (`auto` stays).
    """
    if name.startswith("pool") and (device.type != "cpu" or sys.platform != "linux"):
        raise UserError(f"engine {name!r} is for a CPU under Linux; expected plain, stacked or auto here")
    if name != "auto":
        return name
    if device.type != "cpu":
        return "stacked"
    return "auto" if seconds > SHORT_RUN else usual_engine(model)


def worth_compiling(wish: str, steps: float) -> bool:
    """Whether to compile the stacked step of a run with so many local steps one after another, if the user leaves that
    open. A rule and no measurement: the same run must take the same decision every time, or its last bits differ."""
    return wish == "always" or (wish == "auto" and steps >= _WORTH_COMPILING)


def make_engine(
    name: str, network: Network, data: DeviceSamples, smallest_batch: int, compile_steps: bool = False
) -> Engine:
    """The engine of that name; only stacked steps on a GPU are ever compiled."""
    on_cpu = data.y.device.type == "cpu"
    if name == "auto" and on_cpu:
        return AutoEngine(network, data, smallest_batch)
    if name in ("auto", "stacked") and not on_cpu:
        return StackedEngine(network, data, smallest_batch, compile_steps=compile_steps)
    return engine_of_name(name, network, data, smallest_batch)
