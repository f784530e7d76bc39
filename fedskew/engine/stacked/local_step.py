"""The local steps of a stack of clients: what a step computes, and the program that repeats it in fixed memory.

The model is one program over all clients (`stacked_layers`), and `torch.func.vmap` lifts the objective of one client.
One backward pass of the sum of all losses gives every client its gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedskew.engine.contract import RoundWork
from fedskew.engine.data.batches import companion_key, half_targets, padded_targets, perturbation_key
from fedskew.engine.data.device import DeviceSamples
from fedskew.engine.model.layers import Between
from fedskew.engine.model.network import Network
from fedskew.engine.optimisers import STEPS, clip
from fedskew.engine.stacked.execution import Memory
from fedskew.engine.stacked.layouts import Layouts
from fedskew.losses import real_rows
from fedskew.methods.hook_results import without_gradient_call
from fedskew.methods.parts import (
    STATE,
    LossPart,
    Mode,
    Outputs,
    Solver,
    Tensors,
    Trained,
    pack,
    split_direction,
    uses_hook,
)
from fedskew.randomness import fold


@dataclass(frozen=True)
class Batches:
    """One batch per client, and what else the objective uses. The first axis of every tensor is the client."""

    x: Tensor
    y: Tensor
    valid: Tensor | None
    """[K, B]: False for rows of padding. None if there is no padding."""
    keys: Tensor
    """[K]: the random key of each client's step."""
    label_counts: Tensor
    state: Tensors


@dataclass(frozen=True)
class StepResult:
    """The results of one step, for each client: direction, new buffers, loss, tally, and state for the next step."""

    direction: Tensors
    buffers: Tensors
    loss: Tensor
    tally: Tensors
    state: Tensors = field(default_factory=dict)
    """Only for solvers with `changes_state`."""


def compute_step(
    network: Network, work: RoundWork, batches: Batches, params: Tensors, buffers: Tensors, samples: Tensor
) -> StepResult:
    """Compute each client's direction on its batch: its gradient, or the direction that the solver computes from it.

    `samples` are a few inputs. `Network.mixes_rows` uses them to test whether frozen models need one batch per client.
    """
    frozen = _FrozenModels(network, work, batches, samples).outputs()
    return _Descent(network, work, batches, frozen, buffers).at(params)


@torch.no_grad()
def finish_clients(
    work: RoundWork, params: Tensors, steps: Tensor, label_counts: Tensor, state: Tensors, closing: Tensors
) -> tuple[Tensors, Tensors]:
    """Return what each client sends besides its model, and its next state. Call this after its closing pass."""
    local = work.local

    def finish(
        params: Tensors, steps: Tensor, label_counts: Tensor, state: Tensors, closing: Tensors
    ) -> tuple[Tensors, Tensors]:
        trained = Trained(params, steps, local.lr, local.momentum, closing, local.optimizer)
        return work.finish_client(trained, work.client(label_counts, state))

    finished: tuple[Tensors, Tensors] = torch.func.vmap(finish)(params, steps, label_counts, state, closing)
    return finished


class _FrozenModels:
    """The frozen models whose outputs the objective uses, called its companions."""

    def __init__(self, network: Network, work: RoundWork, batches: Batches, samples: Tensor) -> None:
        self._network, self._work, self._batches, self._samples = network, work, batches, samples

    @torch.no_grad()
    def outputs(self) -> dict[str, Tensors]:
        return {name: self._model_outputs(name, mode) for name, mode in self._work.objective.companions().items()}

    def _model_outputs(self, name: str, mode: Mode) -> Tensors:
        model, x = self._work.companion(name, self._batches.state), self._batches.x
        keys, clients = companion_key(self._batches.keys), len(x)
        valid = self._batches.valid
        if name.startswith("state/") or self._work.personal_names:
            params, buffers = (
                self._stack(model.params, self._work.sent.params),
                self._stack(model.buffers, self._work.sent.buffers),
            )
            return self._stacked(params, buffers, x, valid, mode, keys)
        if not self._network.mixes_rows(mode, self._samples):  # one model for all clients: run it on one large batch
            clients, x, valid, keys = 1, x.flatten(0, 1).unsqueeze(0), None, keys[:1]
        params, buffers = (
            {n: t.expand(clients, *t.shape) for n, t in part.items()} for part in (model.params, model.buffers)
        )
        outputs = self._stacked(params, buffers, x, valid, mode, keys)
        return {kind: t.view(*self._batches.x.shape[:2], *t.shape[2:]) for kind, t in outputs.items()}

    def _stack(self, tensors: Tensors, one_client: Tensors) -> Tensors:
        """Repeat the tensors that all clients share. These have no more axes than the same tensor of `one_client`."""
        clients = len(self._batches.x)
        return {n: t if t.dim() > one_client[n].dim() else t.expand(clients, *t.shape) for n, t in tensors.items()}

    def _stacked(
        self, params: Tensors, buffers: Tensors, x: Tensor, valid: Tensor | None, mode: Mode, keys: Tensor
    ) -> Tensors:
        return self._network.forward_stacked(params, buffers, x, valid, mode, keys)[0].tensors()


