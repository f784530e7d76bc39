"""Passes over clients' own training data, beside their local training: what parts ask for by `opening` and `closing`.

Every sample is seen once, as it is, by the model in eval mode; a part's hook is the maths of one client's batch, and
its sums over the batches are the same in every engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedskew.engine.contract import OPENING, Assignment, RoundWork
from fedskew.engine.data.batches import BatchPlan
from fedskew.engine.data.device_samples import DeviceSamples
from fedskew.engine.model.channels_last import Layout
from fedskew.engine.model.network import ModelState, Network
from fedskew.losses import IGNORE, cross_entropy
from fedskew.methods.hooks import uses_hook
from fedskew.methods.parts import Client, Outputs, Seen, Tensors, pack
from fedskew.randomness import fold

When = Literal["opening", "closing"]

_AT_ONCE = 16
"""Clients of an opening pass: enough to keep a device busy."""


@dataclass(frozen=True)
class Pass:
    """One of a round's two passes, if a part asks for it."""

    work: RoundWork
    when: When

    @property
    def wanted(self) -> bool:
        return any(uses_hook(part, self.when) for part in self.work.parts)

    @property
    def takes_gradients(self) -> bool:
        return self.when == "closing" and any(m.needs_gradient for m in self.work.members)

    def keys(self, client_key: Tensor, rows: Tensor) -> Tensor:
        """Of each sample, whatever batch it is in."""
        return fold(fold(client_key, {"opening": 0x09E2, "closing": 0xC105}[self.when]), rows)

    def of_batch(self, seen: Seen, client: Client) -> Tensors:
        """What the parts make of one client's batch; nothing of one that only pads."""
        sums: Tensors = {}
        for member in self.work.members:
            sums |= member.opening(seen, client) if self.when == "opening" else member.closing(seen, client)
        some = (seen.y != IGNORE).any()
        return {name: torch.where(some, t, torch.zeros_like(t)) for name, t in sums.items()}


def opened(work: RoundWork, each: Sequence[Tensors]) -> RoundWork:
    """The work with what its opening pass came to for each client, where `RoundWork.client` finds it."""
    both = zip(work.assignments, each, strict=True)
    return replace(work, assignments=[replace(a, state={**a.state, **pack(OPENING, sums)}) for a, sums in both])


# -- one client ----------------------------------------------------------------------------------------------


@torch.no_grad()
def client_sums(
    network: Network,
    data: DeviceSamples,
    layout: Layout,
    this: Pass,
    plan: BatchPlan,
    model: ModelState,
    client: Client,
) -> Tensors:
    """One client's pass, batch by batch."""
    key = torch.tensor(plan.client_key, device=data.y.device)
    sums: Tensors = {}
    for numbers in plan.whole:
        rows, y = _rows(data, numbers[numbers >= 0])
        out, gradient = _seen(network, model, layout.of_inputs(data.inputs(rows)), y, this.takes_gradients)
        of_batch = this.of_batch(Seen(out, y, this.keys(key, rows), gradient), client)
        sums = {name: sums[name] + t if sums else t for name, t in of_batch.items()}
    return sums


def _rows(data: DeviceSamples, numbers: npt.NDArray[np.int64]) -> tuple[Tensor, Tensor]:
    """The samples of a batch and their labels; of an empty one, two that only pad: they tell what shape sums have."""
    if len(numbers):
        rows = torch.from_numpy(numbers).to(data.y.device)
        return rows, data.y[rows]
    rows = torch.zeros(2, dtype=torch.int64, device=data.y.device)
    return rows, torch.full_like(rows, IGNORE)


def _seen(network: Network, model: ModelState, x: Tensor, y: Tensor, gradient: bool) -> tuple[Outputs, Tensors]:
    with torch.set_grad_enabled(gradient):
        leaves = {name: p.detach().requires_grad_(gradient) for name, p in model.params.items()}
        out = network.forward(leaves, model.buffers, x, "eval")
        features = None if out.features is None else out.features.detach().contiguous()
        seen = Outputs(out.logits.detach(), features)
        if not gradient:
            return seen, {}
        loss = cross_entropy(out.logits, y)
        grads = torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)
    return seen, dict(zip(leaves, grads, strict=True))


# -- a stack of clients --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stack:
    """Some clients of a round; every tensor has a leading axis of clients."""

    plans: Sequence[BatchPlan]
    params: Tensors
    buffers: Tensors
    label_counts: Tensor
    state: Tensors


