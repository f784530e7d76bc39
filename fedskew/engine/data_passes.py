"""Passes over a client's training data besides its local training, for parts with an `opening` or `closing` hook.

A pass sees every sample once, without augmentation, with the model in eval mode. A hook is the maths of one client's
batch; its sums over the batches are the same in every engine. `stacked.data_passes` does the same for many clients.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedskew.engine.contract import RoundWork
from fedskew.engine.data.batches import BatchPlan
from fedskew.engine.data.device import DeviceSamples
from fedskew.engine.model.channels_last import InputLayout
from fedskew.engine.model.network import ModelState, Network
from fedskew.losses import IGNORE, cross_entropy
from fedskew.methods.parts import Client, Outputs, Seen, Tensors, uses_hook
from fedskew.randomness import fold

When = Literal["opening", "closing"]


@dataclass(frozen=True)
class DataPass:
    """A round's opening or closing pass."""

    work: RoundWork
    when: When

    @property
    def needed(self) -> bool:
        """Whether a part of the method has the hook."""
        return any(uses_hook(part, self.when) for part in self.work.parts)

    @property
    def takes_gradients(self) -> bool:
        return self.when == "closing" and any(m.needs_gradient for m in self.work.members)

    def sample_keys(self, client_key: Tensor, rows: Tensor) -> Tensor:
        """A random key per sample, whichever batch it is in."""
        return fold(fold(client_key, {"opening": 0x09E2, "closing": 0xC105}[self.when]), rows)

    def batch_sums(self, seen: Seen, client: Client) -> Tensors:
        """What the parts' hooks return for one client's batch; zeros for a batch of padding alone."""
        sums: Tensors = {}
        for member in self.work.members:
            sums |= member.opening(seen, client) if self.when == "opening" else member.closing(seen, client)
        some = (seen.y != IGNORE).any()
        return {name: torch.where(some, t, torch.zeros_like(t)) for name, t in sums.items()}


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
    """The sums of one client's pass, batch by batch."""
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
    """Rows and labels of a batch. An empty batch becomes two rows of padding, from which sums get their shape."""
    if len(indices):
        rows = torch.from_numpy(indices).to(data.y.device)
        return rows, data.y[rows]
    rows = torch.zeros(2, dtype=torch.int64, device=data.y.device)
    return rows, torch.full_like(rows, IGNORE)


def _forward(network: Network, model: ModelState, x: Tensor, y: Tensor, gradient: bool) -> tuple[Outputs, Tensors]:
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
