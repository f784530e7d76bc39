"""AutoAugment's operations against Pillow, which defines them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedskew.data.augmentation import image_operations as ops

pytest.importorskip("PIL")
from PIL import Image, ImageEnhance, ImageOps

Pillow = Callable[[Any, float], Any]


def affine(image: Any, *coefficients: float) -> Any:
    return image.transform(image.size, Image.Transform.AFFINE, coefficients, Image.Resampling.NEAREST)


REFERENCE: dict[int, Pillow] = {
    ops.IDENTITY: lambda image, _: image,
    ops.SHEAR_X: lambda image, m: affine(image, 1, m, 0, 0, 1, 0),
    ops.SHEAR_Y: lambda image, m: affine(image, 1, 0, 0, m, 1, 0),
    ops.TRANSLATE_X: lambda image, m: affine(image, 1, 0, m * image.size[0], 0, 1, 0),
    ops.TRANSLATE_Y: lambda image, m: affine(image, 1, 0, 0, 0, 1, m * image.size[1]),
    ops.ROTATE: lambda image, m: image.rotate(m),
    ops.POSTERIZE: lambda image, m: ImageOps.posterize(image, round(m)),
    ops.SOLARIZE: lambda image, m: ImageOps.solarize(image, m),
    ops.AUTO_CONTRAST: lambda image, _: ImageOps.autocontrast(image),
    ops.EQUALIZE: lambda image, _: ImageOps.equalize(image),
    ops.INVERT: lambda image, _: ImageOps.invert(image),
    ops.BRIGHTNESS: lambda image, m: ImageEnhance.Brightness(image).enhance(m),
    ops.CONTRAST: lambda image, m: ImageEnhance.Contrast(image).enhance(m),
    ops.COLOR: lambda image, m: ImageEnhance.Color(image).enhance(m),
    ops.SHARPNESS: lambda image, m: ImageEnhance.Sharpness(image).enhance(m),
}
RANGES = {
    ops.SHEAR_X: (-0.3, 0.3),
    ops.SHEAR_Y: (-0.3, 0.3),
    ops.TRANSLATE_X: (-0.45, 0.45),
    ops.TRANSLATE_Y: (-0.45, 0.45),
    ops.ROTATE: (-30.0, 30.0),
    ops.POSTERIZE: (4.0, 8.0),
    ops.SOLARIZE: (0.0, 256.0),
}


def pictures(channels: int, height: int, width: int) -> np.ndarray:
    """Noise, dark noise, few levels, one level, a gradient: [5, C, H, W]."""
    random = np.random.default_rng(height * width + channels)
    noise = random.integers(0, 256, (channels, height, width))
    dark = random.integers(20, 90, (channels, height, width))
    few = random.choice([3, 100, 101, 250], (channels, height, width))
    one = np.full((channels, height, width), 77)
    gradient = np.broadcast_to(np.linspace(10, 240, width), (channels, height, width))
    return np.stack([noise, dark, few, one, gradient]).astype(np.uint8)


def pillow(image: np.ndarray, operation: int, magnitude: float) -> np.ndarray:
    grey = len(image) == 1
    made = REFERENCE[operation](Image.fromarray(image[0] if grey else image.transpose(1, 2, 0)), magnitude)
    out = np.asarray(made)
    return out[None] if grey else out.transpose(2, 0, 1)


def magnitudes(operation: int, count: int) -> Tensor:
    low, high = RANGES.get(operation, (0.1, 1.9))
    random = torch.Generator().manual_seed(operation)
    return low + (high - low) * torch.rand(count, generator=random)


@pytest.mark.parametrize("shape", [(3, 32, 32), (1, 28, 28), (3, 20, 31)])
@pytest.mark.parametrize("operation", REFERENCE)
def test_operation_equals_pillow(operation: int, shape: tuple[int, int, int]) -> None:
    images = np.concatenate([pictures(*shape)] * 12)
    amounts = magnitudes(operation, len(images))
    ours = ops.apply_operations(torch.from_numpy(images), torch.full((len(images),), operation), amounts)
    theirs = np.stack([pillow(image, operation, float(m)) for image, m in zip(images, amounts, strict=True)])
    assert ours.dtype == torch.uint8
    np.testing.assert_array_equal(ours.numpy(), theirs)


def test_every_image_of_a_batch_gets_its_own_operation() -> None:
    operations = torch.tensor(list(REFERENCE))
    images = torch.from_numpy(pictures(3, 16, 16)[:1]).repeat(len(operations), 1, 1, 1)
    amounts = torch.cat([magnitudes(int(operation), 1) for operation in operations])
    mixed = ops.apply_operations(images, operations, amounts)
    for n, operation in enumerate(operations.tolist()):
        theirs = pillow(images[n].numpy(), operation, float(amounts[n]))
        np.testing.assert_array_equal(mixed[n].numpy(), theirs)
