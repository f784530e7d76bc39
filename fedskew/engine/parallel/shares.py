"""Split a round into shares of about equal cost for several workers or devices, and join their results."""

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
"""Positions in a round's assignments, in ascending order."""


def client_costs(work: RoundWork) -> list[int]:
    """Estimate the cost of each client in steps: its local steps, plus one for its fixed cost."""
    local = work.local
    return [1 + local.epochs * -(-len(a.samples) // local.batch_size) for a in work.assignments]


def balanced_shares(costs: Sequence[int], workers: int) -> list[Share]:
    """Assign the costliest clients first, each to the share with the least cost so far. No share is empty.

    The costliest share costs at most 4/3 as much as in the best possible assignment.
    """
    shares: list[Share] = [[] for _ in range(min(workers, len(costs)))]
    loads = [0] * len(shares)
    for item in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        least = loads.index(min(loads))
        shares[least].append(item)
        loads[least] += max(costs[item], 1)
    return [sorted(share) for share in shares]


def take_share(work: RoundWork, share: Share) -> RoundWork:
    """Return the work with only the clients of the share."""
    return replace(work, assignments=[work.assignments[i] for i in share])


def require_same_form(work: RoundWork, results: Sequence[RoundResult], shares: Sequence[Share]) -> None:
    """Refuse results that cannot be joined, because a hook returned other tensors for one share than for another."""
    firsts = [work.assignments[share[0]].client for share in shares]
    work.require_same_form("uplink", firsts, [result.uplink for result in results], stacked=True)
    work.require_same_form("next_state", firsts, [result.states for result in results], stacked=True)


def join_results(results: Sequence[RoundResult], shares: Sequence[Share]) -> RoundResult:
    """Join all clients' results, in the order of the assignments, on the device of the first result."""
    device = results[0].loss.device
    order = np.argsort(np.concatenate([np.asarray(share, dtype=np.int64) for share in shares]))

    def join(parts: Sequence[Tensors]) -> Tensors:
        names = dict.fromkeys(name for part in parts for name in part)
        return {name: _join_rows([part.get(name) for part in parts], shares, device) for name in names}

    return RoundResult(
        trained=ModelState(join([r.trained.params for r in results]), join([r.trained.buffers for r in results])),
        uplink=join([r.uplink for r in results]),
        states=join([r.states for r in results]),
        loss=_join_rows([r.loss for r in results], shares, device),
        tally=join([r.tally for r in results]),
        visits=np.concatenate([r.visits for r in results])[order],
    )


def _join_rows(parts: Sequence[Tensor | None], shares: Sequence[Share], device: torch.device) -> Tensor:
    """Join the rows of several tensors. A missing tensor counts as zeros: clients without steps have no tally."""
    like = next(part for part in parts if part is not None)
    whole = torch.empty(sum(map(len, shares)), *like.shape[1:], dtype=like.dtype, device=device)
    for part, share in zip(parts, shares, strict=True):
        rows = torch.tensor(share, device=device)
        whole[rows] = torch.zeros((), dtype=like.dtype, device=device) if part is None else part.to(device)
    return whole
