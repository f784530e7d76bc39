"""One round through the slots: clients enter, are trained, leave, and come to an end."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedskew.engine.contract import RoundResult, RoundWork
from fedskew.engine.data.batches import BatchPlan
from fedskew.engine.data.device_samples import DeviceSamples
from fedskew.engine.data.transfer import all_to_device, to_device
from fedskew.engine.model.network import ModelState, Network
from fedskew.engine.passes import Pass, Stack, stacked_sums
from fedskew.engine.stacked.execution import Memory
from fedskew.engine.stacked.local_step import ends
from fedskew.engine.stacked.rows import Flats, Places
from fedskew.engine.stacked.slot_layouts import Layouts
from fedskew.engine.stacked.slot_program import Program
from fedskew.engine.stacked.timetable import Event, Timetable
from fedskew.methods.parts import Tensors


class SlotRound:
    """One round through the slots."""

    def __init__(
        self,
        network: Network,
        data: DeviceSamples,
        layouts: Layouts,
        program: Program,
        work: RoundWork,
        plans: Sequence[BatchPlan],
        table: Timetable,
        width: int,
    ) -> None:
        device = data.y.device
        self._data, self._layouts, self._program, self._work, self._table = data, layouts, program, work, table
        self._network, self._device, self._plans = network, device, plans
        self._width = width
        self.full = _all_full(plans, table, width)
        self._label_counts, moves, self._steps, self._visits, self._first_slots = all_to_device(
            [
                np.stack([a.label_counts for a in work.assignments]),
                _packed(table),
                np.array([plan.steps for plan in plans], dtype=np.int64),
                np.array([max(plan.visits, 1) for plan in plans], dtype=np.int64),
                np.argsort(table.arrivals[0].clients),
            ],
            device,
        )
        self._moves = _Moves(table, moves)
        clients = len(plans)
        self._results: Memory = {
            "params": layouts.params.zeros(clients, device),
            "buffers": layouts.buffers.zeros(clients, device),
            "sums": {n: torch.zeros(clients, dtype=t.dtype, device=device) for n, t in program.memory["sums"].items()},
        }

    @property
    def kinds_of_step(self) -> set[bool]:
        return {bool(full) for full in np.unique(self.full)}

    def train(self) -> RoundResult:
        self._program.rewind()
        for time in range(self._table.times):
            if time in self._table.arrivals:
                self._enter(*self._moves.arrivals[time], self._table.arrivals[time].clients)
            if time % self._program.window == 0:
                self._stage(time // self._program.window)
            self._program.run(time % self._program.window, bool(self.full[time]))
            if time in self._table.departures:
                self._leave(*self._moves.departures[time])
        self._without_steps()
        return self._end()

    def begin(self) -> None:
        """The first clients in their slots, their batches staged."""
        self._program.rewind()
        self._enter(*self._moves.arrivals[0], self._table.arrivals[0].clients)
        for window in range(self._program.windows):
            self._stage(window, again=True)

    def _stage(self, window: int, again: bool = False) -> None:
        """Have the batches of the next steps made; after the last, the first `again`."""
        size = self._program.window
        first = window * size
        first = 0 if again and first >= self._table.times else first
        self._program.stage(window, _scheduled(self._plans, self._table, self._width, first, size))

    def _enter(self, slots: Places, clients: Places, numbers: npt.NDArray[np.int64]) -> None:
        memory = self._program.memory
        self._start(memory, slots, numbers)
        for kind in (*self._work.local.optimiser.state_names, "sums"):
            for tensor in memory[kind].values():
                tensor[slots] = 0
        memory["label_counts"][""][slots] = self._label_counts[clients]
        for name, flat in self._states(numbers).items():
            memory["state"][name][slots] = flat

    def _start(self, memory: Memory, rows: Places, numbers: npt.NDArray[np.int64]) -> None:
        """These rows of params and buffers as the clients start: with what is sent, or with models of their own."""
        starts = [self._work.assignments[number].start for number in numbers]
        own = [start for start in starts if start is not None]
        for kind, source, layout in (
            ("params", "sent", self._layouts.params),
            ("buffers", "sent buffers", self._layouts.buffers),
        ):
            flats = self._program.memory[source]
            if own:
                names = getattr(own[0], kind)
                flats = layout.flat(
                    {n: torch.stack([getattr(start, kind)[n] for start in own]).to(self._device) for n in names}
                )
            for name, flat in flats.items():
                memory[kind][name][rows] = flat

    def _states(self, numbers: npt.NDArray[np.int64]) -> Flats:
        """What these clients keep, brought to the device: through pinned memory, so that the host need not wait."""
        layout, states = self._layouts.state, [self._work.assignments[number].state for number in numbers]
        if all(t.device == self._device for t in states[0].values()):
            return layout.flat({name: torch.stack([s[name] for s in states]) for name in states[0]})
        host = layout.zeros(len(states), torch.device("cpu"), pinned=self._device.type == "cuda")
        for name, rows in layout.views(host).items():
            for row, state in zip(rows, states, strict=True):
                row.copy_(state[name])
        return {kind: flat.to(self._device, non_blocking=True) for kind, flat in host.items()}

    def _leave(self, slots: Places, clients: Places) -> None:
        for kind, results in self._results.items():
            for name, tensor in results.items():
                tensor[clients] = self._program.memory[kind][name][slots]

    def _without_steps(self) -> None:
        """Clients that had nothing to train on return what they were sent."""
        idle = [number for number, plan in enumerate(self._plans) if not plan.steps]
        if idle:
            rows = to_device(torch.tensor(idle), self._device)
            self._start(self._results, rows, np.array(idle))

    @torch.no_grad()
    def _end(self) -> RoundResult:
        params = self._layouts.params.views(self._results["params"])
        buffers = self._layouts.buffers.views(self._results["buffers"])
        uplink, states = self._all_ends(params, buffers)
        sums = self._results["sums"]
        return RoundResult(
            trained=ModelState(params, buffers),
            uplink=uplink,
            states=states,
            loss=sums["loss"] / self._visits,
            tally={name: sums[f"tally {name}"] for name in self._layouts.tally},
            visits=np.array([plan.visits for plan in self._plans]),
        )

    def _all_ends(self, params: Tensors, buffers: Tensors) -> tuple[Tensors, Tensors]:
        """What the clients send beside their models, and what they keep: as many at a time as there are slots."""
        dtype = next(iter(params.values())).dtype
        steps = self._steps.to(dtype)
        uplinks, states = [], []
        for numbers in np.array_split(np.arange(len(self._plans)), -(-len(self._plans) // self._table.slots)):
            rows = slice(int(numbers[0]), int(numbers[-1]) + 1)
            own, statistics = ({name: t[rows] for name, t in part.items()} for part in (params, buffers))
            state = self._states_again(numbers)
            stack = Stack(self._plans[rows], own, statistics, self._label_counts[rows], state)
            sent, kept = ends(self._work, own, steps[rows], stack.label_counts, stack.state, self._closing(stack))
            uplinks.append(sent)
            states.append(kept)
        return _joined(uplinks), _joined(states)

    def _closing(self, stack: Stack) -> Tensors:
        this = Pass(self._work, "closing")
        return stacked_sums(self._network, self._data, this, stack) if this.wanted else {}

    def _states_again(self, numbers: npt.NDArray[np.int64]) -> Tensors:
        """From the slots, where each client has one to itself; else they were overwritten and are brought anew."""
        state = self._layouts.state
        if len(self._first_slots) < len(self._plans):
            return state.views(self._states(numbers))
        slots = self._first_slots[int(numbers[0]) : int(numbers[-1]) + 1]
        return {name: t[slots] for name, t in state.views(self._program.memory["state"]).items()}


class _Moves:
    """Who enters and leaves which slot, by time, on the device: sent there at once, not as a round goes on."""

    def __init__(self, table: Timetable, packed: Tensor) -> None:
        self._packed, self._next = packed, 0
        self.arrivals = {time: self._places(event) for time, event in table.arrivals.items()}
        self.departures = {time: self._places(event) for time, event in table.departures.items()}

    def _places(self, event: Event) -> tuple[Places, Places]:
        columns = slice(self._next, self._next + len(event.slots))
        self._next = columns.stop
        return _place(event.slots, self._packed[0, columns]), _place(event.clients, self._packed[1, columns])


def _packed(table: Timetable) -> npt.NDArray[np.int64]:
    """[2, moves]: the slots and clients of all events, arrivals first."""
    events = [*table.arrivals.values(), *table.departures.values()]
    return np.concatenate([np.stack([event.slots, event.clients]) for event in events], axis=1)


def _place(numbers: npt.NDArray[np.int64], on_device: Tensor) -> Places:
    """A slice where there is one: a plain copy is faster than one by indices."""
    first, last = int(numbers[0]), int(numbers[-1])
    in_a_row = np.array_equal(numbers, np.arange(first, last + 1))
    return slice(first, last + 1) if in_a_row else on_device


def _all_full(plans: Sequence[BatchPlan], table: Timetable, width: int) -> npt.NDArray[np.bool_]:
    """[times]: whether no client's batch is short then."""
    full = np.ones(table.times, dtype=bool)
    for time, event in table.arrivals.items():
        for client in event.clients:
            full[time : time + plans[client].steps] &= plans[client].lengths == width
    return full


def _scheduled(
    plans: Sequence[BatchPlan], table: Timetable, width: int, first: int, window: int
) -> dict[str, npt.NDArray[np.int64]]:
    """Whose which batch each slot is given from time `first` on."""
    end = min(first + window, table.times)
    step = table.step[first:end]
    indices = np.full((*step.shape, width), -1, dtype=np.int64)
    epoch_keys, client_keys = np.zeros_like(step), np.zeros_like(step)
    for begin, slot, number in table.turns:
        plan = plans[number]
        since, until = max(begin, first), min(begin + plan.steps, end)
        if since < until:
            times = slice(since - first, until - first)
            indices[times, slot, : plan.width] = plan.rows(since - begin, until - begin)
            epoch_keys[times, slot] = plan.keys(since - begin, until - begin)
            client_keys[times, slot] = plan.client_key
    return {"indices": indices, "epoch keys": epoch_keys, "client keys": client_keys, "steps": step}


def _joined(parts: Sequence[Tensors]) -> Tensors:
    return parts[0] if len(parts) == 1 else {n: torch.cat([part[n] for part in parts]) for n in parts[0]}
