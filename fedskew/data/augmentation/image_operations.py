"""The fourteen image operations of AutoAugment. Each image of a batch can have a different operation.

They give the same pixels as Pillow (ImageOps, ImageEnhance, and Image.transform with nearest neighbours and a black
background). There are three kinds: an operation moves pixels, maps the levels of each channel through a table, or
blends the image with a changed copy. A batch passes through three steps, one per kind. Each step changes only the
images whose operation is of its kind.
"""

from __future__ import annotations

from math import pi

import torch
from torch import Tensor
from torch.nn import functional

from fedskew.accurate_sums import ACCURATE
from fedskew.data.augmentation.per_sample import pick

IDENTITY = 0
SHEAR_X, SHEAR_Y, TRANSLATE_X, TRANSLATE_Y, ROTATE = range(1, 6)
POSTERIZE, SOLARIZE, AUTO_CONTRAST, EQUALIZE, INVERT, BRIGHTNESS, CONTRAST = range(6, 13)
COLOR, SHARPNESS = range(13, 15)

SMALLEST_SIDE = 3
"""The smallest height and width of an image. Sharpness needs a pixel with neighbours on all sides."""

_LEVELS = 256
_GREY_WEIGHTS = (19595, 38470, 7471)  # Pillow's weights of red, green and blue, in units of 1/65536


def apply_operations(images: Tensor, operations: Tensor, magnitudes: Tensor) -> Tensor:
    """Apply one operation to each image. Images are uint8 [N, 1 or 3, H, W], and operations are int64 [N]."""
    images = _move_pixels(images, operations, magnitudes)
    images = _map_levels(images, operations, magnitudes)
    return _blend_with_copy(images, operations, magnitudes)


def _move_pixels(images: Tensor, operations: Tensor, magnitudes: Tensor) -> Tensor:
    """Shear (by a slope), translate (by a share of the side) and rotate (by degrees), as one affine map."""
    height, width = images.shape[-2:]
    amount = magnitudes.to(ACCURATE[magnitudes.device.type])

    def amount_of(operation: int) -> Tensor:
        return torch.where(operations == operation, amount, 0.0)

    # Pixel (x, y) of the result is pixel (xx x + xy y + x0, yx x + yy y + y0) of the image.
    angle = amount_of(ROTATE) * (-pi / 180)
    cosine, sine = angle.cos(), angle.sin()
    xx, xy = cosine, sine + amount_of(SHEAR_X)
    yx, yy = -sine + amount_of(SHEAR_Y), cosine
    x0 = amount_of(TRANSLATE_X) * width + (width - cosine * width - sine * height) / 2
    y0 = amount_of(TRANSLATE_Y) * height + (height + sine * width - cosine * height) / 2
    return pick(
        images,
        rows=_affine(yx, yy, y0, height, width),
        columns=_affine(xx, xy, x0, height, width),
    )


def _affine(per_column: Tensor, per_row: Tensor, start: Tensor, height: int, width: int) -> Tensor:
    """Return an affine map at each pixel's centre, rounded down, computed in 16.16 fixed point: [N, H, W]."""
    column = torch.arange(width, device=start.device)
    row = torch.arange(height, device=start.device).unsqueeze(1)
    centre = start + (per_column + per_row) / 2
    a, b, c = (_fixed(value)[:, None, None] for value in (per_column, per_row, centre))
    return (c + a * column + b * row) >> 16


def _fixed(value: Tensor) -> Tensor:
    """Convert to 16.16 fixed point."""
    return (value * 65536 + 0.5).floor().to(torch.int64)


def _map_levels(images: Tensor, operations: Tensor, magnitudes: Tensor) -> Tensor:
    """Apply the operations that map each channel's levels through a table."""
    level = torch.arange(_LEVELS, device=images.device).expand(*images.shape[:2], _LEVELS)
    amount = magnitudes[:, None, None]
    table = level
    for operation, mapped in (
        (POSTERIZE, _posterize(level, amount)),
        (SOLARIZE, torch.where(level < amount, level, 255 - level)),
        (AUTO_CONTRAST, _stretch(level, images)),
        (EQUALIZE, _equalize(level, images)),
        (INVERT, 255 - level),
        (BRIGHTNESS, _blend(torch.zeros_like(level), level, amount)),
        (CONTRAST, _blend(_mean_grey(images), level, amount)),
    ):
        table = torch.where((operations == operation)[:, None, None], mapped, table)
    levels = images.flatten(2).to(torch.int64)
    return table.to(torch.uint8).gather(2, levels).view_as(images)