class _Descent:
    """Computes every client's gradient, and the solver's direction from it."""

    def __init__(
        self, network: Network, work: RoundWork, batches: Batches, frozen: dict[str, Tensors], buffers: Tensors
    ) -> None:
        self._network, self._work, self._batches = network, work, batches
        self._frozen, self._buffers = frozen, buffers
        self._recorded: tuple[Tensor, Tensors] | None = None

    def at(self, params: Tensors) -> StepResult:
        if type(self._work.solver).direction is Solver.direction:
            direction = self._gradient(params)
            if self._work.local.clip_norm is not None:
                direction = torch.func.vmap(self._clip)(direction)
        else:
            direction = torch.func.vmap(self._direction)(params, self._batches.label_counts, self._batches.state)
        if self._recorded is None:
            raise without_gradient_call(self._work.solver)
        loss, tally = self._recorded
        direction, kept = split_direction(direction) if self._work.solver.changes_state() else (direction, {})
        return StepResult(direction, self._buffers, loss, tally, kept)

    def _direction(self, params: Tensors, label_counts: Tensor, state: Tensors) -> Tensors:
        """Compute one client's direction, under `vmap`. Each gradient is computed for all clients at once."""

        def gradient(at: Tensors, part: LossPart | None = None, /) -> Tensors:
            grads = _AllClients.apply(lambda *all_: self._gradient_list(list(at), all_, part), *at.values())  # type: ignore[no-untyped-call]
            return dict(zip(at, grads, strict=True))

        client = self._work.client(label_counts, state)
        found = self._work.solver.direction(gradient, params, client)
        if not self._work.solver.changes_state():
            return self._clip(found)
        direction, kept = split_direction(found)
        return self._clip(direction) | pack(STATE, kept)

    def _clip(self, direction: Tensors) -> Tensors:
        return clip(direction, self._work.local.clip_norm)

    def _gradient_list(
        self, names: list[str], tensors: tuple[Tensor, ...], part: LossPart | None
    ) -> tuple[Tensor, ...]:
        return tuple(self._gradient(dict(zip(names, tensors, strict=True)), part).values())

    @torch.enable_grad()
    def _gradient(self, at: Tensors, part: LossPart | None = None) -> Tensors:
        """Compute all clients' gradients as the gradient of the sum of their losses.

        This is right because no loss depends on another client's parameters.
        """
        batches = self._batches
        leaves = {name: p.detach().requires_grad_() for name, p in at.items()}
        y = half_targets(batches.y, part, axis=1)
        out, self._buffers = self._network.forward_stacked(
            leaves, self._buffers, batches.x, batches.valid, "train", batches.keys, self._perturbation(y)
        )
        losses, tally = self._losses(out, y, part)
        if self._recorded is None:  # record the whole batch's loss, even if the first gradient is of a part of it
            whole, tally = (losses, tally) if part is None else self._losses(out, batches.y)
            self._recorded = whole.detach(), {name: t.detach() for name, t in tally.items()}
        grads = torch.autograd.grad(losses.sum(), list(leaves.values()), materialize_grads=True)
        return dict(zip(leaves, grads, strict=True))

    def _perturbation(self, y: Tensor) -> Between | None:
        """Return the function with which the objective changes all clients' features, or None if it does not."""
        work, batches = self._work, self._batches
        if not uses_hook(work.objective, "perturbed"):
            return None

        def one_client(features: Tensor, y: Tensor, label_counts: Tensor, state: Tensors, key: Tensor) -> Tensor:
            return work.objective.perturbed(features, y, work.client(label_counts, state), key)

        def all_clients(features: Tensor) -> Tensor:
            keys = perturbation_key(batches.keys)
            changed: Tensor = torch.func.vmap(one_client)(features, y, batches.label_counts, batches.state, keys)
            return changed

        return all_clients

    def _losses(self, out: Outputs, y: Tensor, part: LossPart | None = None) -> tuple[Tensor, Tensors]:
        """Compute each client's loss and tally."""
        counts, state, loss = self._batches.label_counts, self._batches.state, partial(self._loss, part)
        losses: tuple[Tensor, Tensors] = torch.func.vmap(loss)(out.tensors(), y, counts, state, self._frozen)
        return losses

    def _loss(
        self,
        part: LossPart | None,
        out: Tensors,
        y: Tensor,
        label_counts: Tensor,
        state: Tensors,
        frozen: dict[str, Tensors],
    ) -> tuple[Tensor, Tensors]:
        """Compute one client's loss and tally, under `vmap`."""
        objective, client = self._work.objective, self._work.client(label_counts, state)
        companions = {name: Outputs.from_tensors(tensors) for name, tensors in frozen.items()}
        outputs = replace(Outputs.from_tensors(out), companions=companions)
        if part == "proximal":
            return objective.proximal(outputs, y, client), {}
        return objective.loss(outputs, y, client), objective.tally(outputs, y)


