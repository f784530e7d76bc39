"""A dataset on a device: stored raw, then gathered, augmented and normalised batch by batch."""

from __future__ import annotations

import copy
from typing import Protocol

import torch
from torch import Tensor

from fedskew.data.dataset import Dataset, Samples
from fedskew.methods.parts import Tensors
from fedskew.randomness import fold


class Augmentation(Protocol):
    """Random changes to training images, with a random key per sample."""

    @property
    def moves_pixels_only(self) -> bool:
        """Whether it moves pixels without computing new values."""
        ...

    def before(self, images: Tensor, keys: Tensor) -> Tensor:
        """Change raw images, before normalisation."""
        ...

    def after(self, images: Tensor, keys: Tensor) -> Tensor:
        """Change normalised images."""
        ...


class DeviceSamples:
    """Inputs and labels on a device, as the dataset stores them."""

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
        """Whether compiling keeps the same images, up to the rounding of their normalisation."""
        return self._augmentation is None or self._augmentation.moves_pixels_only

    def tensors(self) -> Tensors:
        """The tensors that a program over static memory reads."""
        return {"x": self.x, "y": self.y}

    def with_tensors(self, tensors: Tensors) -> DeviceSamples:
        """The same samples, read from these tensors."""
        other = copy.copy(self)
        other.x, other.y = tensors["x"], tensors["y"]
        return other

    def inputs(self, indices: Tensor) -> Tensor:
        """The model's inputs for samples with these indices."""
        return self._normalised(self._rows(indices))

    def some_inputs(self) -> Tensor:
        """A few inputs; always the same ones, so that a resumed run decides as the first one did."""
        rows = torch.linspace(0, len(self) - 1, 8, device=self.y.device)
        return self.inputs(rows.long())

    def training_inputs(self, indices: Tensor, epoch_keys: Tensor) -> Tensor:
        """Augmented inputs. A sample's changes depend only on the epoch's key and on the sample."""
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
