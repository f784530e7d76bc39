"""The bounds: all data in one place, and every client on its own."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from linear_clients import (
    COUNTS,
    Array,
    Site,
    cross_entropy_slope,
    descend,
    federation,
    played,
    serve,
    settings,
    sites,
    theta,
)

from fedskew.cli import main
from fedskew.data import Dirichlet
from fedskew.data import federation as split
from fedskew.experiment.callbacks import Callback
from fedskew.experiment.round.record import RoundRow
from fedskew.experiment.round.sampler import ClientSampler
from fedskew.experiment.round.state import RunState
from fedskew.experiment.run import run
from fedskew.methods import make_method


def slope(at: Array, site: Site) -> Array:
    return cross_entropy_slope(site.x @ at.T, site).T @ site.x


def own(state: RunState, client: int) -> Array:
    kept = state.clients.read("global", [client])[0]
    return np.concatenate([kept["params/head.weight"].numpy(), kept["params/head.bias"].numpy()[:, None]], axis=1)


class Stop(Exception):
    """Ends a run early."""


class Stopping(Callback):
    def on_round(self, row: RoundRow, rounds_ahead: int) -> None:
        if row.round == 2:
            raise Stop


# -- centralised ----------------------------------------------------------------------------------------


def test_centralised_is_gradient_descent_on_all_the_data() -> None:
    fed = federation()
    states, _ = played(serve("centralised", federation=fed, rounds=3))
    each = sites(fed)
    x, y = (np.concatenate([getattr(site, name) for site in each]) for name in ("x", "y"))
    pooled = Site(x, y, fed.label_counts.sum(axis=0))
    expected = theta(states[0])
    for t in range(3):
        expected = descend(expected, lambda v: slope(v, pooled), settings(), t)
        np.testing.assert_allclose(theta(states[t + 1]), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("clients_per_round", [1, 2, None])
def test_centralised_visits_as_many_samples_as_fedavg_in_every_round(clients_per_round: int | None) -> None:
    changed = {"clients_per_round": clients_per_round, "rounds": 4}
    rows, same = (played(serve(method, **changed))[1] for method in ("centralised", "fedavg"))
    assert [row.visits for row in rows] == [row.visits for row in same]
    assert all(row.compute == 1 and row.clients == [] for row in rows)


def test_centralised_draws_from_all_clients_in_each_round() -> None:
    fed = split("digits", Dirichlet(20, 0.1), 0)
    sampler = ClientSampler(fed, settings(clients_per_round=5))
    stage = make_method("centralised").stages(3, 1, {})[0]
    rounds = [sampler.sample(stage, t) for t in range(3)]
    owner = np.repeat(np.arange(20), fed.sizes)[np.argsort(np.concatenate(fed.indices))]
    for this in rounds:
        (samples,) = this.samples
        assert len(np.unique(samples)) == len(samples)
        assert len(np.unique(owner[samples])) == 20  # not only from five clients
        assert (this.federation.label_counts[0] > 0).all()
    again = sampler.sample(stage, 1)
    assert np.array_equal(again.samples[0], rounds[1].samples[0])


def test_centralised_draws_new_samples_if_all_clients_have_one_size() -> None:
    sampler = ClientSampler(federation(np.full((4, 4), 3)), settings(clients_per_round=2))
    stage = make_method("centralised").stages(2, 1, {})[0]
    first, second = (set(sampler.sample(stage, t).samples[0]) for t in range(2))
    assert len(first) == len(second) == 24
    assert first != second


def test_with_all_clients_centralised_sees_every_sample() -> None:
    fed = federation()
    this = ClientSampler(fed, settings()).sample(make_method("centralised").stages(1, 1, {})[0], 0)
    assert this.samples[0].tolist() == sorted(np.concatenate(fed.indices))


# -- local-only -----------------------------------------------------------------------------------------


def test_local_only_clients_continue_their_own_models() -> None:
    fed = federation()
    states, rows = played(serve("local-only", federation=fed, rounds=3))
    expected = [theta(states[0])] * 3
    x, y = fed.dataset.test.x.astype(np.float64), fed.dataset.test.y
    for t in range(3):
        expected = [
            descend(w, lambda v, s=s: slope(v, s), settings(), t) for w, s in zip(expected, sites(fed), strict=True)
        ]
        for client, w in enumerate(expected):
            np.testing.assert_allclose(own(states[t + 1], client), w, rtol=0, atol=1e-12)
        right = [((x @ w[:, :-1].T + w[:, -1]).argmax(axis=1) == y).mean() for w in expected]
        assert rows[t].client_accuracy == pytest.approx(right)
        assert rows[t].accuracy == pytest.approx(np.mean(right))


def test_local_only_trains_the_drawn_clients_and_tests_all() -> None:
    states, rows = played(serve("local-only", clients_per_round=1, rounds=5))
    initial = theta(states[0])
    drawn: set[int] = set()
    for before, after, row in zip(states, states[1:], rows, strict=False):
        drawn |= set(row.clients)
        assert set(after.clients.versions["global"]) == drawn
        assert len(row.client_accuracy) == 3
        for client in drawn - set(row.clients):
            assert np.array_equal(own(after, client), own(before, client))
    untrained = {c: row.client_accuracy[c] for row in rows[:1] for c in range(3) if c not in rows[0].clients}
    x, y = federation().dataset.test.x.astype(np.float64), federation().dataset.test.y
    first = ((x @ initial[:, :-1].T + initial[:, -1]).argmax(axis=1) == y).mean()
    assert all(told == pytest.approx(first) for told in untrained.values())


def test_local_only_saves_the_model_of_the_client_with_most_samples() -> None:
    states, _ = played(serve("local-only", rounds=2))
    assert np.array_equal(theta(states[-1]), own(states[-1], int(COUNTS.sum(axis=1).argmax())))


def test_local_only_never_saves_a_model_that_is_not_finite() -> None:
    fed, largest = federation(), int(COUNTS.sum(axis=1).argmax())
    fed.dataset.train.x[fed.indices[largest]] = np.inf
    states, rows = played(serve("local-only", federation=fed, rounds=2))
    assert [row.diverged for row in rows] == [[largest]] * 2
    assert np.array_equal(theta(states[-1]), theta(states[0]))
    assert set(states[-1].clients.versions["global"]) == {0, 1, 2} - {largest}


def test_local_only_models_are_tested_again_only_if_they_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    server = serve("local-only", clients_per_round=1, rounds=4)
    tested = []
    evaluator = server._base_runtime.test_set._evaluators[""]
    real = evaluator.begin
    monkeypatch.setattr(evaluator, "begin", lambda *given: tested.append(given) or real(*given))
    played(server)
    assert len(tested) == 4 + 1  # the participants' models, and the initial model once for all others


@pytest.mark.parametrize("method", ["centralised", "local-only"])
def test_bounds_send_no_models(method: str) -> None:
    _, rows = played(serve(method, rounds=1))
    assert rows[0].bytes == {"down": 0, "up": 0}


@pytest.mark.parametrize("method", ["centralised", "local-only"])
def test_a_bound_can_be_resumed_and_loaded(method: str, tmp_path: Path) -> None:
    fed = split("digits", Dirichlet(5, 0.3), 0)
    changed = {"rounds": 3, "lr": 0.05, "clients_per_round": 2, "device": "cpu", "engine": "plain", "local_epochs": 1}
    whole = run(fed, method, "dnn", **changed)

    with pytest.raises(Stop):
        run(fed, method, "dnn", out=tmp_path / "run", callbacks=[Stopping()], checkpoint_every=1, **changed)
    resumed = run(fed, method, "dnn", out=tmp_path / "run", checkpoint_every=1, **changed)
    assert resumed.accuracy_curve == whole.accuracy_curve
    assert [row.client_accuracy for row in resumed.history] == [row.client_accuracy for row in whole.history]
    recalled = run(fed, method, "dnn", out=tmp_path / "run", checkpoint_every=1, **changed)
    assert recalled.accuracy == whole.accuracy
    for one, other in zip(recalled.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_bound_is_shown_as_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert not main(["methods", "local-only"])
    printed = capsys.readouterr().out
    assert "bound" in printed
    assert "nothing" in printed
