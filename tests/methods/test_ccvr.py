"""CCVR against statistics of all data in one place, and against a head that PyTorch trains on the same features."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from toy_runs import advance, distance, finished, image_federation, linear_layers, server, trained

import fedskew as fs
from fedskew.errors import UserError
from fedskew.experiment.round.aggregate import server_key
from fedskew.experiment.round.state import RunState
from fedskew.methods import METHODS, make_method
from fedskew.methods.ccvr import VirtualFeatures
from fedskew.methods.fedavg import SGD
from fedskew.methods.parts import Updates
from fedskew.randomness import fold, normal, permutation

PARAMS = {"virtual_features": 7, "head_epochs": 3, "head_batch": 5}


@pytest.fixture(scope="module")
def run() -> tuple[RunState, RunState, int, fs.Federation, Any]:
    """The states before and after the last round, and the key of that round."""
    federation = image_federation()
    this = server(federation, "ccvr", linear_layers(), PARAMS, rounds=2)
    before, _ = advance(this, this.start())
    stage = this.next_stage(before)
    assert stage is not None
    key = server_key(this.plan(stage, before).work.key)
    after, _ = advance(this, before)
    return before, after, key, federation, this


def test_the_head_is_trained_on_gaussians_of_all_clients_features(run: Any) -> None:
    before, after, key, federation, this = run
    rows = np.concatenate(federation.indices)
    y = federation.dataset.train.y[rows]
    with torch.no_grad():
        z = this.network.module(before.model).encoder(this._runtimes.train_samples.inputs(torch.from_numpy(rows)))
    classes, width = 4, z.shape[1]
    numbers = torch.arange(classes * 7 * width).view(classes, 7, width)
    noise = normal(fold(torch.tensor(key), numbers)).numpy()
    x = []
    for c in range(classes):
        own = z[y == c].numpy()
        values, vectors = np.linalg.eigh(np.cov(own.T))
        root = vectors @ np.diag(np.sqrt(np.where(values > 1e-12 * values[-1], values, 0))) @ vectors.T
        x.append(own.mean(axis=0) + noise[c] @ root)
    features, labels = torch.tensor(np.concatenate(x)), torch.arange(classes).repeat_interleave(7)
    head = this.network.module(before.model).head
    velocity = [torch.zeros_like(p) for p in head.parameters()]
    for epoch in range(3):
        for batch in np.split(permutation(28, key, "head training", epoch), range(5, 28, 5)):
            loss = torch.nn.functional.cross_entropy(head(features[batch]), labels[batch])
            for p, v, g in zip(head.parameters(), velocity, torch.autograd.grad(loss, head.parameters()), strict=True):
                v.mul_(0.9).add_(g)
                p.data -= 0.01 * v
    for name, expected in head.named_parameters():
        torch.testing.assert_close(after.model.params[f"head.{name}"], expected.detach(), rtol=0, atol=1e-12)
    assert all(torch.equal(w, after.model.params[n]) for n, w in before.model.params.items() if "encoder" in n)


def test_one_sample_has_no_spread_and_no_sample_no_features() -> None:
    rule = VirtualFeatures(virtual_features=3)
    counts = torch.tensor([[1, 0, 2], [0, 0, 1]])
    means = torch.tensor([[[1.0, 2.0], [0, 0], [0, 0]], [[0, 0], [0, 0], [3, 0]]])
    uplink = {"counts": counts, "means": means, "covariances": torch.zeros(2, 3, 2, 2)}
    total, mean, covariance = rule.class_statistics(uplink)
    assert total.tolist() == [1, 0, 3]
    assert mean.tolist() == [[1, 2], [0, 0], [1, 0]]
    assert covariance[0].tolist() == [[0, 0], [0, 0]]
    assert covariance[2].tolist() == [[3, 0], [0, 0]], "the values 0, 0 and 3"
    x, y = rule.draw(total, mean, covariance, key=5)
    assert y.tolist() == [0, 0, 0, 2, 2, 2]
    assert x[:3].tolist() == [[1, 2]] * 3
    assert x[3:, 1].tolist() == [0, 0, 0]


def test_a_head_without_a_bias_stays_without_one() -> None:
    rule = VirtualFeatures(virtual_features=3, head_epochs=1)
    uplink = {"counts": torch.tensor([[2, 2]]), "means": torch.eye(2)[None], "covariances": torch.zeros(1, 2, 2, 2)}
    sent = {"head.weight": torch.zeros(2, 2)}
    updates = Updates(params={}, weights=torch.ones(1), uplink=uplink, lr=0.1, participation=1.0)
    params, _ = rule.aggregate(sent, updates, {})
    assert params.keys() == sent.keys()
    assert params["head.weight"].diagonal().min() > 0


def test_it_is_the_last_round_of_any_training() -> None:
    settings: dict[str, Any] = {"rounds": 3, "clients_per_round": 2}
    alone, rows = trained(image_federation(), "fedrs+scaffold", linear_layers(), rounds=2, clients_per_round=2)
    this = server(image_federation(), "fedrs+scaffold+ccvr", linear_layers(), PARAMS, **settings)
    state, joined = finished(this)
    assert [row.stage for row in joined] == ["train", "train", "calibration"]
    assert joined[:2] == rows
    assert joined[2].clients == [0, 1, 2, 3, 4]
    assert joined[2].visits == 0
    encoder = {name for name in state.model.params if name.startswith("encoder")}
    assert all(torch.equal(state.model.params[name], alone.model.params[name]) for name in encoder)
    stacked, _ = trained(
        image_federation(), "fedrs+scaffold+ccvr", linear_layers(), PARAMS, engine="stacked", **settings
    )
    assert distance(state, stacked) < 1e-9


def test_solver_and_weighting_are_those_of_the_rounds_before_it() -> None:
    method = make_method("fedprox+feddisco+ccvr")
    train, calibration = (method.for_stage(stage) for stage in method.stages(3, 1, {}))
    assert (train.solver, train.weighting) == (method.solver, method.weighting)
    assert (calibration.solver, calibration.weighting) == (SGD(), None)


def test_it_says_what_it_reveals_and_where_it_does_not_fit() -> None:
    assert METHODS["ccvr"].reveals == "label counts, prototypes, feature covariance"
    assert make_method("ccvr+fedavgm").name == "ccvr+fedavgm"
    with pytest.raises(UserError, match="'ccvr' and 'pkd' both set the stages"):
        make_method("ccvr+pkd")
    with pytest.raises(UserError, match="'ccvr' runs in stages, so it cannot be combined with 'fedper'"):
        make_method("fedper+ccvr")
    with pytest.raises(UserError, match="virtual_features is 0; expected a number > 0"):
        make_method("ccvr", {"virtual_features": 0})
    own = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    with pytest.raises(UserError, match="method 'ccvr' needs a model that ends in a linear layer 'head'"):
        fs.run(fs.federation("digits", fs.IID(clients=2)), "ccvr", model=own, rounds=1, device="cpu", progress=False)