def _posterize(level: Tensor, bits: Tensor) -> Tensor:
    lost = 8 - bits.round().clamp(0, 8).to(torch.int64)
    return (level >> lost) << lost


def _stretch(level: Tensor, images: Tensor) -> Tensor:
    """Stretch each channel's levels, so that the darkest becomes 0 and the brightest 255."""
    accurate = ACCURATE[images.device.type]
    darkest = images.flatten(2).amin(2, keepdim=True).to(accurate)
    brightest = images.flatten(2).amax(2, keepdim=True).to(accurate)
    scale = 255 / (brightest - darkest).clamp(min=1)
    stretched = (level * scale - darkest * scale).clamp(0, 255).to(torch.int64)
    return torch.where(brightest > darkest, stretched, level)


def _equalize(level: Tensor, images: Tensor) -> Tensor:
    """Replace levels by ranks, so that a channel's histogram becomes as flat as possible."""
    histogram = _histogram(images)
    brightest = images.flatten(2).amax(2, keepdim=True).to(torch.int64)
    pixels = images.shape[-2] * images.shape[-1]
    step = (pixels - histogram.gather(2, brightest)) // 255
    darker = histogram.cumsum(2) - histogram
    rank = ((darker + step // 2) // step.clamp(min=1)).clamp(max=255)
    return torch.where(step > 0, rank, level)


def _histogram(images: Tensor) -> Tensor:
    """Count the pixels at each level: [N, C, 256]."""
    channels = images.shape[0] * images.shape[1]
    start = torch.arange(channels, device=images.device).unsqueeze(1) * _LEVELS
    index = (images.flatten(2).flatten(0, 1) + start).flatten()
    counts = torch.zeros(channels * _LEVELS, dtype=torch.int64, device=images.device)
    return counts.scatter_add(0, index, torch.ones_like(index)).view(*images.shape[:2], _LEVELS)


def _mean_grey(images: Tensor) -> Tensor:
    """Return the mean of the grey image, rounded: [N, 1, 1]."""
    pixels = images.shape[-2] * images.shape[-1]
    total = _grey(images).sum(dim=(2, 3)).unsqueeze(2)
    return (2 * total + pixels) // (2 * pixels)


def _blend_with_copy(images: Tensor, operations: Tensor, magnitudes: Tensor) -> Tensor:
    """Apply colour and sharpness. Magnitude 0 gives the grey or smooth copy, and magnitude 1 the image itself."""
    color = (operations == COLOR)[:, None, None, None]
    sharpness = (operations == SHARPNESS)[:, None, None, None]
    copy = torch.where(color, _grey(images), torch.where(sharpness, _smooth(images), images))
    return _blend(copy, images, magnitudes[:, None, None, None])


def _blend(copy: Tensor, image: Tensor, factor: Tensor) -> Tensor:
    base = copy.float()
    return (base + factor * (image.float() - base)).clamp(0, 255).to(torch.uint8)


def _grey(images: Tensor) -> Tensor:
    """Return the luminance, [N, 1, H, W]. Grey images are not changed."""
    if images.shape[1] == 1:
        return images.to(torch.int64)
    red, green, blue = (images[:, i : i + 1].to(torch.int64) * w for i, w in enumerate(_GREY_WEIGHTS))
    return (red + green + blue + 0x8000) >> 16


def _smooth(images: Tensor) -> Tensor:
    """Replace each pixel by the mean of itself, with weight 5, and its eight neighbours. The border stays unchanged."""
    height, width = images.shape[-2:]
    levels = images.float()
    total = 4 * levels[..., 1:-1, 1:-1]
    for y in range(3):
        for x in range(3):
            total = total + levels[..., y : height - 2 + y, x : width - 2 + x]
    smooth = functional.pad((total / 13 + 0.5).floor(), (1, 1, 1, 1))
    row = torch.arange(height, device=images.device).unsqueeze(1)
    column = torch.arange(width, device=images.device)
    inner = (row > 0) & (row < height - 1) & (column > 0) & (column < width - 1)
    return torch.where(inner, smooth, levels)
