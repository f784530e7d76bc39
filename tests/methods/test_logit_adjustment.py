"""The classes' shares come from the label counts of earlier participants."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import fedskew as fs
from fedskew.methods import Client, Outputs, Updates, find
from fedskew.methods.logit_adjustment import LogitAdjustment

PARAMS = {"head.weight": torch.zeros(3, 2, dtype=torch.float64)}


def updates(counts: list[list[int]]) -> Updates:
    stacked = torch.zeros(len(counts), 3, 2, dtype=torch.float64)
    weights = torch.full((len(counts),), 1 / len(counts), dtype=torch.float64)
    return Updates({"head.weight": stacked}, weights, {"label_counts": torch.tensor(counts)}, 0.1, 1.0)


def test_the_prior_is_that_of_all_earlier_participants() -> None:
    part = LogitAdjustment()
    state = part.server_state(PARAMS)
    assert part.downlink(state)["prior"].tolist() == pytest.approx([1 / 3] * 3), "uniform before the first round"
    state = part.next_server_state(updates([[8, 0, 0], [1, 0, 1]]), state)
    state = part.next_server_state(updates([[0, 0, 9]]), state)
    assert part.downlink(state)["prior"].tolist() == pytest.approx([9 / 20, 1 / 20, 10 / 20]), "an unseen class is one"


def test_the_loss_is_that_of_the_paper_in_float64() -> None:
    rng = np.random.default_rng(0)
    logits, y = torch.from_numpy(rng.normal(size=(7, 3))), torch.from_numpy(rng.integers(0, 3, 7))
    prior = torch.tensor([0.7, 0.2, 0.1], dtype=torch.float64)
    client = Client(torch.tensor([1, 2, 3]), {}, {"prior": prior})
    found = LogitAdjustment(tau=0.8).loss(Outputs(logits), y, client)
    weights = logits.exp() * prior**0.8
    expected = -(weights[torch.arange(7), y] / weights.sum(dim=1)).log().mean()
    assert float(found) == pytest.approx(float(expected), rel=1e-12)
    even = LogitAdjustment().loss(Outputs(logits), y, Client(client.label_counts, {}, {"prior": prior * 0 + 1 / 3}))
    assert float(even) == pytest.approx(float(nn.functional.cross_entropy(logits, y)), rel=1e-12)


def test_it_declares_that_it_reveals_label_counts() -> None:
    assert find("logit-adjustment").reveals == "label counts"
    assert find("weighted-ce").reveals == "nothing"


def test_with_all_clients_the_second_round_knows_the_shares_of_the_federation() -> None:
    fed = fs.federation("digits", fs.Dirichlet(clients=4, beta=0.3), seed=0)
    seen: list[np.ndarray] = []

    class Watch(LogitAdjustment):
        def next_server_state(self, updates: Updates, server_state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            after = super().next_server_state(updates, server_state)
            seen.append(after["federation_counts"].numpy())
            return after

    fs.run(fed, Watch(), "dnn", rounds=2, local_epochs=1, device="cpu")
    counts = fed.label_counts.sum(axis=0)
    assert [state.tolist() for state in seen[:2]] == [counts.tolist(), (2 * counts).tolist()]
