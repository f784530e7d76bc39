"""FedConcat: clusters by labels, one encoder per cluster, one head on all encoders."""

from __future__ import annotations

import itertools
from pathlib import Path

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
    linear_model,
    played,
    serve,
    settings,
    sites,
    theta,
)
from sklearn.cluster import KMeans
from torch import nn
from toy_runs import use_engine

from fedskew.data import Dirichlet
from fedskew.data import federation as split
from fedskew.errors import UserError
from fedskew.experiment.round.sampler import ClientSampler
from fedskew.experiment.run import run
from fedskew.methods import make_method
from fedskew.methods.clustering import cluster_by_labels
from fedskew.models import Classifier
from fedskew.models.concatenation import concatenate, count_encoders

PAIRED = np.array([[5, 2, 0, 0], [0, 0, 4, 2], [4, 3, 0, 0], [0, 0, 3, 3]])


def slope(at: Array, site: Site) -> Array:
    return cross_entropy_slope(site.x @ at.T, site).T @ site.x


# -- clusters -------------------------------------------------------------------------------------------


def test_clients_with_similar_labels_are_in_one_cluster() -> None:
    assert cluster_by_labels(PAIRED, 2) == [[0, 2], [1, 3]]
    assert cluster_by_labels(PAIRED * 100, 2) == [[0, 2], [1, 3]]  # distributions count, not sizes
    assert cluster_by_labels(PAIRED, 1) == [[0, 1, 2, 3]]


def test_there_are_no_more_clusters_than_different_label_distributions() -> None:
    assert cluster_by_labels(np.array([[1, 0], [2, 0], [0, 3]]), 5) == [[0, 1], [2]]


def test_clients_without_samples_are_in_no_cluster() -> None:
    assert cluster_by_labels(np.array([[1, 0], [0, 0], [0, 3]]), 2) == [[0], [2]]


def test_clusters_cover_the_clients_and_do_not_depend_on_their_order() -> None:
    counts = split("digits", Dirichlet(20, 0.1), 0).label_counts
    found = cluster_by_labels(counts, 5)
    assert sorted(itertools.chain(*found)) == list(range(20))
    assert len(found) == 5
    assert found == cluster_by_labels(counts, 5)


@pytest.mark.parametrize("largest", [1.0, 1.2, 2.0])
def test_no_cluster_is_larger_than_allowed(largest: float) -> None:
    counts = np.vstack([np.tile([9, 1, 0], (9, 1)) + np.arange(9)[:, None], [[0, 0, 5]], [[0, 5, 0]]])
    free, limited = cluster_by_labels(counts, 3), cluster_by_labels(counts, 3, largest)
    assert max(map(len, limited)) <= max(int(largest * 11 / 3), 4) < max(map(len, free)) or largest == 2.0
    assert sorted(itertools.chain(*limited)) == list(range(11))


@pytest.mark.parametrize("seed", range(4))
def test_clusters_are_as_tight_as_those_of_many_starts(seed: int) -> None:
    counts = np.random.default_rng(seed).multinomial(40, np.random.default_rng(seed).dirichlet([0.3] * 6, 30))
    points = counts / counts.sum(axis=1, keepdims=True)
    groups = cluster_by_labels(counts, 5)
    spread = sum(((points[group] - points[group].mean(axis=0)) ** 2).sum() for group in groups)
    best = KMeans(5, n_init=50, random_state=0).fit(points).inertia_
    assert spread == pytest.approx(best, rel=0.05)


# -- the stages -----------------------------------------------------------------------------------------


