"""The stacked engine trains many of a round's clients at a time, as one tensor program.

Each client trains in a *slot*, a row of memory that is kept from one round to the next (`Slots`, `round.py`). A step of
all slots is one program (`local_step.py`). If possible, a CUDA GPU runs this program as a CUDA graph
(`graph_program.py`). A short batch is padded with rows whose target is `IGNORE`. Losses and BatchNorm ignore them.
"""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TypeVar

import torch
from torch import Tensor

from fedskew.accurate_sums import ACCURATE
from fedskew.engine.contract import Engine, RoundResult, RoundWork, same_parts
from fedskew.engine.data.batches import BatchPlan
from fedskew.engine.data.device import DeviceSamples
from fedskew.engine.data_passes import with_opening_pass
from fedskew.engine.model.lifting import host_random_streams
from fedskew.engine.model.network import ModelState, Network
from fedskew.engine.plain import PlainEngine
from fedskew.engine.stacked.execution import Memory
from fedskew.engine.stacked.graph_program import GraphProgram, Pools
from fedskew.engine.stacked.layouts import Layouts
from fedskew.engine.stacked.local_step import KEY_COLUMNS, Program, SlotStep, Staging
from fedskew.engine.stacked.round import SlotRound, SlotSchedule, choose_slots, make_schedule
from fedskew.engine.stacked.trial import Trial, bytes_taken, spare_bytes
from fedskew.errors import UserError
from fedskew.methods.parts import Part, Tensors

T = TypeVar("T")

_CPU_CACHE = 8 << 20
"""On a CPU, the parameters of all clients that train at a time should take at most this many bytes."""
_MIN_ON_CPU = 4
"""On a CPU, this many clients may train at a time even if their parameters take more than `_CPU_CACHE` bytes."""

_STAGED_BYTES = {"cpu": 2 << 20, "cuda": 256 << 20, "mps": 256 << 20}
"""The maximum number of bytes in the batches that are staged (`Staging`) at a time, unless a single step has more.

These batches fit in a CPU's cache, or are enough to keep a GPU busy."""
STAGED_STEPS = 16
"""The maximum number of steps whose batches are staged at a time. It is small, so that the first step starts soon."""

_WINDOWS = {"cpu": 1, "cuda": 2, "mps": 1}
"""The batches of several steps, a *window*, are staged at once. This is the number of windows in memory.

A CUDA GPU stages one window while it steps through the other."""

_PER_SLOT = ("params", "buffers", "state", "sums", "label_counts")
"""The kinds of memory with a row for each slot, besides the optimiser's state."""


