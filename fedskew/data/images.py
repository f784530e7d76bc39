"""Decode images into one uint8 array (n, channels, height, width), and compute each channel's mean and deviation."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

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
_DEEP = 16
"""The bits per pixel of images that have more than 8, unless the option `image_bits` says otherwise."""
_DARK = (1 << 14) - 1
"""A 16-bit image is dark if it has no pixel above this. Scanners write 10, 12 or 14 bits into images of 16."""
_NOTED_ONE_IN = 10
"""A note names dark images if at least one in this many 16-bit images is dark."""


class _Decoded(NamedTuple):
    pixels: Pixels
    largest: int | None
    """The largest pixel before the conversion to 8 bits. None for an image of 8 bits."""


@dataclass
class BitDepths:
    """How the images of a dataset become 8-bit images, and which bit depths they have.

    An image of 8 bits stays as it is. Of any other image, the upper 8 of `bits` bits are read, as image viewers do. So
    the result depends on this number only, and not on the other images, other parts or other sites.
    """

    bits: int | None = None
    """The option `image_bits`: how many bits are used in images that have more than 8. None stands for 16."""
    examples: dict[bool, str] = field(default_factory=dict)
    """The name of the first image of 8 bits (False) and of the first image of more bits (True)."""
    dark: int = 0
    """The number of dark images among those of more than 8 bits (see `_DARK`)."""
    deep: int = 0
    """The number of images of more than 8 bits."""

    def check(self, largest: Sequence[int | None], name: Callable[[int], str]) -> None:
        """Refuse images of 16 bits that would become too dark. `largest` has `_Decoded.largest` of each image."""
        for index, value in enumerate(largest):
            self.examples.setdefault(value is not None, name(index))
        deep = {index: value for index, value in enumerate(largest) if value is not None}
        self.deep += len(deep)
        self.dark += sum(value <= _DARK for value in deep.values())
        if self.bits is None and deep and 0 < max(deep.values()) <= _DARK:
            raise UserError(
                f"{name(min(deep))}: no pixel of this and the other 16-bit images is above {max(deep.values())}; "
                "expected pixels up to 65535; set image_bits to the bits that they use, such as 12 (grey images only), "
                "or to 16 if they are right as they are; or convert them to 8 bits"
            )

    def notes(self, data: str) -> tuple[str, ...]:
        """Return a line for the user if images seem to differ in their bit depth."""
        notes = []
        if len(self.examples) > 1:
            notes.append(
                f"{data}: some images have 8 bits ({self.examples[False]}) and others more ({self.examples[True]}); "
                "if the depth depends on the class, models learn it instead of the class; better convert all to 8 bits"
            )
        if self.bits is None and 0 < self.deep <= _NOTED_ONE_IN * self.dark:
            notes.append(
                f"{data}: {self.dark} of {self.deep} 16-bit images have no pixel above {_DARK}; if they use only 10, "
                "12 or 14 bits, they are too dark; convert these to 8 bits, or set image_bits=16 if they are right"
            )
        return tuple(notes)


def parse_bits(value: object) -> int | None:
    """Read the option `image_bits`: 8 to 16."""
    if value is None:
        return None
    if isinstance(value, bool) or not str(value).strip().isdecimal() or not 8 <= int(str(value)) <= _DEEP:
        raise UserError(f"image_bits is {value!r}; expected a whole number from 8 to 16, such as 12")
    return int(str(value))


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
    depths: BitDepths | None = None,
) -> Pixels:
    """Decode every image and resize it to `size`. Without `size`, all images must have the same size.

    `colour` chooses colour or grey. If it is None, the result is grey only if every image is grey. `name` turns an
    image's index into its name for error messages. `depths` says how images of more than 8 bits are read. All parts of
    a dataset share it.
    """
    pillow = _pillow()
    depths = BitDepths() if depths is None else depths
    if not sources:
        raise UserError("no images to read")

    def decode(index: int) -> _Decoded:
        source = sources[index]
        file = io.BytesIO(source) if isinstance(source, bytes) else source
        with _report_unreadable(pillow, name(index)), pillow.Image.open(file) as image:
            return _decode(pillow, image, name(index), size, colour, depths.bits)

    first = decode(0).pixels
    largest: list[int | None] = []
    out = np.empty((len(sources), *first.shape), np.uint8)
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        for start in range(0, len(sources), _BLOCK):
            indices = range(start, min(start + _BLOCK, len(sources)))
            for index, (image, value) in zip(indices, pool.map(decode, indices), strict=True):
                largest.append(value)
                if image.shape[1:] != first.shape[1:]:
                    raise UserError(
                        f"{name(index)}: {image.shape[1]}x{image.shape[2]} pixels, but {name(0)} has "
                        f"{first.shape[1]}x{first.shape[2]}; expected one size; set image_size to resize all"
                    )
                if len(image) > out.shape[1]:
                    out = out.repeat(len(image), axis=1)
                out[index] = image  # a grey image among coloured ones gets three equal channels
    depths.check(largest, name)
    _refuse_black(out, name(0))
    return out


def _refuse_black(images: Sequence[Pixels] | Pixels, first: str) -> None:
    """Refuse images that are all black. `first` is the name of the first image."""
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


def image_pixels(
    images: Sequence[Any], name: Callable[[int], str], size: Size | None, depths: BitDepths
) -> list[Pixels]:
    """Return the pixels (channels, height, width) of Pillow images, turned upright and resized to `size`."""
    pillow = _pillow()
    decoded = []
    for index, image in enumerate(images):
        with _report_unreadable(pillow, name(index)):
            decoded.append(_decode(pillow, image, name(index), size, None, depths.bits))
    depths.check([one.largest for one in decoded], name)
    pixels = [one.pixels for one in decoded]
    _refuse_black(pixels, name(0))
    return pixels


@contextmanager
def _report_unreadable(pillow: Any, name: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, SyntaxError, EOFError, pillow.Image.DecompressionBombError) as error:
        reason = str(error).split(" <")[0]
        raise UserError(f"{name}: unreadable image ({reason})") from error


def _decode(pillow: Any, image: Any, name: str, size: Size | None, colour: bool | None, bits: int | None) -> _Decoded:
    if image.mode == "F":  # the range of its pixels is unknown: 0 to 1, 0 to 255 or measurements
        raise UserError(f"{name}: an image of 32-bit floats (mode F); expected 8 or 16 bits per channel")
    is_deep_grey = image.mode.startswith("I")  # I, I;16 and I;16B have more than 8 bits
    is_cut = not is_deep_grey and ";16" in _stored_mode(image)
    if is_cut and bits not in (None, _DEEP):
        raise UserError(f"{name}: a 16-bit image in colour, of which only the upper 8 bits are read; expected 8 bits")
    upright = pillow.ImageOps.exif_transpose(image)
    grey = not colour if colour is not None else upright.mode in _GREY_MODES or is_deep_grey
    largest = None
    if is_deep_grey:
        raw = np.asarray(upright)
        largest = _largest(raw, name, bits)
        # 16-bit grey is scaled, as in image viewers, because Pillow would clip it at 255.
        upright = pillow.Image.fromarray((raw >> ((bits or _DEEP) - 8)).astype(np.uint8))
    converted = upright.convert("L" if grey else "RGB")
    if is_cut:
        largest = int(np.asarray(converted).max(initial=0)) * 256 + 255
    if size is not None and converted.size != (size[1], size[0]):
        converted = converted.resize((size[1], size[0]), pillow.Image.Resampling.BILINEAR)
    pixels = np.asarray(converted)
    return _Decoded(pixels[None] if grey else pixels.transpose(2, 0, 1), largest)


def _largest(raw: npt.NDArray[Any], name: str, bits: int | None) -> int:
    """Return the largest pixel. Refuse pixels that do not fit into `bits` bits."""
    smallest, largest, most = int(raw.min(initial=0)), int(raw.max(initial=0)), (1 << (bits or _DEEP)) - 1
    if smallest < 0 or largest > most:
        reason = "" if bits is None else f", because image_bits is {bits}"
        raise UserError(f"{name}: a pixel is {min(smallest, 0) or largest}; expected 0 to {most}{reason}")
    return largest


def _stored_mode(image: Any) -> str:
    """Return how Pillow describes the pixels in an image's file, such as RGB;16B. Empty if it is not known."""
    tiles = getattr(image, "tile", None)
    how = tiles[0][3] if tiles and len(tiles[0]) > 3 else ""
    how = how[0] if isinstance(how, tuple) and how else how
    return how if isinstance(how, str) else ""


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
