"""Synthetic data: Gaussian classes, as a table or as images, with any number of classes.

They stand in for data that are not available yet. The user chooses the shape, the number of classes and the difficulty.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from fedskew.data.dataset import Dataset, Samples
from fedskew.data.own.labels import class_list
from fedskew.errors import UserError
from fedskew.randomness import raw_uniforms

Floats = npt.NDArray[np.float64]

CLASSES, SAMPLES, FEATURES, SEPARATION = 10, 4000, 20, 4.0
TEST_SHARE = 0.25
"""The default number of test samples per training sample."""
_PATCHES = 4
"""The number of random values along each side of an image. The pixels are interpolated between them."""
_PIXEL_NOISE = 0.2
"""The standard deviation of the noise on each pixel, relative to the spread of the random values."""
_CONTRAST = 40.0
"""How many grey levels one standard deviation of the random values spans."""


def load_synthetic(
    *,
    classes: object = CLASSES,
    samples: object = SAMPLES,
    test_samples: object = None,
    features: object = None,
    image: object = None,
    separation: object = SEPARATION,
    seed: object = 0,
) -> Dataset:
    """Draw the samples of each class around a random centre. The numbers of samples per class differ by at most one.

    `classes` is a number or a list of names. `image` is the shape of an image: (height, width) or (channels, height,
    width). Without `image`, a sample is a row of `features` numbers.

    With many features, two centres are about `separation` standard deviations apart. The best possible accuracy on a
    table with two classes is then about Φ(separation / 2): 84 % for 2, and 98 % for 4.
    """
    names = _class_names(classes)
    train = _whole("samples", samples, len(names))
    test = max(len(names), round(train * TEST_SHARE)) if test_samples is None else (
        _whole("test_samples", test_samples, len(names))
    )  # fmt: skip
    if not _is_number(separation) or not 0 < float(str(separation)) < math.inf:
        raise UserError(f"separation is {separation!r}; expected a finite number above 0, such as {SEPARATION}")
    shape, checked_seed = _image_shape(image), _whole("seed", seed, 0)
    if shape is not None and features is not None:
        raise UserError("both features and image are set; expected features for a table, or image for images")
    dimensions = _whole("features", FEATURES if features is None else features, 1)
    if shape is not None:
        dimensions = shape[0] * _PATCHES**2
    centres = _centres(len(names), dimensions, float(str(separation)), checked_seed)
    training, testing = (
        _samples(centres, count, shape, checked_seed, part) for part, count in enumerate((train, test))
    )
    if shape is None:
        columns = tuple(f"feature {i}" for i in range(dimensions))
        return Dataset("synthetic", "table", names, training, testing, columns=columns)
    mean, std = (0.5,) * shape[0], (_CONTRAST / 255,) * shape[0]
    return Dataset("synthetic", "image", names, training, testing, mean, std)


def _class_names(classes: object) -> tuple[str, ...]:
    if isinstance(classes, str | list | tuple):
        names = class_list(classes)
        if not names:
            raise UserError(f"classes is {classes!r}; expected a whole number ≥ 2, or the names of all classes")
        return names
    return tuple(str(c) for c in range(_whole("classes", classes, 2)))


def _whole(name: str, value: object, at_least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < at_least:
        raise UserError(f"{name} is {value!r}; expected a whole number ≥ {at_least}")
    return int(value)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float | np.number) and not isinstance(value, bool)


def _image_shape(image: object) -> tuple[int, int, int] | None:
    if image is None:
        return None
    sides = list(image) if isinstance(image, Sequence) and not isinstance(image, str) else []
    if len(sides) not in (2, 3) or not all(type(side) is int and side > 0 for side in sides):
        raise UserError(
            f"image is {image!r}; expected [height, width] or [channels, height, width], in whole numbers ≥ 1"
        )
    channels, height, width = [1, *sides][-3:]
    return channels, height, width


def _normals(count: int, dimensions: int, key: tuple[int, ...]) -> Floats:
    """Draw standard normal numbers [count, dimensions] by the Box–Muller transform of uniform numbers.

    `key` is the seed, and then numbers that tell the draws of this module apart.
    """
    pairs = (count * dimensions + 1) // 2
    radius, angle = raw_uniforms(2 * pairs, key[0], "synthetic", *key[1:]).reshape(2, pairs)
    radius = np.sqrt(-2 * np.log1p(-radius))
    both = np.concatenate([radius * np.cos(2 * np.pi * angle), radius * np.sin(2 * np.pi * angle)])
    return np.asarray(both[: count * dimensions].reshape(count, dimensions), np.float64)


def _centres(classes: int, dimensions: int, separation: float, seed: int) -> Floats:
    """Draw random vectors of length `separation`/√2. In many dimensions, they are nearly orthogonal.

    So any two of them are about `separation` apart.
    """
    directions = _normals(classes, dimensions, (seed, 0))
    lengths = np.linalg.norm(directions, axis=1, keepdims=True)
    return np.asarray(directions / lengths * (separation / math.sqrt(2)), np.float64)


def _samples(centres: Floats, count: int, shape: tuple[int, int, int] | None, seed: int, part: int) -> Samples:
    """Draw `count` samples in total, class by class. Each class has its own random key.

    `part` is 0 for training and 1 for test samples.
    """
    classes, dimensions = centres.shape
    sizes = [count // classes + (c < count % classes) for c in range(classes)]
    points = [centre + _normals(size, dimensions, (seed, 1, part, c))
              for c, (centre, size) in enumerate(zip(centres, sizes, strict=True))]  # fmt: skip
    y = np.repeat(np.arange(classes, dtype=np.int64), sizes)
    x = np.concatenate(points)
    if shape is None:
        return Samples(x.astype(np.float32), y)
    return Samples(_images(x, shape, (seed, 2, part)), y)


def _images(points: Floats, shape: tuple[int, int, int], key: tuple[int, ...]) -> npt.NDArray[np.uint8]:
    """Turn the points into smooth grey or colour images, with a little noise on each pixel."""
    channels, height, width = shape
    patches = points.reshape(len(points), channels, _PATCHES, _PATCHES)
    pictures = np.einsum("hp,ncpq,wq->nchw", _interpolation(height), patches, _interpolation(width))
    noise = _normals(len(points), channels * height * width, key).reshape(pictures.shape)
    grey = np.rint(127.5 + _CONTRAST * (pictures + _PIXEL_NOISE * noise))
    return np.asarray(np.clip(grey, 0, 255), np.uint8)


def _interpolation(side: int) -> Floats:
    """Return the weight of each random value at each pixel, [side, `_PATCHES`], for linear interpolation."""
    position = (np.arange(side) + 0.5) / side * _PATCHES - 0.5
    distance = np.abs(np.clip(position, 0, _PATCHES - 1)[:, None] - np.arange(_PATCHES))
    return np.asarray(np.clip(1 - distance, 0, None), np.float64)
