"""Accuracy over groups of classes."""

from __future__ import annotations

import numpy as np

from fedskew.metrics.groups import group_accuracy


def test_group_accuracy_is_the_mean_over_tested_classes() -> None:
    groups = {"vacant": (0, 1), "minority": (2,), "majority": (3,), "none": ()}
    accuracies = (0.25, 0.75, None, 1.0)
    expected = {"vacant": 0.5, "minority": None, "majority": 1.0, "none": None}
    assert group_accuracy(accuracies, groups) == expected
    assert group_accuracy(np.array([0.25, 0.75, np.nan, 1.0]), groups) == expected
