"""FedCurv against numpy with partial participation, and its special cases."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from linear_clients import (
    Array,
    Recording,
    Site,
    averaged,
    cross_entropy_slope,
    descend,
    federation,
    final,
    played,
    serve,
    settings,
    sites,
    theta,
)
from toy_runs import use_engine

from fedskew.errors import UserError
from fedskew.losses import IGNORE
from fedskew.methods import Client, Outputs, Seen, make_method
from fedskew.methods.fedcurv import FedCurv


def slope(at: Array, site: Site) -> Array:
    return cross_entropy_slope(site.x @ at.T, site).T @ site.x


def sample_gradients(at: Array, site: Site) -> list[Array]:
    """The gradient of each sample's cross entropy."""
    return [slope(at, Site(site.x[i : i + 1], site.y[i : i + 1], site.counts)) for i in range(len(site.y))]


def close(found: Array, expected: Array) -> None:
    np.testing.assert_allclose(found, expected, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("engine", ["plain", "stacked"])
@pytest.mark.parametrize("participants", [2, 3])
def test_rounds_match_numpy(participants: int, engine: str) -> None:
    fed, weight, rounds = federation(), 0.7, 4
    params = {"curvature_weight": weight}
    changed: dict[str, Any] = {"rounds": rounds, "clients_per_round": participants, "engine": engine}
    states, rows = played(serve("fedcurv", params, federation=fed, **changed))
    at, expected = sites(fed), theta(states[0])
    fishers: dict[int, Array] = {}
    models: dict[int, Array] = {}
    for t, row in enumerate(rows):
        made = {}
        for k in row.clients:
            others = [(fishers[j], models[j]) for j in fishers if j != k]

            def direction(v: Array, site: Site = at[k], others: list[tuple[Array, Array]] = others) -> Array:
                pull = sum((fisher * (v - model) for fisher, model in others), np.zeros_like(v))
                return slope(v, site) + 2 * weight * pull

            made[k] = descend(expected, direction, settings(**changed), t)
        fishers |= {k: slope(w, at[k]) ** 2 for k, w in made.items()}
        models |= made
        expected = averaged(list(made.values()), [at[k] for k in made])
        close(theta(states[t + 1]), expected)


@pytest.mark.parametrize("engine", ["plain", "stacked"])
def test_the_fisher_information_is_the_mean_square_over_batches(engine: str) -> None:
    fed = federation()
    server = serve("fedcurv", federation=fed, rounds=1, batch_size=1, lr=0.01, engine=engine)
    recording = use_engine(server, Recording(server.engine))
    played(server)
    ((_, result),) = recording.results
    weight, bias = (result.trained.params[f"head.{name}"].numpy() for name in ("weight", "bias"))
    fisher = result.uplink["fisher/head.weight_change"].numpy()
    centre = result.uplink["fisher_centre/head.weight_change"].numpy()
    for k, site in enumerate(sites(fed)):
        at = np.concatenate([weight[k], bias[k][:, None]], axis=1)
        expected = np.mean([g**2 for g in sample_gradients(at, site)], axis=0)[:, :-1]
        close(fisher[k], expected)
        close(centre[k], expected * weight[k])


@pytest.mark.parametrize("engine", ["plain", "stacked"])
def test_without_weight_and_in_the_first_round_it_is_fedavg(engine: str) -> None:
    changed: dict[str, Any] = {"batch_size": 2, "engine": engine}
    close(final("fedcurv", {"curvature_weight": 0.0}, **changed), final("fedavg", **changed))
    close(final("fedcurv", rounds=1, **changed), final("fedavg", rounds=1, **changed))
    assert np.abs(final("fedcurv", **changed) - final("fedavg", **changed)).max() > 1e-6


def test_a_single_client_is_not_pulled_to_itself() -> None:
    fed = federation(np.array([[5, 2, 0, 1]]))
    close(final("fedcurv", federation=fed, rounds=3), final("fedavg", federation=fed, rounds=3))


def test_it_combines_with_any_objective_and_server_rule() -> None:
    found = final("fedlmd+fedcurv+fedavgm", {"curvature_weight": 0.0, "server_momentum": 0.0})
    close(found, final("fedlmd"))


def test_a_pass_with_gradients_counts_as_an_epoch() -> None:
    _, rows = played(serve("fedcurv", local_epochs=3))
    assert [row.compute for row in rows] == pytest.approx([4 / 3, 4 / 3])


def test_a_negative_weight_is_refused() -> None:
    with pytest.raises(UserError, match="curvature_weight"):
        make_method("fedcurv", {"curvature_weight": -1})


def test_a_batch_of_padding_alone_does_not_count() -> None:
    """The stacked engine pads a client that has fewer batches than others."""
    real, padding = torch.tensor([0, IGNORE]), torch.tensor([IGNORE, IGNORE])
    client = Client(torch.ones(2), {})
    for y, batches in ((real, 1), (padding, 0)):
        seen = Seen(Outputs(torch.zeros(2, 2)), y, torch.zeros(2), {"head.weight": torch.zeros(2, 3)})
        assert FedCurv().closing(seen, client)["batches"] == batches
