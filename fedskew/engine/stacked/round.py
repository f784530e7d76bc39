"""One round on the slots: which slot trains which client, and how clients enter, train, leave and finish.

A slot is memory for one client. Clients have unequal numbers of steps. A round takes at least as many steps as its
*longest* client, the one with the most steps. Meanwhile, the other clients take turns in the remaining slots, so that
few slots are idle. There are never more slots than fit in memory.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedskew.engine.contract import RoundResult, RoundWork
from fedskew.engine.data.batches import BatchPlan
from fedskew.engine.data.device import DeviceSamples, all_to_device, to_device
from fedskew.engine.data_passes import ClientStack, DataPass, stacked_sums
from fedskew.engine.model.network import ModelState, Network
from fedskew.engine.stacked.execution import Memory
from fedskew.engine.stacked.layouts import Flats, Layouts, Rows
from fedskew.engine.stacked.local_step import KEY_COLUMNS, Program, finish_clients
from fedskew.methods.parts import Tensors, unpack
from fedskew.methods.personal import PERSONAL

SLACK = 1.05
"""A round may take up to this many times the steps of its longest client, if this saves slots."""


@dataclass(frozen=True)
class SlotChange:
    """Clients that enter or leave slots at one time."""

    slots: npt.NDArray[np.int64]
    clients: npt.NDArray[np.int64]


@dataclass(frozen=True)
class SlotSchedule:
    """The steps of a round in order. At each time, counted from 0, all busy slots take one step.

    Clients are numbered by their positions in the round's assignments.
    """

    client: npt.NDArray[np.int64]
    """[times, slots]: the client that trains, or −1 in an idle slot."""
    step: npt.NDArray[np.int64]
    """[times, slots]: the number of that client's local step."""
    arrivals: dict[int, SlotChange]
    """By time: the clients that enter before the step."""
    departures: dict[int, SlotChange]
    """By time: the clients that leave after the step."""

    @cached_property
    def turns(self) -> list[tuple[int, int, int]]:
        """Each client's stay in its slot, as a (start, slot, client) triple."""
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
    """Assign each client with steps to a slot: the longest client first, each to the slot that is free first.

    Schedules are cached, because every round has the same one if all clients have the same number of samples.
    """
    return _make_schedule(tuple(steps), slots)


@lru_cache(maxsize=4)
def _make_schedule(steps: tuple[int, ...], slots: int) -> SlotSchedule:
    turns, times = _assign_slots(steps, slots)
    trained, step = np.full((times, slots), -1, dtype=np.int64), np.zeros((times, slots), dtype=np.int64)
    for begin, slot, client in turns:
        rows = slice(begin, begin + steps[client])
        trained[rows, slot], step[rows, slot] = client, np.arange(steps[client])
    return SlotSchedule(
        client=trained,
        step=step,
        arrivals=_changes(turns),
        departures=_changes([(begin + steps[client] - 1, slot, client) for begin, slot, client in turns]),
    )


def _assign_slots(steps: Sequence[int], slots: int) -> tuple[list[tuple[int, int, int]], int]:
    """Return the (start, slot, client) triple of each turn, and the time at which the last turn ends."""
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


def choose_slots(steps: Sequence[int], max_slots: int, coarse: bool = False) -> int:
    """Return the smallest number of slots with which the round is not much longer than its longest client.

    If even `max_slots` slots are too few for that, use all of them. Only a few slot counts are possible, and with
    `coarse` even fewer, because a step is captured or compiled separately for each.
    """
    busy = [n for n in steps if n]
    longest, limit = max(busy), min(max_slots, len(busy))
    for slots in _slot_counts(limit, coarse):
        if slots * longest * SLACK >= sum(busy) and _assign_slots(busy, slots)[1] <= longest * SLACK:
            return slots
    return limit