@torch.no_grad()
def stacked_sums(network: Network, data: DeviceSamples, this: Pass, stack: Stack) -> Tensors:
    """The passes of these clients, a batch of each at a time; whose last is behind them only pads."""
    device = data.y.device
    keys = torch.tensor([plan.client_key for plan in stack.plans], device=device)
    batches = _padded([plan.whole for plan in stack.plans])

    def one(out: Tensors, y: Tensor, keys: Tensor, gradient: Tensors, label_counts: Tensor, state: Tensors) -> Tensors:
        return this.of_batch(Seen(Outputs.from_tensors(out), y, keys, gradient), this.work.client(label_counts, state))

    sums: Tensors = {}
    for numbers in torch.from_numpy(batches).to(device):
        valid = numbers >= 0
        rows = torch.where(valid, numbers, 0)
        y = torch.where(valid, data.y[rows], IGNORE)
        out, gradients = _all_seen(network, stack, _inputs(network, data, rows), y, valid, keys, this.takes_gradients)
        row_keys = this.keys(keys.unsqueeze(-1), rows)
        found = torch.func.vmap(one)(out, y, row_keys, gradients, stack.label_counts, stack.state)
        sums = {name: sums[name] + t if sums else t for name, t in found.items()}
    return sums


def stacked_opening(network: Network, data: DeviceSamples, work: RoundWork, plans: Sequence[BatchPlan]) -> RoundWork:
    """The work with its opening pass made, some clients at a time: the received model, the same for all."""
    this, device = Pass(work, "opening"), data.y.device
    if not this.wanted:
        return work
    each: list[Tensors] = []
    for first in range(0, len(plans), _AT_ONCE):
        own, some = plans[first : first + _AT_ONCE], work.assignments[first : first + _AT_ONCE]
        model = _starts(work, some, device)
        counts = torch.from_numpy(np.stack([a.label_counts for a in some])).to(device)
        state = {name: torch.stack([a.state[name].to(device) for a in some]) for name in some[0].state}
        sums = stacked_sums(network, data, this, Stack(own, model.params, model.buffers, counts, state))
        each += [{name: t[row] for name, t in sums.items()} for row in range(len(own))]
    return opened(work, each)


def _starts(work: RoundWork, some: Sequence[Assignment], device: torch.device) -> ModelState:
    """The models that these clients start with, stacked."""
    own = [a.start for a in some if a.start is not None]
    if own:
        params, buffers = (
            {
                name: torch.stack([getattr(start, kind)[name] for start in own]).to(device)
                for name in getattr(own[0], kind)
            }
            for kind in ("params", "buffers")
        )
    else:
        params, buffers = (
            {name: t.expand(len(some), *t.shape) for name, t in part.items()}
            for part in (work.sent.params, work.sent.buffers)
        )
    return ModelState(params, buffers)


def _padded(plans: Sequence[npt.NDArray[np.int64]]) -> npt.NDArray[np.int64]:
    """[batches, clients, width], −1 where a client has no more."""
    width = max(whole.shape[1] for whole in plans)
    rows = np.full((max(map(len, plans)), len(plans), width), -1, dtype=np.int64)
    for client, whole in enumerate(plans):
        rows[: len(whole), client, : whole.shape[1]] = whole
    return rows


def _inputs(network: Network, data: DeviceSamples, rows: Tensor) -> Tensor:
    x = data.inputs(rows)
    if x.dim() == 5 and network.prefers_channels_last(x[0]):
        return x.movedim(2, -1).contiguous().movedim(-1, 2)
    return x


def _all_seen(
    network: Network, stack: Stack, x: Tensor, y: Tensor, valid: Tensor, keys: Tensor, gradient: bool
) -> tuple[Tensors, Tensors]:
    with torch.set_grad_enabled(gradient):
        leaves = {name: p.detach().requires_grad_(gradient) for name, p in stack.params.items()}
        out, _ = network.forward_stacked(leaves, stack.buffers, x, valid, "eval", keys)
        seen = {kind: t.detach() for kind, t in out.tensors().items()}
        if not gradient:
            return seen, {}
        losses = torch.func.vmap(cross_entropy)(out.logits, y)
        grads = torch.autograd.grad(losses.sum(), list(leaves.values()), materialize_grads=True)
    return seen, dict(zip(leaves, grads, strict=True))
