"""A test set cut from the training data."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedskew.data.dataset import stratified_holdout
from fedskew.errors import UserError


@given(st.lists(st.integers(0, 5), min_size=30, max_size=200), st.floats(0.05, 0.95))
def test_a_holdout_takes_the_nearest_share_of_each_class(labels: list[int], fraction: float) -> None:
    y = np.array(labels)
    wanted = [round(int((y == c).sum()) * fraction) for c in range(6)]
    if sum(wanted) in (0, len(y)):
        with pytest.raises(UserError, match="too few"):
            stratified_holdout(y, fraction, "here")
        return
    train, test = stratified_holdout(y, fraction, "here")
    assert sorted([*train, *test]) == list(range(len(y)))
    assert np.bincount(y[test], minlength=6).tolist() == wanted


def test_a_holdout_is_the_same_on_every_machine() -> None:
    _, test = stratified_holdout(np.zeros(20, dtype=np.int64), 0.2, "here")
    assert test.tolist() == [2, 5, 8, 16]