def _slot_counts(maximum: int, coarse: bool) -> list[int]:
    """Return 1, 2, 3, 4, 6, 8, 12, 16, …, or only powers of two, up to and including `maximum`."""
    powers = [1 << bits for bits in range(maximum.bit_length())]
    between = [] if coarse else [3 * count // 2 for count in powers[1:]]
    return sorted({count for count in (*powers, *between) if count < maximum} | {maximum})


class SlotRound:
    """Trains the clients of one round on the slots."""

    def __init__(
        self,
        network: Network,
        data: DeviceSamples,
        layouts: Layouts,
        program: Program,
        work: RoundWork,
        plans: Sequence[BatchPlan],
        schedule: SlotSchedule,
        width: int,
    ) -> None:
        device = data.y.device
        self._data, self._layouts, self._program, self._work, self._schedule = data, layouts, program, work, schedule
        self._network, self._device, self._plans = network, device, plans
        self._width = width
        """The number of rows of a batch, with padding."""
        self.full = _all_full(plans, schedule, width)
        self._label_counts, moves, self._steps, self._visits, self._first_slots = all_to_device(
            [
                np.stack([a.label_counts for a in work.assignments]),
                _packed(schedule),
                np.array([plan.steps for plan in plans], dtype=np.int64),
                np.array([max(plan.visits, 1) for plan in plans], dtype=np.int64),
                np.argsort(schedule.arrivals[0].clients),  # the slot of each client, if each has its own
            ],
            device,
        )
        self._moves = _Moves(schedule, moves)
        clients = len(plans)
        # The slots' states are results only if they change during training.
        kept = {"state": layouts.state.zeros(clients, device)} if work.solver.changes_state() else {}
        self._results: Memory = {
            **kept,
            "params": layouts.params.zeros(clients, device),
            "buffers": layouts.buffers.zeros(clients, device),
            "sums": {n: torch.zeros(clients, dtype=t.dtype, device=device) for n, t in program.memory["sums"].items()},
        }

    @property
    def step_forms(self) -> set[bool]:
        """The forms of the step that the round needs: for full batches (True), for padded batches (False), or both."""
        return {bool(full) for full in np.unique(self.full)}

    def train(self) -> RoundResult:
        self._program.rewind()
        for time in range(self._schedule.times):
            if time in self._schedule.arrivals:
                self._enter(*self._moves.arrivals[time], self._schedule.arrivals[time].clients)
            if time % self._program.window_size == 0:
                self._stage(time // self._program.window_size)
            self._program.run(time % self._program.window_size, bool(self.full[time]))
            if time in self._schedule.departures:
                self._leave(*self._moves.departures[time])
        self._return_idle_clients()
        return self._finish()

    def begin(self) -> None:
        """Put the first clients into their slots and stage their batches, so that a benchmark can time single steps."""
        self._program.rewind()
        self._enter(*self._moves.arrivals[0], self._schedule.arrivals[0].clients)
        for window in range(self._program.windows):
            self._stage(window, again=True)

    def _stage(self, window: int, again: bool = False) -> None:
        """Stage the batches of a window: those of several consecutive times.

        With `again`, a window after the round's end repeats the first one.
        """
        size = self._program.window_size
        first = window * size
        first = 0 if again and first >= self._schedule.times else first
        self._program.stage(window, _window_plan(self._plans, self._schedule, self._width, first, size))

    def _enter(self, slots: Rows, clients: Rows, numbers: npt.NDArray[np.int64]) -> None:
        """Write clients into slots. `clients` (on the device) and `numbers` (on the host) are the same clients."""
        memory = self._program.memory
        self._start(memory, slots, numbers)
        for kind in (*self._work.local.local_optimiser.state_names, "sums"):
            for tensor in memory[kind].values():
                tensor[slots] = 0
        memory["label_counts"][""][slots] = self._label_counts[clients]
        for name, flat in self._states(numbers).items():
            memory["state"][name][slots] = flat

    def _start(self, memory: Memory, rows: Rows, numbers: npt.NDArray[np.int64]) -> None:
        """Fill these rows of params and buffers with the clients' start models."""
        starts = [self._work.assignments[number].start for number in numbers]
        own_models = [start for start in starts if start is not None]
        for kind, source, layout in (
            ("params", "sent", self._layouts.params),
            ("buffers", "sent buffers", self._layouts.buffers),
        ):
            flats = self._program.memory[source]
            if own_models:
                tensors = [start.params if kind == "params" else start.buffers for start in own_models]
                flats = layout.flat({n: torch.stack([t[n] for t in tensors]).to(self._device) for n in tensors[0]})
            for name, flat in flats.items():
                memory[kind][name][rows] = flat
        if self._work.personal_names and not own_models:
            self._start_personal(memory, rows, numbers)

    def _start_personal(self, memory: Memory, rows: Rows, numbers: npt.NDArray[np.int64]) -> None:
        """Write the clients' personal tensors over those of the model that the server sent."""
        personal = unpack(PERSONAL, self._layouts.state.views(self._states(numbers)))
        for kind, layout in (("params", self._layouts.params), ("buffers", self._layouts.buffers)):
            views = layout.views(memory[kind])
            for name in views.keys() & personal.keys():
                views[name][rows] = personal[name]

    def _states(self, numbers: npt.NDArray[np.int64]) -> Flats:
        """Return the states of these clients on the device.

        States in host memory are copied to a CUDA GPU through pinned memory, so that the host does not wait.
        """
        layout, states = self._layouts.state, [self._work.assignments[number].state for number in numbers]
        if all(t.device == self._device for t in states[0].values()):
            return layout.flat({name: torch.stack([s[name] for s in states]) for name in states[0]})
        host = layout.zeros(len(states), torch.device("cpu"), pinned=self._device.type == "cuda")
        for name, rows in layout.views(host).items():
            for row, state in zip(rows, states, strict=True):
                row.copy_(state[name])
        return {dtype: flat.to(self._device, non_blocking=True) for dtype, flat in host.items()}

    def _leave(self, slots: Rows, clients: Rows) -> None:
        for kind, results in self._results.items():
            for name, tensor in results.items():
                tensor[clients] = self._program.memory[kind][name][slots]

    def _return_idle_clients(self) -> None:
        """Let clients without steps return the model that they started from."""
        idle = [number for number, plan in enumerate(self._plans) if not plan.steps]
        if idle:
            rows = to_device(torch.tensor(idle), self._device)
            self._start(self._results, rows, np.array(idle))
            for name, tensor in self._results.get("state", {}).items():
                tensor[rows] = self._states(np.array(idle))[name]

    @torch.no_grad()
    def _finish(self) -> RoundResult:
        params = self._layouts.params.views(self._results["params"])
        buffers = self._layouts.buffers.views(self._results["buffers"])
        uplink, states = self._finish_clients(params, buffers)
        sums = self._results["sums"]
        return RoundResult(
            trained=ModelState(params, buffers),
            uplink=uplink,
            states=states,
            loss=sums["loss"] / self._visits,
            tally={name: sums[f"tally {name}"] for name in self._layouts.tally},
            visits=np.array([plan.visits for plan in self._plans]),
        )

    def _finish_clients(self, params: Tensors, buffers: Tensors) -> tuple[Tensors, Tensors]:
        """Return what the clients send besides their models, and their next states.

        At most as many clients finish at a time as there are slots, so that memory suffices.
        """
        dtype = next(iter(params.values())).dtype
        steps = self._steps.to(dtype)
        clients, uplinks, states = [], [], []
        for numbers in np.array_split(np.arange(len(self._plans)), -(-len(self._plans) // self._schedule.slots)):
            rows = slice(int(numbers[0]), int(numbers[-1]) + 1)
            chunk_params, chunk_buffers = ({name: t[rows] for name, t in part.items()} for part in (params, buffers))
            state = self._states_again(numbers)
            stack = ClientStack(self._plans[rows], chunk_params, chunk_buffers, self._label_counts[rows], state)
            sent, kept = finish_clients(
                self._work, chunk_params, steps[rows], stack.label_counts, stack.state, self._closing_sums(stack)
            )
            clients.append(self._work.assignments[int(numbers[0])].client)
            uplinks.append(sent)
            states.append(kept)
        self._work.require_same_form("uplink", clients, uplinks, stacked=True)
        self._work.require_same_form("next_state", clients, states, stacked=True)
        return _concatenate(uplinks), _concatenate(states)

    def _closing_sums(self, stack: ClientStack) -> Tensors:
        if not self._work.needs_pass("closing"):
            return {}
        return stacked_sums(self._network, self._data, DataPass(self._work, "closing"), stack)

    def _states_again(self, numbers: npt.NDArray[np.int64]) -> Tensors:
        """Return the clients' states.

        States that training may have changed are among the results. Unchanged states are still in the slots, if every
        client had a slot of its own. If not, they are copied to the device again.
        """
        state = self._layouts.state
        if "state" in self._results:
            rows = slice(int(numbers[0]), int(numbers[-1]) + 1)
            return {name: t[rows] for name, t in state.views(self._results["state"]).items()}
        if len(self._first_slots) < len(self._plans):
            return state.views(self._states(numbers))
        slots = self._first_slots[int(numbers[0]) : int(numbers[-1]) + 1]
        return {name: t[slots] for name, t in state.views(self._program.memory["state"]).items()}


class _Moves:
    """The slots and clients of the arrivals and departures, as indices on the device.

    They are copied to the device once per round.
    """

    def __init__(self, schedule: SlotSchedule, packed: Tensor) -> None:
        self._packed, self._next = packed, 0
        self.arrivals = {time: self._rows(event) for time, event in schedule.arrivals.items()}
        self.departures = {time: self._rows(event) for time, event in schedule.departures.items()}

    def _rows(self, event: SlotChange) -> tuple[Rows, Rows]:
        columns = slice(self._next, self._next + len(event.slots))
        self._next = columns.stop
        return _as_rows(event.slots, self._packed[0, columns]), _as_rows(event.clients, self._packed[1, columns])


def _packed(schedule: SlotSchedule) -> npt.NDArray[np.int64]:
    """Return the slots and clients of all arrivals and then of all departures: [2, moves]."""
    events = [*schedule.arrivals.values(), *schedule.departures.values()]
    return np.concatenate([np.stack([event.slots, event.clients]) for event in events], axis=1)


def _as_rows(numbers: npt.NDArray[np.int64], on_device: Tensor) -> Rows:
    """Return a slice if the numbers are consecutive, because a copy of a slice is faster than one by indices."""
    first, last = int(numbers[0]), int(numbers[-1])
    are_consecutive = np.array_equal(numbers, np.arange(first, last + 1))
    return slice(first, last + 1) if are_consecutive else on_device


def _all_full(plans: Sequence[BatchPlan], schedule: SlotSchedule, width: int) -> npt.NDArray[np.bool_]:
    """Return, for each time, whether all clients' batches are full: [times]."""
    full = np.ones(schedule.times, dtype=bool)
    for time, event in schedule.arrivals.items():
        for client in event.clients:
            full[time : time + plans[client].steps] &= plans[client].lengths == width
    return full


def _window_plan(
    plans: Sequence[BatchPlan], schedule: SlotSchedule, width: int, first: int, window_size: int
) -> npt.NDArray[np.int64]:
    """Return the sample indices and keys per slot, for `window_size` times from `first` on, as `Staging` reads them."""
    end = min(first + window_size, schedule.times)
    window = np.zeros((end - first, schedule.slots, width + KEY_COLUMNS), dtype=np.int64)
    indices, (epoch_keys, client_keys, steps) = window[..., :width], np.moveaxis(window[..., width:], -1, 0)
    indices[...], steps[...] = -1, schedule.step[first:end]
    for begin, slot, number in schedule.turns:
        plan = plans[number]
        since, until = max(begin, first), min(begin + plan.steps, end)
        if since < until:
            times = slice(since - first, until - first)
            indices[times, slot, : plan.width] = plan.indices_between(since - begin, until - begin)
            epoch_keys[times, slot] = plan.epoch_keys_between(since - begin, until - begin)
            client_keys[times, slot] = plan.client_key
    return window


def _concatenate(parts: Sequence[Tensors]) -> Tensors:
    return parts[0] if len(parts) == 1 else {n: torch.cat([part[n] for part in parts]) for n in parts[0]}