class _AllClients(torch.autograd.Function):
    """Calls a function once from within `vmap`, with the stacked tensors of all clients."""

    @staticmethod
    def forward(function: Callable[..., tuple[Tensor, ...]], *tensors: Tensor) -> tuple[Tensor, ...]:  # noqa: ARG004
        raise RuntimeError("called outside vmap")

    @staticmethod
    def setup_context(ctx: object, inputs: object, output: object) -> None:
        """Save nothing, because gradients are not differentiated again."""

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


@dataclass(frozen=True)
class SlotStep:
    """One local step of all slots, in fixed memory. A slot holds one client after another."""

    network: Network
    work: RoundWork
    layouts: Layouts
    samples: Tensor
    full: bool
    """Whether no batch is padded."""
    channels_last: bool
    use_kernel: bool
    """Whether the optimiser may use its kernel, if it has one. Without it, a compiler can fuse more operations."""

    def __call__(self, memory: Memory) -> None:
        """Take the step at the position `inputs["at"]`, and advance the position, entirely on the device."""
        inputs = memory["inputs"]
        at = inputs["at"]
        now = {name: t.index_select(0, at).squeeze(0) for name, t in inputs.items() if name != "at"}
        self.descend(memory, now, memory["rates"]["lr"])
        at.copy_((at + 1) % len(inputs["y"]))

    @torch.no_grad()
    def descend(self, memory: Memory, now: Tensors, lr: Tensor | float) -> None:
        work = self.layouts.work_from_memory(self.work, memory)
        valid = None if self.full else real_rows(now["y"], axes=2)
        x = now["x"].movedim(-1, 2) if self.channels_last else now["x"]
        state = self.layouts.state.views(memory["state"])
        batches = Batches(x, now["y"], valid, now["keys"], memory["label_counts"][""], state)
        params = self.layouts.params.views(memory["params"])
        buffers = self.layouts.buffers.views(memory["buffers"])
        found = compute_step(self.network, work, batches, params, buffers, self.samples)
        self._step(memory, found.direction, lr)
        for name, tensor in found.state.items():
            state[name].copy_(tensor)
        for name, tensor in found.buffers.items():
            if tensor is not buffers[name]:
                buffers[name].copy_(tensor)
        memory["sums"]["loss"] += found.loss.to(now["lengths"].dtype) * now["lengths"]
        for name, value in found.tally.items():
            memory["sums"][f"tally {name}"] += value

    def _step(self, memory: Memory, direction: Tensors, lr: Tensor | float) -> None:
        """Update the parameters.

        Without CUDA or with a kernel, tensors are updated one by one. Otherwise, whole rows of memory are updated at
        once.
        """
        layout, optimiser = self.layouts.params, self.work.local.local_optimiser
        by_tensor = isinstance(lr, float) or (self.use_kernel and optimiser.has_kernel)
        arranged = direction if by_tensor else layout.flat(direction)
        names = list(arranged)

        def tensors(kind: str) -> list[Tensor]:
            named = layout.views(memory[kind]) if by_tensor else memory[kind]
            return [named[name] for name in names]

        state = {kind: tensors(kind) for kind in optimiser.shaped_state}
        if optimiser.counts_steps:
            state[STEPS] = [memory[STEPS][""]]
        optimiser.step(tensors("params"), [arranged[name] for name in names], state, lr, self.use_kernel)


