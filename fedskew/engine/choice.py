"""Which engine, device and number format a run uses."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from fedskew.engine.device_data import DeviceSamples
from fedskew.engine.network import Network
from fedskew.engine.plain import PlainEngine
from fedskew.engine.stacked import StackedEngine
from fedskew.engine.work import Engine
from fedskew.errors import UserError

_WORTH_COMPILING = 5_000
"""Local steps: compiling costs what a few thousand steps gain by it, or a second when it was done before."""


def choose_device(name: str) -> torch.device:
    """`auto` is a GPU where there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda":
        found = torch.cuda.device_count()
        if (device.index or 0) >= found:
            raise UserError(f"device {name!r} is not there: {found} CUDA devices found; choose cpu or auto")
    return device


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


def choose_engine(name: str, model: nn.Module, device: torch.device) -> str:
    """`auto` stacks, but not convolutions on a CPU, where one client after another is faster."""
    if name != "auto":
        return name
    convolutional = any(isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Conv3d) for layer in model.modules())
    return "plain" if convolutional and device.type == "cpu" else "stacked"


def worth_compiling(wish: str, steps: float) -> bool:
    """Whether to compile the stacked step of a run with so many local steps one after another, if the user leaves that
    open. A rule and no measurement: the same run must take the same decision every time, or its last bits differ."""
    return wish == "always" or (wish == "auto" and steps >= _WORTH_COMPILING)


def make_engine(
    name: str, network: Network, data: DeviceSamples, smallest_batch: int, compile_steps: bool = False
) -> Engine:
    """The engine of that name; only stacked steps on a GPU are ever compiled."""
    if name == "stacked":
        return StackedEngine(network, data, smallest_batch, compile_steps=compile_steps)
    return PlainEngine(network, data, smallest_batch)
