"""Arithmetic of the loop and the limit: number formats, and the fastest kernels that PyTorch has."""

from __future__ import annotations

import contextlib

import torch

from fedskew.engine import arithmetic


def fastest_arithmetic(precision: str) -> contextlib.AbstractContextManager[None]:
    """Use a run's arithmetic, but also allow cuDNN's nondeterministic kernels, which fedskew's runs avoid."""
    return arithmetic(precision, deterministic=False)


def autocast(precision: str, device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Use autocast for bf16. For other formats, do nothing."""
    if precision != "bf16":
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=torch.bfloat16)
