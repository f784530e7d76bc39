"""What the host must know of a round's training: losses, tallies, and whose numbers are finite."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from fedskew.engine import Fetch, ModelState, RoundResult


@dataclass(frozen=True)
class RoundReport:
    """What the host must know of a round's training."""

    finite: npt.NDArray[np.bool_]
    """[K]: which clients came back with finite numbers only, but for a buffer that is meant to hold others."""
    loss: npt.NDArray[np.float64]
    tally: dict[str, float]

    @classmethod
    def of(cls, result: RoundResult, sent: ModelState) -> RoundReport:
        return AskedReport(result, sent).read()


class AskedReport:
    """A report on its way to the host: one transfer from the device, unless something is not finite."""

    def __init__(self, result: RoundResult, sent: ModelState, made: Sequence[torch.Tensor] = ()) -> None:
        """`made` is what the server made of the round before it was known what that is worth."""
        self._result, self._sent, self._made = result, sent, made
        tensors = [*result.trained.params.values(), *result.trained.buffers.values(), *result.uplink.values()]
        device = result.loss.device
        numbers = [
            _magnitude(tensors, device),
            _magnitude(list(result.states.values()), device),
            _magnitude(made, device),
            *map(torch.sum, result.tally.values()),
        ]
        told = torch.cat([result.loss.double(), *(n.to(device).double().view(1) for n in numbers)])
        self._told = Fetch({"": told})

    def read(self) -> RoundReport:
        told, clients = self._told.read()[""].numpy(), len(self._result.loss)
        loss, magnitude, tally = np.split(told, [clients, clients + 3])
        finite = np.isfinite(loss) if np.isfinite(magnitude[:2]).all() else _finite(self._result, self._sent)
        return RoundReport(finite, loss, dict(zip(self._result.tally, tally.tolist(), strict=True)))

    def made_well(self) -> bool:
        """Whether what the server made holds finite numbers only."""
        magnitude = self._told.read()[""][len(self._result.loss) + 2]
        return bool(magnitude.isfinite()) or are_finite(self._made)


def _magnitude(tensors: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """A number that is finite only if all entries are."""
    inexact = [t for t in tensors if (t.is_floating_point() or t.is_complex()) and t.numel()]
    if not inexact:
        return torch.zeros((), device=device)
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
    if not tensors or bool(_magnitude(tensors, tensors[0].device).isfinite()):
        return True
    return all(bool(t.isfinite().all()) for t in tensors)
