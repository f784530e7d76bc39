"""The schedule of a round: which slot trains which client, and when.

A slot is memory for one client. Clients have unequal numbers of steps. The longest decides how long a round takes, and
the others share the remaining slots, one after another, so that no client waits for another. If a round has more
clients than fit in memory, there are simply fewer slots.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import numpy.typing as npt

SLACK = 1.05
"""By what factor a round may be longer than its longest client, to need fewer slots."""


@dataclass(frozen=True)
class SlotChange:
    """Clients that enter or leave slots at one time."""

    slots: npt.NDArray[np.int64]
    clients: npt.NDArray[np.int64]


@dataclass(frozen=True)
class SlotSchedule:
    """The steps of a round in order. Times count from 0."""

    client: npt.NDArray[np.int64]
    """[times, slots]: the client that trains; −1 in an idle slot."""
    step: npt.NDArray[np.int64]
    """[times, slots]: the number of that client's local step."""
    arrivals: dict[int, SlotChange]
    """Clients that enter before the step of that time."""
    departures: dict[int, SlotChange]
    """Clients that leave after the step of that time."""

    @cached_property
    def turns(self) -> list[tuple[int, int, int]]:
        """(start, slot, client) triples."""
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


def make_schedule(steps: Sequence[int], slots: int) -> SlotSchedule:
    """Give each client with steps to a slot: the longest first, each to the slot that is free first.

    If all clients have equally many samples, all rounds share one schedule.
    """
    return _make_schedule(tuple(steps), slots)


@lru_cache(maxsize=4)
def _make_schedule(steps: tuple[int, ...], slots: int) -> SlotSchedule:
    turns, times = _assign_slots(steps, slots)
    who, step = np.full((times, slots), -1, dtype=np.int64), np.zeros((times, slots), dtype=np.int64)
    for begin, slot, client in turns:
        rows = slice(begin, begin + steps[client])
        who[rows, slot], step[rows, slot] = client, np.arange(steps[client])
    return SlotSchedule(
        client=who,
        step=step,
        arrivals=_changes(turns),
        departures=_changes([(begin + steps[client] - 1, slot, client) for begin, slot, client in turns]),
    )


def _assign_slots(steps: Sequence[int], slots: int) -> tuple[list[tuple[int, int, int]], int]:
    """(start, slot, client) of each turn, and when the last turn ends."""
    free = [(0, slot) for slot in range(slots)]
    turns: list[tuple[int, int, int]] = []
    for client in sorted((c for c in range(len(steps)) if steps[c]), key=lambda c: -steps[c]):
        begin, slot = heapq.heappop(free)
        turns.append((begin, slot, client))
        heapq.heappush(free, (begin + steps[client], slot))
    return turns, max(end for end, _ in free)


def _changes(moves: list[tuple[int, int, int]]) -> dict[int, SlotChange]:
    by_time: dict[int, list[tuple[int, int]]] = {}
    for time, slot, client in sorted(moves):
        by_time.setdefault(time, []).append((slot, client))
    return {time: SlotChange(*np.array(pairs, dtype=np.int64).T) for time, pairs in by_time.items()}


def slots_for(steps: Sequence[int], most: int, coarse: bool = False) -> int:
    """The fewest slots that hardly lengthen the round. Few numbers are used: each is captured or compiled anew."""
    busy = [n for n in steps if n]
    longest, most = max(busy), min(most, len(busy))
    for slots in _sizes(most, coarse):
        if slots * longest * SLACK >= sum(busy) and _assign_slots(busy, slots)[1] <= longest * SLACK:
            return slots
    return most


def _sizes(most: int, coarse: bool) -> list[int]:
    """1, 2, 3, 4, 6, 8, 12, 16, …, or only powers of two, up to `most`, which is included."""
    powers = [1 << bits for bits in range(most.bit_length())]
    between = [] if coarse else [3 * size // 2 for size in powers[1:]]
    return sorted({size for size in (*powers, *between) if size < most} | {most})
