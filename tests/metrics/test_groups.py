"""Vacant, minority and majority classes as the papers define them."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fedskew.metrics.groups import class_groups, group_accuracy


def test_the_threshold_n_over_c_belongs_to_the_minority() -> None:
    assert class_groups([0, 5, 1, 14]) == {"vacant": (0,), "minority": (1, 2), "majority": (3,)}


def test_a_balanced_client_has_minority_classes_only() -> None:
    assert class_groups([4, 4, 4]) == {"vacant": (), "minority": (0, 1, 2), "majority": ()}


def test_a_client_with_one_class() -> None:
    assert class_groups(np.array([0, 9])) == {"vacant": (0,), "minority": (), "majority": (1,)}


@given(st.lists(st.integers(0, 50), min_size=1, max_size=12))
def test_every_class_is_in_exactly_one_group(counts: list[int]) -> None:
    groups = class_groups(counts)
    assert sorted(c for members in groups.values() for c in members) == list(range(len(counts)))
    threshold = sum(counts) / len(counts)
    assert all(counts[c] == 0 for c in groups["vacant"])
    assert all(0 < counts[c] <= threshold + 1e-9 for c in groups["minority"])
    assert all(counts[c] > threshold - 1e-9 for c in groups["majority"])


def test_group_accuracy_is_the_mean_over_tested_classes() -> None:
    groups = {"vacant": (0, 1), "minority": (2,), "majority": (3,), "none": ()}
    accuracies = (0.25, 0.75, None, 1.0)
    expected = {"vacant": 0.5, "minority": None, "majority": 1.0, "none": None}
    assert group_accuracy(accuracies, groups) == expected
    assert group_accuracy(np.array([0.25, 0.75, np.nan, 1.0]), groups) == expected
