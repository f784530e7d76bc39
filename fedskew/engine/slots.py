"""The slots of the stacked engine: memory for so many clients at once, filled and emptied as clients come and go."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedskew.engine.batches import BatchPlan
from fedskew.engine.device_data import DeviceSamples
from fedskew.engine.execution import Memory, captured, compiled
from fedskew.engine.local_step import Batches, directions, ends
from fedskew.engine.network import ModelState, Network
from fedskew.engine.rows import Flats, RowLayout
from fedskew.engine.timetable import Event, Timetable
from fedskew.engine.work import RoundResult, RoundWork, same_parts, sgd_
from fedskew.losses import IGNORE
from fedskew.methods.parts import Tensors
from fedskew.randomness import fold

_STAGED_BYTES = {"cpu": 2 << 20, "cuda": 256 << 20}  # what a cache holds; what keeps a GPU busy
_STAGED_STEPS = 16
"""Few, so that the device need not wait long for the first."""

_LONGEST_EXPRESSION = 15
"""Operations: fewer than a keyed draw has, or a compiler would draw a sample's numbers anew for each of its pixels."""

Places = slice | Tensor
"""Rows of a stack."""

_PER_SLOT = ("params", "velocity", "buffers", "state", "sums", "label_counts")
"""The kinds of memory with a row for each slot."""


@dataclass(frozen=True)
class Layouts:
    """The shapes of what the clients of a kind of work have; the same in every round."""

    params: RowLayout
    buffers: RowLayout
    state: RowLayout
    downlink: RowLayout
    companions: Mapping[str, tuple[RowLayout, RowLayout]]
    tally: Mapping[str, torch.dtype]

    @classmethod
    def of(cls, work: RoundWork, tally: Mapping[str, torch.dtype]) -> Layouts:
        used = [name for name in work.objective.companions() if name in work.companions]
        return cls(
            params=RowLayout(work.sent.params),
            buffers=RowLayout(work.sent.buffers),
            state=RowLayout(work.assignments[0].state),
            downlink=RowLayout(work.downlink),
            companions={
                name: (RowLayout(work.companions[name].params), RowLayout(work.companions[name].buffers))
                for name in used
            },
            tally=tally,
        )

    def common(self, work: RoundWork) -> Memory:
        """What all clients of a round are given."""
        memory = {
            "sent": self.params.flat(_one_row(work.sent.params)),
            "sent buffers": self.buffers.flat(_one_row(work.sent.buffers)),
            "downlink": self.downlink.flat(_one_row(work.downlink)),
        }
        for name, (params, buffers) in self.companions.items():
            memory[f"companion {name}"] = params.flat(_one_row(work.companions[name].params))
            memory[f"companion buffers {name}"] = buffers.flat(_one_row(work.companions[name].buffers))
        return memory

    def work(self, work: RoundWork, memory: Memory) -> RoundWork:
        """The same work with what is common to all clients read from memory."""

        def model(kind: str, params: RowLayout, buffers: RowLayout) -> ModelState:
            head, _, name = kind.partition(" ")
            statistics = f"{head} buffers {name}".strip()
            return ModelState(_row(params.views(memory[kind])), _row(buffers.views(memory[statistics])))

        return replace(
            work,
            sent=model("sent", self.params, self.buffers),
            downlink=_row(self.downlink.views(memory["downlink"])),
            companions={name: model(f"companion {name}", *both) for name, both in self.companions.items()},
        )