def test_encoders_then_a_head_on_all_of_them() -> None:
    fed, rounds = federation(PAIRED), 2
    states, rows = played(serve("fedconcat", {"clusters": 2, "head_start": "joined"}, federation=fed, rounds=rounds))
    assert [(row.stage, row.model) for row in rows] == [
        *[("encoder 0", "encoder.0")] * 2,
        *[("encoder 1", "encoder.1")] * 2,
        *[("head", "global")] * 2,
    ]
    assert rows[-1].notes == {"clusters": [[0, 2], [1, 3]]}
    at, start = sites(fed), theta(states[0])
    models = []
    for cluster in ([0, 2], [1, 3]):
        here = start
        for t in range(rounds):
            trained = [descend(here, lambda v, s=at[k]: slope(v, s), settings(), t) for k in cluster]
            here = averaged(trained, [at[k] for k in cluster])
        models.append(here)
    for place, model in enumerate(models):
        params = states[-1].models[f"encoder.{place}"].model.params
        np.testing.assert_allclose(params["head.weight"].numpy(), model[:, :-1], rtol=0, atol=1e-12)
    # The features are the inputs twice; the joined bias is the sum.
    wide = np.concatenate([models[0][:, :-1], models[1][:, :-1], models[0][:, -1:] + models[1][:, -1:]], axis=1)
    sites_wide = [Site(np.concatenate([s.x[:, :-1], s.x], axis=1), s.y, s.counts) for s in at]
    for t in range(rounds):
        trained = [descend(wide, lambda v, s=s: slope(v, s), settings(), t, steps=1) for s in sites_wide]
        wide = np.mean(trained, axis=0)  # all clients have equal weights
        params = states[2 * rounds + t + 1].model.params
        told = np.concatenate([params["head.weight"].numpy(), params["head.bias"].numpy()[:, None]], axis=1)
        np.testing.assert_allclose(told, wide, rtol=0, atol=1e-12)


def test_one_cluster_is_fedavg_and_then_head_training() -> None:
    states, _ = played(serve("fedconcat", {"clusters": 1}, rounds=3))
    params = states[-1].models["encoder.0"].model.params
    fedavg = final("fedavg", rounds=3)
    np.testing.assert_allclose(params["head.weight"].numpy(), fedavg[:, :-1], rtol=0, atol=1e-12)
    np.testing.assert_allclose(params["head.bias"].numpy(), fedavg[:, -1], rtol=0, atol=1e-12)


def test_a_random_head_comes_from_the_seed_of_the_run() -> None:
    changed = {"federation": federation(PAIRED), "rounds": 1, "lr": 1e-12}
    states, _ = played(serve("fedconcat", {"clusters": 2}, **changed))
    start = concatenate([linear_model(), linear_model()], settings().seed).head.weight
    np.testing.assert_allclose(states[-1].model.params["head.weight"].numpy(), start.detach().numpy(), atol=1e-9)
    states, _ = played(serve("fedconcat", {"clusters": 2, "head_start": "joined"}, **changed))
    joined = concatenate([linear_model(), linear_model()]).head.weight
    np.testing.assert_allclose(states[-1].model.params["head.weight"].numpy(), joined.detach().numpy(), atol=1e-9)


def test_every_encoder_draws_its_own_batches() -> None:
    server = serve("fedconcat", {"clusters": 2}, federation=federation(PAIRED), rounds=1)
    recording = use_engine(server, Recording(server.engine))
    played(server)
    keys = [work.key for work, _ in recording.results]
    assert len(keys) == len(set(keys)) == 2


def test_a_round_of_the_head_costs_a_forward_of_every_encoder() -> None:
    _, rows = played(serve("fedconcat", {"clusters": 2}, federation=federation(PAIRED), local_epochs=2))
    assert rows[-1].stage == "head"
    assert rows[-1].compute == pytest.approx(2 / 3 / 2)  # once over the samples that FedAvg visits twice


def test_a_cluster_s_control_variate_is_the_mean_over_its_own_clients() -> None:
    fed = federation(PAIRED)
    states, _ = played(serve("fedconcat+scaffold", {"clusters": 2}, federation=fed, rounds=2, clients_per_round=2))
    for place, cluster in enumerate(([0, 2], [1, 3])):
        model = f"encoder.{place}"
        kept = states[-1].clients.read(model, cluster)
        own = [state["control/head.weight"].numpy() for state in kept if state]
        assert own
        common = states[-1].models[model].server_state["control/head.weight"].numpy()
        np.testing.assert_allclose(common, np.sum(own, axis=0) / len(cluster), rtol=1e-11, atol=1e-14)


def test_clusters_share_the_clients_of_a_round() -> None:
    fed = split("digits", Dirichlet(20, 0.1), 0)
    sampler = ClientSampler(fed, settings(clients_per_round=10))
    clusters = cluster_by_labels(fed.label_counts, 5)
    stages = make_method("fedconcat").stages(4, 1, {"clusters": clusters})
    drawn = [sampler.sample(stage, 0).clients for stage in stages[1:-1]]
    for clients, cluster in zip(drawn, clusters, strict=True):
        assert set(clients) <= set(cluster)
        assert len(clients) == max(1, round(len(cluster) / 2))
    assert len(sampler.sample(stages[-1], 0).clients) == 10


