"""PKD's three stages, round by round, against its formulas in numpy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from linear_clients import (
    Array,
    Site,
    averaged,
    cross_entropy_slope,
    descend,
    federation,
    played,
    serve,
    settings,
    sites,
    softmax,
    theta,
)

from fedskew.experiment.round.state import RunState

GROUPS = ((0, 1), (1, 2, 3))
WEIGHT, TEMPERATURE = 0.8, 2.0


def expert_slope(z: Array, site: Site, group: tuple[int, ...]) -> Array:
    """∂CE/∂z with the softmax over the group."""
    slope = np.zeros_like(z)
    slope[:, group] = softmax(z[:, group]) - site.one_hot[:, group]
    return slope / len(z)


def distilled_slope(z: Array, site: Site, experts: list[Array]) -> Array:
    """∂/∂z of CE + λ·mean of KL(expert ‖ student), where the student confuses classes of a group."""
    slope = len(z) * cross_entropy_slope(z, site)
    for row, target in enumerate(site.y):
        said = int(z[row].argmax())
        both = [g for g, group in enumerate(GROUPS) if target in group and said in group]
        if said == target or not both:
            continue
        group = GROUPS[both[0]]
        student, expert = (softmax(logits[row : row + 1, group] / TEMPERATURE)[0] for logits in (z, experts[both[0]]))
        slope[row, group] += WEIGHT * (student - expert) / TEMPERATURE
    return slope / len(z)


def only(site: Site, group: tuple[int, ...]) -> Site:
    own = np.isin(site.y, group)
    return Site(site.x[own], site.y[own], np.bincount(site.y[own], minlength=len(site.counts)))


def averaged_round(start: Array, at: list[Site], slope: Callable[[Array, Site], Array], number: int) -> Array:
    """FedAvg of clients that each descend their own loss on all their samples."""

    def direction(site: Site) -> Callable[[Array], Array]:
        return lambda v: slope(site.x @ v.T, site).T @ site.x

    here = [site for site in at if len(site.y)]
    return averaged([descend(start, direction(site), settings(), number) for site in here], here)


def model_named(state: RunState, name: str) -> Array:
    params = state.models[name].model.params
    return np.concatenate([params["head.weight"].numpy(), params["head.bias"].numpy()[:, None]], axis=1)


@pytest.mark.parametrize("engine", ["plain", "stacked"])
def test_warm_up_experts_and_distillation_are_the_formulas(engine: str) -> None:
    fed = federation(np.array([[5, 2, 1, 0], [0, 4, 4, 1], [3, 0, 0, 0], [1, 1, 2, 6]]))
    params: dict[str, Any] = {
        "groups": [list(group) for group in GROUPS], "warmup_rounds": 2, "expert_rounds": 2,
        "distill_weight": WEIGHT, "temperature": TEMPERATURE,
    }  # fmt: skip
    states, rows = played(serve("pkd", params, federation=fed, rounds=5, engine=engine))
    assert [row.stage for row in rows] == [*["warm-up"] * 2, *["expert 0"] * 2, *["expert 1"] * 2, *["distil"] * 3]
    at, model = sites(fed), theta(states[0])
    for t in range(2):
        model = averaged_round(model, at, cross_entropy_slope, t)
        np.testing.assert_allclose(theta(states[t + 1]), model, rtol=1e-10, atol=1e-12)

    experts = []
    for g, group in enumerate(GROUPS):
        own = [only(site, group) for site in at]
        expert = model
        for t in range(2):
            expert = averaged_round(expert, own, lambda z, site, group=group: expert_slope(z, site, group), t)
            np.testing.assert_allclose(
                model_named(states[3 + 2 * g + t], f"expert.{g}"), expert, rtol=1e-10, atol=1e-12
            )
        experts.append(expert)

    for t in range(3):
        model = averaged_round(
            model, at, lambda z, site: distilled_slope(z, site, [site.x @ e.T for e in experts]), 2 + t
        )
        np.testing.assert_allclose(theta(states[7 + t]), model, rtol=1e-10, atol=1e-12)
    assert sum(row.tally.get("distilled", 0) for row in rows) > 5