@dataclass(frozen=True)
class _SlotStep:
    """One local step of all slots, from static memory to static memory."""

    network: Network
    work: RoundWork
    layouts: Layouts
    samples: Tensor
    full: bool
    """Whether no batch is padded."""
    channels_last: bool
    fused: bool
    """Whether SGD is PyTorch's fused kernel, rather than arithmetic that a compiler may fuse with more."""

    def __call__(self, memory: Memory) -> None:
        """The step that memory says is next; all of it on the device."""
        inputs = memory["inputs"]
        at = inputs["at"]
        now = {name: t.index_select(0, at).squeeze(0) for name, t in inputs.items() if name != "at"}
        self.descend(memory, now, memory["rates"]["lr"])
        at.copy_((at + 1) % len(inputs["y"]))

    @torch.no_grad()
    def descend(self, memory: Memory, now: Tensors, lr: Tensor | float) -> None:
        work = self.layouts.work(self.work, memory)
        valid = None if self.full else now["y"] != IGNORE
        x = now["x"].movedim(-1, 2) if self.channels_last else now["x"]
        state = self.layouts.state.views(memory["state"])
        batches = Batches(x, now["y"], valid, now["keys"], memory["label_counts"][""], state)
        params = self.layouts.params.views(memory["params"])
        buffers = self.layouts.buffers.views(memory["buffers"])
        found = directions(self.network, work, batches, params, buffers, self.samples)
        if isinstance(lr, float):
            velocity = self.layouts.params.views(memory["velocity"])
            local, names = replace(self.work.local, lr=lr), list(params)
            sgd_([params[n] for n in names], [velocity[n] for n in names], [found.direction[n] for n in names], local)
        else:
            for kind, g in self.layouts.params.flat(found.direction).items():
                self._descend(memory["params"][kind], memory["velocity"][kind], g, lr)
        for name, tensor in found.buffers.items():
            if tensor is not buffers[name]:
                buffers[name].copy_(tensor)
        memory["sums"]["loss"] += found.loss.double() * now["lengths"]
        for name, value in found.tally.items():
            memory["sums"][f"tally {name}"] += value

    def _descend(self, p: Tensor, v: Tensor, g: Tensor, lr: Tensor) -> None:
        """One step of SGD, as `sgd_` does it, with a learning rate that the device holds."""
        decay, momentum = self.work.local.weight_decay, self.work.local.momentum
        if self.fused and p.dtype == torch.float32:
            torch._fused_sgd_(
                [p], [g], [v] if momentum else [], weight_decay=decay, momentum=momentum, lr=lr, dampening=0.0,
                nesterov=False, maximize=False, is_first_step=False,
            )  # fmt: skip
            return
        g = g + decay * p if decay else g
        if momentum:
            g = momentum * v + g
            v.copy_(g)
        p.copy_(p - lr * g)


@dataclass(frozen=True)
class _Staging:
    """Gathers, augments and normalises the batches of some steps ahead, all in one go."""

    data: DeviceSamples
    channels_last: bool

    @torch.no_grad()
    def __call__(self, memory: Memory) -> None:
        plan, inputs, data = memory["plan"], memory["inputs"], self.data.holding(memory["data"])
        valid = plan["indices"] >= 0
        indices = torch.where(valid, plan["indices"], 0)
        x = data.training_inputs(indices, plan["epoch keys"].unsqueeze(-1))
        inputs["x"].copy_(x.movedim(3, -1) if self.channels_last else x)
        inputs["y"].copy_(torch.where(valid, data.y[indices], IGNORE))
        inputs["keys"].copy_(fold(plan["client keys"], plan["steps"]))
        inputs["lengths"].copy_(valid.sum(dim=-1))
        inputs["at"].zero_()


