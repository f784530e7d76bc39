"""Apply random changes to batches of training images, on the device of the images.

How a sample is changed depends only on its random key, never on its batch. Nothing here loops over samples or waits for
the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedskew.data.augmentation.autoaugment import AutoAugment
from fedskew.data.augmentation.image_operations import SMALLEST_SIDE
from fedskew.data.augmentation.per_sample import draw_uniforms, integers_below, pick
from fedskew.errors import UserError, unknown

Step = Callable[[Tensor, Tensor], Tensor]
"""Maps images [N, C, H, W] and their random keys [N] to images of the same shape and type."""

Shape = tuple[int, ...]

# The index of each augmentation's first random draw. Augmentations that can be combined share no draws.
_CROP_DRAWS = 0
_FLIP_DRAW = 2
_CUTOUT_DRAWS = 3
_AUTOAUGMENT_DRAWS = 5

_CUTOUT_SIZE = 16


@dataclass(frozen=True)
class Augmentation:
    """Steps that change raw images, then steps that change normalised images. Both are in the order of `names`."""

    names: tuple[str, ...] = ()
    raw: tuple[Step, ...] = ()
    normalised: tuple[Step, ...] = ()

    @property
    def moves_pixels_only(self) -> bool:
        """Whether the steps only move or erase pixels. Such steps give bit-identical images when compiled."""
        return all(isinstance(step, Crop | Flip | Cutout) for step in (*self.raw, *self.normalised))

    def augment_raw(self, images: Tensor, keys: Tensor) -> Tensor:
        """Augment raw uint8 images [N, C, H, W] with random numbers from the int64 keys [N]."""
        return _apply(self.raw, images, keys)

    def augment_normalised(self, images: Tensor, keys: Tensor) -> Tensor:
        """Augment the same images after normalisation, with the same keys."""
        return _apply(self.normalised, images, keys)


def _apply(steps: Sequence[Step], images: Tensor, keys: Tensor) -> Tensor:
    for step in steps:
        images = step(images, keys)
    return images


@dataclass(frozen=True)
class Crop:
    """Pads every side, then crops to the original size at a random position."""

    padding: int
    mode: Literal["zero", "reflect"]

    def __call__(self, images: Tensor, keys: Tensor) -> Tensor:
        height, width = images.shape[-2:]
        offsets = integers_below(2 * self.padding + 1, draw_uniforms(keys, _CROP_DRAWS, 2)) - self.padding
        rows = torch.arange(height, device=images.device) + offsets[:, :1]
        columns = torch.arange(width, device=images.device) + offsets[:, 1:]
        if self.mode == "reflect":
            rows, columns = _reflect(rows, height), _reflect(columns, width)
        return pick(images, rows.unsqueeze(2), columns.unsqueeze(1))


def _reflect(position: Tensor, length: int) -> Tensor:
    """Mirror positions outside the image at the outermost pixel. That pixel is not repeated."""
    last = length - 1
    return last - (last - position.abs()).abs()


@dataclass(frozen=True)
class Flip:
    """Mirrors each image left to right with probability 1/2."""

    def __call__(self, images: Tensor, keys: Tensor) -> Tensor:
        flipped = draw_uniforms(keys, _FLIP_DRAW, 1) < 0.5
        return torch.where(flipped[:, :, None, None], images.flip(-1), images)


@dataclass(frozen=True)
class Cutout:
    """Sets a square around a random pixel to 0, the mean of normalised images. Parts outside the image are cut off."""

    size: int

    def __call__(self, images: Tensor, keys: Tensor) -> Tensor:
        height, width = images.shape[-2:]
        draws = draw_uniforms(keys, _CUTOUT_DRAWS, 2)
        rows = self._covered(integers_below(height, draws[:, :1]), height)
        columns = self._covered(integers_below(width, draws[:, 1:]), width)
        covered = rows.unsqueeze(2) & columns.unsqueeze(1)
        return images.masked_fill(covered.unsqueeze(1), 0)

    def _covered(self, centre: Tensor, length: int) -> Tensor:
        start = centre - self.size // 2
        position = torch.arange(length, device=centre.device)
        return (position >= start) & (position < start + self.size)


@dataclass(frozen=True)
class AugmentationEntry:
    """An augmentation in the catalogue: how to make it, and which images it accepts."""

    name: str
    description: str
    make: Callable[[Shape], Step]
    smallest_side: int = 1
    channels: tuple[int, ...] | None = None
    """The numbers of channels that it accepts; None for any number."""
    normalised: bool = False
    """Whether the augmentation changes normalised images rather than raw ones."""


def _reflect_crop(shape: Shape) -> Crop:
    return Crop(padding=8 if min(shape[1:]) >= 64 else 4, mode="reflect")


_ENTRIES = (
    AugmentationEntry("crop", "zero-pad by 4, random crop", lambda _: Crop(padding=4, mode="zero")),
    AugmentationEntry(
        "crop-reflect", "reflect-pad by 4 (by 8 if 64×64 or larger), random crop", _reflect_crop, smallest_side=5
    ),  # reflecting 4 pixels needs a side of 5
    AugmentationEntry("flip", "mirror half of the images left to right", lambda _: Flip()),
    AugmentationEntry(
        "cutout",
        "erase a 16×16 square around a random pixel",
        lambda _: Cutout(_CUTOUT_SIZE),
        smallest_side=_CUTOUT_SIZE + 1,  # the square could cover all of a smaller image
        normalised=True,
    ),
    AugmentationEntry(
        "autoaugment",
        "AutoAugment's CIFAR-10 policy",
        lambda _: AutoAugment(_AUTOAUGMENT_DRAWS),
        smallest_side=SMALLEST_SIDE,
        channels=(1, 3),
    ),
)

AUGMENTATIONS: dict[str, AugmentationEntry] = {entry.name: entry for entry in _ENTRIES}


def make_augmentation(names: Sequence[str], image_shape: Shape) -> Augmentation:
    """Make the augmentations with these names, in this order, for images of this shape (channels, height, width)."""
    for name in names:
        if name not in AUGMENTATIONS:
            raise unknown("augmentation", name, AUGMENTATIONS)
    _check_combination(names)
    entries = [AUGMENTATIONS[name] for name in names]
    for entry in entries:
        _check_shape(entry, image_shape)
    return Augmentation(
        names=tuple(names),
        raw=tuple(entry.make(image_shape) for entry in entries if not entry.normalised),
        normalised=tuple(entry.make(image_shape) for entry in entries if entry.normalised),
    )


def _check_combination(names: Sequence[str]) -> None:
    """Refuse repeated augmentations. Also refuse two crops, because both use the same random numbers."""
    if len(set(names)) < len(names) or {"crop", "crop-reflect"} <= set(names):
        raise UserError(f"augmentations {', '.join(names)}: expected each at most once, and at most one crop")


def _check_shape(entry: AugmentationEntry, shape: Shape) -> None:
    if len(shape) != 3:
        raise UserError(
            f"augmentation {entry.name!r} cannot change samples of shape {shape}; "
            "expected images (channels, height, width)"
        )
    if min(shape[1:]) < entry.smallest_side:
        side = entry.smallest_side
        raise UserError(
            f"augmentation {entry.name!r} cannot change images of shape {shape}; expected at least {side}×{side}"
        )
    if entry.channels is not None and shape[0] not in entry.channels:
        raise UserError(
            f"augmentation {entry.name!r} cannot change images of shape {shape}; "
            f"expected {' or '.join(map(str, entry.channels))} channels"
        )
