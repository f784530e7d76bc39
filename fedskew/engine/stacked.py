"""The stacked engine: all of a round's clients as one tensor program.

Parameters carry a leading client axis. The model is one program over all clients (`lifting`), the objective of one
client is lifted by `torch.func.vmap`, and one backward pass of the sum gives every client its own gradient. Clients
are sorted by their number of steps; those that are done leave the stack, so that nobody waits or pads for them. A
client's short last batch is padded; padded rows have the target `IGNORE`, which losses and BatchNorm do not count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedskew.engine.batches import BatchPlan
from fedskew.engine.device_data import DeviceSamples
from fedskew.engine.network import ModelState, Network
from fedskew.engine.plain import PlainEngine
from fedskew.engine.work import Assignment, RoundResult, RoundWork, clipped, companion, companion_key, sgd_
from fedskew.losses import IGNORE
from fedskew.methods.parts import Client, Mode, Outputs, Solver, Tensors, Trained
from fedskew.randomness import fold

Rows = slice | Tensor


class StackedEngine:
    """Trains a round's clients together."""

    name = "stacked"

    def __init__(self, network: Network, data: DeviceSamples, smallest_batch: int = 1) -> None:
        self._network = network
        self._data = data
        self._smallest = smallest_batch
        self._plain = PlainEngine(network, data, smallest_batch)
        self._abilities: dict[str, tuple[bool, bool]] = {}
        self.notices: list[str] = []

    def train(self, work: RoundWork) -> RoundResult:
        plans = work.plans(self._smallest)
        if not any(plan.steps for plan in plans):
            return self._plain.train(work)
        stackable, paddable = self._probe(work)
        if not stackable:
            return self._plain.train(work)
        order = np.argsort([-plan.steps for plan in plans], kind="stable")
        sorted_work = replace(work, assignments=[work.assignments[i] for i in order])
        stack = _Stack(self._network, self._data, sorted_work, [plans[i] for i in order], paddable)
        return _reordered(stack.train(), np.argsort(order))

    def _probe(self, work: RoundWork) -> tuple[bool, bool]:
        """Whether this objective, solver and model can be stacked, and whether they leave padded rows out of account.

        One step of one client, alone and padded with rows that must not count, tells both.
        """
        kind = f"{work.objective!r} {work.solver!r} {work.server!r}"
        if kind not in self._abilities:
            try:
                self._abilities[kind] = (True, self._padding_is_harmless(work))
            except (RuntimeError, ValueError, TypeError, IndexError) as error:
                reason = str(error).strip().splitlines()[0]
                self._notice(f"this model or method cannot be stacked, clients run one after another: {reason}")
                self._abilities[kind] = (False, False)
            else:
                if not self._abilities[kind][1]:
                    self._notice("this model or method counts padded rows, so short batches run apart (slower)")
        return self._abilities[kind]

    def _notice(self, line: str) -> None:
        if line not in self.notices:
            self.notices.append(line)

    def _padding_is_harmless(self, work: RoundWork) -> bool:
        """Whether padded rows count for nothing, however few samples tell; and, before, whether a step can be stacked.

        That what they hold does not count is seen in the step, to its last digits: a row of weight zero adds exactly
        nothing. That their number does not count is asked of the objective alone, for a network's outputs on a batch
        of another shape are rounded otherwise, and a deep one amplifies that beyond telling.
        """
        largest = max(work.assignments, key=lambda a: len(a.samples))
        few = replace(largest, samples=largest.samples[:3])
        one_step = replace(work, assignments=[few], local=replace(work.local, epochs=1, batch_size=len(few.samples)))
        plan = one_step.plans(1)[0]
        _Stack(self._network, self._data, one_step, [plan], True).train()
        padded, otherwise_padded = (self._padded_direction(one_step, plan, row) for row in (0, len(self._data) - 1))
        return _close(padded, otherwise_padded, 10 * self._network.resolution) and self._number_does_not_count(
            work, few
        )

    def _padded_direction(self, one_step: RoundWork, plan: BatchPlan, row: int) -> Tensors:
        """The step with a batch to which `row` of the data was added three times as padding."""
        indices = np.concatenate([plan.indices, np.full((1, 3), -1, dtype=np.int64)], axis=1)
        padded = replace(plan, indices=indices)
        return _Stack(self._network, self._data, one_step, [padded], True, row).directions(slice(0, 1), 0)[0]

    def _number_does_not_count(self, work: RoundWork, few: Assignment) -> bool:
        """Whether the objective and its gradient are the same with padded rows behind given outputs and without."""
        device, samples = self._data.y.device, len(few.samples)
        rows = torch.from_numpy(np.tile(few.samples, 2)).to(device)
        with torch.no_grad():
            out = self._network.forward(work.sent.params, work.sent.buffers, self._data.inputs(rows)).tensors()
        y = torch.where(torch.arange(len(rows), device=device) < samples, self._data.y[rows], IGNORE)
        client = Client(torch.tensor(few.label_counts, device=device), work.sent.params, work.downlink, few.state)

        def told(count: int) -> Tensors:
            leaves = {kind: t[:count].clone().requires_grad_() for kind, t in out.items()}
            others = {kind: t[:count].roll(1, dims=-1) for kind, t in out.items()}  # not to agree with the student
            frozen = {name: Outputs.of(others) for name in work.objective.companions()}
            loss = work.objective.loss(replace(Outputs.of(leaves), companions=frozen), y[:count], client)
            grads = torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)
            return {"loss": loss.detach()} | {kind: g[:samples] for kind, g in zip(leaves, grads, strict=True)}

        return _close(told(samples), told(2 * samples), 1000 * torch.finfo(out["logits"].dtype).eps)


