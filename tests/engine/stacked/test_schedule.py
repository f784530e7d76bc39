"""Clients are dealt to slots so that each takes all its steps, in order, in one slot, and hardly a slot idles."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedskew.engine.stacked.round import SLACK, choose_slots, make_schedule

STEPS = st.lists(st.integers(0, 30), min_size=1, max_size=25).filter(any)


@given(STEPS, st.integers(1, 30))
def test_every_client_takes_its_steps_in_order_in_one_slot(steps: list[int], slots: int) -> None:
    table = make_schedule(steps, slots)
    assert table.client.shape == (table.times, slots)
    for client, count in enumerate(steps):
        times, places = np.nonzero(table.client == client)
        assert len(times) == count
        assert len(set(places)) <= 1
        assert table.step[times, places].tolist() == list(range(count))
        assert times.tolist() == list(range(times[0], times[0] + count)) if count else True


@given(STEPS, st.integers(1, 30))
def test_a_client_enters_before_its_first_step_and_leaves_after_its_last(steps: list[int], slots: int) -> None:
    table = make_schedule(steps, slots)
    for events, at_step in ((table.arrivals, lambda client: 0), (table.departures, lambda client: steps[client] - 1)):
        moved = [(t, s, c) for t, e in events.items() for s, c in zip(e.slots, e.clients, strict=True)]
        assert sorted(c for _, _, c in moved) == [c for c, n in enumerate(steps) if n]
        for time, slot, client in moved:
            assert (table.client[time, slot], table.step[time, slot]) == (client, at_step(client))


@given(STEPS, st.integers(1, 30), st.booleans())
def test_slots_are_few_and_hardly_lengthen_a_round(steps: list[int], most: int, coarse: bool) -> None:
    slots = choose_slots(steps, most, coarse)
    busy = sum(1 for n in steps if n)
    assert 1 <= slots <= min(most, busy)
    if slots < min(most, busy):
        assert make_schedule(steps, slots).times <= max(steps) * SLACK


@pytest.mark.parametrize(
    ("steps", "most", "slots"),
    [
        ([10] * 10, 100, 10),  # equal clients: all at once
        ([10] * 10, 4, 4),  # as many as fit
        ([30, 10, 10, 10], 100, 2),  # the short ones one after another, beside the long one
        ([7], 100, 1),
        ([100] + [1] * 50, 100, 2),
    ],
)
def test_numbers_of_slots(steps: list[int], most: int, slots: int) -> None:
    assert choose_slots(steps, most) == slots


def test_few_different_numbers_over_many_rounds() -> None:
    rng = np.random.default_rng(0)
    rounds = [choose_slots(rng.integers(1, 60, 100).tolist(), 100) for _ in range(200)]
    assert len(set(rounds)) <= 4