class Slots:
    """Memory for some clients of one kind of work, and the programs that step them."""

    def __init__(
        self,
        network: Network,
        data: DeviceSamples,
        work: RoundWork,
        tally: Mapping[str, torch.dtype],
        capacity: int,
        compile_steps: bool,
    ) -> None:
        self._network, self._data, self._compile = network, data, compile_steps
        self._device = data.y.device
        self._layouts = Layouts.of(work, tally)
        self._work = replace(work, sent=ModelState({}, {}), downlink={}, companions={}, assignments=[])
        self.capacity = capacity
        self._samples = data.some_inputs()
        self._channels_last = self._samples.dim() == 4 and network.prefers_channels_last(self._samples)
        layouts, rows = self._layouts, capacity
        sums = {"loss": torch.zeros(rows, dtype=torch.float64, device=self._device)}
        sums |= {f"tally {n}": torch.zeros(rows, dtype=dtype, device=self._device) for n, dtype in tally.items()}
        self._memory: Memory = {
            "params": layouts.params.zeros(rows, self._device),
            "velocity": layouts.params.zeros(rows, self._device),
            "buffers": layouts.buffers.zeros(rows, self._device),
            "state": layouts.state.zeros(rows, self._device),
            "sums": sums,
            "label_counts": {"": torch.zeros(rows, data.classes, dtype=torch.int64, device=self._device)},
            "rates": {"lr": torch.zeros((), dtype=torch.float32, device=self._device)},
            "data": data.held(),
            **layouts.common(work),
        }
        if any(p.dtype == torch.float64 for p in work.sent.params.values()):
            self._memory["rates"]["lr"] = self._memory["rates"]["lr"].double()
        self._programs: dict[tuple[int, int], _Program] = {}
        self._pool: object = torch.cuda.graph_pool_handle() if self._device.type == "cuda" else None
        self.notices: list[str] = []

    def suit(self, work: RoundWork, clients: int) -> bool:
        """Whether there is room for so many clients at a time, and the programs are those of the work's own parts."""
        return self.capacity >= clients and same_parts(self._work.parts, work.parts)

    def train(self, work: RoundWork, plans: Sequence[BatchPlan], table: Timetable, width: int) -> RoundResult:
        program = self._program(work, table, width)
        round_ = _Round(self._data, self._layouts, program, work, plans, table, width)
        program.prepare(round_.kinds_of_step)
        self._give(work)
        return round_.train()

    def bare_step(
        self, work: RoundWork, plans: Sequence[BatchPlan], table: Timetable, width: int
    ) -> Callable[[], None]:
        """One step of the round's first clients, again and again on staged batches: for measurements."""
        program = self._program(work, table, width)
        round_ = _Round(self._data, self._layouts, program, work, plans, table, width)
        program.prepare({bool(round_.full[0])})
        self._give(work)
        round_.begin()
        positions = min(program.window, table.times)
        state = {"next": 0}

        def step() -> None:
            program.run(state["next"], bool(round_.full[0]))
            state["next"] = (state["next"] + 1) % positions

        return step

    def _give(self, work: RoundWork) -> None:
        """What the server sends to all, where the programs read it."""
        for kind, flats in self._layouts.common(work).items():
            for name, flat in flats.items():
                self._memory[kind][name].copy_(flat)
        self._memory["rates"]["lr"].fill_(work.local.lr)

    def _program(self, work: RoundWork, table: Timetable, width: int) -> _Program:
        slots = table.slots
        key = slots, width
        if key not in self._programs:
            memory = {kind: dict(tensors) for kind, tensors in self._memory.items()}
            for kind in _PER_SLOT:
                memory[kind] = {name: t[:slots] for name, t in self._memory[kind].items()}
            memory["inputs"], memory["plan"] = self._inputs(slots, width, table.times)
            step = _SlotStep(
                self._network, self._work, self._layouts, self._samples, True, self._channels_last, not self._compile
            )
            staging = _Staging(self._data, self._channels_last)
            self._programs[key] = _Program(step, staging, memory, self._pool, self._compile, self.notices)
        return self._programs[key].of_round(work)

    def _inputs(self, slots: int, width: int, times: int) -> tuple[Tensors, Tensors]:
        """Room for the batches of some steps ahead, and for what they are made from."""
        sample = self._samples[0]
        shape = (*sample.shape[1:], sample.shape[0]) if self._channels_last else sample.shape
        bytes_ = slots * width * sample.numel() * sample.element_size()
        most = max(1, min(_STAGED_STEPS, _STAGED_BYTES[self._device.type] // max(bytes_, 1)))
        even = -(-times // -(-times // most))  # windows of a size, so that the last is not half empty
        window = max(even, min(most, _STAGED_STEPS // 2))  # though later rounds may be longer than this one

        def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=self._device)

        integers = torch.int64
        inputs = {
            "x": zeros(window, slots, width, *shape, dtype=sample.dtype),
            "y": zeros(window, slots, width, dtype=integers),
            "keys": zeros(window, slots, dtype=integers),
            "lengths": zeros(window, slots, dtype=torch.float64),
            "at": zeros(1, dtype=integers),
        }
        plan = {name: zeros(window, slots, dtype=integers) for name in ("epoch keys", "client keys", "steps")}
        return inputs, {"indices": zeros(window, slots, width, dtype=integers), **plan}


class _Program:
    """Staging and step for one number of slots and one width of batch; the step with and without padding."""

    def __init__(
        self,
        step: _SlotStep,
        staging: _Staging,
        memory: Memory,
        pool: object,
        compile_steps: bool,
        notices: list[str],
    ) -> None:
        self.memory = memory
        self._step, self._staging = step, staging
        self._pool, self._compile, self._notices = pool, compile_steps, notices
        self._stage: Callable[[int], None] | None = None
        self._runs: dict[bool, Callable[[int], None]] = {}
        self._lr = 0.0

    @property
    def window(self) -> int:
        """How many steps' batches are staged at a time."""
        return len(self.memory["inputs"]["y"])

    def of_round(self, work: RoundWork) -> _Program:
        self._lr = work.local.lr
        return self

    def prepare(self, kinds: set[bool]) -> None:
        """Ready the steps that a round will take, before its clients enter: making ready writes into memory."""
        if self._on_gpu:
            kinds = {False}  # the kernels there mask for nothing, and each kind is compiled and captured anew
        for full in kinds - self._runs.keys():
            self._runs[full] = self._ready(replace(self._step, full=full))
        if self._stage is None:
            self._stage = self._ready_staging()

    def stage(self, plan: Mapping[str, npt.NDArray[np.int64]]) -> None:
        """Make the batches of the next steps: at most a window of them."""
        for name, array in plan.items():
            self.memory["plan"][name][: len(array)].copy_(_sendable(array, self._on_gpu), non_blocking=True)
        assert self._stage is not None
        self._stage(len(plan["steps"]))

    def run(self, position: int, full: bool) -> None:
        self._runs.get(full, self._runs.get(False))(position)  # type: ignore[misc]

    @property
    def _on_gpu(self) -> bool:
        return self.memory["inputs"]["at"].device.type == "cuda"

    def _ready(self, step: _SlotStep) -> Callable[[int], None]:
        if not self._on_gpu:
            return lambda position: self._launch(step, position)
        replay = self._replay(step)
        return _ignoring(replay) if replay else (lambda _: step(self.memory))

    def _launch(self, step: _SlotStep, position: int) -> None:
        now = {name: t[position] for name, t in self.memory["inputs"].items() if name != "at"}
        step.descend(self.memory, now, self._lr)

    def _replay(self, step: _SlotStep) -> Callable[[], None] | None:
        if self._compile:
            try:
                return captured(compiled(step, self.memory), self.memory, self._pool)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # a compiler may fail in any way
                self._notice("cannot be compiled, so it runs as it is", error)
        try:
            return captured(replace(step, fused=True), self.memory, self._pool)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            self._notice("cannot be captured as a CUDA graph, so operations are launched one by one", error)
            return None

    def _ready_staging(self) -> Callable[[int], None]:
        if self._on_gpu:
            if self._compile and self._staging.data.compilable:
                with contextlib.suppress(Exception):  # a compiler may fail in any way; what it was given works as well
                    program = compiled(self._staging, self.memory, _LONGEST_EXPRESSION)
                    return _ignoring(captured(program, self.memory, self._pool))
            try:
                return _ignoring(captured(self._staging, self.memory, self._pool))
            except torch.OutOfMemoryError:
                raise
            except RuntimeError:  # an augmentation may wait for the device
                torch.cuda.synchronize()
        return self._stage_now

    def _stage_now(self, steps: int) -> None:
        ahead = {kind: {name: t[:steps] for name, t in self.memory[kind].items()} for kind in ("plan", "inputs")}
        self._staging(self.memory | ahead)

    def _notice(self, what: str, error: Exception) -> None:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        self._notices.append(f"a step of this model or method {what}: {reason}")


def _ignoring(replay: Callable[[], None]) -> Callable[[int], None]:
    return lambda _: replay()


def _sendable(array: npt.NDArray[np.int64], to_gpu: bool) -> Tensor:
    """From pinned memory the host need not wait until the device takes it."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory() if to_gpu else tensor


class _Round:
    """One round through the slots."""

    def __init__(
        self,
        data: DeviceSamples,
        layouts: Layouts,
        program: _Program,
        work: RoundWork,
        plans: Sequence[BatchPlan],
        table: Timetable,
        width: int,
    ) -> None:
        device = data.y.device
        self._data, self._layouts, self._program, self._work, self._table = data, layouts, program, work, table
        self._device, self._plans = device, plans
        self._width = width
        self.full = _all_full(plans, table, width)
        self._label_counts = torch.from_numpy(np.stack([a.label_counts for a in work.assignments])).to(device)
        self._moves = _Moves(table, device)
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
        for time in range(self._table.times):
            if time in self._table.arrivals:
                self._enter(*self._moves.arrivals[time], self._table.arrivals[time].clients)
            if time % self._program.window == 0:
                self._stage(time)
            self._program.run(time % self._program.window, bool(self.full[time]))
            if time in self._table.departures:
                self._leave(*self._moves.departures[time])
        self._without_steps()
        return self._end()

    def begin(self) -> None:
        """The first clients in their slots, their batches staged."""
        self._enter(*self._moves.arrivals[0], self._table.arrivals[0].clients)
        self._stage(0)

    def _stage(self, first: int) -> None:
        """Have the batches of the next steps made."""
        self._program.stage(_scheduled(self._plans, self._table, self._width, first, self._program.window))

    def _enter(self, slots: Places, clients: Places, numbers: npt.NDArray[np.int64]) -> None:
        memory = self._program.memory
        for kind, source in (("params", "sent"), ("buffers", "sent buffers")):
            for name, flat in memory[source].items():
                memory[kind][name][slots] = flat
        for kind in ("velocity", "sums"):
            for tensor in memory[kind].values():
                tensor[slots] = 0
        memory["label_counts"][""][slots] = self._label_counts[clients]
        for name, flat in self._states(numbers).items():
            memory["state"][name][slots] = flat

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
        memory = self._program.memory
        for kind, source in (("params", "sent"), ("buffers", "sent buffers")):
            for name, flat in memory[source].items():
                self._results[kind][name][idle] = flat

    @torch.no_grad()
    def _end(self) -> RoundResult:
        params = self._layouts.params.views(self._results["params"])
        uplink, states = self._all_ends(params)
        visits = np.array([plan.visits for plan in self._plans])
        sums = self._results["sums"]
        return RoundResult(
            trained=ModelState(params, self._layouts.buffers.views(self._results["buffers"])),
            uplink=uplink,
            states=states,
            loss=sums["loss"] / torch.from_numpy(visits).to(sums["loss"]).clamp(min=1),
            tally={name: sums[f"tally {name}"] for name in self._layouts.tally},
            visits=visits,
        )

    def _all_ends(self, params: Tensors) -> tuple[Tensors, Tensors]:
        """What the clients send beside their models, and what they keep: as many at a time as there are slots."""
        dtype = next(iter(params.values())).dtype
        steps = torch.tensor([plan.steps for plan in self._plans], dtype=dtype).to(self._device)
        uplinks, states = [], []
        for numbers in np.array_split(np.arange(len(self._plans)), -(-len(self._plans) // self._table.slots)):
            rows = slice(int(numbers[0]), int(numbers[-1]) + 1)
            own = {name: p[rows] for name, p in params.items()}
            sent, kept = ends(self._work, own, steps[rows], self._label_counts[rows], self._states_again(numbers))
            uplinks.append(sent)
            states.append(kept)
        return _joined(uplinks), _joined(states)

    def _states_again(self, numbers: npt.NDArray[np.int64]) -> Tensors:
        """From the slots, where each client has one to itself; else they were overwritten and are brought anew."""
        arrived = self._table.arrivals[0].clients
        if len(arrived) < len(self._plans):
            return self._layouts.state.views(self._states(numbers))
        slots = torch.from_numpy(np.argsort(arrived)[numbers]).to(self._device)
        return {name: t[slots] for name, t in self._layouts.state.views(self._program.memory["state"]).items()}


class _Moves:
    """Who enters and leaves which slot, by time, on the device: sent there at once, not as a round goes on."""

    def __init__(self, table: Timetable, device: torch.device) -> None:
        events = [*table.arrivals.values(), *table.departures.values()]
        packed = np.concatenate([np.stack([event.slots, event.clients]) for event in events], axis=1)
        self._packed, self._next = torch.from_numpy(packed).to(device), 0
        self.arrivals = {time: self._places(event) for time, event in table.arrivals.items()}
        self.departures = {time: self._places(event) for time, event in table.departures.items()}

    def _places(self, event: Event) -> tuple[Places, Places]:
        columns = slice(self._next, self._next + len(event.slots))
        self._next = columns.stop
        return _place(event.slots, self._packed[0, columns]), _place(event.clients, self._packed[1, columns])


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
    client, step = table.client[first:end], table.step[first:end]
    indices = np.full((*client.shape, width), -1, dtype=np.int64)
    epoch_keys, client_keys = np.zeros_like(client), np.zeros_like(client)
    for slot, number in ((s, n) for s in range(table.slots) for n in np.unique(client[:, s]) if n >= 0):
        times = np.flatnonzero(client[:, slot] == number)
        plan, begin = plans[number], step[times[0], slot]
        indices[times, slot, : plan.width] = plan.rows(begin, begin + len(times))
        epoch_keys[times, slot] = plan.keys(begin, begin + len(times))
        client_keys[times, slot] = plan.client_key
    return {"indices": indices, "epoch keys": epoch_keys, "client keys": client_keys, "steps": step}


def _one_row(tensors: Mapping[str, Tensor]) -> Tensors:
    return {name: t.unsqueeze(0) for name, t in tensors.items()}


def _row(tensors: Tensors) -> Tensors:
    return {name: t[0] for name, t in tensors.items()}


def _joined(parts: Sequence[Tensors]) -> Tensors:
    return parts[0] if len(parts) == 1 else {n: torch.cat([part[n] for part in parts]) for n in parts[0]}
