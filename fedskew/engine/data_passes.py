"""Passes over clients' training data besides their local training, for parts with an `opening` or `closing` hook.

A pass sees each sample at most once, without augmentation, with the model in eval mode. In a round with local training,
a pass leaves out a last batch that is too small to train on. A hook computes statistics of one batch of a client.
The sums of these statistics over the batches are the same in every engine, up to rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedskew.engine.contract import OPENING, Assignment, PassKind, RoundWork
from fedskew.engine.data.batches import BatchPlan, padded_targets
from fedskew.engine.data.device import DeviceSamples
from fedskew.engine.model.channels_last import InputLayout
from fedskew.engine.model.network import ModelState, Network
from fedskew.losses import IGNORE
from fedskew.methods.parts import Client, Outputs, Seen, Tensors, collect, pack, unpack
from fedskew.methods.personal import PERSONAL, shared_tensors
from fedskew.randomness import fold
from fedskew.task import task_for

_CLIENTS_AT_A_TIME = 16
"""How many clients run a stacked opening pass together. This is enough to keep a device busy."""


@dataclass(frozen=True)
class DataPass:
    """A round's opening or closing pass."""

    work: RoundWork
    when: PassKind

    @property
    def takes_gradients(self) -> bool:
        return self.when == "closing" and any(m.needs_gradient for m in self.work.members)

    def sample_keys(self, client_key: Tensor, rows: Tensor) -> Tensor:
        """Return a random key per sample, which does not depend on the sample's batch."""
        # Any two constants. Local steps fold their numbers 0, 1, 2, … into the same key, so only a round of thousands
        # of steps uses these constants again.
        constant = {"opening": 0x09E2, "closing": 0xC105}[self.when]
        return fold(fold(client_key, constant), rows)

    def batch_sums(self, seen: Seen, client: Client) -> Tensors:
        """Call the parts' hooks on one client's batch. A batch of only padding gives zeros."""
        if self.work.personal_names:
            seen = replace(seen, gradient=shared_tensors(seen.gradient, self.work.personal_names))
        sums = collect(self.work.members, self.when, seen, client)
        has_samples = (seen.y != IGNORE).any()
        return {name: torch.where(has_samples, t, torch.zeros_like(t)) for name, t in sums.items()}


@torch.no_grad()
def client_sums(
    network: Network,
    data: DeviceSamples,
    layout: InputLayout,
    data_pass: DataPass,
    plan: BatchPlan,
    model: ModelState,
    client: Client,
) -> Tensors:
    """Run one client's pass, batch by batch, and return its sums."""
    key = torch.tensor(plan.client_key, device=data.y.device)
    sums: Tensors = {}
    for indices in plan.pass_batches:
        rows, y = _batch(data, indices[indices >= 0])
        x = layout.arrange(data.inputs(rows))
        out, gradient = _forward(network, model, x, y, data_pass.takes_gradients)
        found = data_pass.batch_sums(Seen(out, y, data_pass.sample_keys(key, rows), gradient), client)
        sums = {name: sums[name] + t if sums else t for name, t in found.items()}
    return sums


def _batch(data: DeviceSamples, indices: npt.NDArray[np.int64]) -> tuple[Tensor, Tensor]:
    """Return the rows and labels of a batch. An empty batch becomes two rows of padding, which give sums of zeros.

    A BatchNorm without running statistics fails on a single row.
    """
    if len(indices):
        rows = torch.from_numpy(indices).to(data.y.device)
        return rows, data.y[rows]
    rows = torch.zeros(2, dtype=torch.int64, device=data.y.device)
    return rows, torch.full((2, *data.y.shape[1:]), IGNORE, device=data.y.device)


def _forward(network: Network, model: ModelState, x: Tensor, y: Tensor, with_gradient: bool) -> tuple[Outputs, Tensors]:
    """Return the model's outputs and, if requested, the gradient of the task's loss on the batch."""
    with torch.set_grad_enabled(with_gradient):
        leaves = {name: p.detach().requires_grad_(with_gradient) for name, p in model.params.items()}
        out = network.forward(leaves, model.buffers, x, "eval")
        features = None if out.features is None else out.features.detach().contiguous()
        detached = Outputs(out.logits.detach(), features)
        if not with_gradient:
            return detached, {}
        loss = task_for(y).loss(out.logits, y)
        grads = torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)
    return detached, dict(zip(leaves, grads, strict=True))


@dataclass(frozen=True)
class ClientStack:
    """Some clients of a round. Every tensor has a leading axis of clients."""

    plans: Sequence[BatchPlan]
    params: Tensors
    buffers: Tensors
    label_counts: Tensor
    state: Tensors


