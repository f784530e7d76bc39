"""Between host and device without the one waiting for the other.

A copy from or to ordinary host memory makes the host wait until the device has done all that it was given before; one
from or to pinned memory does not.
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
    """A small tensor of the host there; the host goes on at once."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def all_to_device(arrays: Sequence[npt.NDArray[np.int64]], device: torch.device) -> list[Tensor]:
    """Several small arrays there, in one copy."""
    packed = to_device(torch.from_numpy(np.concatenate([array.ravel() for array in arrays])), device)
    parts = torch.split(packed, [array.size for array in arrays])
    return [part.view(array.shape) for part, array in zip(parts, arrays, strict=True)]


class Fetch:
    """Tensors on their way to the host; who reads them waits for them, and for nothing that was begun later."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        """From a GPU through pinned memory, several times as fast as one by one; what is on the host stays there."""
        self._there = {name: _begun(t) for name, t in tensors.items()}
        self._arrivals = [_moment(d) for d in {t.device for t in tensors.values() if t.device.type == "cuda"}]

    @classmethod
    def beside(cls, tensors: Mapping[str, Tensor], device: torch.device) -> Fetch:
        """The same while the device goes on with what it is given next; the tensors must live until they are read."""
        if device.type != "cuda":
            return cls(tensors)
        stream = stream_for("copying", device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            return cls(tensors)

    def read(self) -> Tensors:
        for arrival in self._arrivals:
            arrival.synchronize()
        return self._there


def _begun(tensor: Tensor) -> Tensor:
    if tensor.device.type != "cuda":
        return tensor
    return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)


def _moment(device: torch.device) -> torch.cuda.Event:
    """After all that the device was given so far, in the present stream."""
    moment = torch.cuda.Event()  # type: ignore[no-untyped-call]
    moment.record(torch.cuda.current_stream(device))
    return moment


def on_host(tensors: Tensors) -> Tensors:
    """In host memory, now."""
    return Fetch(tensors).read()


@cache
def stream_for(purpose: str, device: torch.device) -> torch.cuda.Stream:  # noqa: ARG001 - by which it is remembered
    """A stream of its own, always the same: programs captured in one stream share a workspace of cuBLAS, so that those
    which run at the same time must come from different ones."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
