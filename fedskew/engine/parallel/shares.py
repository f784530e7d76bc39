"""A round cut into shares of about equal cost for several workers or devices, and their results put together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from fedskew.engine.contract import RoundResult, RoundWork
from fedskew.engine.model.network import ModelState
from fedskew.methods.parts import Tensors

Share = list[int]
"""Which of a round's assignments, ascending."""


def local_steps(work: RoundWork) -> list[int]:
    """What each client costs: its local steps, and one for what every client costs besides."""
    local = work.local
    return [1 + local.epochs * -(-len(a.samples) // local.batch_size) for a in work.assignments]


def balanced_shares(costs: Sequence[int], workers: int) -> list[Share]:
    """The costliest first, each to whoever has least to do: at most 4/3 of the best possible. None is empty."""
    shares: list[Share] = [[] for _ in range(min(workers, len(costs)))]
    loads = [0] * len(shares)
    for item in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        least = loads.index(min(loads))
        shares[least].append(item)
        loads[least] += max(costs[item], 1)
    return [sorted(share) for share in shares]


def share_of(work: RoundWork, share: Share) -> RoundWork:
    return replace(work, assignments=[work.assignments[i] for i in share])


def joined(results: Sequence[RoundResult], shares: Sequence[Share]) -> RoundResult:
    """All clients' results in the order of the assignments, on the first result's device."""
    device = results[0].loss.device
    order = np.argsort(np.concatenate([np.asarray(share, dtype=np.int64) for share in shares]))

    def together(parts: Sequence[Tensors]) -> Tensors:
        names = dict.fromkeys(name for part in parts for name in part)
        return {name: _joined([part.get(name) for part in parts], shares, device) for name in names}

    return RoundResult(
        trained=ModelState(
            together([r.trained.params for r in results]), together([r.trained.buffers for r in results])
        ),
        uplink=together([r.uplink for r in results]),
        states=together([r.states for r in results]),
        loss=_joined([r.loss for r in results], shares, device),
        tally=together([r.tally for r in results]),
        visits=np.concatenate([r.visits for r in results])[order],
    )


def _joined(parts: Sequence[Tensor | None], shares: Sequence[Share], device: torch.device) -> Tensor:
    """Rows of several tensors as one; a share none of whose clients took a step has tallied nothing: zero."""
    like = next(part for part in parts if part is not None)
    whole = torch.empty(sum(map(len, shares)), *like.shape[1:], dtype=like.dtype, device=device)
    for part, share in zip(parts, shares, strict=True):
        rows = torch.tensor(share, device=device)
        whole[rows] = torch.zeros((), dtype=like.dtype, device=device) if part is None else part.to(device)
    return whole
