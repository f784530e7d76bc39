"""The choice of engine, devices and number format for a run."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fedskew.engine.contract import Engine
from fedskew.engine.data.device import DeviceSamples
from fedskew.engine.model.network import Network
from fedskew.engine.parallel.pool import PoolEngine
from fedskew.engine.plain import PlainEngine
from fedskew.engine.stacked.engine import StackedEngine
from fedskew.errors import UserError
from fedskew.platforms import CAN_FORK, usable_cores

_WORTH_COMPILING = 400_000
"""Compiling pays off if steps × layers is at least this number.

Compiling takes half a minute. It saves less than 0.1 ms per step and layer, because the costly operations already have
their own kernels.
"""
_WORTH_STACKING = 4
"""If a worker process would have fewer clients than this, `auto` does not stack the clients."""
_LARGE_ATTENTION = 1e6
"""With this many multiplications per sample or more, most models with attention train faster client by client on a CPU.

`count_multiplications` counts them, and `python benchmarks/attention.py` measured this. With fewer multiplications, the
stacked engine took 0.8 to 0.9 times as long as the plain engine. With more, it took 0.9 to 2.1 times as long
(docs/speed.md).
"""
SHORT_RUN = 30.0
"""The estimated seconds below which starting worker processes does not pay off."""
ENGINES = ("plain", "stacked", "pool", "pool-stacked")
"""`plain` trains the clients one by one, and `stacked` trains them together, as one stack of models. `pool` and
`pool-stacked` do the same in several worker processes."""


def choose_devices(name: str) -> tuple[torch.device, ...]:
    """Return the devices of a run.

    `auto` is a CUDA GPU if there is one, or else Apple's GPU (`mps`), or else the CPU. `cuda:all` is every CUDA GPU.
    Several devices are separated by commas.
    """
    available, has_mps = torch.cuda.device_count(), torch.backends.mps.is_available()
    if name == "auto":
        return (torch.device("cuda" if torch.cuda.is_available() else "mps" if has_mps else "cpu"),)
    if name == "mps" and not has_mps:
        raise UserError("device is 'mps', but no Apple GPU is available; expected cpu or auto")
    if name == "cuda:all":
        if not available:
            raise UserError("device is 'cuda:all', but no CUDA device is available; expected cpu or auto")
        return tuple(torch.device("cuda", index) for index in range(available))
    devices = tuple(torch.device(part) for part in name.split(","))
    for device in devices:
        if device.type == "cuda" and (device.index or 0) >= available:
            raise UserError(
                f"device is {str(device)!r}, but {_cuda_devices_are(available)} available; "
                f"expected {_cuda_names(available)}cpu or auto"
            )
    return devices


def _cuda_devices_are(count: int) -> str:
    return {0: "no CUDA device is", 1: "1 CUDA device is"}.get(count, f"{count} CUDA devices are")


def _cuda_names(count: int) -> str:
    """Return the names of `count` CUDA devices as the beginning of a list of choices."""
    if count <= 2:
        return "".join(f"cuda:{index}, " for index in range(count))
    return f"cuda:0 to cuda:{count - 1}, "


def choose_device(name: str) -> torch.device:
    """Return the device that holds the global model."""
    return choose_devices(name)[0]


def choose_precision(name: str, device: torch.device) -> str:
    """Resolve `auto`: bf16 on a CUDA GPU that computes in it, float32 elsewhere.

    Two float32 runs whose sums are rounded differently end with different accuracies. Over 36 runs, bf16 and float32
    did not differ more than that on average (benchmarks/precision-h200.md).
    """
    if device.type == "mps" and name in ("float64", "tf32"):
        raise UserError(f"precision is {name!r}, but Apple's GPUs do not have it; expected float32, bf16 or auto")
    if name != "auto":
        return name
    return "bf16" if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0) else "float32"


def number_format(precision: str) -> tuple[torch.dtype, torch.dtype | None]:
    """Return the dtype of parameters, and the dtype of autocast, if any."""
    dtype = torch.float64 if precision == "float64" else torch.float32
    return dtype, torch.bfloat16 if precision == "bf16" else None


@contextlib.contextmanager
def arithmetic(precision: str, deterministic: bool = True) -> Iterator[None]:
    """Let a GPU compute float32 products in TF32 within a `with` block, if the precision is `tf32` or `bf16`.

    With `deterministic`, cuDNN's convolutions give the same bits each time, so a resumed run ends like an uninterrupted
    one. Otherwise, cuDNN chooses the fastest algorithms by trial.
    """
    allows_tf32 = precision in ("tf32", "bf16")
    cudnn, products = torch.backends.cudnn, torch.backends.cuda.matmul
    before = products.allow_tf32, cudnn.allow_tf32, cudnn.deterministic, cudnn.benchmark
    products.allow_tf32, cudnn.allow_tf32 = allows_tf32, allows_tf32
    cudnn.deterministic, cudnn.benchmark = deterministic, not deterministic
    try:
        yield
    finally:
        products.allow_tf32, cudnn.allow_tf32, cudnn.deterministic, cudnn.benchmark = before


def choose_engine(name: str, model: nn.Module, sample: Tensor, device: torch.device, seconds: float = 0.0) -> str:
    """Resolve `auto`. `sample` is one input of the model, and `seconds` is the estimated duration of the run.

    A CUDA GPU uses `stacked`. Apple's GPU uses `plain`, which needs fewer kinds of operations. No engine was timed on
    Apple's GPU. For a short run on a CPU, `single_process_engine` decides. A long run on a CPU keeps `auto` in its
    configuration, because its engine depends on the machine: `cpu_engine` decides when the run starts. A resumed run
    keeps the engine that it started with.
    """
    if name.startswith("pool") and device.type != "cpu":
        raise UserError(f"engine {name!r} needs device cpu, not {device}; expected plain, stacked or auto here")
    if name != "auto":
        return name
    if device.type != "cpu":
        return "plain" if device.type == "mps" else "stacked"
    return "auto" if seconds > SHORT_RUN else single_process_engine(model, sample)


def single_process_engine(model: nn.Module, sample: Tensor) -> str:
    """Return the engine that a CPU uses in one process: plain for convolutions and large attention, else stacked."""
    return "stacked" if _is_faster_stacked(model, sample) else "plain"


def cpu_engine(model: nn.Module, sample: Tensor, clients: int) -> str:
    """Return the engine for a long run on a CPU with `clients` clients per round.

    Worker processes pay off with several cores and clients. On two cores, this choice takes at most 1.2 times as long
    as the fastest engine, for the models that `fedskew bench` trains on a CPU (docs/speed.md).
    """
    workers = min(usable_cores(), clients)
    # If torch has a GPU, a process that has computed a gradient cannot fork another that computes gradients.
    # Where processes are spawned, this choice was not measured, and a user's model may not be picklable.
    if not CAN_FORK or workers < 2 or torch.cuda.is_available():
        return single_process_engine(model, sample)
    is_stacked = clients // workers >= _WORTH_STACKING and _is_faster_stacked(model, sample)
    return "pool-stacked" if is_stacked else "pool"


def _is_faster_stacked(model: nn.Module, sample: Tensor) -> bool:
    """Return whether stacked clients usually train faster on a CPU: without convolutions or large attention."""
    if any(isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Conv3d) for layer in model.modules()):
        return False
    return not _has_attention(model, sample) or count_multiplications(model, sample) < _LARGE_ATTENTION


@torch.no_grad()
def _has_attention(model: nn.Module, sample: Tensor) -> bool:
    """Return whether the model multiplies matrices of activations, as every implementation of attention does."""
    with _Operations() as operations:
        _copy_for(sample, model)(sample)
    return any(word in name for name in operations.names for word in _ATTENTION)


def _copy_for(sample: Tensor, model: nn.Module) -> nn.Module:
    """Return a copy of the model that accepts the sample, which may be on another device or in float64."""
    return copy.deepcopy(model).to(sample.device, sample.dtype if sample.is_floating_point() else None).eval()


_ATTENTION = ("aten::bmm", "attention", "transformer_encoder")
"""Parts of the names of the operations that compute attention."""


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Collects the names of all operations within a `with` block."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: set[str] = set()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False. Otherwise, torch would import its compiler, which takes a second and is not used here."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.name())
        return func(*args, **(kwargs or {}))


def worth_compiling(compile_steps: str, steps: float, model: nn.Module) -> bool:
    """Return whether to compile the stacked step of a run with `steps` consecutive local steps.

    `auto` follows a rule instead of a measurement. A repeated run must make the same choice, or the last bits of its
    results differ.
    """
    if compile_steps != "auto":
        return compile_steps == "always"
    layers = sum(1 for layer in model.modules() if next(layer.parameters(recurse=False), None) is not None)
    return steps * layers >= _WORTH_COMPILING


def make_engine(
    name: str, network: Network, data: DeviceSamples, smallest_batch: int, compile_steps: bool = False
) -> Engine:
    """Make the engine called `name`. Only the stacked engine, and only on a CUDA GPU, compiles its steps."""
    if name.startswith("pool"):
        inner = "stacked" if name == "pool-stacked" else "plain"
        return PoolEngine(make_engine(inner, network, data, smallest_batch))
    if name == "plain":
        return PlainEngine(network, data, smallest_batch)
    return StackedEngine(network, data, smallest_batch, compile_steps=compile_steps)


# -- how long a run takes --------------------------------------------------------------------------------------

_SECONDS_PER_STEP = 1e-3
"""Seconds per step that do not depend on the model's size."""
_MULTIPLICATIONS_PER_SECOND = 1e10
"""Multiplications per second in small convolutions. Large layers reach five times as many."""


