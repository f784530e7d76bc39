"""Passes over the training data of a stack of clients (see `engine.data_passes`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedskew.engine.contract import OPENING, Assignment, RoundWork
from fedskew.engine.data.batches import BatchPlan
from fedskew.engine.data.device import DeviceSamples
from fedskew.engine.data_passes import DataPass
from fedskew.engine.model.network import ModelState, Network
from fedskew.losses import IGNORE, cross_entropy
from fedskew.methods.parts import Outputs, Seen, Tensors, pack

_CLIENTS_AT_A_TIME = 16
"""Clients in one opening pass: enough to keep a device busy."""


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
    """The sums of the clients' passes, one batch of each client at a time. Clients with fewer batches are padded."""
    device = data.y.device
    keys = torch.tensor([plan.client_key for plan in stack.plans], device=device)
    batches = _padded([plan.pass_batches for plan in stack.plans])

    def one_client(
        out: Tensors, y: Tensor, keys: Tensor, gradient: Tensors, label_counts: Tensor, state: Tensors
    ) -> Tensors:
        client = data_pass.work.client(label_counts, state)
        return data_pass.batch_sums(Seen(Outputs.from_tensors(out), y, keys, gradient), client)

    sums: Tensors = {}
    for indices in torch.from_numpy(batches).to(device):
        valid = indices >= 0
        rows = torch.where(valid, indices, 0)
        y = torch.where(valid, data.y[rows], IGNORE)
        x = _inputs(network, data, rows)
        out, gradients = _forward(network, stack, x, y, valid, keys, data_pass.takes_gradients)
        row_keys = data_pass.sample_keys(keys.unsqueeze(-1), rows)
        found = torch.func.vmap(one_client)(out, y, row_keys, gradients, stack.label_counts, stack.state)
        sums = {name: sums[name] + t if sums else t for name, t in found.items()}
    return sums


def with_opening_pass(network: Network, data: DeviceSamples, work: RoundWork, plans: Sequence[BatchPlan]) -> RoundWork:
    """The work after its opening pass. Its sums are in the clients' states, where `RoundWork.client` finds them."""
    data_pass, device = DataPass(work, "opening"), data.y.device
    if not data_pass.needed:
        return work
    opened: list[Assignment] = []
    for first in range(0, len(plans), _CLIENTS_AT_A_TIME):
        some = work.assignments[first : first + _CLIENTS_AT_A_TIME]
        model = _start_models(work, some, device)
        counts = torch.from_numpy(np.stack([a.label_counts for a in some])).to(device)
        state = {name: torch.stack([a.state[name].to(device) for a in some]) for name in some[0].state}
        stack = ClientStack(plans[first : first + _CLIENTS_AT_A_TIME], model.params, model.buffers, counts, state)
        sums = stacked_sums(network, data, data_pass, stack)
        for row, assignment in enumerate(some):
            own = pack(OPENING, {name: t[row] for name, t in sums.items()})
            opened.append(replace(assignment, state={**assignment.state, **own}))
    return replace(work, assignments=opened)


def _start_models(work: RoundWork, some: Sequence[Assignment], device: torch.device) -> ModelState:
    """The models that these clients start from, stacked."""
    starts = [a.start for a in some if a.start is not None]
    if not starts:
        params, buffers = (
            {name: t.expand(len(some), *t.shape) for name, t in part.items()}
            for part in (work.sent.params, work.sent.buffers)
        )
        return ModelState(params, buffers)
    return ModelState(
        {name: torch.stack([start.params[name] for start in starts]).to(device) for name in starts[0].params},
        {name: torch.stack([start.buffers[name] for start in starts]).to(device) for name in starts[0].buffers},
    )


def _padded(plans: Sequence[npt.NDArray[np.int64]]) -> npt.NDArray[np.int64]:
    """[batches, clients, width], with −1 where a client has no more samples."""
    width = max(batches.shape[1] for batches in plans)
    rows = np.full((max(map(len, plans)), len(plans), width), -1, dtype=np.int64)
    for client, batches in enumerate(plans):
        rows[: len(batches), client, : batches.shape[1]] = batches
    return rows


def _inputs(network: Network, data: DeviceSamples, rows: Tensor) -> Tensor:
    x = data.inputs(rows)
    if x.dim() == 5 and network.prefers_channels_last(x[0]):
        return x.movedim(2, -1).contiguous().movedim(-1, 2)
    return x


def _forward(
    network: Network, stack: ClientStack, x: Tensor, y: Tensor, valid: Tensor, keys: Tensor, gradient: bool
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
