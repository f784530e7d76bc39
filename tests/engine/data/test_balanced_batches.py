"""Balanced batches: every class equally often, the same number of steps, and the same draws wherever they are drawn."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from hypothesis import given
from hypothesis import strategies as st

from fedskew.engine.data.batches import BatchPlan, RoundKey, plan_batches

LABELS = st.lists(st.sampled_from([0, 1, 1, 1, 1, 1, 4, 4, 7]), min_size=1, max_size=60)


def plan(labels: list[int], *, balanced: bool = True, epochs: int = 3, round: int = 2, client: int = 5) -> BatchPlan:
    y = np.array(labels)
    key = RoundKey(0, 0, round)
    return plan_batches(100 + np.arange(len(y)), client, epochs, 8, 1, key, y if balanced else None)


def drawn(found: BatchPlan, epoch: int) -> npt.NDArray[np.int64]:
    rows = found.indices_between(epoch * found.per_epoch, (epoch + 1) * found.per_epoch)
    return rows[rows >= 0] - 100


@given(LABELS)
def test_an_epoch_has_every_present_class_equally_often(labels: list[int]) -> None:
    y, found = np.array(labels), plan(labels)
    shuffled = plan(labels, balanced=False)
    assert (found.steps, found.visits) == (shuffled.steps, shuffled.visits)
    assert (found.lengths == shuffled.lengths).all()
    for epoch in range(3):
        rows = drawn(found, epoch)
        classes, sizes = np.unique(y, return_counts=True)
        visits = np.array([(y[rows] == c).sum() for c in classes])
        assert visits.sum() == len(y)
        assert visits.max() - visits.min() <= 1
        for c, size, visited in zip(classes, sizes, visits, strict=True):
            times = np.bincount(rows[y[rows] == c], minlength=len(y))[y == c]
            assert times.max() - times.min() <= 1, "a rare class repeats all its samples equally often"
            assert times.max() == -(-visited // size)


def test_each_position_of_a_batch_has_every_class_with_the_same_probability() -> None:
    labels = [0] * 40 + [1] * 6 + [2] * 2
    y = np.array(labels)
    first = np.concatenate([y[plan(labels, epochs=1, round=r).indices[0] - 100] for r in range(400)])
    shares = np.bincount(first) / len(first)
    assert np.abs(shares - 1 / 3).max() < 0.025  # 3200 draws; three standard deviations are 0.025 even if independent


def test_a_class_with_too_many_samples_shows_others_in_each_epoch() -> None:
    labels = [0] * 40 + [1] * 4
    majority = [set(drawn(plan(labels), epoch)) - set(range(40, 44)) for epoch in range(3)]
    assert [len(found) for found in majority] == [22, 22, 22]
    assert len({frozenset(found) for found in majority}) == 3


def test_draws_depend_on_round_and_client_and_on_nothing_else() -> None:
    labels = [0, 1, 1, 1, 1, 1, 2, 2, 2] * 4
    again = plan(labels)
    again.indices_between(again.per_epoch, 2 * again.per_epoch)  # out of order
    assert (plan(labels).indices == again.indices).all()
    for other in (plan(labels, round=3), plan(labels, client=6)):
        assert (plan(labels).indices != other.indices).any()


def test_one_class_visits_each_sample_once() -> None:
    assert sorted(drawn(plan([3] * 20), 0).tolist()) == list(range(20))


def test_passes_besides_the_training_see_every_sample_once() -> None:
    rows = plan([0] * 15 + [1] * 2).pass_batches
    assert sorted((rows[rows >= 0] - 100).tolist()) == list(range(17))
