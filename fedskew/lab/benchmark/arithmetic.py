"""Number formats for the loop and the limit: as fast as PyTorch allows, deterministic or not."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def fastest_arithmetic(precision: str) -> Iterator[None]:
    """Use TF32 if the precision allows it, and let cuDNN choose nondeterministic algorithms, unlike fedskew's runs."""
    allowed = precision in ("tf32", "bf16")
    cudnn, products = torch.backends.cudnn, torch.backends.cuda.matmul
    before = products.allow_tf32, cudnn.allow_tf32, cudnn.deterministic, cudnn.benchmark
    products.allow_tf32, cudnn.allow_tf32, cudnn.deterministic, cudnn.benchmark = allowed, allowed, False, True
    try:
        yield
    finally:
        products.allow_tf32, cudnn.allow_tf32, cudnn.deterministic, cudnn.benchmark = before


def casting(precision: str, device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Autocast for bf16, nothing otherwise."""
    if precision != "bf16":
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=torch.bfloat16)
