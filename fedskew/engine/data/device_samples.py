"""A dataset on a device: raw there once; gathered, augmented and normalised batch by batch."""

from __future__ import annotations

import copy
from typing import Protocol

import torch
from torch import Tensor

from fedskew.data.dataset import Dataset, Samples
from fedskew.methods.parts import Tensors
from fedskew.randomness import fold


class Augmentation(Protocol):
    """Random changes to training images, keyed sample by sample."""

    @property
    def moves_pixels_only(self) -> bool:
        """Whether it computes no new values."""
        ...

    def before(self, images: Tensor, keys: Tensor) -> Tensor:
        """On raw images, before normalisation."""
        ...

    def after(self, images: Tensor, keys: Tensor) -> Tensor:
        """On normalised images."""
        ...


class DeviceSamples:
    """Inputs and labels on a device, in the form they are stored."""

    def __init__(
        self,
        dataset: Dataset,
        samples: Samples,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        augmentation: Augmentation | None = None,
    ) -> None:
        self.x = torch.tensor(samples.x, device=device)
        self.y = torch.tensor(samples.y, device=device)
        self.classes = len(dataset.classes)
        self._dtype = dtype
        self._augmentation = augmentation
        shape = (-1, 1, 1)
        self._mean = torch.tensor(dataset.mean, dtype=dtype, device=device).view(shape)
        self._std = torch.tensor(dataset.std, dtype=dtype, device=device).view(shape)

    def __len__(self) -> int:
        return len(self.y)

    @property
    def compilable(self) -> bool:
        """Whether compiled inputs are the same images up to the rounding of their normalisation."""
        return self._augmentation is None or self._augmentation.moves_pixels_only

    def held(self) -> Tensors:
        """What a program over static memory reads."""
        return {"x": self.x, "y": self.y}

    def holding(self, tensors: Tensors) -> DeviceSamples:
        """The same with these tensors instead of its own."""
        other = copy.copy(self)
        other.x, other.y = tensors["x"], tensors["y"]
        return other

    def inputs(self, indices: Tensor) -> Tensor:
        """The model's inputs for some rows."""
        return self._normalised(self._rows(indices))

    def some_inputs(self) -> Tensor:
        """A few; always the same, so that a resumed run finds what the first one did."""
        rows = torch.linspace(0, len(self) - 1, 8, device=self.y.device)
        return self.inputs(rows.long())

    def training_inputs(self, indices: Tensor, epoch_keys: Tensor) -> Tensor:
        """The same, augmented: a sample's changes depend on the epoch's key and on the sample alone."""
        if self._augmentation is None:
            return self.inputs(indices)
        flat, keys = indices.flatten(), fold(epoch_keys.expand_as(indices).flatten(), indices.flatten())
        images = self._augmentation.before(self._rows(flat), keys)
        images = self._augmentation.after(self._normalised(images), keys)
        return images.view(*indices.shape, *images.shape[1:])

    def _rows(self, indices: Tensor) -> Tensor:
        return self.x.index_select(0, indices.flatten()).view(*indices.shape, *self.x.shape[1:])

    def _normalised(self, x: Tensor) -> Tensor:
        if x.dtype == torch.uint8:
            return (x.to(self._dtype) / 255 - self._mean) / self._std
        return x.to(self._dtype) if x.is_floating_point() else x