def estimated_seconds(model: nn.Module, sample: Tensor, steps: float, visits: float) -> float:
    """Estimate roughly how long `steps` local steps take on a CPU, with `visits` samples in all their batches together.

    The estimate is the same on every machine. `sample` is one input of the model.
    """
    per_visit = 3 * count_multiplications(model, sample)  # a backward pass takes as long as two forward passes
    return steps * _SECONDS_PER_STEP + per_visit * visits / _MULTIPLICATIONS_PER_SECOND


@torch.no_grad()
def count_multiplications(model: nn.Module, sample: Tensor) -> float:
    """Count the multiplications of linear and convolutional layers in the forward pass of one sample.

    Products of activations are not counted, nor are the projections within `nn.MultiheadAttention`. The pass has the
    sample twice, because a BatchNorm without running statistics refuses a single value per channel.
    """
    total = 0.0

    def count(layer: nn.Module, _: Any, out: Tensor) -> None:
        nonlocal total
        weight = layer.weight
        assert isinstance(weight, Tensor)
        total += out.numel() * prod(weight.shape[1:])

    hooked = _copy_for(sample, model)
    for layer in hooked.modules():
        if isinstance(layer, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d):
            layer.register_forward_hook(count)
    hooked(torch.cat([sample, sample]))
    return total / 2
