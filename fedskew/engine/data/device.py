"""Tensors on a device: a dataset that stays on it, and copies that do not make the host wait.

A dataset is stored raw. Its batches are gathered, augmented and normalised when they are needed. A copy from or to
ordinary host memory makes the host wait until the device has finished its earlier work. A copy from or to pinned memory
does not.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping, Sequence
from functools import cache, cached_property
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedskew.accurate_sums import ACCURATE
from fedskew.data.dataset import Dataset, Samples, row_blocks
from fedskew.methods.parts import Tensors
from fedskew.randomness import fold


class Augmentation(Protocol):
    """Random changes to training images, with a random key per sample."""

    @property
    def moves_pixels_only(self) -> bool:
        """Whether it only moves or erases pixels. Compiled code then gives bit-identical images."""
        ...

    def augment_raw(self, images: Tensor, keys: Tensor) -> Tensor:
        """Change raw images, before normalisation."""
        ...

    def augment_normalised(self, images: Tensor, keys: Tensor) -> Tensor:
        """Change normalised images."""
        ...


class DeviceSamples:
    """Inputs and labels on a device, in the dataset's raw format."""

    def __init__(
        self,
        dataset: Dataset,
        samples: Samples,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        augmentation: Augmentation | None = None,
    ) -> None:
        self.x = _inputs_on(device, samples.x)
        self.y = torch.tensor(samples.y, device=device)
        self.classes, self.task = len(dataset.classes), dataset.task
        self._dtype = dtype
        self._augmentation = augmentation
        shape = (-1, 1, 1)
        self._mean = torch.tensor(dataset.mean, dtype=dtype, device=device).view(shape)
        self._std = torch.tensor(dataset.std, dtype=dtype, device=device).view(shape)

    def __len__(self) -> int:
        return len(self.y)

    @cached_property
    def host_labels(self) -> npt.NDArray[np.int64]:
        """The labels in host memory, for balanced batches."""
        labels: npt.NDArray[np.int64] = self.y.cpu().numpy()
        return labels

    @property
    def compilable(self) -> bool:
        """Whether compiled code gives the same images as uncompiled code, up to rounding in the normalisation."""
        return self._augmentation is None or self._augmentation.moves_pixels_only

    def tensors(self) -> Tensors:
        """Return the stored tensors by name, for a CUDA graph, which reads them at fixed addresses."""
        return {"x": self.x, "y": self.y}

    def with_tensors(self, tensors: Tensors) -> DeviceSamples:
        """Return the same samples, read from these tensors."""
        other = copy.copy(self)
        other.x, other.y = tensors["x"], tensors["y"]
        return other

    def inputs(self, indices: Tensor) -> Tensor:
        """Return the model's inputs for samples with these indices."""
        return self._normalised(self._rows(indices))

    def some_inputs(self) -> Tensor:
        """Return a few inputs to try out a model with.

        They are always the same, so that a resumed run gets the same results.
        """
        rows = torch.linspace(0, len(self) - 1, 8, device=self.y.device)
        return self.inputs(rows.long().clamp(max=len(self) - 1))  # float32 rounds a large last index up

    def training_inputs(self, indices: Tensor, epoch_keys: Tensor) -> Tensor:
        """Return augmented inputs. A sample's augmentation depends only on the epoch's key and on the sample."""
        if self._augmentation is None:
            return self.inputs(indices)
        flat, keys = indices.flatten(), fold(epoch_keys.expand_as(indices).flatten(), indices.flatten())
        images = self._augmentation.augment_raw(self._rows(flat), keys)
        images = self._augmentation.augment_normalised(self._normalised(images), keys)
        return images.view(*indices.shape, *images.shape[1:])

    def _rows(self, indices: Tensor) -> Tensor:
        return self.x.index_select(0, indices.flatten()).view(*indices.shape, *self.x.shape[1:])

    def _normalised(self, x: Tensor) -> Tensor:
        if x.dtype == torch.uint8:
            return (x.to(self._dtype) / 255 - self._mean) / self._std
        return x.to(self._dtype) if x.is_floating_point() else x


def _inputs_on(device: torch.device, x: npt.NDArray[np.generic]) -> Tensor:
    """Copy inputs to the device. A memory-mapped file stays on disk if the device is the host."""
    if not isinstance(x, np.memmap):
        return torch.tensor(x, device=device)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")  # the inputs are never written to
        mapped = torch.from_numpy(x)
    if device.type == "cpu":
        return mapped
    copied = torch.empty_like(mapped, device=device)
    first = 0
    for block in row_blocks(x):
        copied[first : first + len(block)] = mapped[first : first + len(block)]
        first += len(block)
    return copied


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a small tensor from the host to the device, without waiting for a CUDA GPU.

    A device without float64 gets float32.
    """
    if tensor.dtype == torch.float64:
        tensor = tensor.to(ACCURATE[device.type])
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def all_to_device(arrays: Sequence[npt.NDArray[np.int64]], device: torch.device) -> list[Tensor]:
    """Copy several small arrays to the device in one transfer."""
    packed = to_device(torch.from_numpy(np.concatenate([array.ravel() for array in arrays])), device)
    parts = torch.split(packed, [array.size for array in arrays])
    return [part.view(array.shape) for part, array in zip(parts, arrays, strict=True)]


class Fetch:
    """A running copy of tensors to the host. `read` waits for it, but not for work that started later."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        """Start to copy tensors from a CUDA GPU into pinned memory. Tensors on the host are not copied."""
        self._copies = {name: _begin_copy(t) for name, t in tensors.items()}
        self._arrivals = [_event(d) for d in {t.device for t in tensors.values() if t.device.type == "cuda"}]

    @classmethod
    def in_parallel(cls, tensors: Mapping[str, Tensor], device: torch.device) -> Fetch:
        """Copy while the device continues with its next work. The tensors must not change until they are read."""
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
        return tensor.cpu()
    return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)


def _event(device: torch.device) -> torch.cuda.Event:
    """Record an event after all work so far in the current stream."""
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


def on_host(tensors: Tensors) -> Tensors:
    """Return tensors in host memory, and wait for their copies. Tensors on the host are not copied."""
    return Fetch(tensors).read()


@cache
def stream_for(purpose: str, device: torch.device) -> torch.cuda.Stream:  # noqa: ARG001 - the key of the cache
    """Return the stream for a purpose. It is always the same one.

    Programs captured in one stream share a cuBLAS workspace, so programs that run in parallel need different streams.
    """
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
