"""Digit datasets besides MNIST: scikit-learn's, USPS, SVHN and synthetic digits."""

from __future__ import annotations

import zlib
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from fedskew.data.dataset import TEST_FRACTION, Dataset, Samples, stratified_holdout
from fedskew.errors import UserError

_DIGITS = tuple("0123456789")

USPS_LAYOUT = (("usps.bz2", "usps"), ("usps.t.bz2", "usps.t"))
SVHN_LAYOUT = (("train_32x32.mat",), ("test_32x32.mat",))
SYN_LAYOUT = (("synth_train_32x32.mat",), ("synth_test_32x32.mat",))

_USPS_SIDE = 16


def load_digits() -> Dataset:
    """Load the 1,797 8×8 digits that ship with scikit-learn.

    They have no official split. The test set is a fixed fifth of each class.
    """
    rows = np.loadtxt(_digits_file(), delimiter=",")
    x = np.rint(rows[:, :-1].reshape(-1, 1, 8, 8) * (255 / 16)).astype(np.uint8)  # the file has grey levels 0 to 16
    y = rows[:, -1].astype(np.int64)
    train, test = stratified_holdout(y, TEST_FRACTION, "digits")
    return Dataset(
        name="digits",
        kind="image",
        classes=_DIGITS,
        train=Samples(x[train], y[train]),
        test=Samples(x[test], y[test]),
        mean=(0.3058,),
        std=(0.3760,),
    )


def _digits_file() -> Path:
    """Find scikit-learn's file without importing scikit-learn, because the import takes longer than a short run."""
    package = find_spec("sklearn")
    file = Path(package.origin or "").parent / "datasets" / "data" / "digits.csv.gz" if package else None
    if file is None or not file.is_file():
        raise UserError(
            "the dataset digits is a file of scikit-learn, which was not found; run pip install scikit-learn"
        )
    return file


def load_usps(files: list[Path]) -> Dataset:
    """Load USPS, 16×16 grey digits, from files in LIBSVM's format."""
    train, test = map(_usps_samples, files)
    return Dataset("usps", "image", _DIGITS, train, test, (0.2469,), (0.2989,))


def _usps_samples(path: Path) -> Samples:
    """Read one file. Its pixels range from −1 to 1 and its labels from 1 to 10."""
    from sklearn.datasets import load_svmlight_file

    try:
        rows, labels = load_svmlight_file(str(path), n_features=_USPS_SIDE**2, zero_based=False)
    except (OSError, EOFError, ValueError) as error:
        raise UserError(f"{path}: cannot be read ({error}); expected USPS in LIBSVM's format") from error
    pixels = rows.toarray()
    if abs(pixels).max(initial=0) > 1 + 1e-6:
        raise UserError(f"{path}: pixel value {abs(pixels).max():g}; expected −1 to 1, as in USPS in LIBSVM's format")
    x = ((pixels + 1) / 2 * 255).astype(np.uint8).reshape(-1, 1, _USPS_SIDE, _USPS_SIDE)
    return Samples(x, labels.astype(np.int64) - 1)


def load_svhn(files: list[Path]) -> Dataset:
    """Load SVHN's cropped house numbers, 32×32 colour images."""
    train, test = map(_matlab_samples, files)
    return Dataset("svhn", "image", _DIGITS, train, test, mean=(0.4377, 0.4438, 0.4728), std=(0.1980, 0.2010, 0.1970))


def load_syn(files: list[Path]) -> Dataset:
    """Load the synthetic digits of Ganin and Lempitsky, 32×32 colour images in many fonts."""
    train, test = map(_matlab_samples, files)
    return Dataset("syn-digits", "image", _DIGITS, train, test, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))


def _matlab_samples(path: Path) -> Samples:
    """Read one file. `X` has shape (height, width, channels, n), and `y` may be 10 for the digit 0."""
    from scipy.io import loadmat
    from scipy.io.matlab import MatReadError

    try:
        content = loadmat(path, variable_names=("X", "y"))
        images, y = content["X"], content["y"].astype(np.int64).reshape(-1)
    except (OSError, EOFError, ValueError, TypeError, KeyError, NotImplementedError, MatReadError, zlib.error) as error:
        raise UserError(f"{path}: cannot be read ({error}); expected a MATLAB file with X and y") from error
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[2] != 3:
        raise UserError(f"{path}: X has shape {images.shape} and type {images.dtype}; expected (32, 32, 3, n), uint8")
    return Samples(np.ascontiguousarray(images.transpose(3, 2, 0, 1)), np.where(y == 10, 0, y))
