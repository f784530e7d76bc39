"""What a dataset is: arrays, class names and the publisher's train/test split."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from fedskew.errors import UserError

Kind = Literal["image", "table", "text"]


@dataclass(frozen=True)
class Samples:
    """Inputs and labels, row by row."""

    x: npt.NDArray[np.generic]
    """Images: uint8 (n, channels, height, width). Tables: float32 (n, features), standardised.
    Text: int64 token ids (n, length), where 0 pads and 1 is an unknown word."""
    y: npt.NDArray[np.int64]
    domain: npt.NDArray[np.int64] | None = None
    """Of each row, the number of its domain, where the dataset has any."""

    def __len__(self) -> int:
        return len(self.y)

    def where(self, rows: npt.NDArray[np.generic]) -> Samples:
        """Some rows."""
        return Samples(self.x[rows], self.y[rows], None if self.domain is None else self.domain[rows])


@dataclass(frozen=True)
class Dataset:
    """A classification dataset as it leaves its loader: images not normalised, nothing shuffled."""

    name: str
    kind: Kind
    classes: tuple[str, ...]
    train: Samples
    test: Samples
    mean: tuple[float, ...] = (0.5,)
    """Per channel, of images scaled to [0, 1]; the loaders give each dataset's usual values."""
    std: tuple[float, ...] = (0.5,)
    vocabulary: int = 0
    """Number of token ids of a text dataset, the padding id 0 included."""
    words: tuple[str, ...] = ()
    """Of a text dataset: what its ids from 2 on stand for; empty if only its maker knows."""
    domains: tuple[str, ...] = ()
    """Names of the domains that the samples come from, such as mnist and svhn."""
    scaling: tuple[tuple[float, float], ...] = ()
    """Of a table: mean and deviation of each column, by which its loader standardised it; empty if it did not."""
    columns: tuple[str, ...] = ()
    """Of a table: its columns' names, in order, where its file tells them."""

    @property
    def input_shape(self) -> tuple[int, ...]:
        return tuple(self.train.x.shape[1:])

    def __post_init__(self) -> None:
        if len(self.classes) < 2:
            raise UserError(f"dataset {self.name!r} has {len(self.classes)} classes; expected at least 2")
        for part, samples in (("train", self.train), ("test", self.test)):
            check_samples(samples, len(self.classes), f"{self.name} {part}")
        if self.train.x.shape[1:] != self.test.x.shape[1:]:
            raise UserError(
                f"dataset {self.name!r}: train inputs have shape {self.train.x.shape[1:]}, "
                f"test inputs {self.test.x.shape[1:]}; expected the same"
            )


def check_samples(samples: Samples, classes: int, where: str, row: Callable[[int], str] = "row {}".format) -> None:
    """Refuse bad data, naming the first offending row (`row` tells how the user counts rows)."""
    x, y = samples.x, samples.y
    if len(x) != len(y):
        raise UserError(f"{where}: {len(x)} inputs but {len(y)} labels; expected equal lengths")
    if len(y) == 0:
        raise UserError(f"{where}: no samples")
    outside = np.flatnonzero((y < 0) | (y >= classes))
    if len(outside):
        raise UserError(f"{where}: label {y[outside[0]]} in {row(int(outside[0]))}; expected 0 to {classes - 1}")
    if np.issubdtype(x.dtype, np.floating):
        bad = np.flatnonzero(~np.isfinite(x.reshape(len(x), -1)).all(axis=1))
        if len(bad):
            raise UserError(f"{where}: NaN or infinite value in {row(int(bad[0]))}; expected finite numbers")
