"""Accuracy over groups of classes, such as those of which a client has no, few or many samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt


def group_accuracy(
    class_accuracy: Sequence[float | None] | npt.NDArray[np.float64],
    groups: Mapping[str, Sequence[int]],
) -> dict[str, float | None]:
    """Average the class accuracies in each group. The mean is None for a group without test samples.

    Every class counts equally, so the mean does not depend on how many test samples each class has.
    """
    accuracies = np.array(class_accuracy, dtype=np.float64)
    means: dict[str, float | None] = {}
    for name, members in groups.items():
        tested = accuracies[list(members)] if len(members) else accuracies[:0]
        tested = tested[~np.isnan(tested)]
        means[name] = float(tested.mean()) if len(tested) else None
    return means