class Slots:
    """Memory for some clients, and the programs that train them, for all rounds of one kind (`_work_kind`)."""

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
        sums = {"loss": torch.zeros(rows, dtype=ACCURATE[self._device.type], device=self._device)}
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
            **layouts.optimiser_memory(work.local.local_optimiser, rows, self._device),
        }
        if any(p.dtype == torch.float64 for p in work.sent.params.values()):
            self._memory["rates"]["lr"] = self._memory["rates"]["lr"].double()
        self._programs: dict[tuple[int, int], Program] = {}
        self._pools = Pools.new() if self._device.type == "cuda" else None
        self.notices: list[str] = []

    def fits(self, work: RoundWork, clients: int) -> bool:
        """Return whether there is memory for this many clients, and whether the programs are for the work's parts."""
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
        """Return a function that takes one step of the round's first clients, for benchmarks.

        Its calls go through the first staged batches again and again.
        """
        program = self._program(work, schedule, width)
        round_ = SlotRound(self._network, self._data, self._layouts, program, work, plans, schedule, width)
        program.prepare({bool(round_.full[0])})
        self._fill_common(work)
        round_.begin()
        positions = min(program.window_size, schedule.times)
        state = {"next": 0}

        def step() -> None:
            program.run(state["next"], bool(round_.full[0]))
            state["next"] = (state["next"] + 1) % positions

        return step

    def _fill_common(self, work: RoundWork) -> None:
        """Copy what all clients have in common, such as the server's model, into the programs' memory."""
        for kind, flats in self._layouts.common_memory(work).items():
            for name, flat in flats.items():
                self._memory[kind][name].copy_(flat)
        self._memory["rates"]["lr"].fill_(work.local.lr)

    def _program(self, work: RoundWork, schedule: SlotSchedule, width: int) -> Program:
        slots = schedule.slots
        key = slots, width
        if key not in self._programs:
            memory = {kind: dict(tensors) for kind, tensors in self._memory.items()}
            for kind in (*_PER_SLOT, *work.local.local_optimiser.state_names):
                memory[kind] = {name: t[:slots] for name, t in self._memory[kind].items()}
            memory["inputs"], memory["plan"] = self._inputs(slots, width, schedule.times)
            step = SlotStep(
                self._network,
                self._work,
                self._layouts,
                self._samples,
                full=True,
                channels_last=self._channels_last,
                use_kernel=not self._compile,
            )
            staging = Staging(self._data, self._channels_last)
            if self._pools is None:
                self._programs[key] = Program(step, staging, memory)
            else:
                self._programs[key] = GraphProgram(step, staging, memory, self._pools, self._compile, self.notices)
        return self._programs[key].start_round(work)

    def _inputs(self, slots: int, width: int, times: int) -> tuple[Tensors, Tensors]:
        """Allocate memory for the batches of the next steps, and for the indices and keys from which they are made."""
        sample = self._samples[0]
        shape = (*sample.shape[1:], sample.shape[0]) if self._channels_last else sample.shape
        bytes_ = slots * width * sample.numel() * sample.element_size()
        longest = max(1, min(STAGED_STEPS, _STAGED_BYTES[self._device.type] // max(bytes_, 1)))
        even = -(-times // -(-times // longest))  # windows of equal size, so that the last one is not half empty
        window = max(even, min(longest, STAGED_STEPS // 2))  # later rounds may be longer than this one

        def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=self._device)

        integers = torch.int64
        staged = _WINDOWS[self._device.type] * window
        inputs = {
            "x": zeros(staged, slots, width, *shape, dtype=sample.dtype),
            "y": zeros(staged, slots, width, *self._data.y.shape[1:], dtype=integers),
            "keys": zeros(staged, slots, dtype=integers),
            "lengths": zeros(staged, slots, dtype=ACCURATE[self._device.type]),
            "at": zeros(1, dtype=integers),
        }
        return inputs, {"": zeros(window, slots, width + KEY_COLUMNS, dtype=integers)}


@dataclass(frozen=True)
class _Ability:
    """What the engine can do with the work of all rounds of one kind (`_work_kind`)."""

    stackable: bool
    paddable: bool = False
    """Whether the model and the method ignore padding."""
    tally: Mapping[str, torch.dtype] | None = None
    max_clients: int = 1
    """The maximum number of clients to train at a time, in any round."""
    fitting: int = sys.maxsize
    """An estimate of the number of clients that fit in memory. It is reduced if memory runs out."""


class StackedEngine(Engine):
    """Trains a round's clients together, or one after another if they cannot be stacked."""

    name = "stacked"

    def __init__(
        self,
        network: Network,
        data: DeviceSamples,
        smallest_batch: int = 1,
        *,
        compile_steps: bool = False,
        max_slots: int | None = None,
    ) -> None:
        """`max_slots` is the maximum number of clients that train at a time."""
        self._network = network
        self._data = data
        self._smallest = smallest_batch
        self._compile = compile_steps and data.y.device.type == "cuda"
        self._max_slots = max_slots
        self._abilities: dict[str, tuple[Sequence[Part], _Ability]] = {}
        """The method's parts and the engine's ability, by kind of work (`_work_kind`)."""
        self._slots: dict[int, tuple[str, Slots]] = {}
        """Kind of work and slots, by phase of the local training. Methods without a personal part have one phase."""
        self._prefetched: tuple[RoundWork, list[BatchPlan]] | None = None
        self.notices: list[str] = []
        self._noticed: set[str] = set()

    @cached_property
    def _plain(self) -> PlainEngine:
        """Trains what cannot be stacked."""
        return PlainEngine(self._network, self._data, self._smallest)

    def prefetch(self, work: RoundWork) -> None:
        """Draw the first batches of the round that probably comes next."""
        plans = work.batch_plans(self._smallest, self._data)
        for plan in plans:
            plan.draw(min(plan.steps, STAGED_STEPS))
        self._prefetched = work, plans

    def _plans(self, work: RoundWork) -> list[BatchPlan]:
        prefetched, self._prefetched = self._prefetched, None
        if prefetched is not None and prefetched[0] is work:
            return prefetched[1]
        return work.batch_plans(self._smallest, self._data)

    def train(self, work: RoundWork) -> RoundResult:
        plans = self._plans(work)
        if work.local.is_private:
            self._notice("example-level privacy computes gradients sample by sample, so clients run one after another")
        if work.local.is_private or not any(plan.steps for plan in plans):
            return self._plain.train(work)
        opened = self._try_opening_pass(work, plans)
        ability = _Ability(stackable=False) if opened is None else self._find_ability(opened, plans)
        if opened is None or not ability.stackable or (_have_short_batches(plans) and not ability.paddable):
            return self._plain.train(work)
        return self._on_slots(opened, plans, lambda slots, schedule, width: slots.train(opened, plans, schedule, width))

    def bare_step(self, work: RoundWork) -> tuple[Callable[[], None], int]:
        """Return a function that takes one step on staged batches, and its number of clients, for benchmarks."""
        plans = work.batch_plans(self._smallest, self._data)
        work = self._with_opening_pass(work, plans)
        return self._on_slots(
            work, plans, lambda slots, schedule, width: (slots.bare_step(work, plans, schedule, width), schedule.slots)
        )

    def _with_opening_pass(self, work: RoundWork, plans: Sequence[BatchPlan]) -> RoundWork:
        return with_opening_pass(self._network, self._data, work, plans) if work.needs_pass("opening") else work

    def _try_opening_pass(self, work: RoundWork, plans: Sequence[BatchPlan]) -> RoundWork | None:
        """Run the opening pass, if there is one, and return the work. Return None if the pass cannot be stacked."""
        try:
            return self._with_opening_pass(work, plans)
        except (torch.OutOfMemoryError, UserError):
            raise
        except Exception as error:  # a user's hook may fail in any way, as in `_try_work`
            self._note_unstackable(error)
            return None

    # -- slots -------------------------------------------------------------------------------------------

    def _on_slots(self, work: RoundWork, plans: Sequence[BatchPlan], do: Callable[[Slots, SlotSchedule, int], T]) -> T:
        """Call `do` with slots for the work. If memory runs out, try again with half as many slots."""
        steps = [plan.steps for plan in plans]
        while True:
            ability = self._find_ability(work, plans)
            max_slots = min(ability.max_clients, ability.fitting, len(plans))
            number = choose_slots(steps, max_slots, coarse=self._compile)
            with contextlib.suppress(torch.OutOfMemoryError):  # in an `except` block, the error would keep memory alive
                width = self._width(work, plans, ability)
                return do(self._slots_for(work, ability, max_slots), make_schedule(steps, number), width)
            if number == 1:
                raise UserError(
                    f"the round does not fit in the memory of {self._data.y.device}, "
                    "although clients train one at a time; "
                    "expected a smaller model or batch_size, or fewer clients per round"
                )
            self._limit_clients(work, number // 2)

    def _slots_for(self, work: RoundWork, ability: _Ability, capacity: int) -> Slots:
        kind = _work_kind(work)
        phase = work.key.phase
        if phase not in self._slots or self._slots[phase][0] != kind or not self._slots[phase][1].fits(work, capacity):
            self._slots.pop(phase, None)  # free the old memory first
            slots = Slots(self._network, self._data, work, ability.tally or {}, capacity, self._compile)
            slots.notices = self.notices
            self._slots[phase] = kind, slots
        return self._slots[phase][1]

    def _limit_clients(self, work: RoundWork, fitting: int) -> None:
        kind = _work_kind(work)
        parts, ability = self._abilities[kind]
        self._abilities[kind] = parts, replace(ability, fitting=fitting)
        self._slots = {}
        gc.collect()
        torch.cuda.empty_cache()

    def _width(self, work: RoundWork, plans: Sequence[BatchPlan], ability: _Ability) -> int:
        """Return the number of rows of a batch, with padding.

        On a GPU, if the work ignores padding, the number is a power of two or the batch size, because each number needs
        its own CUDA graph.
        """
        width = plans[0].width
        if self._data.y.device.type == "cpu" or not ability.paddable:
            return width
        return min(work.local.batch_size, 1 << (width - 1).bit_length())

    # -- what the work allows ------------------------------------------------------------------------------

    def _find_ability(self, work: RoundWork, plans: Sequence[BatchPlan]) -> _Ability:
        """Find out whether this work can be stacked, whether it ignores padding, and how many clients fit in memory.

        Trial steps give the answers (`Trial`), which are kept for later rounds.
        """
        kind = _work_kind(work)
        parts, ability = self._abilities.get(kind, ((), _Ability(stackable=False)))
        if not same_parts(parts, work.parts):
            ability = self._try_work(work, plans)
            self._abilities[kind] = work.parts, ability
        if ability.stackable and not ability.paddable and _have_short_batches(plans):
            self._notice(
                "this model or method depends on rows of padding, "
                "so clients run one after another in rounds with short batches"
            )
        elif ability.stackable and ability.fitting < min(ability.max_clients, len(plans)):
            self._notice(f"the round's clients do not all fit in memory; they train up to {ability.fitting} at a time")
        return ability

    def _try_work(self, work: RoundWork, plans: Sequence[BatchPlan]) -> _Ability:
        try:
            trial = Trial(self._network, self._data, work)
            trial.compile_kernels(plans[0].width)
            streams = host_random_streams()
            tally, paddable = trial.tally_dtypes(), trial.ignores_padding()
            if streams != host_random_streams():
                raise RuntimeError(
                    "the model or method draws from the generators of Python or numpy, once for all clients"
                )
            fitting = self._fitting(work, lambda clients: trial.step(clients, plans[0].width))
        except UserError:
            raise
        except Exception as error:  # a user's code may fail in any way, and a bug shows again in the plain engine
            self._note_unstackable(error)
            return _Ability(stackable=False)
        return _Ability(True, paddable, tally, self._max_clients(work), fitting)

    def _max_clients(self, work: RoundWork) -> int:
        """Return the maximum number of clients at a time. On a CPU, their parameters should fit in its cache."""
        maximum = sys.maxsize if self._max_slots is None else self._max_slots
        if self._data.y.device.type == "cpu":
            each = max(Layouts.for_work(work, {}).params.row_bytes, 1)
            maximum = min(maximum, max(_MIN_ON_CPU, _CPU_CACHE // each))
        return maximum

    def _fitting(self, work: RoundWork, step: Callable[[int], object]) -> int:
        """Estimate how many clients fit in memory, from the memory of a step with one client and of a step with two."""
        spare = spare_bytes(self._data.y.device)
        if spare is None:
            return sys.maxsize
        clients, layouts = len(work.assignments), Layouts.for_work(work, {})
        try:
            one, two = (bytes_taken(partial(step, number), self._data.y.device) for number in (1, 2))
        except torch.OutOfMemoryError:
            return 1
        params, buffers, state = (rows.row_bytes for rows in (layouts.params, layouts.buffers, layouts.state))
        step_bytes = max(two - one, one // 2)  # what a second client adds, but at least half of what one takes
        slot_bytes = params * (1 + len(work.local.local_optimiser.shaped_state)) + buffers + state
        update_bytes = 2 * params + buffers  # the direction as one flat row, and the new parameters and buffers
        per_slot = step_bytes + slot_bytes + update_bytes
        per_result = params + buffers + 2 * state  # the state before and after the round
        return max(1, (spare - clients * per_result) // max(per_slot, 1))

    def _note_unstackable(self, error: Exception) -> None:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        self._notice(f"this model or method cannot be stacked, so clients run one after another: {reason}")

    def _notice(self, line: str) -> None:
        if line not in self._noticed:
            self._noticed.add(line)
            self.notices.append(line)


def _work_kind(work: RoundWork) -> str:
    """Return a text that is equal for rounds that can share programs and memory.

    Rounds of one kind may differ in their clients, learning rate, epochs, random numbers and values of tensors.
    """
    companions = sorted(work.objective.companions().items())
    shapes = [sorted((n, t.dtype, t.shape) for n, t in ts.items()) for ts in (work.downlink, work.assignments[0].state)]
    # Phases of local training differ in the parameters that they train. The others are among the buffers.
    fixed = sorted(work.personal_names & work.sent.buffers.keys()), len(work.sent.params)
    return f"{work.parts!r} {replace(work.local, lr=0.0, epochs=0)!r} {companions!r} {shapes!r} {fixed!r}"


def _have_short_batches(plans: Sequence[BatchPlan]) -> bool:
    """Return whether a client has a short batch, which must be padded."""
    return any(plan.visits < plan.steps * plan.width for plan in plans)
