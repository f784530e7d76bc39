"""An SGD step of one parameter for all clients, in one pass over memory.

The gradient is read as the backward pass wrote it, even in 16 bits. Without this kernel, a step updates all parameters
at once. For that, all gradients must be copied into one array, which takes as long as the update itself.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedskew.engine.kernels.availability import supported
from fedskew.engine.kernels.geometry import blocks
from fedskew.engine.kernels.launches import launch

_SIZE = 1024
"""The number of values that one program updates."""


def can_step(param: Tensor, grad: Tensor) -> bool:
    """Return whether the kernel can update this parameter [K, …]. A client's values must be contiguous."""
    return supported(grad, grad) and param.dtype == torch.float32 and (param.numel() == 0 or param[0].is_contiguous())


def stacked_sgd_step(
    param: Tensor, grad: Tensor, velocity: Tensor, lr: Tensor, momentum: float, weight_decay: float, nesterov: bool
) -> None:
    """Change the parameter and its velocity in place, like `torch.optim.SGD`."""
    from fedskew.engine.kernels.sgd_programs import sgd_program

    size = param[0].numel()
    launch(sgd_program, (blocks(size, _SIZE), len(param)))(
        param, grad.contiguous(), velocity, lr, size, param.stride(0), velocity.stride(0), momentum, weight_decay,
        HAS_MOMENTUM=momentum != 0, NESTEROV=nesterov, SIZE=_SIZE, num_warps=4,
    )  # fmt: skip
