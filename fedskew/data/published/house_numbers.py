"""SVHN's cropped digits and the synthetic digits of Ganin and Lempitsky: MATLAB files of one form."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fedskew.data.dataset import Dataset, Samples
from fedskew.errors import UserError

SVHN_LAYOUT = (("train_32x32.mat",), ("test_32x32.mat",))
SYN_LAYOUT = (("synth_train_32x32.mat",), ("synth_test_32x32.mat",))

_SVHN_MEAN, _SVHN_STD = (0.4377, 0.4438, 0.4728), (0.1980, 0.2010, 0.1970)
_SYN_MEAN, _SYN_STD = (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)


def load_svhn(files: list[Path]) -> Dataset:
    """House numbers, 32×32 in colour."""
    train, test = map(_samples, files)
    return Dataset("svhn", "image", tuple("0123456789"), train, test, _SVHN_MEAN, _SVHN_STD)


def load_syn(files: list[Path]) -> Dataset:
    """Digits drawn in many fonts on many backgrounds, 32×32 in colour."""
    train, test = map(_samples, files)
    return Dataset("syn-digits", "image", tuple("0123456789"), train, test, _SYN_MEAN, _SYN_STD)


def _samples(path: Path) -> Samples:
    """`X` is (height, width, channels, n), `y` holds digits, with 10 for the zero."""
    from scipy.io import loadmat
    from scipy.io.matlab import MatReadError

    try:
        content = loadmat(path, variable_names=("X", "y"))
        images, labels = content["X"], content["y"]
    except (OSError, EOFError, ValueError, TypeError, KeyError, NotImplementedError, MatReadError) as error:
        raise UserError(f"{path}: cannot be read ({error}); expected a MATLAB file with X and y") from error
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[2] != 3:
        raise UserError(f"{path}: X has shape {images.shape} and type {images.dtype}; expected bytes, (32, 32, 3, n)")
    y = labels.astype(np.int64).reshape(-1)
    return Samples(np.ascontiguousarray(images.transpose(3, 2, 0, 1)), np.where(y == 10, 0, y))
