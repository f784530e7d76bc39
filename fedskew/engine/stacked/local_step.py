"""One local step of a stack of clients.

The model is one program over all clients (`lifting`), the objective of one client is lifted by `torch.func.vmap`, and
one backward pass of the sum gives every client its own gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fedskew.engine.contract import (
    RoundWork,
    clipped,
    companion,
    companion_key,
    perturbation_key,
    targets_of,
)
from fedskew.engine.model.layers import Between
from fedskew.engine.model.network import Network
from fedskew.methods.hooks import uses_hook
from fedskew.methods.parts import Half, Mode, Outputs, Solver, Tensors, Trained


@dataclass(frozen=True)
class Batches:
    """One batch of each client, and what its objective uses besides; every tensor has a leading axis of clients."""

    x: Tensor
    y: Tensor
    valid: Tensor | None
    """[K, B]: rows that do not pad; None: no row does."""
    keys: Tensor
    label_counts: Tensor
    state: Tensors


@dataclass(frozen=True)
class Directions:
    """What a step comes to, for each client."""

    direction: Tensors
    buffers: Tensors
    loss: Tensor
    tally: Tensors


def directions(
    network: Network, work: RoundWork, batches: Batches, params: Tensors, buffers: Tensors, samples: Tensor
) -> Directions:
    """Each client's descent direction on its batch; `samples` are any, to know the frozen models by."""
    frozen = _Frozen(network, work, batches, samples).outputs()
    return _Descent(network, work, batches, frozen, buffers).at(params)


@torch.no_grad()
def ends(
    work: RoundWork, params: Tensors, steps: Tensor, label_counts: Tensor, state: Tensors, closing: Tensors
) -> tuple[Tensors, Tensors]:
    """What each client sends beside its model, and what it keeps, after its last step and its closing pass."""
    local = work.local

    def end(
        params: Tensors, steps: Tensor, label_counts: Tensor, state: Tensors, closing: Tensors
    ) -> tuple[Tensors, Tensors]:
        trained = Trained(params, steps, local.lr, local.momentum, closing, local.optimizer)
        return work.end(trained, work.client(label_counts, state))

    of_all: tuple[Tensors, Tensors] = torch.func.vmap(end)(params, steps, label_counts, state, closing)
    return of_all


class _Frozen:
    """The models that the objective compares with."""

    def __init__(self, network: Network, work: RoundWork, batches: Batches, samples: Tensor) -> None:
        self._network, self._work, self._batches, self._samples = network, work, batches, samples

    @torch.no_grad()
    def outputs(self) -> dict[str, Tensors]:
        return {name: self._of(name, mode) for name, mode in self._work.objective.companions().items()}

    def _of(self, name: str, mode: Mode) -> Tensors:
        model, x = companion(name, self._work, self._batches.state), self._batches.x
        keys, clients = companion_key(self._batches.keys), len(x)
        valid = self._batches.valid
        if name.startswith("state/"):
            buffers = {n: b.expand(clients, *b.shape) for n, b in model.buffers.items()}
            return self._stacked(model.params, buffers, x, valid, mode, keys)
        if not self._network.mixes_rows(mode, self._samples):  # common to all: one model on one batch
            clients, x, valid, keys = 1, x.flatten(0, 1).unsqueeze(0), None, keys[:1]
        params, buffers = (
            {n: t.expand(clients, *t.shape) for n, t in part.items()} for part in (model.params, model.buffers)
        )
        outputs = self._stacked(params, buffers, x, valid, mode, keys)
        return {kind: t.view(*self._batches.x.shape[:2], *t.shape[2:]) for kind, t in outputs.items()}

    def _stacked(
        self, params: Tensors, buffers: Tensors, x: Tensor, valid: Tensor | None, mode: Mode, keys: Tensor
    ) -> Tensors:
        return self._network.forward_stacked(params, buffers, x, valid, mode, keys)[0].tensors()