class _Stack:
    """The clients of one round, most steps first."""

    def __init__(
        self,
        network: Network,
        data: DeviceSamples,
        work: RoundWork,
        plans: list[BatchPlan],
        paddable: bool,
        padding: int = 0,
    ) -> None:
        device = data.y.device
        clients = len(plans)
        self._network, self._data, self._work = network, data, work
        self._paddable, self._padding = paddable, padding
        self._steps = np.array([plan.steps for plan in plans])
        self._visits = np.array([plan.visits for plan in plans])
        self._lengths = _padded([(plan.indices >= 0).sum(axis=1) for plan in plans], 0)
        self._batch_sizes = torch.from_numpy(self._lengths).to(device, torch.float64)
        self._indices = torch.from_numpy(_padded([plan.indices for plan in plans], -1)).to(device)
        self._epoch_keys = torch.from_numpy(_padded([plan.epoch_keys for plan in plans], 0)).to(device)
        self._keys = torch.tensor([plan.client_key for plan in plans], device=device)
        self._label_counts = torch.from_numpy(np.stack([a.label_counts for a in work.assignments])).to(device)
        self._state = {
            name: torch.stack([a.state[name] for a in work.assignments]) for name in work.assignments[0].state
        }
        self._params = {name: _repeated(p, clients) for name, p in work.sent.params.items()}
        self._buffers = {name: _repeated(b, clients) for name, b in work.sent.buffers.items()}
        self._velocity = {name: torch.zeros_like(p) for name, p in self._params.items()}
        self._loss = torch.zeros(clients, dtype=torch.float64, device=device)
        self._tally: Tensors = {}

    def train(self) -> RoundResult:
        for step in range(int(self._steps.max(initial=0))):
            for rows in self._groups(step):
                self._descend(rows, step)
        uplink, states = self._end()
        visits = torch.from_numpy(self._visits).to(self._loss)
        return RoundResult(
            trained=ModelState(self._params, self._buffers),
            uplink=uplink,
            states=states,
            loss=self._loss / visits.clamp(min=1),
            tally=self._tally,
            visits=self._visits,
        )

    def _groups(self, step: int) -> Iterator[Rows]:
        """The clients that still train, as one stack, or, if padding would count, by the length of their batch."""
        active = int((self._steps > step).sum())
        if self._paddable:
            yield slice(0, active)
            return
        lengths = self._lengths[:active, step]
        for length in np.unique(lengths)[::-1]:
            yield torch.from_numpy(np.flatnonzero(lengths == length)).to(self._indices.device)

    def _descend(self, rows: Rows, step: int) -> None:
        params = {name: p[rows] for name, p in self._params.items()}
        velocity = {name: v[rows] for name, v in self._velocity.items()}
        direction, buffers, loss, tally = self.directions(rows, step)
        sgd_(list(params.values()), list(velocity.values()), [direction[n] for n in params], self._work.local)
        if not isinstance(rows, slice):
            _write(self._params, rows, params)
            _write(self._velocity, rows, velocity)
        _write(self._buffers, rows, buffers)
        self._loss[rows] += loss.double() * self._batch_sizes[rows, step]
        for name, value in tally.items():
            total = self._tally.setdefault(name, torch.zeros(len(self._steps), dtype=value.dtype, device=value.device))
            total[rows] += value

    def directions(self, rows: Rows, step: int) -> tuple[Tensors, Tensors, Tensor, Tensors]:
        """Each client's descent direction, new buffers, loss and tally at one step."""
        batch = self._indices[rows, step]
        if not self._paddable:
            batch = batch[:, : int(self._lengths[_host(rows), step].max())]
        valid = batch >= 0
        batch = torch.where(valid, batch, self._padding)
        x = self._data.training_inputs(batch, self._epoch_keys[rows, step].unsqueeze(-1))
        y = torch.where(valid, self._data.y[batch], IGNORE)
        keys = fold(self._keys[rows], step)
        state = {name: s[rows] for name, s in self._state.items()}
        companions = self._companions(state, x, valid, companion_key(keys))
        params = {name: p[rows] for name, p in self._params.items()}
        buffers = {name: b[rows] for name, b in self._buffers.items()}
        batches = _Batches(x, y, keys, self._label_counts[rows], state, companions)
        return _Directions(self._network, self._work, batches, buffers).of(params)

    @torch.no_grad()
    def _companions(self, state: Tensors, x: Tensor, valid: Tensor, keys: Tensor) -> dict[str, Tensors]:
        return {
            name: self._companion(name, mode, state, x, valid, keys)
            for name, mode in self._work.objective.companions().items()
        }

    def _companion(self, name: str, mode: Mode, state: Tensors, x: Tensor, valid: Tensor, keys: Tensor) -> Tensors:
        """A frozen model's outputs for every client; one that is common to all is not repeated."""
        model = companion(name, self._work, state)
        own = name.startswith("state/")
        if not own and not self._network.mixes_rows(mode, self._some_samples()):
            out = self._network.forward(model.params, model.buffers, x.flatten(0, 1), mode, keys[0])
            return {kind: t.view(*x.shape[:2], *t.shape[1:]) for kind, t in out.tensors().items()}
        clients = len(x)
        params = model.params if own else {n: p.expand(clients, *p.shape) for n, p in model.params.items()}
        buffers = {n: b.expand(clients, *b.shape) for n, b in model.buffers.items()}
        return self._network.forward_stacked(params, buffers, x, valid, mode, keys)[0].tensors()

    def _some_samples(self) -> Tensor:
        """Always the same, so that a resumed run finds what the first one did."""
        rows = torch.linspace(0, len(self._data) - 1, 8, device=self._loss.device)
        return self._data.inputs(rows.long())

    @torch.no_grad()
    def _end(self) -> tuple[Tensors, Tensors]:
        """What the clients send beside their models, and what they keep."""
        work = self._work

        def end(params: Tensors, steps: Tensor, label_counts: Tensor, state: Tensors) -> tuple[Tensors, Tensors]:
            trained = Trained(params, steps, work.local.lr, work.local.momentum)
            return work.end(trained, Client(label_counts, work.sent.params, work.downlink, state))

        dtype = next(iter(self._params.values())).dtype
        steps = torch.from_numpy(self._steps).to(self._loss.device, dtype)
        ends: tuple[Tensors, Tensors] = torch.func.vmap(end)(self._params, steps, self._label_counts, self._state)
        return ends


