"""The stacked engine: all of a round's clients as one tensor program.

Parameters carry a leading client axis: a row of memory, a *slot*, for each client that trains at the time
(`timetable`, `slots`). A step of all slots is one program (`local_step`), on a GPU captured as a CUDA graph
(`execution`). A client's short last batch is padded; padded rows have the target `IGNORE`, which losses and BatchNorm
do not count.
"""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedskew.engine.contract import Assignment, Engine, RoundResult, RoundWork
from fedskew.engine.data.batches import BatchPlan, plan_batches
from fedskew.engine.data.device_samples import DeviceSamples
from fedskew.engine.model.network import Network
from fedskew.engine.passes import Pass, Stack, When, stacked_opening, stacked_sums
from fedskew.engine.plain import PlainEngine
from fedskew.engine.same_parts import same_parts
from fedskew.engine.stacked.device_memory import bytes_taken, spare_bytes
from fedskew.engine.stacked.local_step import Batches, Directions, directions, ends
from fedskew.engine.stacked.slot_layouts import Layouts
from fedskew.engine.stacked.slots import STAGED_STEPS, Slots
from fedskew.engine.stacked.timetable import Timetable, slots_for, timetable
from fedskew.errors import UserError
from fedskew.losses import IGNORE
from fedskew.methods.parts import Outputs, Part, Seen, Tensors
from fedskew.randomness import fold

T = TypeVar("T")

_WHEN: tuple[When, ...] = ("opening", "closing")

_CPU_CACHE, _FEWEST_ON_CPU = 8 << 20, 4
"""Bytes of parameters, and clients, up to which stacking more at a time pays on a CPU."""


@dataclass(frozen=True)
class _Ability:
    """What was found out about a kind of work by trying it."""

    stackable: bool
    paddable: bool = False
    """Whether padded rows are left out of account."""
    tally: Mapping[str, torch.dtype] | None = None
    most: int = 1
    """How many clients to train at a time, in whichever round."""
    fitting: int = sys.maxsize
    """How many fit the device's memory at a time."""