@torch.no_grad()
def stacked_sums(network: Network, data: DeviceSamples, data_pass: DataPass, stack: ClientStack) -> Tensors:
    """Run the clients' passes together, batch by batch, and return the sums. Clients with fewer batches get padding."""
    device = data.y.device
    keys = torch.tensor([plan.client_key for plan in stack.plans], device=device)
    batches = _padded([plan.pass_batches for plan in stack.plans])

    def one_client(
        out: Tensors, y: Tensor, row_keys: Tensor, gradient: Tensors, label_counts: Tensor, state: Tensors
    ) -> Tensors:
        client = data_pass.work.client(label_counts, state)
        return data_pass.batch_sums(Seen(Outputs.from_tensors(out), y, row_keys, gradient), client)

    sums: Tensors = {}
    for indices in torch.from_numpy(batches).to(device):
        has_sample = indices >= 0
        rows = torch.where(has_sample, indices, 0)
        y = padded_targets(data.y[rows], has_sample)
        x = _inputs(network, data, rows)
        out, gradients = _forward_stacked(network, stack, x, y, has_sample, keys, data_pass.takes_gradients)
        row_keys = data_pass.sample_keys(keys.unsqueeze(-1), rows)
        found = torch.func.vmap(one_client)(out, y, row_keys, gradients, stack.label_counts, stack.state)
        sums = {name: sums[name] + t if sums else t for name, t in found.items()}
    return sums


def with_opening_pass(network: Network, data: DeviceSamples, work: RoundWork, plans: Sequence[BatchPlan]) -> RoundWork:
    """Run the opening pass. Return the work with the sums in the clients' states, for `RoundWork.client`."""
    data_pass, device = DataPass(work, "opening"), data.y.device
    opened: list[Assignment] = []
    for first in range(0, len(plans), _CLIENTS_AT_A_TIME):
        group = work.assignments[first : first + _CLIENTS_AT_A_TIME]
        model = _start_models(work, group, device)
        counts = torch.from_numpy(np.stack([a.label_counts for a in group])).to(device)
        state = {name: torch.stack([a.state[name].to(device) for a in group]) for name in group[0].state}
        stack = ClientStack(plans[first : first + _CLIENTS_AT_A_TIME], model.params, model.buffers, counts, state)
        sums = stacked_sums(network, data, data_pass, stack)
        for row, assignment in enumerate(group):
            own = pack(OPENING, {name: t[row] for name, t in sums.items()})
            opened.append(replace(assignment, state={**assignment.state, **own}))
    return replace(work, assignments=opened)


def _start_models(work: RoundWork, group: Sequence[Assignment], device: torch.device) -> ModelState:
    """Stack the models that these clients start from."""
    starts = [a.start for a in group if a.start is not None]
    if not starts:
        own = {
            n: torch.stack([a.state[f"{PERSONAL}/{n}"].to(device) for a in group])
            for n in unpack(PERSONAL, group[0].state)
        }
        params, buffers = (
            {name: own.get(name, t.expand(len(group), *t.shape)) for name, t in part.items()}
            for part in (work.sent.params, work.sent.buffers)
        )
        return ModelState(params, buffers)
    return ModelState(
        {name: torch.stack([start.params[name] for start in starts]).to(device) for name in starts[0].params},
        {name: torch.stack([start.buffers[name] for start in starts]).to(device) for name in starts[0].buffers},
    )


def _padded(client_batches: Sequence[npt.NDArray[np.int64]]) -> npt.NDArray[np.int64]:
    """Stack the clients' batches: [batches, clients, width], with −1 where a client has no more samples."""
    width = max(batches.shape[1] for batches in client_batches)
    rows = np.full((max(map(len, client_batches)), len(client_batches), width), -1, dtype=np.int64)
    for client, batches in enumerate(client_batches):
        rows[: len(batches), client, : batches.shape[1]] = batches
    return rows


def _inputs(network: Network, data: DeviceSamples, rows: Tensor) -> Tensor:
    x = data.inputs(rows)
    if x.dim() == 5 and network.prefers_channels_last(x[0]):
        return x.movedim(2, -1).contiguous().movedim(-1, 2)
    return x


def _forward_stacked(
    network: Network, stack: ClientStack, x: Tensor, y: Tensor, has_sample: Tensor, keys: Tensor, with_gradient: bool
) -> tuple[Tensors, Tensors]:
    """Return all clients' outputs and, if requested, the gradients of the task's loss on their batches.

    `has_sample` is False for rows of padding.
    """
    with torch.set_grad_enabled(with_gradient):
        leaves = {name: p.detach().requires_grad_(with_gradient) for name, p in stack.params.items()}
        out, _ = network.forward_stacked(leaves, stack.buffers, x, has_sample, "eval", keys)
        detached = {kind: t.detach() for kind, t in out.tensors().items()}
        if not with_gradient:
            return detached, {}
        losses = torch.func.vmap(task_for(y[0]).loss)(out.logits, y)
        grads = torch.autograd.grad(losses.sum(), list(leaves.values()), materialize_grads=True)
    return detached, dict(zip(leaves, grads, strict=True))