@dataclass(frozen=True)
class _Batches:
    """One batch of each client, and what its objective uses besides."""

    x: Tensor
    y: Tensor
    keys: Tensor
    label_counts: Tensor
    state: Tensors
    companions: dict[str, Tensors]


class _Directions:
    """Every client's descent direction on its batch."""

    def __init__(self, network: Network, work: RoundWork, batches: _Batches, buffers: Tensors) -> None:
        self._network, self._work, self._batches, self._buffers = network, work, batches, buffers
        self._seen: list[tuple[Tensor, Tensors]] = []

    def of(self, params: Tensors) -> tuple[Tensors, Tensors, Tensor, Tensors]:
        """Directions, new buffers, losses and tallies at these parameters."""
        if type(self._work.solver).direction is Solver.direction:
            direction = self._gradient(params)
            if self._work.local.clip_norm is not None:
                direction = torch.func.vmap(self._clipped)(direction)
        else:
            direction = torch.func.vmap(self._direction)(params, self._batches.label_counts, self._batches.state)
        loss, tally = self._seen[0]
        return direction, self._buffers, loss, tally

    def _direction(self, params: Tensors, label_counts: Tensor, state: Tensors) -> Tensors:
        """One client's direction, which `vmap` lifts; the gradients it asks for are taken for all clients at once."""

        def gradient(at: Tensors) -> Tensors:
            grads = _AllClients.apply(lambda *all_: self._gradient_list(list(at), all_), *at.values())  # type: ignore[no-untyped-call]
            return dict(zip(at, grads, strict=True))

        work = self._work
        client = Client(label_counts, work.sent.params, work.downlink, state)
        return self._clipped(work.solver.direction(gradient, params, client))

    def _clipped(self, direction: Tensors) -> Tensors:
        return clipped(direction, self._work.local.clip_norm)

    def _gradient_list(self, names: list[str], tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(self._gradient(dict(zip(names, tensors, strict=True))).values())

    @torch.enable_grad()
    def _gradient(self, at: Tensors) -> Tensors:
        """Each client's gradient: that of the sum, for no client's loss depends on another's parameters."""
        batches = self._batches
        leaves = {name: p.detach().requires_grad_() for name, p in at.items()}
        valid = batches.y != IGNORE
        out, self._buffers = self._network.forward_stacked(
            leaves, self._buffers, batches.x, valid, "train", batches.keys
        )
        losses, tally = torch.func.vmap(self._loss)(
            out.tensors(), batches.y, batches.label_counts, batches.state, batches.companions
        )
        self._seen.append((losses.detach(), {name: t.detach() for name, t in tally.items()}))
        grads = torch.autograd.grad(losses.sum(), list(leaves.values()), materialize_grads=True)
        return dict(zip(leaves, grads, strict=True))

    def _loss(
        self, out: Tensors, y: Tensor, label_counts: Tensor, state: Tensors, companions: dict[str, Tensors]
    ) -> tuple[Tensor, Tensors]:
        """One client's loss and tally, which `vmap` lifts."""
        work = self._work
        client = Client(label_counts, work.sent.params, work.downlink, state)
        frozen = {name: Outputs.of(tensors) for name, tensors in companions.items()}
        outputs = replace(Outputs.of(out), companions=frozen)
        return work.objective.loss(outputs, y, client), work.objective.tally(outputs, y)


class _AllClients(torch.autograd.Function):
    """Leaves `vmap` for a function of all clients' tensors at once."""

    @staticmethod
    def forward(function: Callable[..., tuple[Tensor, ...]], *tensors: Tensor) -> tuple[Tensor, ...]:  # noqa: ARG004
        raise RuntimeError("called outside vmap")

    @staticmethod
    def setup_context(ctx: object, inputs: object, output: object) -> None:
        """Nothing is kept: no gradient is taken of a gradient."""

    @staticmethod
    def vmap(
        info: Any,
        in_dims: tuple[int | None, ...],
        function: Callable[..., tuple[Tensor, ...]],
        *tensors: Tensor,
    ) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        stacked = [
            t.expand(info.batch_size, *t.shape) if axis is None else t.movedim(axis, 0)
            for t, axis in zip(tensors, in_dims[1:], strict=True)
        ]
        out = function(*stacked)
        return out, (0,) * len(out)


def _close(a: Tensors, b: Tensors, tolerance: float) -> bool:
    """Whether tensors differ by rounding alone; numbers that are not finite in both do not differ."""
    return _norm({n: a[n].nan_to_num() - b[n].nan_to_num() for n in a}) <= tolerance * _norm(a) + 1e-20


def _norm(tensors: Tensors) -> float:
    return float(torch.stack([t.double().nan_to_num().square().sum() for t in tensors.values()]).sum().sqrt())


def _repeated(tensor: Tensor, clients: int) -> Tensor:
    return tensor.expand(clients, *tensor.shape).clone()


def _write(stack: Tensors, rows: Rows, values: Tensors) -> None:
    for name, value in values.items():
        stack[name][rows] = value


def _host(rows: Rows) -> slice | npt.NDArray[np.int64]:
    return rows if isinstance(rows, slice) else rows.cpu().numpy()


def _padded(arrays: list[npt.NDArray[np.int64]], value: int) -> npt.NDArray[np.int64]:
    """Arrays with unequal first axes as one."""
    longest = max(len(a) for a in arrays)
    whole = np.full((len(arrays), longest, *arrays[0].shape[1:]), value, dtype=np.int64)
    for i, a in enumerate(arrays):
        whole[i, : len(a)] = a
    return whole


def _reordered(result: RoundResult, order: npt.NDArray[np.int64]) -> RoundResult:
    rows = torch.from_numpy(order).to(result.loss.device)

    def picked(tensors: Tensors) -> Tensors:
        return {name: t[rows] for name, t in tensors.items()}

    return RoundResult(
        trained=ModelState(picked(result.trained.params), picked(result.trained.buffers)),
        uplink=picked(result.uplink),
        states=picked(result.states),
        loss=result.loss[rows],
        tally=picked(result.tally),
        visits=result.visits[order],
    )
