"""Decode images into one uint8 array (n, channels, height, width), and compute each channel's mean and deviation."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedskew.data.dataset import row_blocks
from fedskew.errors import UserError

Pixels = npt.NDArray[np.uint8]
Source = Path | bytes
Size = tuple[int, int]
"""Height and width."""

_BLOCK = 1024  # images that are decoded ahead; limits memory, and the delay before an error is raised
_GREY_MODES = {"1", "L", "LA"}


def parse_size(value: object) -> Size | None:
    """Read the option `image_size`: 32, (32, 48), [32, 48] or "32x48" (height × width)."""
    if value is None:
        return None
    parts: Sequence[object]
    if isinstance(value, str):
        parts = value.lower().replace("×", "x").split("x")
    elif isinstance(value, list | tuple):
        parts = value
    else:
        parts = [value]
    if len(parts) not in (1, 2) or any(isinstance(p, bool) or not str(p).strip().isdecimal() for p in parts):
        raise UserError(
            f"image_size is {value!r}; expected a number of pixels such as 32, or height x width such as 32x48"
        )
    sides = [int(str(part)) for part in parts]
    if min(sides) < 1:
        raise UserError(f"image_size is {value!r}; expected at least 1 pixel")
    return sides[0], sides[-1]


def decode_all(
    sources: Sequence[Source],
    name: Callable[[int], str],
    size: Size | None = None,
    colour: bool | None = None,
) -> Pixels:
    """Decode every image and resize it to `size`. Without `size`, all images must have the same size.

    `colour` chooses colour or grey. If it is None, the result is grey only if every image is grey. `name` turns an
    image's index into its name for error messages.
    """
    pillow = _pillow()
    if not sources:
        raise UserError("no images to read")

    def decode(index: int) -> Pixels:
        source = sources[index]
        file = io.BytesIO(source) if isinstance(source, bytes) else source
        with _report_unreadable(pillow, name(index)), pillow.Image.open(file) as image:
            return _pixels(pillow, image, name(index), size, colour)

    first = decode(0)
    out = np.empty((len(sources), *first.shape), np.uint8)
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        for start in range(0, len(sources), _BLOCK):
            indices = range(start, min(start + _BLOCK, len(sources)))
            for index, image in zip(indices, pool.map(decode, indices), strict=True):
                if image.shape[1:] != first.shape[1:]:
                    raise UserError(
                        f"{name(index)}: {image.shape[1]}x{image.shape[2]} pixels, but {name(0)} has "
                        f"{first.shape[1]}x{first.shape[2]}; expected one size; set image_size to resize all"
                    )
                if len(image) > out.shape[1]:
                    out = out.repeat(len(image), axis=1)
                out[index] = image  # a grey image among coloured ones gets three equal channels
    refuse_black(out, name(0))
    return out


def refuse_black(images: Sequence[Pixels] | Pixels, first: str) -> None:
    """Refuse images that are all black. `first` is the name of the first image.

    8-bit pixels that are stored in 16 bits become black, because only the upper 8 bits are read.
    """
    if not any(image.any() for image in images):
        raise UserError(
            f"{first}: this and all other images are black after conversion to 8 bits; expected pixels up to 255 in "
            "8-bit images, or up to 65535 in 16-bit images"
        )


def same_channels(parts: Sequence[Pixels]) -> list[Pixels]:
    """Give grey images three equal channels if another part has colours."""
    channels = max(part.shape[1] for part in parts)
    return [part if part.shape[1] == channels else part.repeat(channels, axis=1) for part in parts]


def is_image(value: object) -> bool:
    """Return whether this is a Pillow image."""
    return all(hasattr(value, name) for name in ("mode", "size", "convert"))


def image_pixels(image: Any, name: str, size: Size | None = None, colour: bool | None = None) -> Pixels:
    """Return the pixels (channels, height, width) of a Pillow image, turned upright and resized to `size`."""
    pillow = _pillow()
    with _report_unreadable(pillow, name):
        return _pixels(pillow, image, name, size, colour)


@contextmanager
def _report_unreadable(pillow: Any, name: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, SyntaxError, EOFError, pillow.Image.DecompressionBombError) as error:
        reason = str(error).split(" <")[0]
        raise UserError(f"{name}: unreadable image ({reason})") from error


def _pixels(pillow: Any, image: Any, name: str, size: Size | None, colour: bool | None) -> Pixels:
    if image.mode == "F":  # the range of its pixels is unknown: 0 to 1, 0 to 255 or measurements
        raise UserError(f"{name}: an image of 32-bit floats (mode F); expected 8 or 16 bits per channel")
    upright = pillow.ImageOps.exif_transpose(image)
    is_grey = upright.mode in _GREY_MODES or upright.mode.startswith("I")  # I, I;16 and I;16B have more than 8 bits
    grey = not colour if colour is not None else is_grey
    converted = _to_8_bits(pillow, upright, grey)
    if size is not None and converted.size != (size[1], size[0]):
        converted = converted.resize((size[1], size[0]), pillow.Image.Resampling.BILINEAR)
    pixels = np.asarray(converted)
    return pixels[None] if grey else pixels.transpose(2, 0, 1)


def _to_8_bits(pillow: Any, image: Any, grey: bool) -> Any:
    """Convert to 8 bits. 16-bit grey is scaled, as in image viewers, because Pillow would clip it at 255."""
    if image.mode.startswith("I"):
        image = pillow.Image.fromarray((np.asarray(image) >> 8).clip(0, 255).astype(np.uint8))
    return image.convert("L" if grey else "RGB")


def _pillow() -> Any:
    try:
        import PIL.Image
        import PIL.ImageOps
    except ImportError as error:
        raise UserError("reading image files needs Pillow: pip install 'fedskew[data]'") from error
    return PIL


def channel_statistics(images: npt.NDArray[np.generic]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return each channel's mean and standard deviation, for images scaled to [0, 1].

    A constant channel has deviation 1. Histograms avoid a copy of the images as floats.
    """
    levels = np.arange(256) / 255
    means, stds = [], []
    for channel in range(images.shape[1]):
        counts = sum(np.bincount(block[:, channel].ravel(), minlength=256) for block in row_blocks(images))
        frequency = counts / max(images[:, channel].size, 1)
        mean = float(frequency @ levels)
        means.append(mean)
        stds.append(float(np.sqrt(frequency @ (levels - mean) ** 2)) or 1.0)
    return tuple(means), tuple(stds)
