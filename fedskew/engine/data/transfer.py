"""Copies between host and device that neither of them waits for.

A copy from or to ordinary host memory makes the host wait until the device has finished its earlier work. A copy from
or to pinned memory does not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedskew.methods.parts import Tensors


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a small tensor from the host to the device, without waiting."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def all_to_device(arrays: Sequence[npt.NDArray[np.int64]], device: torch.device) -> list[Tensor]:
    """Copy several small arrays to the device in one transfer."""
    packed = to_device(torch.from_numpy(np.concatenate([array.ravel() for array in arrays])), device)
    parts = torch.split(packed, [array.size for array in arrays])
    return [part.view(array.shape) for part, array in zip(parts, arrays, strict=True)]


class Fetch:
    """Tensors on their way to the host. `read` waits for them, but not for work that began later."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        """Begin to copy tensors from a GPU through pinned memory. Tensors on the host are not copied."""
        self._copies = {name: _begin_copy(t) for name, t in tensors.items()}
        self._arrivals = [_event(d) for d in {t.device for t in tensors.values() if t.device.type == "cuda"}]

    @classmethod
    def beside(cls, tensors: Mapping[str, Tensor], device: torch.device) -> Fetch:
        """Copy while the device goes on with its next work. The tensors must not change until they are read."""
        if device.type != "cuda":
            return cls(tensors)
        stream = stream_for("copying", device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            return cls(tensors)

    def read(self) -> Tensors:
        for arrival in self._arrivals:
            arrival.synchronize()
        return self._copies


def _begin_copy(tensor: Tensor) -> Tensor:
    if tensor.device.type != "cuda":
        return tensor
    return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)


def _event(device: torch.device) -> torch.cuda.Event:
    """An event after all work so far in the current stream."""
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


def on_host(tensors: Tensors) -> Tensors:
    """Copy tensors to host memory and wait for them."""
    return Fetch(tensors).read()


@cache
def stream_for(purpose: str, device: torch.device) -> torch.cuda.Stream:  # noqa: ARG001 - the key of the cache
    """The stream for a purpose, always the same one.

    Programs captured in one stream share a cuBLAS workspace, so programs that run at the same time need different ones.
    """
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
