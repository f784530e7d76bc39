"""Assemble a dataset from a user's inputs and labels: encode the labels, hold out a test set, scale inputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fedskew.data.dataset import TEST_FRACTION, Dataset, Kind, Samples, check_samples, stratified_holdout
from fedskew.data.own.labels import Labels, encode_labels
from fedskew.data.published.text import LENGTH, VOCABULARY, text_dataset
from fedskew.errors import UserError

Array = npt.NDArray[np.generic]
IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Part:
    """Inputs before any preparation (uint8 images, a table of numbers, or a list of texts), and their labels."""

    x: Array | list[str]
    labels: Labels
    where: str
    """The source, for error messages."""


def assemble(
    name: str,
    kind: Kind,
    parts: Sequence[Part],
    classes: Sequence[str] | None = None,
    test_fraction: float | None = None,
    length: int = LENGTH,
    vocabulary: int = VOCABULARY,
) -> Dataset:
    """Assemble a dataset from one part, holding out a test set, or from two parts: train and test."""
    for part in parts:
        if len(part.x) != len(part.labels):
            raise UserError(f"{part.where}: {len(part.x)} inputs but {len(part.labels)} labels; expected equal lengths")
    names, numbers = encode_labels([part.labels for part in parts], classes)
    if kind == "table":
        for part, y in zip(parts, numbers, strict=True):
            check_samples(Samples(np.asarray(part.x), y), len(names), part.where, part.labels.row)
    (train_x, train_y), (test_x, test_y) = _train_and_test(parts, numbers, test_fraction)
    if kind == "text":
        return text_dataset(name, names, (list(train_x), train_y), (list(test_x), test_y), length, vocabulary)
    train, test = np.asarray(train_x), np.asarray(test_x)
    if train.shape[1:] != test.shape[1:]:
        raise UserError(
            f"{name}: train inputs have shape {train.shape[1:]}, test inputs {test.shape[1:]}; expected the same"
        )
    if kind == "table":
        train, test, scaling = _standardise(train, test)
        return Dataset(name, kind, names, Samples(train, train_y), Samples(test, test_y), scaling=scaling)
    mean, std = _channel_statistics(train)
    return Dataset(name, kind, names, Samples(train, train_y), Samples(test, test_y), mean, std)


def _train_and_test(
    parts: Sequence[Part], numbers: Sequence[IntArray], fraction: float | None
) -> tuple[tuple[Array | list[str], IntArray], tuple[Array | list[str], IntArray]]:
    if len(parts) == 2:
        if fraction is not None:
            raise UserError(f"{parts[1].where} is the test set; leave out test_fraction")
        return (parts[0].x, numbers[0]), (parts[1].x, numbers[1])
    x, y = parts[0].x, numbers[0]
    train, test = stratified_holdout(y, TEST_FRACTION if fraction is None else fraction, parts[0].where)
    return (_take(x, train), y[train]), (_take(x, test), y[test])


def _take(x: Array | list[str], rows: IntArray) -> Array | list[str]:
    return [x[row] for row in rows] if isinstance(x, list) else x[rows]


def _standardise(train: Array, test: Array) -> tuple[Array, Array, tuple[tuple[float, float], ...]]:
    """Standardise by the training set's mean and standard deviation, and return these. Constant columns become 0."""
    source = train.astype(np.float64)
    mean, std = source.mean(axis=0), source.std(axis=0)
    std[std == 0] = 1.0
    scaled = [((part - mean) / std).astype(np.float32) for part in (source, test.astype(np.float64))]
    return scaled[0], scaled[1], tuple(zip(mean.tolist(), std.tolist(), strict=True))


def _channel_statistics(images: Array) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return each channel's mean and standard deviation, for images scaled to [0, 1]. Histograms avoid a float copy."""
    levels = np.arange(256) / 255
    means, stds = [], []
    for channel in range(images.shape[1]):
        frequency = np.bincount(images[:, channel].ravel(), minlength=256) / max(images[:, channel].size, 1)
        mean = float(frequency @ levels)
        means.append(mean)
        stds.append(float(np.sqrt(frequency @ (levels - mean) ** 2)) or 1.0)
    return tuple(means), tuple(stds)
