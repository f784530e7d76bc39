"""Launches kernels, and compiles those of a whole step in parallel before they are first launched.

Triton compiles a kernel at its first launch, so a new step would compile its kernels one after another.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

_AHEAD = threading.local()
"""`_AHEAD.kernels` lists the kernels that this thread has asked for but not launched. It exists only during
`compile_ahead`."""


def launch(program: Any, grid: tuple[int, ...]) -> Callable[..., None]:
    """Return a function that launches a Triton program. During `compile_ahead`, it only compiles the program."""
    kernels: list[Any] | None = getattr(_AHEAD, "kernels", None)
    if kernels is None:
        launched: Callable[..., None] = program[grid]
        return launched

    def compile_only(*arguments: Any, **constants: Any) -> None:
        kernels.append(program.run(*arguments, grid=grid, warmup=True, **constants))

    return compile_only


def compile_ahead(step: Callable[[], None], device: torch.device) -> None:
    """Call the step without its Triton kernels, compile these in parallel, and load them on the device.

    The kernels' results stay uninitialised, so the caller must reset what the step writes. A kernel that cannot be
    compiled raises its error when it is launched. Nothing happens if Triton cannot compile in parallel.
    """
    mode = _async_compile_mode()
    if mode is None:
        return
    kernels: list[Any] = []
    _AHEAD.kernels = kernels
    try:
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            # The backward pass must run in this thread, because `_AHEAD` and Triton's mode are thread-local.
            with mode(pool, ignore_errors=True), torch.autograd.set_multithreading_enabled(False):
                step()
            pool.map(lambda kernel: _load(kernel, device), kernels)
    finally:
        del _AHEAD.kernels


def _async_compile_mode() -> Any:
    """Return Triton's `AsyncCompileMode`. Return None if Triton is missing, lacks it, or only interprets kernels."""
    if os.environ.get("TRITON_INTERPRET") == "1" or find_spec("triton") is None:
        return None
    return getattr(import_module("triton"), "AsyncCompileMode", None)


def _load(kernel: Any, device: torch.device) -> None:
    """Load a compiled kernel on the device. Triton then also compiles a small C function that launches it."""
    with contextlib.suppress(Exception), torch.cuda.device(device):
        kernel = kernel.result() if hasattr(kernel, "result") else kernel
        kernel.run  # noqa: B018 (reading this property loads the kernel)
