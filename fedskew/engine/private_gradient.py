"""Example-level privacy: the gradient of a batch from clipped gradients of single samples, with noise (DP-SGD).

    g = (Σ_i clip(∇ℓ_i, C) + z·C·N(0, 1)) / B

ℓ_i is the loss of sample i alone, C is the clip, and z is the noise multiplier. B is the size of the client's full
batches, which is known in advance. If one sample is replaced, the sum moves by at most 2·C. At the same parameters, the
sums of the epoch's other batches do not change. An epoch is therefore one Gaussian mechanism with μ = 2/z for each
sample (`gaussian_privacy`). If a solver computes several gradients per step, the epoch counts as that many mechanisms.

Abadi et al., "Deep learning with differential privacy", CCS 2016. Their amplification by sampling is not used: batches
are not drawn independently, but cut from a shuffled list.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedskew.accurate_sums import ACCURATE
from fedskew.engine.contract import RoundWork
from fedskew.engine.data.batches import half_targets
from fedskew.engine.model.network import ModelState, Network
from fedskew.engine.plain import contiguous, frozen_outputs, perturbation
from fedskew.errors import UserError
from fedskew.losses import real_rows
from fedskew.methods.hook_results import wrong_number
from fedskew.methods.parts import Client, LossPart, Mode, Outputs, Tensors
from fedskew.randomness import fold

_NUMBERS_AT_ONCE = {"cpu": 1 << 22, "cuda": 1 << 27, "mps": 1 << 27}
"""The maximum number of values in the gradients of single samples that are computed at a time, unless the gradients of
`_SAMPLES_AT_ONCE` samples have more. With a larger maximum, the gradients would not fit in a CPU's cache, and each
sample would take three times as long."""
_SAMPLES_AT_ONCE = 8
"""The minimum number of samples whose gradients are computed at a time, for large models."""


class PrivateGradient:
    """Computes private gradients of one batch, and records its loss and tally.

    The loss and the tally have no noise, so they must not be sent.
    """

    def __init__(
        self,
        network: Network,
        work: RoundWork,
        client: Client,
        companions: Mapping[str, tuple[ModelState, Mode]],
        buffers: Tensors,
        x: Tensor,
        y: Tensor,
        key: Tensor,
        full_batch: int,
    ) -> None:
        """`full_batch` is B, and the other arguments are those of `BatchGradient`."""
        self._network, self._work, self._client, self._companions = network, work, client, companions
        self._buffers, self._x, self._y, self._key, self._full_batch = buffers, x, y, key, full_batch
        self._gradients = 0
        self.recorded: tuple[Tensor, Tensors] | None = None
        """The mean loss and the tally of the batch. None before the first gradient."""

    def __call__(self, at: Tensors, part: LossPart | None = None, /) -> Tensors:
        self._gradients += 1
        if self._gradients > self._work.solver.gradients():
            raise UserError(
                f"a step of {type(self._work.solver.members[0]).__name__} computes more gradients than its gradients() "
                "returns, so example-level privacy would not count them all; expected a larger gradients(), "
                "or plain_gradient = False if the step never calls gradient(params)"
            )
        sums = self._clipped_sums(at, part)
        clip, multiplier = self._work.local.example_privacy
        size = self._planned_samples(part)
        key = int(fold(self._key, self._gradients))
        lengths = [total.numel() for total in sums.values()]
        noise = torch.split(self._work.noise(torch.Size([sum(lengths)]), key), lengths)
        return {
            name: ((total + multiplier * clip * n.view(total.shape).to(total)) / size).to(at[name].dtype)
            for (name, total), n in zip(sums.items(), noise, strict=True)
        }

    def _planned_samples(self, part: LossPart | None) -> int:
        """Return how many samples of a full batch this part of the loss uses. An empty half means the whole batch."""
        halves = {"first": -(-self._full_batch // 2), "second": self._full_batch // 2}
        return halves.get(part or "", 0) or self._full_batch

    def _clipped_sums(self, at: Tensors, part: LossPart | None) -> Tensors:
        """Return the sum of the samples' clipped gradients at these parameters."""
        included = real_rows(half_targets(self._y, part))
        numbers = sum(p.numel() for p in at.values())
        device = self._x.device.type
        rows = max(_SAMPLES_AT_ONCE, _NUMBERS_AT_ONCE[device] // max(numbers, 1))
        accurate = ACCURATE[device]
        sums = {name: torch.zeros_like(p, dtype=accurate) for name, p in at.items()}
        keys = fold(self._key, torch.arange(len(self._y), device=self._y.device))
        records: list[tuple[Tensor, Tensors]] = []
        for first in range(0, len(self._y), rows):
            chunk = slice(first, first + rows)
            grads, recorded = self._sample_gradients(at, part, self._x[chunk], self._y[chunk], keys[chunk])
            records.append(recorded)
            for name, total in clipped_sums(grads, self._work.local.example_privacy[0], included[chunk]).items():
                sums[name] += total
        if self.recorded is None:
            loss = torch.cat([losses for losses, _ in records]).mean()
            tally = {name: torch.cat([tally[name] for _, tally in records]).sum() for name in records[0][1]}
            self.recorded = loss, tally
        return sums

    def _sample_gradients(
        self, at: Tensors, part: LossPart | None, x: Tensor, y: Tensor, keys: Tensor
    ) -> tuple[Tensors, tuple[Tensor, Tensors]]:
        """Return each sample's gradient, loss and tally, along a leading axis of samples."""
        objective = self._work.objective

        def loss(params: Tensors, x: Tensor, y: Tensor, key: Tensor) -> tuple[Tensor, tuple[Tensor, Tensors]]:
            batch, target = x.unsqueeze(0), y.unsqueeze(0)
            between = perturbation(objective, target, self._client, key)
            out = self._network.forward(params, dict(self._buffers), batch, "train", key, between)
            frozen = frozen_outputs(self._network, self._companions, batch, key)
            out = Outputs(out.logits, contiguous(out.features), frozen)
            whole = objective.loss(out, target, self._client)
            found = objective.proximal(out, target, self._client) if part == "proximal" else whole
            if not isinstance(found, Tensor) or found.dim():
                raise wrong_number(objective, "proximal" if part == "proximal" else "loss", found)
            return found, (whole.detach(), objective.tally(out, target))

        gradient = torch.func.grad(loss, has_aux=True)
        result: tuple[Tensors, tuple[Tensor, Tensors]] = torch.func.vmap(
            gradient, in_dims=(None, 0, 0, 0), randomness="different"
        )({name: p.detach() for name, p in at.items()}, x, y, keys)
        return result


def clipped_sums(gradients: Mapping[str, Tensor], clip: float, included: Tensor) -> Tensors:
    """Return Σ_i clip(g_i, C) over the samples that are `included`, in the device's most accurate format.

    A gradient with a number that is not finite counts as zero. Such a gradient has no norm to clip by, and the server
    can cause one, because it chooses the model.
    """
    accurate = ACCURATE[included.device.type]
    rows = {name: g.reshape(len(g), -1) for name, g in gradients.items()}
    norms = torch.stack([torch.linalg.vector_norm(r, dim=1, dtype=accurate) for r in rows.values()]).norm(dim=0)
    counted = included & norms.isfinite()
    scale = torch.where(counted, (clip / norms.clamp(min=1e-30)).clamp(max=1.0), 0.0)
    if not counted.all():
        rows = {name: torch.where(counted.unsqueeze(1), r, 0.0) for name, r in rows.items()}
    return {name: (scale @ r.to(accurate)).view(gradients[name].shape[1:]) for name, r in rows.items()}


def require_sample_gradients(model: nn.Module, sample: Tensor) -> None:
    """Refuse a model that has BatchNorm, or whose gradients torch cannot compute sample by sample.

    `sample` is a batch of one input.
    """
    layer = next((type(m).__name__ for m in model.modules() if isinstance(m, _BatchNorm)), None)
    if layer is not None:
        raise UserError(
            f"the model has {layer}, which mixes the samples of a batch, so example-level privacy does not cover it; "
            "expected a model without BatchNorm, or train: head"
        )
    network = Network(model).to(sample.device)
    state = network.state()

    def loss(params: Tensors, x: Tensor, key: Tensor) -> Tensor:
        buffers = dict(state.buffers)
        logits = network.forward(params, buffers, x.unsqueeze(0), "train", key).logits
        if any(buffers[name] is not buffer for name, buffer in state.buffers.items()):
            raise RuntimeError("the model writes into its buffers")
        return logits.sum()

    inputs = torch.cat([sample, sample]).to(torch.float32 if sample.is_floating_point() else sample.dtype)
    keys = torch.arange(2, device=sample.device)
    try:
        torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0), randomness="different")(state.params, inputs, keys)
    except Exception as error:  # a user's model may fail in any way
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(
            f"torch cannot compute the gradients of single samples of this model, which example-level privacy needs: "
            f"{reason}"
        ) from error
