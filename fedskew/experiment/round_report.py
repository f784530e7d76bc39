"""What the host must know of a round's training: losses, tallies, and whose numbers are finite."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from fedskew.engine import ModelState, RoundResult


@dataclass(frozen=True)
class RoundReport:
    """What the host must know of a round's training."""

    finite: npt.NDArray[np.bool_]
    """[K]: which clients came back with finite numbers only, but for a buffer that is meant to hold others."""
    loss: npt.NDArray[np.float64]
    tally: dict[str, float]

    @classmethod
    def of(cls, result: RoundResult, sent: ModelState) -> RoundReport:
        """In one transfer from the device, unless something is not finite."""
        tensors = [*result.trained.params.values(), *result.trained.buffers.values(), *result.uplink.values()]
        numbers = [
            _magnitude(tensors),
            _magnitude(list(result.states.values())),
            *map(torch.sum, result.tally.values()),
        ]
        device = result.loss.device
        told = torch.cat([result.loss.double(), *(n.to(device).double().view(1) for n in numbers)]).cpu().numpy()
        loss, magnitude, tally = np.split(told, [len(result.loss), len(result.loss) + 2])
        finite = np.isfinite(loss) if np.isfinite(magnitude).all() else _finite(result, sent)
        return cls(finite, loss, dict(zip(result.tally, tally.tolist(), strict=True)))


def _magnitude(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """A number that is finite only if all entries are."""
    inexact = [t for t in tensors if (t.is_floating_point() or t.is_complex()) and t.numel()]
    if not inexact:
        return torch.zeros(())
    return torch.stack(torch._foreach_norm(inexact, 1)).sum(dtype=torch.float64)


def _finite(result: RoundResult, sent: ModelState) -> npt.NDArray[np.bool_]:
    """Client by client."""
    tensors = [*result.trained.params.values(), *result.uplink.values(), *result.states.values()]
    entries = [tensor.isfinite() for tensor in tensors]
    entries += [t.isfinite() | (t == sent.buffers[name]) for name, t in result.trained.buffers.items()]
    finite = result.loss.isfinite().cpu()
    for entry in entries:
        finite &= entry.flatten(1).all(dim=1).cpu() if entry.dim() > 1 else entry.cpu()
    return np.asarray(finite.numpy())


def are_finite(tensors: Sequence[torch.Tensor]) -> bool:
    if bool(_magnitude(tensors).isfinite()):
        return True
    return all(bool(t.isfinite().all()) for t in tensors)
