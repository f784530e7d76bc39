"""FedRoD against a loop with two losses and two optimisers, as in its public programs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from toy_runs import finished, image_federation, linear_layers, server

import fedskew as fs
from fedskew.errors import UserError
from fedskew.experiment.preparation import prepare
from fedskew.methods import METHODS, Client, Objective, Outputs, make_method
from fedskew.models import Classifier, DataShape, make_model
from fedskew.models.heads import replace_head

WHOLE: dict[str, Any] = {"batch_size": 50, "momentum": 0.0, "weight_decay": 0.0, "lr": 0.1}
"""One step per epoch, of plain SGD."""


def model() -> Classifier:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return replace_head(linear_layers(), "personal")


def reference(start: dict[str, Tensor], x: Tensor, y: Tensor, epochs: int, personal: Tensor) -> tuple[Any, Tensor]:
    """One client's round. `personal` is its own head, with the bias as last column."""
    shared = {name: t.clone().requires_grad_() for name, t in start.items() if "personal" not in name}
    own = personal.clone().requires_grad_()
    counts = torch.bincount(y, minlength=4).double()
    for _ in range(epochs):
        h = x.flatten(1) @ shared["encoder.1.weight"].T + shared["encoder.1.bias"]
        generic = h @ shared["head.generic.weight"].T + shared["head.generic.bias"]
        balanced = cross_entropy(generic + counts.log(), y)
        total = generic.detach() + h.detach() @ own[:, :-1].T + own[:, -1]
        steps = torch.autograd.grad(balanced, list(shared.values()))
        (step,) = torch.autograd.grad(cross_entropy(total, y), [own])
        with torch.no_grad():
            for tensor, grad in zip(shared.values(), steps, strict=True):
                tensor -= 0.1 * grad
            own -= 0.1 * step
    return {name: t.detach() for name, t in shared.items()}, own.detach()


@pytest.mark.parametrize("engine", ["plain", "stacked"])
def test_two_rounds_are_those_of_a_plain_loop(engine: str) -> None:
    federation = image_federation()
    this = server(federation, "fedrod", model(), rounds=2, engine=engine, **WHOLE)
    start = this.start()
    state, _ = finished(this, start)
    params = dict(start.model.params)
    own = {client: torch.zeros(4, 7, dtype=torch.float64) for client in range(5)}
    share = torch.from_numpy(federation.sizes / federation.sizes.sum())
    for _ in range(2):
        models = []
        for client, rows in enumerate(federation.indices):
            x = this._runtimes.train_samples.inputs(torch.from_numpy(rows))
            y = torch.from_numpy(federation.dataset.train.y[rows])
            trained, own[client] = reference(params, x, y, 2, own[client])
            models.append(trained)
        mean = {name: sum(a * m[name] for a, m in zip(share, models, strict=True)) for name in models[0]}
        params |= mean
    for name, expected in params.items():
        torch.testing.assert_close(state.model.params[name], expected, rtol=0, atol=1e-12)
    for client, kept in enumerate(state.clients.read("global", range(5))):
        head = torch.cat([kept["personal/head.personal.weight"], kept["personal/head.personal.bias"][:, None]], dim=1)
        torch.testing.assert_close(head, own[client], rtol=0, atol=1e-12)


def test_the_global_model_predicts_with_the_generic_head() -> None:
    made = make_model("dnn", DataShape((1, 8, 8), 4), 0, "personal")
    assert isinstance(made, Classifier)
    x = torch.randn(3, 1, 8, 8)
    with torch.no_grad():
        assert torch.equal(made.eval()(x), made.head.generic(made.encoder(x)))
        made.head.personal.bias += 1
        assert torch.equal(made(x), made.head.generic(made.encoder(x)) + 1)
    assert made.train()(x).shape == (3, 8)


def test_clients_own_models_fit_their_own_labels() -> None:
    fed = fs.federation("digits", fs.Shards(clients=5, shards=2), seed=0)
    settings: dict[str, Any] = {"rounds": 3, "local_epochs": 2, "lr": 0.1, "client_test": 0.3, "progress": False}
    tests = fs.run(fed, "fedrod", device="cpu", **settings).history[-1].client_tests
    assert tests is not None
    assert np.mean(tests["personal"]) > np.mean(tests["accuracy"]) + 0.1


def test_regularisers_see_the_generic_logits() -> None:
    """The personal ones pass no gradient to the shared layers."""
    objective = make_method("fedrod").objective
    assert isinstance(objective, Objective)
    generic, personal = torch.randn(2, 3, 4)
    seen = objective.class_outputs(Outputs(torch.cat([generic, personal], dim=-1), torch.ones(3, 5)))
    assert torch.equal(seen.logits, generic)
    assert torch.equal(seen.required_features, torch.ones(3, 5))


def test_class_weights_weigh_both_losses() -> None:
    objective, counts = make_method("fedrod").objective, torch.tensor([2, 1, 4, 1])
    assert isinstance(objective, Objective)
    z, y, weights = torch.randn(5, 8).double(), torch.tensor([0, 2, 2, 3, 1]), torch.tensor([0.5, 1.0, 2.0, 4.0])
    losses = cross_entropy(z[:, :4] + counts.log(), y, reduction="none") + cross_entropy(z[:, 4:], y, reduction="none")
    found = objective.loss(Outputs(z), y, Client(counts, {}, class_weights=weights))
    torch.testing.assert_close(found, (weights[y] * losses).mean())


def test_what_it_shares_and_where_it_does_not_fit() -> None:
    assert METHODS["fedrod"].sends == "model without the personal head, sample count"
    assert METHODS["fedrod"].reveals == "nothing"
    assert make_method("fedrod+feduv+scaffold").name == "fedrod+feduv+scaffold"
    config = fs.Config(method="fedavg", head="personal", data="digits")
    with pytest.raises(UserError, match="head is 'personal', but method 'fedavg' trains one head; expected auto"):
        prepare(config)
