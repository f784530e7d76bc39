"""USPS digits: the two bzip2-packed files in LIBSVM's format, as its data page offers them."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fedskew.data.dataset import Dataset, Samples
from fedskew.errors import UserError

LAYOUT = (("usps.bz2", "usps"), ("usps.t.bz2", "usps.t"))

_SIDE = 16
MEAN, STD = (0.2469,), (0.2989,)


def load_usps(files: list[Path]) -> Dataset:
    """Grey images of 16×16, whose pixels run from −1 to 1 in the files and whose digits from 1 to 10."""
    train, test = map(_samples, files)
    return Dataset("usps", "image", tuple("0123456789"), train, test, MEAN, STD)


def _samples(path: Path) -> Samples:
    from sklearn.datasets import load_svmlight_file

    try:
        rows, labels = load_svmlight_file(str(path), n_features=_SIDE**2, zero_based=False)
    except (OSError, EOFError, ValueError) as error:
        raise UserError(f"{path}: cannot be read ({error}); expected USPS in LIBSVM's format") from error
    pixels = rows.toarray()
    if abs(pixels).max(initial=0) > 1 + 1e-6:
        raise UserError(f"{path}: a pixel of {abs(pixels).max():g}; expected −1 to 1, as in USPS in LIBSVM's format")
    x = ((pixels + 1) / 2 * 255).astype(np.uint8).reshape(-1, 1, _SIDE, _SIDE)
    return Samples(x, labels.astype(np.int64) - 1)
