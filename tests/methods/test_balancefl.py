"""BalanceFL's feature augmentation: the noise, two rounds against the formula, special cases."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from linear_clients import Recording, federation, played, settings, sites
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from toy_runs import use_engine

from fedskew.engine import RoundWork
from fedskew.engine.data.batches import perturbation_key
from fedskew.errors import UserError
from fedskew.experiment.round.record import RoundRow
from fedskew.experiment.round.server import Server
from fedskew.experiment.round.state import RunState
from fedskew.losses import IGNORE, batch_class_cross_entropy, class_masks
from fedskew.methods import Client, Outputs, Seen, Tensors, make_method
from fedskew.methods.balancefl import BalanceFL
from fedskew.models import Classifier
from fedskew.randomness import fold, uniform

NAMES = ("encoder.0.weight", "encoder.0.bias", "head.weight", "head.bias")


def two_layers(classes: int = 4) -> Classifier:
    with torch.random.fork_rng():
        torch.manual_seed(4)
        return Classifier(nn.Sequential(nn.Linear(3, 5), nn.Tanh()), nn.Linear(5, classes))


def serve(method: str, params: dict[str, Any] | None = None, counts: Any = None, **changed: Any) -> Server:
    fed = federation() if counts is None else federation(np.array(counts))
    return Server(fed, make_method(method, params), two_layers(fed.classes), settings(**changed))


def recorded(
    method: str, params: dict[str, Any] | None = None, **changed: Any
) -> tuple[list[RunState], list[RoundRow]]:
    return played(serve(method, params, **changed))


def final_weights(method: str, params: dict[str, Any] | None = None, **changed: Any) -> list[Tensor]:
    state = recorded(method, params, **changed)[0][-1]
    return [state.model.params[name] for name in NAMES]


def features_and_labels() -> tuple[Tensor, Tensor]:
    rng = np.random.default_rng(3)
    y = np.repeat([0, 1, 3], [9, 4, 1])
    spread = rng.normal(size=(4, 4))
    return torch.from_numpy(rng.normal(size=(len(y), 4)) @ spread + 5 * y[:, None]), torch.from_numpy(y)


def opening(objective: BalanceFL, features: Tensor, y: Tensor, batches: int = 1) -> Client:
    """A client whose opening pass saw these features in this many batches."""
    counts = class_masks(y, 4).sum(dim=0)
    client = Client(counts, {})
    sums: Tensors = {}
    for rows in torch.arange(len(y)).tensor_split(batches):
        seen = Seen(Outputs(torch.zeros(len(rows), 4), features[rows]), y[rows], fold(torch.tensor(7), rows))
        sums = {name: t + sums.get(name, 0) for name, t in objective.opening(seen, client).items()}
    return Client(counts, {}, opening=sums)


def published_covariance(features: Tensor, y: Tensor) -> np.ndarray:
    """The published program's covariance: numpy's per class, 0 for a single sample, weighted by the counts."""
    covariances, counts = [], []
    for label in sorted(set(y.tolist())):
        own = features[y == label].numpy()
        covariances.append(np.cov(own.T) if len(own) > 1 else np.zeros((own.shape[1], own.shape[1])))
        counts.append(len(own))
    return np.asarray(np.average(covariances, axis=0, weights=counts))


def draw_noise(client: Client) -> Tensor:
    sums = client.opening
    return sums["noise"] - sums["noise_by_class"] @ (
        sums["feature_sums"] / sums["feature_counts"].clamp(min=1).unsqueeze(-1)
    )


def test_the_noise_has_the_covariance_of_the_classes() -> None:
    features, y = features_and_labels()
    noise = draw_noise(opening(BalanceFL(noises=40_000), features, y)).numpy()
    expected = published_covariance(features, y)
    scale = np.sqrt(np.diag(expected))
    assert np.abs(noise.mean(axis=0) / scale).max() < 0.03
    assert np.abs((np.cov(noise.T) - expected) / np.outer(scale, scale)).max() < 0.03
    kurtosis = ((noise / noise.std(axis=0)) ** 4).mean(axis=0)
    assert np.abs(kurtosis - 3).max() < 0.15  # of a normal distribution


def test_the_noise_does_not_depend_on_the_batches_or_on_padding() -> None:
    features, y = features_and_labels()
    objective = BalanceFL(noises=6)
    whole = draw_noise(opening(objective, features, y))
    torch.testing.assert_close(draw_noise(opening(objective, features, y, batches=4)), whole)
    longer, padded = torch.cat([features, features[:2]]), torch.cat([y, torch.full((2,), IGNORE)])
    torch.testing.assert_close(draw_noise(opening(objective, longer, padded)), whole)


@pytest.mark.parametrize(
    ("given", "expected"), [((), [0, 5 / 9, 1, 8 / 9]), ((0.3,), [0.3] * 4), ((0, 1, 0, 1), [0, 1, 0, 1])]
)
def test_rarer_classes_are_perturbed_more_often(given: tuple[float, ...], expected: list[float]) -> None:
    features, y = features_and_labels()
    objective = BalanceFL(probability=given)
    client = opening(objective, features, y)
    labels = torch.arange(4).repeat_interleave(5000)
    moved = objective.perturbed(torch.zeros(len(labels), 4).double(), labels, client, torch.tensor(11))
    found = [(moved[labels == label] != 0).any(dim=1).double().mean() for label in range(4)]
    torch.testing.assert_close(torch.stack(found), torch.tensor(expected, dtype=torch.float64), rtol=0, atol=0.02)


def test_classes_that_are_not_in_the_batch_are_not_in_the_softmax() -> None:
    logits = torch.from_numpy(np.random.default_rng(0).normal(size=(5, 4))).requires_grad_()
    y = torch.tensor([0, 2, 2, IGNORE, 0])
    found = batch_class_cross_entropy(logits, y)
    kept = logits[[0, 1, 2, 4]][:, [0, 2]]
    expected = cross_entropy(kept, torch.tensor([0, 1, 1, 0]))
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(*(torch.autograd.grad(loss, logits, retain_graph=True)[0] for loss in (found, expected)))
    lone = batch_class_cross_entropy(logits, torch.tensor([1, 1, 1, 1, IGNORE]))
    assert lone.item() == 0
    assert not torch.autograd.grad(lone, logits)[0].any()


# -- rounds -----------------------------------------------------------------------------------------------


def perturbations(work: RoundWork, row: int, features: Tensor, y: Tensor, order: list[list[int]]) -> list[Tensor]:
    """The noise of each step, from an explicit matrix of centred features; batches are whole, in this order."""
    n, noises = len(y), 500
    plan = work.batch_plans(1)[row]
    key = torch.tensor(plan.client_key)
    sample_keys = fold(fold(key, 0x09E2), torch.from_numpy(work.assignments[row].samples))
    draws = torch.arange(noises)
    u, v = (uniform(sample_keys.unsqueeze(-1), 2 * draws + i).double() for i in (0, 1))
    xi = torch.sqrt(-2 * torch.log(1 - u)) * torch.cos(2 * torch.pi * v)
    noise = torch.zeros(noises, features.shape[1], dtype=torch.float64)
    counts = torch.bincount(y, minlength=4)
    for i in range(n):
        own = int(counts[y[i]])
        if own > 1:
            centred = features[i] - features[y == y[i]].mean(dim=0)
            noise += xi[i].unsqueeze(-1) * centred * (own / (own - 1) / n) ** 0.5
    found = []
    for step in range(plan.steps):
        step_key = perturbation_key(fold(key, step))
        rows = torch.arange(n)
        which = (uniform(fold(step_key, 0), rows) * noises).long()
        hit = uniform(fold(step_key, 1), rows) < (1 - counts.float() / counts.max())[y[order[step]]]
        found.append(torch.where(hit.unsqueeze(-1), noise[which], 0.0))
    return found


@pytest.mark.parametrize("engine", ["plain", "stacked"])
@pytest.mark.parametrize("softmax", ["all", "batch"])
def test_two_rounds_match_the_formula(softmax: str, engine: str) -> None:
    server = serve("balancefl", {"softmax": softmax}, engine=engine)
    recording = use_engine(server, Recording(server.engine))
    states, _ = played(server)
    config, at = settings(), sites(federation())
    weights = [states[0].model.params[name] for name in NAMES]
    for t, (work, _) in enumerate(recording.results):
        made = []
        for k, site in enumerate(at):
            x, y = torch.from_numpy(site.x[:, :-1]), torch.from_numpy(site.y)
            first = int(work.assignments[k].samples[0])
            order = [(plan_rows[plan_rows >= 0] - first).tolist() for plan_rows in work.batch_plans(1)[k].indices]
            received = torch.tanh(x @ weights[0].T + weights[1])
            noise = perturbations(work, k, received, y, order)
            own = [w.clone().requires_grad_() for w in weights]
            optimizer = torch.optim.SGD(
                own, config.lr * config.lr_decay**t, config.momentum, weight_decay=config.weight_decay
            )
            for rows, moved in zip(order, noise, strict=True):
                features = torch.tanh(x[rows] @ own[0].T + own[1]) + moved
                logits, targets = features @ own[2].T + own[3], y[rows]
                if softmax == "batch":
                    labels = sorted(set(y.tolist()))
                    logits, targets = logits[:, labels], torch.tensor([labels.index(int(c)) for c in targets])
                optimizer.zero_grad()
                cross_entropy(logits, targets).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
            made.append([w.detach() for w in own])
        sizes = torch.tensor([len(site.y) for site in at], dtype=torch.float64)
        weights = [torch.tensordot(sizes / sizes.sum(), torch.stack(ws), 1) for ws in zip(*made, strict=True)]
        for name, expected in zip(NAMES, weights, strict=True):
            torch.testing.assert_close(states[t + 1].model.params[name], expected, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("engine", ["plain", "stacked"])
def test_without_noise_it_is_cross_entropy(engine: str) -> None:
    settled: dict[str, Any] = {"engine": engine, "batch_size": 2}
    balanced = [[3, 3, 3, 3], [2, 2, 2, 2]]
    pairs = [
        (
            final_weights("balancefl", {"softmax": "all"}, counts=balanced, **settled),
            final_weights("fedavg", counts=balanced, **settled),
        ),
        (
            final_weights("balancefl", {"softmax": "all", "probability": [0.0]}, **settled),
            final_weights("fedavg", **settled),
        ),
    ]
    for found, expected in pairs:
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)
    moved = final_weights("balancefl", {"softmax": "all"}, **settled)
    assert any(not torch.allclose(a, b) for a, b in zip(moved, pairs[1][1], strict=True))


def test_the_pass_costs_a_forward_of_each_sample() -> None:
    _, rows = recorded("balancefl", local_epochs=1)
    assert [row.compute for row in rows] == pytest.approx([4 / 3] * 2)


@pytest.mark.parametrize(
    ("params", "words"),
    [({"probability": [1.5]}, "from 0 to 1"), ({"noises": 0}, "noises"), ({"softmax": "own"}, "softmax")],
)
def test_bad_parameters_are_refused(params: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        make_method("balancefl", params)


def test_a_probability_for_some_classes_only_is_refused() -> None:
    with pytest.raises(UserError, match="a list of one number, or of 4"):
        BalanceFL(probability=(0.1, 0.2)).check({}, 4)
