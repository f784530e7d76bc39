"""The arithmetic of the references that fedskew is compared with: number formats and PyTorch's fastest kernels."""

from __future__ import annotations

import contextlib

import torch

from fedskew.engine import arithmetic


def fastest_arithmetic(precision: str) -> contextlib.AbstractContextManager[None]:
    """Use the arithmetic of a run, but also allow cuDNN's nondeterministic kernels."""
    return arithmetic(precision, deterministic=False)


def autocast(precision: str, device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Use autocast for bf16. For other formats, do nothing."""
    if precision != "bf16":
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=torch.bfloat16)
