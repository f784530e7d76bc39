"""Server rules that declare that they use only the mean of the updates give the same model from the mean alone."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from fedskew.methods import METHODS, ServerRule, Tensors, Updates, make_method
from fedskew.methods.parts import individual_updates_reason, server_step

SERVERS = [name for name, entry in METHODS.items() if any(issubclass(part, ServerRule) for part in entry.parts)]
USE_ONLY_MEAN = [name for name in SERVERS if METHODS[name].secure_aggregation]


def updates(params: Tensors, weights: torch.Tensor) -> Updates:
    return Updates(params, weights, {}, lr=0.1, participation=0.5)


@pytest.mark.parametrize("method", ["fedavg", *USE_ONLY_MEAN])
def test_the_mean_in_place_of_every_update_gives_the_same_model(method: str) -> None:
    rule, generator = make_method(method).server, torch.Generator().manual_seed(0)
    sent = {"w": torch.randn(5, 3, generator=generator, dtype=torch.float64)}
    state = means = rule.server_state(sent)
    stepped = stepped_by_mean = sent
    for _ in range(3):
        every = updates({"w": torch.randn(4, 5, 3, generator=generator).double()}, torch.tensor([0.1, 0.2, 0.3, 0.4]))
        mean = {name: t.expand(4, *t.shape) for name, t in every.mean().items()}
        stepped, state = server_step(rule, (), stepped, every, state)
        stepped_by_mean, means = server_step(rule, (), stepped_by_mean, updates(mean, torch.full((4,), 0.25)), means)
    torch.testing.assert_close(stepped_by_mean, stepped)
    torch.testing.assert_close(means, state)


def test_these_server_rules_need_single_updates() -> None:
    assert {"median", "trimmed-mean", "norm-clipping", "fedexp", "fednova", "scaffold", "feddyn", "fedgf"} <= {
        name for name in SERVERS if name not in USE_ONLY_MEAN
    }
    assert METHODS["median"].individual_updates_reason == "uses individual updates on the server"
    assert METHODS["fedgr"].individual_updates_reason.startswith("sends ")


def test_a_rule_that_does_not_declare_it_is_taken_to_need_single_updates() -> None:
    @dataclass(frozen=True)
    class Own(ServerRule):
        def aggregate(self, sent: Tensors, updates: Updates, state: Tensors) -> tuple[Tensors, Tensors]:
            return updates.mean(), state

    @dataclass(frozen=True)
    class Keeping(Own):
        uses_only_mean = True

        def next_server_state(self, updates: Updates, server_state: Tensors) -> Tensors:
            return {"first": updates.params["w"][0]}

    assert individual_updates_reason(Own) == "uses individual updates on the server"
    assert individual_updates_reason(Keeping) == "keeps a state on the server that is made from individual updates"
