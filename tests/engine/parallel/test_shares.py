"""Sharing a round out to workers loses no client, gives nobody much more than the others, and is undone in order."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedskew.engine.contract import RoundResult
from fedskew.engine.model.network import ModelState
from fedskew.engine.parallel.shares import balanced_shares, join_results

COSTS = st.lists(st.integers(0, 50), min_size=1, max_size=30)
WORKERS = st.integers(1, 8)


@given(COSTS, WORKERS)
def test_every_client_is_in_one_share_and_no_share_is_empty(costs: list[int], workers: int) -> None:
    shares = balanced_shares(costs, workers)
    assert sorted(item for share in shares for item in share) == list(range(len(costs)))
    assert all(share == sorted(share) and share for share in shares)
    assert len(shares) == min(workers, len(costs))


@given(COSTS, WORKERS)
def test_nobody_has_more_than_the_mean_and_one_client(costs: list[int], workers: int) -> None:
    loads = [sum(max(costs[item], 1) for item in share) for share in balanced_shares(costs, workers)]
    assert max(loads) <= sum(loads) / len(loads) + max(*costs, 1)
    assert balanced_shares(costs, workers) == balanced_shares(costs, workers)


def result(rows: list[int], tallied: bool = True) -> RoundResult:
    """As if client k came back with the number k."""
    numbers = torch.tensor(rows, dtype=torch.float32)
    table = torch.stack([numbers, -numbers], dim=1)
    return RoundResult(
        trained=ModelState({"w": table}, {"seen": numbers.long()}),
        uplink={"up": table + 1},
        states={},
        loss=numbers.double(),
        tally={"masked": numbers} if tallied else {},
        visits=np.array(rows),
    )


@given(COSTS, WORKERS)
def test_results_come_back_in_the_order_of_the_assignments(costs: list[int], workers: int) -> None:
    shares = balanced_shares(costs, workers)
    whole, expected = join_results([result(share) for share in shares], shares), result(list(range(len(costs))))
    assert torch.equal(whole.trained.params["w"], expected.trained.params["w"])
    assert torch.equal(whole.trained.buffers["seen"], expected.trained.buffers["seen"])
    assert torch.equal(whole.uplink["up"], expected.uplink["up"])
    assert torch.equal(whole.loss, expected.loss)
    assert torch.equal(whole.tally["masked"], expected.tally["masked"])
    assert whole.visits.tolist() == expected.visits.tolist()
    assert whole.states == {}


def test_a_share_that_took_no_step_has_tallied_zero() -> None:
    whole = join_results([result([1, 2]), result([0, 3], tallied=False)], [[1, 2], [0, 3]])
    assert whole.tally["masked"].tolist() == [0.0, 1.0, 2.0, 0.0]