class StackedEngine(Engine):
    """Trains a round's clients together."""

    name = "stacked"

    def __init__(
        self,
        network: Network,
        data: DeviceSamples,
        smallest_batch: int = 1,
        *,
        compile_steps: bool = False,
        most_slots: int | None = None,
    ) -> None:
        """`most_slots` trains no more clients at a time, even if more would fit."""
        self._network = network
        self._data = data
        self._smallest = smallest_batch
        self._compile = compile_steps and data.y.device.type == "cuda"
        self._most = most_slots
        self._plain = PlainEngine(network, data, smallest_batch)
        self._abilities: dict[str, tuple[Sequence[Part], _Ability]] = {}
        self._slots: tuple[str, Slots] | None = None
        self._prefetched: tuple[RoundWork, list[BatchPlan]] | None = None
        self.notices: list[str] = []
        self._said: set[str] = set()

    def prefetch(self, work: RoundWork) -> None:
        """Draw the first batches of a round that will probably come, while the device is busy with the one before."""
        plans = work.plans(self._smallest)
        for plan in plans:
            plan.draw(min(plan.steps, STAGED_STEPS))
        self._prefetched = work, plans

    def _plans(self, work: RoundWork) -> list[BatchPlan]:
        prefetched, self._prefetched = self._prefetched, None
        return prefetched[1] if prefetched is not None and prefetched[0] is work else work.plans(self._smallest)

    def train(self, work: RoundWork) -> RoundResult:
        plans = self._plans(work)
        if not any(plan.steps for plan in plans):
            return self._plain.train(work)
        opened = self._opened(work, plans)
        ability = _Ability(stackable=False) if opened is None else self._ability(opened, plans)
        if opened is None or not ability.stackable or (_pads(plans) and not ability.paddable):
            return self._plain.train(work)
        return self._on_slots(opened, plans, lambda slots, table, width: slots.train(opened, plans, table, width))

    def bare_step(self, work: RoundWork) -> tuple[Callable[[], None], int]:
        """One step of the clients that train at a time, again and again on the same batches, and how many they are:
        for measurements."""
        plans = work.plans(self._smallest)
        work = stacked_opening(self._network, self._data, work, plans)
        return self._on_slots(
            work, plans, lambda slots, table, width: (slots.bare_step(work, plans, table, width), table.slots)
        )

    def _opened(self, work: RoundWork, plans: Sequence[BatchPlan]) -> RoundWork | None:
        """The work with its opening pass made; None if that cannot be stacked."""
        try:
            return stacked_opening(self._network, self._data, work, plans)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # of a user's hook, as in `_tried`
            self._note_unstackable(error)
            return None

    # -- slots -------------------------------------------------------------------------------------------

    def _on_slots(self, work: RoundWork, plans: Sequence[BatchPlan], do: Callable[[Slots, Timetable, int], T]) -> T:
        steps = [plan.steps for plan in plans]
        while True:
            ability = self._ability(work, plans)
            most = min(ability.most, ability.fitting, len(plans))
            number = slots_for(steps, most, coarse=self._compile)
            with contextlib.suppress(torch.OutOfMemoryError):  # it would hold what the attempt took
                width = self._width(work, plans, ability)
                return do(self._slots_for(work, ability, most), timetable(steps, number), width)
            if number == 1:
                raise UserError(
                    f"one client's step does not fit the memory of {self._data.y.device}; "
                    "expected a smaller model or batch_size"
                )
            self._make_room(work, number // 2)

    def _slots_for(self, work: RoundWork, ability: _Ability, capacity: int) -> Slots:
        kind = _kind(work)
        if self._slots is None or self._slots[0] != kind or not self._slots[1].suit(work, capacity):
            self._slots = None  # the old ones' memory first
            slots = Slots(self._network, self._data, work, ability.tally or {}, capacity, self._compile)
            slots.notices = self.notices
            self._slots = kind, slots
        return self._slots[1]

    def _make_room(self, work: RoundWork, most: int) -> None:
        kind = _kind(work)
        parts, ability = self._abilities[kind]
        self._abilities[kind] = parts, replace(ability, fitting=most)
        self._slots = None
        gc.collect()
        torch.cuda.empty_cache()

    def _width(self, work: RoundWork, plans: Sequence[BatchPlan], ability: _Ability) -> int:
        """Of a batch; on a GPU from a handful of numbers, for each is captured anew."""
        width = plans[0].width
        if self._data.y.device.type == "cpu" or not ability.paddable:
            return width
        return min(work.local.batch_size, 1 << (width - 1).bit_length())

    # -- what a kind of work allows ------------------------------------------------------------------------

    def _ability(self, work: RoundWork, plans: Sequence[BatchPlan]) -> _Ability:
        """Whether this objective, solver and model can be stacked, and whether they leave padded rows out of account.

        One step of one client, alone and padded with rows that must not count, tells both.
        """
        kind = _kind(work)
        parts, ability = self._abilities.get(kind, ((), _Ability(stackable=False)))
        if not same_parts(parts, work.parts):
            ability = self._tried(work, plans)
            self._abilities[kind] = work.parts, ability
        if ability.stackable and not ability.paddable and _pads(plans):
            self._notice("this model or method counts padded rows, so clients with short batches run one after another")
        if ability.stackable and ability.fitting < min(ability.most, len(plans)):
            self._notice(f"the round's clients do not fit the memory together: {ability.fitting} are trained at a time")
        return ability

    def _tried(self, work: RoundWork, plans: Sequence[BatchPlan]) -> _Ability:
        try:
            trial = _Trial(self._network, self._data, work)
            tally, paddable = trial.tally(), trial.padding_is_harmless()
            fitting = self._fitting(work, lambda clients: trial.step(clients, plans[0].width))
        except Exception as error:  # a user's model or method may fail in any way; if it is wrong, plain will say so
            self._note_unstackable(error)
            return _Ability(stackable=False)
        return _Ability(True, paddable, tally, self._most_clients(work), fitting)

    def _most_clients(self, work: RoundWork) -> int:
        """How many clients train at a time: on a CPU no more than its cache holds."""
        most = sys.maxsize if self._most is None else self._most
        if self._data.y.device.type == "cpu":
            each = max(Layouts.of(work, {}).params.row_bytes, 1)
            most = min(most, max(_FEWEST_ON_CPU, _CPU_CACHE // each))
        return most

    def _fitting(self, work: RoundWork, step: Callable[[int], object]) -> int:
        """How many fit, by what a step of one and of two clients takes beside what each keeps."""
        spare = spare_bytes(self._data.y.device)
        if spare is None:
            return sys.maxsize
        clients, layouts = len(work.assignments), Layouts.of(work, {})
        try:
            one, two = (bytes_taken(partial(step, number), self._data.y.device) for number in (1, 2))
        except torch.OutOfMemoryError:
            return 1
        shaped = 3 + len(work.local.optimiser.shaped_state)
        each = max(two - one, one // 2) + shaped * layouts.params.row_bytes
        each += 2 * layouts.buffers.row_bytes + layouts.state.row_bytes
        of_round = layouts.params.row_bytes + layouts.buffers.row_bytes + 2 * layouts.state.row_bytes
        return max(1, (spare - clients * of_round) // max(each, 1))

    def _note_unstackable(self, error: Exception) -> None:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        self._notice(f"this model or method cannot be stacked, clients run one after another: {reason}")

    def _notice(self, line: str) -> None:
        if line not in self._said:
            self._said.add(line)
            self.notices.append(line)


class _Trial:
    """Steps that change nothing, to see what they do."""

    def __init__(self, network: Network, data: DeviceSamples, work: RoundWork) -> None:
        self._network, self._data, self._work = network, data, work
        largest = max(work.assignments, key=lambda a: len(a.samples))
        self._few = replace(largest, samples=largest.samples[:3])

    def tally(self) -> dict[str, torch.dtype]:
        """What the objective tallies; an error if its step cannot be stacked."""
        found = self._directions(1, self._few.samples, len(self._few.samples))
        params = {name: p.unsqueeze(0) for name, p in self._work.sent.params.items()}
        steps = torch.ones(1, dtype=next(iter(params.values())).dtype, device=self._data.y.device)
        ends(self._work, params, steps, *self._belongings(1), self._closing(params))
        return {name: t.dtype for name, t in found.tally.items()}

    def _closing(self, params: Tensors) -> Tensors:
        """What the closing pass of one client comes to."""
        this, work = Pass(self._work, "closing"), self._work
        if not this.wanted:
            return {}
        few = self._few.samples
        plan = plan_batches(few, self._few.client, 1, max(len(few), 1), 1, work.key)
        buffers = {name: b.unsqueeze(0) for name, b in work.sent.buffers.items()}
        return stacked_sums(self._network, self._data, this, Stack([plan], params, buffers, *self._belongings(1)))

    def step(self, clients: int, width: int) -> Directions:
        """A step of so many clients with batches of that width."""
        rows = np.resize(self._few.samples, width)
        return self._directions(clients, rows, width)

    def padding_is_harmless(self) -> bool:
        """Whether padded rows count for nothing, however few samples tell; and, before, whether a step can be stacked.

        That what they hold does not count is seen in the step, to its last digits: a row of weight zero adds exactly
        nothing. That their number does not count is asked of the objective alone, for a network's outputs on a batch
        of another shape are rounded otherwise, and a deep one amplifies that beyond telling.
        """
        samples = self._few.samples
        padded, otherwise_padded = (
            self._directions(1, np.concatenate([samples, [row] * 3]), len(samples)).direction
            for row in (0, len(self._data) - 1)
        )
        same = _close(padded, otherwise_padded, 10 * self._network.resolution)
        return same and self._number_does_not_count(self._few)

    def _directions(self, clients: int, rows: npt.NDArray[np.int64], valid_rows: int) -> Directions:
        """The step on these rows of the data, of which the first `valid_rows` count."""
        work, device = self._work, self._data.y.device
        indices = torch.tensor(rows, dtype=torch.int64, device=device).expand(clients, -1)
        valid = torch.arange(len(rows), device=device).expand(clients, -1) < valid_rows
        keys = torch.arange(clients, device=device)
        label_counts, state = self._belongings(clients)
        batches = Batches(
            x=self._data.training_inputs(indices, keys.unsqueeze(-1)),
            y=torch.where(valid, self._data.y[indices], IGNORE),
            valid=valid,
            keys=fold(keys, 0),
            label_counts=label_counts,
            state=state,
        )
        params = {name: _copies(p, clients) for name, p in work.sent.params.items()}
        buffers = {name: _copies(b, clients) for name, b in work.sent.buffers.items()}
        with torch.no_grad():
            return directions(self._network, work, batches, params, buffers, self._data.some_inputs())

    def _belongings(self, clients: int) -> tuple[Tensor, Tensors]:
        """Label counts and state, of one client again and again."""
        device = self._data.y.device
        state = {name: _copies(t.to(device), clients) for name, t in self._few.state.items()}
        return _copies(torch.tensor(self._few.label_counts, device=device), clients), state

    def _number_does_not_count(self, few: Assignment) -> bool:
        """Whether the objective and its gradient are the same with padded rows behind given outputs and without."""
        work, device, samples = self._work, self._data.y.device, len(few.samples)
        rows = torch.from_numpy(np.tile(few.samples, 2)).to(device)
        with torch.no_grad():
            out = self._network.forward(work.sent.params, work.sent.buffers, self._data.inputs(rows)).tensors()
        y = torch.where(torch.arange(len(rows), device=device) < samples, self._data.y[rows], IGNORE)
        state = {name: t.to(device) for name, t in few.state.items()}
        client = work.client(torch.tensor(few.label_counts, device=device), state)

        def told(count: int) -> Tensors:
            leaves = {kind: t[:count].clone().requires_grad_() for kind, t in out.items()}
            others = {kind: t[:count].roll(1, dims=-1) for kind, t in out.items()}  # not to agree with the student
            frozen = {name: Outputs.from_tensors(others) for name in work.objective.companions()}
            loss = work.objective.loss(replace(Outputs.from_tensors(leaves), companions=frozen), y[:count], client)
            grads = torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)
            seen = Seen(
                Outputs.from_tensors({kind: t[:count] for kind, t in out.items()}),
                y[:count],
                rows[:count],
                work.sent.params,
            )
            passes = {f"{when} {n}": t for when in _WHEN for n, t in Pass(work, when).of_batch(seen, client).items()}
            told = {kind: g[:samples] for kind, g in zip(leaves, grads, strict=True)}
            return {"loss": loss.detach(), **told, **passes}

        return _close(told(samples), told(2 * samples), 1000 * torch.finfo(out["logits"].dtype).eps)


def _kind(work: RoundWork) -> str:
    """Works of one kind differ in their clients and numbers only."""
    companions = sorted(work.objective.companions().items())
    given = [sorted((n, t.dtype, t.shape) for n, t in ts.items()) for ts in (work.downlink, work.assignments[0].state)]
    return f"{work.parts!r} {replace(work.local, lr=0.0, epochs=0)!r} {companions!r} {given!r}"


def _pads(plans: Sequence[BatchPlan]) -> bool:
    return any(plan.visits < plan.steps * plan.width for plan in plans)


def _copies(tensor: Tensor, clients: int) -> Tensor:
    return tensor.expand(clients, *tensor.shape).clone()


def _close(a: Tensors, b: Tensors, tolerance: float) -> bool:
    """Whether tensors differ by rounding alone; numbers that are not finite in both do not differ."""
    return _norm({n: a[n].nan_to_num() - b[n].nan_to_num() for n in a}) <= tolerance * _norm(a) + 1e-20


def _norm(tensors: Tensors) -> float:
    return float(torch.stack([t.double().nan_to_num().square().sum() for t in tensors.values()]).sum().sqrt())