def test_a_client_trains_the_head_on_a_few_batches_only() -> None:
    fed = split("digits", Dirichlet(5, 0.5), 0)
    sampler = ClientSampler(fed, settings(batch_size=10))
    head = make_method("fedconcat", {"head_batches": 2}).stages(4, 1, {"clusters": [[0, 1, 2, 3, 4]]})[-1]
    one, other = sampler.sample(head, 0), sampler.sample(head, 1)
    for client, samples, later in zip(one.clients, one.samples, other.samples, strict=True):
        assert len(samples) == 20
        assert set(samples) <= set(fed.indices[client])
        assert set(samples) != set(later)


# -- the concatenated model ---------------------------------------------------------------------------


def models(classes: int = 3) -> list[Classifier]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return [
            Classifier(
                nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Dropout(0.5)), nn.Linear(5, classes)
            )
            for _ in range(3)
        ]


def test_the_concatenated_head_adds_up_the_logits() -> None:
    parts, x = [m.eval() for m in models()], torch.randn(7, 4)
    wide = concatenate(parts).eval()
    torch.testing.assert_close(wide(x), sum(m(x) for m in parts))
    assert count_encoders(wide) == 3
    assert count_encoders(parts[0]) == 0


def test_train_mode_does_not_reach_the_encoders() -> None:
    wide, x = concatenate(models()), torch.randn(7, 4)
    before = {name: b.clone() for name, b in wide.named_buffers()}
    wide.train()
    features = wide.encoder(x)
    assert torch.equal(features, wide.encoder(x))  # no dropout
    assert all(torch.equal(b, before[name]) for name, b in wide.named_buffers())
    assert [name for name, p in wide.named_parameters() if p.requires_grad] == ["head.weight", "head.bias"]


def test_a_new_head_is_drawn_from_the_seed() -> None:
    first, again, other = (concatenate(models(), seed).head.weight for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize("engine", ["plain", "stacked"])
def test_the_concatenated_model_is_evaluated_saved_and_loaded(engine: str, tmp_path: Path) -> None:
    fed = split("digits", Dirichlet(6, 0.2), 0)
    given = {"rounds": 2, "lr": 0.05, "device": "cpu", "engine": engine, "local_epochs": 1}
    made = run(
        fed,
        "fedconcat",
        "cnn" if engine == "plain" else "dnn",
        method_params={"clusters": 2},
        out=tmp_path / "run",
        **given,
    )
    test = fed.dataset.test
    x = (torch.from_numpy(test.x).float() / 255 - fed.dataset.mean[0]) / fed.dataset.std[0]
    with torch.no_grad():
        told = (made.model(x).argmax(dim=1).numpy() == test.y).mean()
    assert told == pytest.approx(made.accuracy, abs=1 / len(test))
    assert count_encoders(made.model) == 2
    recalled = run(
        fed,
        "fedconcat",
        "cnn" if engine == "plain" else "dnn",
        method_params={"clusters": 2},
        out=tmp_path / "run",
        **given,
    )
    assert recalled.history == made.history
    one, other = made.model.state_dict(), recalled.model.state_dict()
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_model_without_a_linear_head_is_refused_before_training() -> None:
    fed = split("digits", Dirichlet(4, 1.0), 0)
    headless = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    with pytest.raises(UserError, match="needs"):
        run(fed, "fedconcat", headless, rounds=1)
    deep = Classifier(nn.Flatten(), nn.Sequential(nn.Linear(64, 8), nn.Linear(8, 10)))
    with pytest.raises(UserError, match="method 'fedconcat' needs a model that ends in a linear layer 'head'"):
        run(fed, "fedconcat", deep, rounds=1)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"clusters": 0}, "clusters is 0; expected a whole number ≥ 1"),
        ({"head_rounds": 0}, "head_rounds is 0"),
        ({"encoder_rounds": 0}, "encoder_rounds is 0"),
        ({"head_batches": 0}, "head_batches is 0"),
        ({"largest": 0.5}, "largest is 0.5; expected a number ≥ 1"),
    ],
)
def test_wrong_parameters_are_refused(params: dict[str, float], message: str) -> None:
    with pytest.raises(UserError, match=message):
        make_method("fedconcat", params)
