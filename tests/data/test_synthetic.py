"""Synthetic data: the shape, classes and difficulty that were requested, the same on every machine."""

from __future__ import annotations

import hashlib
import math

import numpy as np
import pytest

import fedskew as fs
from fedskew.errors import UserError


@pytest.mark.parametrize("classes", [2, 3, 4, 37])
def test_any_number_of_classes_and_samples(classes: int) -> None:
    data = fs.load("synthetic", classes=classes, samples=100, test_samples=80, features=7)
    assert len(data.classes) == classes
    assert (len(data.train), len(data.test)) == (100, 80)
    assert data.train.x.shape == (100, 7)
    sizes = np.bincount(data.train.y, minlength=classes)
    assert sizes.max() - sizes.min() <= 1


def test_images_have_the_requested_shape_and_use_the_range_of_grey() -> None:
    data = fs.load("synthetic", classes=["benign", "malignant"], image=[3, 20, 24], samples=200)
    assert data.kind == "image"
    assert data.classes == ("benign", "malignant")
    assert data.train.x.shape == (200, 3, 20, 24)
    assert data.train.x.dtype == np.uint8
    scaled = (data.train.x / 255 - np.array(data.mean)[:, None, None]) / np.array(data.std)[:, None, None]
    assert abs(scaled.mean()) < 0.3
    assert 0.5 < scaled.std() < 2
    assert fs.load("synthetic", image=[9, 9], samples=20).input_shape == (1, 9, 9)


@pytest.mark.parametrize("separation", [1.0, 2.0, 4.0])
def test_two_classes_overlap_as_their_separation_says(separation: float) -> None:
    data = fs.load("synthetic", classes=2, samples=4000, features=400, separation=separation)
    centres = [data.train.x[data.train.y == c].mean(axis=0) for c in range(2)]
    axis = centres[1] - centres[0]
    right = ((data.test.x - (centres[0] + centres[1]) / 2) @ axis > 0) == (data.test.y == 1)
    best = 0.5 * (1 + math.erf(separation / 2 / math.sqrt(2)))
    assert right.mean() == pytest.approx(best, abs=0.08)
    assert data.train.x[data.train.y == 0].std(axis=0).mean() == pytest.approx(1, abs=0.02)


def test_the_data_are_the_same_on_every_machine_and_differ_by_seed() -> None:
    data = fs.load("synthetic", classes=3, samples=30, features=5)
    rounded = np.round(data.train.x.astype(np.float64), 4) + 0.0
    assert hashlib.sha256(rounded.tobytes()).hexdigest()[:12] == "7990cf5519c2"
    other = fs.load("synthetic", classes=3, samples=30, features=5, seed=1)
    assert not np.allclose(data.train.x, other.train.x)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"classes": 1}, "classes is 1; expected a whole number ≥ 2"),
        ({"classes": []}, "classes is \\[\\]; expected a whole number ≥ 2, or the names of all classes"),
        ({"classes": ["ill", "well", "ill"]}, "dataset 'synthetic' has two classes 'ill'; expected different names"),
        ({"samples": 3}, "samples is 3; expected a whole number ≥ 10"),
        ({"separation": 0}, "separation is 0; expected a finite number above 0"),
        ({"separation": math.inf}, "separation is inf; expected a finite number above 0"),
        ({"separation": "big"}, "separation is 'big'"),
        ({"image": [3, 3, 3, 3]}, "expected \\[height, width\\]"),
        ({"image": [8, 0]}, "image is \\[8, 0\\]; expected .*, in whole numbers ≥ 1"),
        ({"image": [8, 8], "features": 3}, "both features and image are set"),
        ({"colour": 1}, "unknown option of synthetic: 'colour'"),
    ],
)
def test_what_cannot_be_drawn_is_refused(options: dict[str, object], reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        fs.load("synthetic", **options)
