"""Where the kernels can run, and in which number format."""

from __future__ import annotations

import os
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

_FORMATS = (torch.float32, torch.bfloat16, torch.float16)


@cache
def _triton_is_installed() -> bool:
    return find_spec("triton") is not None


def supported(x: Tensor, weight: Tensor) -> bool:
    """Return whether the kernels can process these tensors: on CUDA, or on any device in Triton's interpreter."""
    is_interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    is_reachable = x.device == weight.device and (x.device.type == "cuda" or is_interpreted)
    return is_reachable and x.dtype in _FORMATS and weight.dtype in _FORMATS and _triton_is_installed()


def working_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype in which a layer computes: autocast's, or that of `x` if autocast is off."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def tf32_allowed() -> bool:
    """Return whether a float32 convolution may use TF32. PyTorch's setting for cuDNN decides."""
    return bool(torch.backends.cudnn.allow_tf32)
