"""The slots of the stacked engine: memory for a number of clients, kept from round to round."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fedskew.engine.contract import RoundResult, RoundWork, same_parts
from fedskew.engine.data.batches import BatchPlan
from fedskew.engine.data.device import DeviceSamples
from fedskew.engine.model.network import ModelState, Network
from fedskew.engine.stacked.execution import Memory
from fedskew.engine.stacked.layouts import Layouts
from fedskew.engine.stacked.program import Pools, Program, SlotStep, Staging
from fedskew.engine.stacked.round import SlotRound
from fedskew.engine.stacked.schedule import SlotSchedule
from fedskew.methods.parts import Tensors

_STAGED_BYTES = {"cpu": 2 << 20, "cuda": 256 << 20}  # what fits in a cache; what keeps a GPU busy
STAGED_STEPS = 16
"""Steps staged at a time. They are few, so that the device need not wait long for the first."""

_WINDOWS = {"cpu": 1, "cuda": 2}
"""Windows of staged batches in memory: a GPU stages one while it steps through the other."""

_PER_SLOT = ("params", "buffers", "state", "sums", "label_counts")
"""The kinds of memory with a row for each slot, besides the optimiser's state."""


class Slots:
    """Memory for some clients of one kind of work, and the programs that train them."""

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
        self._layouts = Layouts.for_work(work, tally)
        self._work = replace(work, sent=ModelState({}, {}), downlink={}, companions={}, assignments=[])
        self.capacity = capacity
        self._samples = data.some_inputs()
        self._channels_last = self._samples.dim() == 4 and network.prefers_channels_last(self._samples)
        layouts, rows = self._layouts, capacity
        sums = {"loss": torch.zeros(rows, dtype=torch.float64, device=self._device)}
        sums |= {f"tally {n}": torch.zeros(rows, dtype=dtype, device=self._device) for n, dtype in tally.items()}
        self._memory: Memory = {
            "params": layouts.params.zeros(rows, self._device),
            "buffers": layouts.buffers.zeros(rows, self._device),
            "state": layouts.state.zeros(rows, self._device),
            "sums": sums,
            "label_counts": {"": torch.zeros(rows, data.classes, dtype=torch.int64, device=self._device)},
            "rates": {"lr": torch.zeros((), dtype=torch.float32, device=self._device)},
            "data": data.tensors(),
            **layouts.common_memory(work),
            **layouts.optimiser_memory(work.local.optimiser, rows, self._device),
        }
        if any(p.dtype == torch.float64 for p in work.sent.params.values()):
            self._memory["rates"]["lr"] = self._memory["rates"]["lr"].double()
        self._programs: dict[tuple[int, int], Program] = {}
        self._pools = Pools.on(self._device)
        self.notices: list[str] = []

    def fits(self, work: RoundWork, clients: int) -> bool:
        """Whether there is memory for so many clients, and the programs are made for the same parts."""
        return self.capacity >= clients and same_parts(self._work.parts, work.parts)

    def train(self, work: RoundWork, plans: Sequence[BatchPlan], schedule: SlotSchedule, width: int) -> RoundResult:
        program = self._program(work, schedule, width)
        round_ = SlotRound(self._network, self._data, self._layouts, program, work, plans, schedule, width)
        program.prepare(round_.step_forms)
        self._fill_common(work)
        return round_.train()

    def bare_step(
        self, work: RoundWork, plans: Sequence[BatchPlan], schedule: SlotSchedule, width: int
    ) -> Callable[[], None]:
        """A function that repeats one step of the round's first clients on staged batches, for benchmarks."""
        program = self._program(work, schedule, width)
        round_ = SlotRound(self._network, self._data, self._layouts, program, work, plans, schedule, width)
        program.prepare({bool(round_.full[0])})
        self._fill_common(work)
        round_.begin()
        positions = min(program.window, schedule.times)
        state = {"next": 0}

        def step() -> None:
            program.run(state["next"], bool(round_.full[0]))
            state["next"] = (state["next"] + 1) % positions

        return step

    def _fill_common(self, work: RoundWork) -> None:
        """Copy what the server sends to all clients to where the programs read it."""
        for kind, flats in self._layouts.common_memory(work).items():
            for name, flat in flats.items():
                self._memory[kind][name].copy_(flat)
        self._memory["rates"]["lr"].fill_(work.local.lr)

    def _program(self, work: RoundWork, schedule: SlotSchedule, width: int) -> Program:
        slots = schedule.slots
        key = slots, width
        if key not in self._programs:
            memory = {kind: dict(tensors) for kind, tensors in self._memory.items()}
            for kind in (*_PER_SLOT, *work.local.optimiser.state_names):
                memory[kind] = {name: t[:slots] for name, t in self._memory[kind].items()}
            memory["inputs"], memory["plan"] = self._inputs(slots, width, schedule.times)
            step = SlotStep(
                self._network, self._work, self._layouts, self._samples, True, self._channels_last, not self._compile
            )
            staging = Staging(self._data, self._channels_last)
            self._programs[key] = Program(step, staging, memory, self._pools, self._compile, self.notices)
        return self._programs[key].start_round(work)

    def _inputs(self, slots: int, width: int, times: int) -> tuple[Tensors, Tensors]:
        """Memory for the batches of the next steps, and for the indices and keys from which they are made."""
        sample = self._samples[0]
        shape = (*sample.shape[1:], sample.shape[0]) if self._channels_last else sample.shape
        bytes_ = slots * width * sample.numel() * sample.element_size()
        most = max(1, min(STAGED_STEPS, _STAGED_BYTES[self._device.type] // max(bytes_, 1)))
        even = -(-times // -(-times // most))  # windows of equal size, so that the last is not half empty
        window = max(even, min(most, STAGED_STEPS // 2))  # later rounds may be longer than this one

        def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=self._device)

        integers = torch.int64
        staged = _WINDOWS[self._device.type] * window
        inputs = {
            "x": zeros(staged, slots, width, *shape, dtype=sample.dtype),
            "y": zeros(staged, slots, width, dtype=integers),
            "keys": zeros(staged, slots, dtype=integers),
            "lengths": zeros(staged, slots, dtype=torch.float64),
            "at": zeros(1, dtype=integers),
        }
        plan = {name: zeros(window, slots, dtype=integers) for name in ("epoch keys", "client keys", "steps")}
        return inputs, {"indices": zeros(window, slots, width, dtype=integers), **plan}