KEY_COLUMNS = 3
"""Columns of `memory["plan"]` after the sample indices: the epoch's key, the client's key and the step's number."""


@dataclass(frozen=True)
class Staging:
    """Gathers, augments and normalises the batches of the next steps, all at once.

    `memory["plan"]` has a row for each step and slot: the indices of the samples, and then the key columns.
    """

    data: DeviceSamples
    channels_last: bool

    @torch.no_grad()
    def __call__(self, memory: Memory) -> None:
        plan, inputs, data = memory["plan"][""], memory["inputs"], self.data.with_tensors(memory["data"])
        planned, (epoch_keys, client_keys, steps) = plan[..., :-KEY_COLUMNS], plan[..., -KEY_COLUMNS:].unbind(-1)
        is_sample = planned >= 0
        indices = torch.where(is_sample, planned, 0)
        x = data.training_inputs(indices, epoch_keys.unsqueeze(-1))
        inputs["x"].copy_(x.movedim(3, -1) if self.channels_last else x)
        inputs["y"].copy_(padded_targets(data.y[indices], is_sample))
        inputs["keys"].copy_(fold(client_keys, steps))
        inputs["lengths"].copy_(is_sample.sum(dim=-1))


class Program:
    """Staging and step for one number of slots and one batch width. The step has two forms: with and without padding.

    The batches of several steps, a *window*, are staged at once. This class calls staging and steps directly. On a CUDA
    GPU, `GraphProgram` is used instead.
    """

    def __init__(self, step: SlotStep, staging: Staging, memory: Memory) -> None:
        self.memory = memory
        self._step, self._staging = step, staging
        self._staging_by_window: list[Callable[[int], None]] = []
        self._step_by_form: dict[bool, Callable[[int], None]] = {}
        self._lr = 0.0

    @property
    def window_size(self) -> int:
        """Number of steps whose batches are staged at a time."""
        return len(self.memory["plan"][""])

    @property
    def windows(self) -> int:
        """Number of windows in memory. There are two if one is staged while the steps of the other run."""
        return len(self.memory["inputs"]["y"]) // self.window_size

    def start_round(self, work: RoundWork) -> Program:
        self._lr = work.local.lr
        return self

    def prepare(self, forms: set[bool]) -> None:
        """Prepare the steps of a round, without padding (True), with padding (False), or both.

        Call this before the first clients are written into memory, because it may overwrite them.
        """
        for full in forms - self._step_by_form.keys():
            self._step_by_form[full] = self._prepare_step(replace(self._step, full=full))
        if not self._staging_by_window:
            self._staging_by_window = self._prepare_staging()

    def rewind(self) -> None:
        """Go to the first step of a round."""
        self.memory["inputs"]["at"].zero_()

    def stage(self, window: int, plan: npt.NDArray[np.int64]) -> None:
        """Stage the batches of a window: `plan` has a row per step. Windows are numbered from 0.

        Earlier steps that read the same memory must already have been launched.
        """
        self.memory["plan"][""][: len(plan)].copy_(self._sendable(plan), non_blocking=True)
        self._staging_by_window[window % self.windows](len(plan))

    def run(self, position: int, full: bool) -> None:
        """Take a step on the batches at this position of the window. `full` chooses the form without padding."""
        self._step_by_form[full](position)

    def _sendable(self, array: npt.NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(array)

    def _prepare_step(self, step: SlotStep) -> Callable[[int], None]:
        return partial(self._take_step, step)

    def _take_step(self, step: SlotStep, position: int) -> None:
        now = {name: t[position] for name, t in self.memory["inputs"].items() if name != "at"}
        step.descend(self.memory, now, self._lr)

    def _prepare_staging(self) -> list[Callable[[int], None]]:
        """Return one function per window in memory."""
        return [partial(self._stage_now, self._window_memory(number)) for number in range(self.windows)]

    def _window_memory(self, number: int) -> Memory:
        """Return the memory with the inputs of only one window."""
        rows = slice(number * self.window_size, (number + 1) * self.window_size)
        return self.memory | {"inputs": {n: t[rows] for n, t in self.memory["inputs"].items() if n != "at"}}

    def _stage_now(self, memory: Memory, steps: int) -> None:
        ahead = {kind: {name: t[:steps] for name, t in memory[kind].items()} for kind in ("plan", "inputs")}
        self._staging(memory | ahead)
