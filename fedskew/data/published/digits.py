"""scikit-learn's handwritten digits: 1,797 images of 8×8 inside its wheel, so that nothing is downloaded."""

from __future__ import annotations

import numpy as np

from fedskew.data.dataset import Dataset, Samples
from fedskew.data.loading import TEST_FRACTION, stratified_holdout

MEAN, STD = (0.3058,), (0.3760,)  # of the training pixels, which run from 0 to 16 in the source and to 255 here


def load_digits() -> Dataset:
    """The digits with a fixed, stratified test set of one fifth: the publisher gives no split."""
    from sklearn import datasets

    source = datasets.load_digits()
    x = np.rint(source.images * (255 / 16)).astype(np.uint8)[:, None]
    y = source.target.astype(np.int64)
    train, test = stratified_holdout(y, TEST_FRACTION, "digits")
    return Dataset(
        name="digits",
        kind="image",
        classes=tuple("0123456789"),
        train=Samples(x[train], y[train]),
        test=Samples(x[test], y[test]),
        mean=MEAN,
        std=STD,
    )
