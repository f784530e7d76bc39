"""Which slot of the stack trains which client, and when.

The stack has a number of slots, each with the memory of one client. Clients have unequal numbers of steps: the longest
sets how long a round takes, and the others share the slots that are left, one after another, so that nobody pads for
anybody. A round with more clients than fit the device's memory is the same with fewer slots.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import numpy.typing as npt

SLACK = 1.05
"""By how much a round may be longer than its longest client for the sake of fewer slots."""


@dataclass(frozen=True)
class Event:
    """Clients that enter or leave slots at one time."""

    slots: npt.NDArray[np.int64]
    clients: npt.NDArray[np.int64]


@dataclass(frozen=True)
class Timetable:
    """The steps of a round in order; times count from 0."""

    client: npt.NDArray[np.int64]
    """[times, slots]: who trains; −1 in an idle slot."""
    step: npt.NDArray[np.int64]
    """[times, slots]: at which of its local steps that client is."""
    arrivals: dict[int, Event]
    """Before the step of that time."""
    departures: dict[int, Event]
    """After the step of that time."""

    @cached_property
    def turns(self) -> list[tuple[int, int, int]]:
        """When who begins in which slot: time, slot and client."""
        return [
            (time, slot, client)
            for time, event in self.arrivals.items()
            for slot, client in zip(event.slots.tolist(), event.clients.tolist(), strict=True)
        ]

    @property
    def times(self) -> int:
        return len(self.client)

    @property
    def slots(self) -> int:
        return int(self.client.shape[1])


def timetable(steps: Sequence[int], slots: int) -> Timetable:
    """Deal the clients with steps to do to the slots: the longest first, each to the slot that is free first.

    Where all clients have equally many samples, each round has the same one.
    """
    return _timetable(tuple(steps), slots)


@lru_cache(maxsize=4)
def _timetable(steps: tuple[int, ...], slots: int) -> Timetable:
    seats, times = _dealt(steps, slots)
    who, step = np.full((times, slots), -1, dtype=np.int64), np.zeros((times, slots), dtype=np.int64)
    for begin, slot, client in seats:
        rows = slice(begin, begin + steps[client])
        who[rows, slot], step[rows, slot] = client, np.arange(steps[client])
    return Timetable(
        client=who,
        step=step,
        arrivals=_events(seats),
        departures=_events([(begin + steps[client] - 1, slot, client) for begin, slot, client in seats]),
    )


def _dealt(steps: Sequence[int], slots: int) -> tuple[list[tuple[int, int, int]], int]:
    """Begin, slot and client of each turn; and when the last one ends."""
    free = [(0, slot) for slot in range(slots)]
    seats: list[tuple[int, int, int]] = []
    for client in sorted((c for c in range(len(steps)) if steps[c]), key=lambda c: -steps[c]):
        begin, slot = heapq.heappop(free)
        seats.append((begin, slot, client))
        heapq.heappush(free, (begin + steps[client], slot))
    return seats, max(end for end, _ in free)


def _events(moves: list[tuple[int, int, int]]) -> dict[int, Event]:
    by_time: dict[int, list[tuple[int, int]]] = {}
    for time, slot, client in sorted(moves):
        by_time.setdefault(time, []).append((slot, client))
    return {time: Event(*np.array(pairs, dtype=np.int64).T) for time, pairs in by_time.items()}


def slots_for(steps: Sequence[int], most: int, coarse: bool = False) -> int:
    """As few slots as hardly lengthen the round, from a handful of numbers, for each is captured or compiled anew."""
    busy = [n for n in steps if n]
    longest, most = max(busy), min(most, len(busy))
    for slots in _sizes(most, coarse):
        if slots * longest * SLACK >= sum(busy) and _dealt(busy, slots)[1] <= longest * SLACK:
            return slots
    return most


def _sizes(most: int, coarse: bool) -> list[int]:
    """1, 2, 3, 4, 6, 8, 12, 16, …, or the powers of two; and the most there can be."""
    powers = [1 << bits for bits in range(most.bit_length())]
    between = [] if coarse else [3 * size // 2 for size in powers[1:]]
    return sorted({size for size in (*powers, *between) if size < most} | {most})
