"""A client's vacant, minority and majority classes, and accuracy over such groups of classes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

Groups = dict[str, tuple[int, ...]]


def class_groups(label_counts: npt.ArrayLike) -> Groups:
    """Vacant: no sample; minority: up to n/C; majority: more (n the client's samples, C the classes)."""
    counts = np.asarray(label_counts, dtype=np.int64)
    scaled, samples = counts * len(counts), counts.sum()  # whole numbers: n/C itself may not be one
    vacant, majority = counts == 0, scaled > samples
    members = {"vacant": vacant, "minority": ~vacant & ~majority, "majority": majority}
    return {name: tuple(np.flatnonzero(mask).tolist()) for name, mask in members.items()}


def group_accuracy(
    class_accuracy: Sequence[float | None] | npt.NDArray[np.float64],
    groups: Mapping[str, Sequence[int]],
) -> dict[str, float | None]:
    """Mean class accuracy over each group; None for a group without any tested class.

    The mean is over classes, not samples, so that a client's score does not hang on the test set's balance.
    """
    accuracies = np.array(class_accuracy, dtype=np.float64)
    means: dict[str, float | None] = {}
    for name, members in groups.items():
        tested = accuracies[list(members)] if len(members) else accuracies[:0]
        tested = tested[~np.isnan(tested)]
        means[name] = float(tested.mean()) if len(tested) else None
    return means
