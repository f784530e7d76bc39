"""Number formats for the loop and the limit: as fast as PyTorch allows, deterministic or not."""

from __future__ import annotations

import contextlib

import torch

from fedskew.engine import arithmetic


def fastest_arithmetic(precision: str) -> contextlib.AbstractContextManager[None]:
    """The arithmetic of a run, but with cuDNN's nondeterministic algorithms, which fedskew's runs do not use."""
    return arithmetic(precision, deterministic=False)


def casting(precision: str, device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Autocast for bf16, nothing otherwise."""
    if precision != "bf16":
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=torch.bfloat16)
