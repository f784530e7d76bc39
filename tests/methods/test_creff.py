"""CReFF against a loop with PyTorch's own layers and gradients, as in the authors' program."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from toy_runs import advance, distance, finished, image_federation, linear_layers, norm_and_dropout, server, trained

import fedskew as fs
from fedskew.errors import UserError
from fedskew.experiment.preparation import prepare
from fedskew.experiment.round.aggregate import server_key
from fedskew.methods import METHODS, make_method
from fedskew.methods.parts import Client, Outputs, Seen, Trained
from fedskew.models import Classifier
from fedskew.models.heads import replace_head
from fedskew.randomness import fold, normal, permutation, uniform

PARAMS = {"features_per_class": 3, "match_steps": 4, "head_epochs": 2, "head_batch": 5}
WHOLE: dict[str, Any] = {"batch_size": 50, "momentum": 0.0, "weight_decay": 0.0, "lr": 0.1}
"""One step per epoch, of plain SGD."""
CLASSES, WIDTH = 4, 6


def model() -> Classifier:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return replace_head(linear_layers(), "retrained")


def class_gradients(this: Any, federation: Any, model: Any, clients: list[int]) -> dict[int, list[list[torch.Tensor]]]:
    """For each class, the gradients of the second head at the clients that have it."""
    found: dict[int, list[list[torch.Tensor]]] = {c: [] for c in range(CLASSES)}
    for client in clients:
        x, y = samples(this, federation, client)
        for c in y.unique().tolist():
            loss = torch.nn.functional.cross_entropy(model.head.retrained(model.encoder(x[y == c])), y[y == c])
            found[c].append(list(torch.autograd.grad(loss, list(model.head.retrained.parameters()))))
    return found


def samples(this: Any, federation: Any, client: int) -> tuple[torch.Tensor, torch.Tensor]:
    rows = torch.from_numpy(federation.indices[client])
    return this._runtimes.train_samples.inputs(rows), torch.from_numpy(federation.dataset.train.y)[rows]


def matched(features: torch.Tensor, head: torch.nn.Linear, real: dict[int, list[list[torch.Tensor]]]) -> torch.Tensor:
    for _ in range(4):
        x = features.clone().requires_grad_()
        loss = torch.zeros((), dtype=torch.float64)
        for c, gradients in real.items():
            if not gradients:
                continue
            mean = [torch.stack(each).mean(dim=0) for each in zip(*gradients, strict=True)]
            own = torch.nn.functional.cross_entropy(head(x[c]), torch.full((len(x[c]),), c))
            for g, r in zip(torch.autograd.grad(own, list(head.parameters()), create_graph=True), mean, strict=True):
                for row, goal in zip(g.view(-1, g.shape[-1]), r.view(-1, r.shape[-1]), strict=True):
                    loss = loss + 1 - row @ goal / (row.norm() * goal.norm() + 1e-6)
        features = features - 0.1 * torch.autograd.grad(loss, x)[0]
    return features


def retrained(features: torch.Tensor, key: int) -> torch.nn.Linear:
    numbers = torch.arange(CLASSES * (WIDTH + 1)).view(CLASSES, WIDTH + 1)
    start = (2 * uniform(fold(torch.tensor(key), numbers), 2).double() - 1) / WIDTH**0.5
    head = torch.nn.Linear(WIDTH, CLASSES).double()
    head.weight.data, head.bias.data = start[:, :-1].clone(), start[:, -1].clone()
    x, y = features.reshape(-1, WIDTH), torch.arange(CLASSES).repeat_interleave(3)
    optimiser = torch.optim.SGD(head.parameters(), lr=0.01)
    for epoch in range(2):
        for batch in torch.from_numpy(permutation(12, key, "head training", epoch)).split(5):
            optimiser.zero_grad()
            torch.nn.functional.cross_entropy(head(x[batch]), y[batch]).backward()
            optimiser.step()
    return head


@pytest.mark.parametrize("engine", ["plain", "stacked"])
def test_three_rounds_are_those_of_the_authors_program(engine: str) -> None:
    federation = image_federation()
    this = server(federation, "creff", model(), PARAMS, rounds=3, clients_per_round=2, engine=engine, **WHOLE)
    state = this.start()
    reference = this.network.module(state.model).double()
    features = torch.zeros(0)
    for number in range(3):
        stage = this.next_stage(state)
        assert stage is not None
        plan = this.plan(stage, state)
        key, clients = server_key(plan.work.key), plan.clients.tolist()
        state, _ = advance(this, state)
        if not number:
            shape = CLASSES, 3, WIDTH
            features = normal(fold(torch.tensor(key), torch.arange(CLASSES * 3 * WIDTH).view(shape)))
        real = class_gradients(this, federation, reference, clients)
        features = matched(features, reference.head.retrained, real)
        share = torch.from_numpy(federation.sizes[clients] / federation.sizes[clients].sum())
        mean = [torch.zeros_like(p) for p in (*reference.encoder.parameters(), *reference.head.generic.parameters())]
        for a, client in zip(share, clients, strict=True):
            copy = this.network.module(this.start().model).double()
            copy.load_state_dict(reference.state_dict())
            x, y = samples(this, federation, client)
            optimiser = torch.optim.SGD([*copy.encoder.parameters(), *copy.head.generic.parameters()], lr=0.1)
            for _ in range(2):
                optimiser.zero_grad()
                torch.nn.functional.cross_entropy(copy.head.generic(copy.encoder(x)), y).backward()
                optimiser.step()
            for total, p in zip(mean, (*copy.encoder.parameters(), *copy.head.generic.parameters()), strict=True):
                total += a * p.data
        for p, w in zip((*reference.encoder.parameters(), *reference.head.generic.parameters()), mean, strict=True):
            p.data = w
        reference.head.retrained.load_state_dict(retrained(features, key).state_dict())
        for name, expected in reference.named_parameters():
            torch.testing.assert_close(state.model.params[name], expected.detach(), rtol=0, atol=1e-12)
    kept = state.models["global"].server_state["federated_features"]
    torch.testing.assert_close(kept, features, rtol=0, atol=1e-12)


def test_engines_agree_with_batches_batchnorm_and_other_parts() -> None:
    plain, rows = trained(image_federation(), "creff+fedsam", norm_and_dropout(), PARAMS)
    this = server(image_federation(), "creff+fedsam", norm_and_dropout(), PARAMS, engine="stacked")
    assert distance(finished(this)[0], plain) < 1e-9
    assert not this.engine.notices
    assert not any(row.diverged for row in rows)


def test_gradients_are_means_over_the_samples_of_the_pass() -> None:
    """BatchNorm cannot train on a last batch of one sample, so the pass leaves it out. Label counts include it."""
    rule, generator = make_method("creff", PARAMS).server, torch.Generator().manual_seed(0)
    z, logits = (torch.randn(3, width, dtype=torch.float64, generator=generator) for width in (WIDTH, CLASSES))
    client = Client(torch.tensor([3, 1, 0, 1]), {})  # without the last samples of the classes 0 and 3
    opening = rule.opening(Seen(Outputs(logits, z), torch.tensor([0, 0, 1]), torch.zeros(3)), client)
    params = {"head.retrained.weight": torch.zeros(CLASSES, WIDTH, dtype=torch.float64)}
    sent = rule.uplink(Trained(params, torch.ones(()), 0.1, 0.0), replace(client, opening=opening))
    error = logits[:2].softmax(dim=-1) - torch.eye(CLASSES, dtype=torch.float64)[:1]
    torch.testing.assert_close(sent["class_gradients"][0], error.T @ z[:2] / 2)
    torch.testing.assert_close(sent["class_bias_gradients"][0], error.mean(dim=0))
    assert sent["class_known"].tolist() == [True, True, False, False]


def test_a_class_that_no_participant_has_keeps_its_features() -> None:
    rule = make_method("creff", PARAMS).server
    features, head = torch.randn(2, 3, 5), (torch.randn(2, 5), torch.randn(2))
    present = torch.tensor([True, False])
    moved = rule.match(features, head, torch.randn(2, 2, 5), torch.randn(2, 2), present)  # type: ignore[attr-defined]
    assert torch.equal(moved[1], features[1])
    assert not torch.equal(moved[0], features[0])


def test_matching_turns_the_gradients_of_the_features_towards_the_real_ones() -> None:
    rule = make_method("creff", {"features_per_class": 3, "match_steps": 200}).server
    torch.manual_seed(0)
    real, start = torch.randn(2, 20, 5).double() + 1, torch.randn(2, 3, 5).double()
    head = torch.randn(2, 5).double(), torch.randn(2).double()

    def gradients(x: torch.Tensor) -> torch.Tensor:
        error = (x @ head[0].T + head[1]).softmax(dim=-1) - torch.eye(2).unsqueeze(1)
        return error.mT @ x / x.shape[1]

    bias = ((real @ head[0].T + head[1]).softmax(dim=-1) - torch.eye(2).unsqueeze(1)).mean(dim=1)
    moved = rule.match(start, head, gradients(real), bias, torch.ones(2, dtype=torch.bool))  # type: ignore[attr-defined]
    cosines = torch.nn.functional.cosine_similarity(gradients(moved), gradients(real), dim=-1)
    assert cosines.min() > 0.99
    assert torch.nn.functional.cosine_similarity(gradients(start), gradients(real), dim=-1).min() < 0.9


def test_what_it_reveals_and_where_it_does_not_fit() -> None:
    assert METHODS["creff"].reveals == "label presence, prototypes"
    assert METHODS["creff"].sends == "model, sample count, gradient of the second head for each class of the client"
    assert not METHODS["creff"].secure_aggregation
    assert make_method("creff+feduv+fedsam").name == "creff+feduv+fedsam"
    with pytest.raises(UserError, match="match_steps is -1; expected a whole number ≥ 0"):
        make_method("creff", {"match_steps": -1})
    with pytest.raises(UserError, match="head is 'retrained', but method 'fedavg' trains one head; expected auto"):
        prepare(fs.Config(method="fedavg", head="retrained", data="digits"))
    with pytest.raises(UserError, match="needs tensors that stay on the clients: CReFF needs"):
        prepare(fs.Config(method="creff+fedper", data="digits"))
    fed = fs.federation("digits", fs.IID(clients=2))
    own = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    with pytest.raises(UserError, match="CReFF needs a model with a second head"):
        fs.run(fed, "creff", model=own, rounds=1, device="cpu", progress=False)