class _Descent:
    """Every client's gradient, and the direction that the solver makes of it."""

    def __init__(
        self, network: Network, work: RoundWork, batches: Batches, frozen: dict[str, Tensors], buffers: Tensors
    ) -> None:
        self._network, self._work, self._batches = network, work, batches
        self._frozen, self._buffers = frozen, buffers
        self._told: tuple[Tensor, Tensors] | None = None

    def at(self, params: Tensors) -> Directions:
        if type(self._work.solver).direction is Solver.direction:
            direction = self._gradient(params)
            if self._work.local.clip_norm is not None:
                direction = torch.func.vmap(self._clipped)(direction)
        else:
            direction = torch.func.vmap(self._direction)(params, self._batches.label_counts, self._batches.state)
        assert self._told is not None, "a direction without a gradient"
        loss, tally = self._told
        return Directions(direction, self._buffers, loss, tally)

    def _direction(self, params: Tensors, label_counts: Tensor, state: Tensors) -> Tensors:
        """One client's direction, which `vmap` lifts; the gradients it asks for are taken for all clients at once."""

        def gradient(at: Tensors, half: Half | None = None, /) -> Tensors:
            grads = _AllClients.apply(lambda *all_: self._gradient_list(list(at), all_, half), *at.values())  # type: ignore[no-untyped-call]
            return dict(zip(at, grads, strict=True))

        client = self._work.client(label_counts, state)
        return self._clipped(self._work.solver.direction(gradient, params, client))

    def _clipped(self, direction: Tensors) -> Tensors:
        return clipped(direction, self._work.local.clip_norm)

    def _gradient_list(self, names: list[str], tensors: tuple[Tensor, ...], half: Half | None) -> tuple[Tensor, ...]:
        return tuple(self._gradient(dict(zip(names, tensors, strict=True)), half).values())

    @torch.enable_grad()
    def _gradient(self, at: Tensors, half: Half | None = None) -> Tensors:
        """Each client's gradient: that of the sum, for no client's loss depends on another's parameters."""
        batches = self._batches
        leaves = {name: p.detach().requires_grad_() for name, p in at.items()}
        y = targets_of(batches.y, half)
        out, self._buffers = self._network.forward_stacked(
            leaves, self._buffers, batches.x, batches.valid, "train", batches.keys, self._perturbation(y)
        )
        losses, tally = self._losses(out, y)
        if self._told is None:  # of the whole batch, also where a solver begins with half of it
            told, tally = (losses, tally) if half is None else self._losses(out, batches.y)
            self._told = told.detach(), {name: t.detach() for name, t in tally.items()}
        grads = torch.autograd.grad(losses.sum(), list(leaves.values()), materialize_grads=True)
        return dict(zip(leaves, grads, strict=True))

    def _perturbation(self, y: Tensor) -> Between | None:
        """What the objective does to all clients' features, if it does anything."""
        work, batches = self._work, self._batches
        if not uses_hook(work.objective, "perturbed"):
            return None

        def one(features: Tensor, y: Tensor, label_counts: Tensor, state: Tensors, key: Tensor) -> Tensor:
            return work.objective.perturbed(features, y, work.client(label_counts, state), key)

        def of_all(features: Tensor) -> Tensor:
            keys = perturbation_key(batches.keys)
            changed: Tensor = torch.func.vmap(one)(features, y, batches.label_counts, batches.state, keys)
            return changed

        return of_all

    def _losses(self, out: Outputs, y: Tensor) -> tuple[Tensor, Tensors]:
        """Each client's loss and tally."""
        counts, state = self._batches.label_counts, self._batches.state
        of_all: tuple[Tensor, Tensors] = torch.func.vmap(self._loss)(out.tensors(), y, counts, state, self._frozen)
        return of_all

    def _loss(
        self, out: Tensors, y: Tensor, label_counts: Tensor, state: Tensors, frozen: dict[str, Tensors]
    ) -> tuple[Tensor, Tensors]:
        """One client's loss and tally, which `vmap` lifts."""
        objective, client = self._work.objective, self._work.client(label_counts, state)
        companions = {name: Outputs.from_tensors(tensors) for name, tensors in frozen.items()}
        outputs = replace(Outputs.from_tensors(out), companions=companions)
        return objective.loss(outputs, y, client), objective.tally(outputs, y)


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
