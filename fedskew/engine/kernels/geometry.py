"""The shape of a convolution, in the form that the kernels use."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor


@dataclass(frozen=True)
class Geometry:
    """Sizes of images and windows, named as in the kernels.

    Images have height h, width w and c channels. Results have height ho, width wo and o channels. A window is kh × kw,
    its stride is (sh, sw), and the padding is (ph, pw).
    """

    h: int
    w: int
    c: int
    ho: int
    wo: int
    o: int
    kh: int
    kw: int
    sh: int
    sw: int
    ph: int
    pw: int

    @classmethod
    def from_shapes(
        cls,
        image: Sequence[int],
        out_channels: int,
        window: Sequence[int],
        stride: Sequence[int],
        padding: Sequence[int],
    ) -> Geometry:
        """Make the geometry of images [K, B, H, W, C] and windows [KH, KW]."""
        (_, _, h, w, c), (kh, kw), (sh, sw), (ph, pw) = image, window, stride, padding
        ho, wo = (h + 2 * ph - kh) // sh + 1, (w + 2 * pw - kw) // sw + 1
        return cls(h, w, c, ho, wo, out_channels, kh, kw, sh, sw, ph, pw)

    @property
    def taps(self) -> int:
        """The number of positions in a window."""
        return self.kh * self.kw

    @property
    def depth(self) -> int:
        """The number of products per value of the result."""
        return self.taps * self.c

    def reversed(self) -> Geometry:
        """Return the geometry of the flipped window's convolution, which gives the images' gradient at stride 1."""
        ph, pw = self.kh - 1 - self.ph, self.kw - 1 - self.pw
        return replace(self, h=self.ho, w=self.wo, c=self.o, ho=self.h, wo=self.w, o=self.c, ph=ph, pw=pw)

    def sizes(self) -> tuple[int, int, int, int, int]:
        """Return h, w, the number of channel groups of size `alignment(c)`, ho and wo."""
        return self.h, self.w, self.c // alignment(self.c), self.ho, self.wo

    @property
    def shifts(self) -> bool:
        """Whether all heights and widths are powers of two, so that a division by one of them is a shift."""
        return all(map(is_power_of_two, (self.h, self.w, self.ho, self.wo)))

    def constants(self) -> dict[str, int]:
        """Return the constants that are compiled in: window, stride, padding, and the alignment of the channels."""
        names = ("kh", "kw", "sh", "sw", "ph", "pw")
        return {"ALIGNED": alignment(self.c), **{name.upper(): getattr(self, name) for name in names}}


def channels_last(images: Tensor) -> Tensor:
    """Return [K, B, C, H, W] as contiguous [K, B, H, W, C], without a copy if the memory has that order."""
    return images.permute(0, 1, 3, 4, 2).contiguous()


def channels_first(images: Tensor) -> Tensor:
    """Return a view of [K, B, H, W, C] as [K, B, C, H, W]."""
    return images.permute(0, 1, 4, 2, 3)


def blocks(total: int, block: int) -> int:
    """Return how many blocks cover the total."""
    return -(-total // block)


def power_of_two(minimum: int, maximum: int, number: int) -> int:
    """Return the smallest power of two that is at least the number, limited to the bounds, which are powers of two."""
    return max(minimum, min(maximum, 1 << (number - 1).bit_length()))


def alignment(channels: int) -> int:
    """Return the largest power of two up to 8 that divides the channels. One load takes at most 8 values of 16 bits."""
    return math.gcd(channels, 8)


def is_power_of_two(number: int) -> bool:
    return number.bit_count() == 1
