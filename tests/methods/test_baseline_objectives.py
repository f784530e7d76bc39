"""The losses of the papers' baselines: two rounds of each against the formula, and special cases."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from linear_clients import COUNTS, Array, federation, final, linear_model, played, settings
from sklearn.utils.class_weight import compute_class_weight
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity, kl_div, log_softmax, softmax

import fedskew as fs
from fedskew import losses
from fedskew.data import Federation
from fedskew.errors import UserError
from fedskew.experiment.round.record import RoundRow
from fedskew.experiment.round.server import Server
from fedskew.experiment.round.state import RunState
from fedskew.losses import IGNORE
from fedskew.methods import make_method
from fedskew.methods.moon import MOON
from fedskew.models import Classifier


def two_layers(classes: int = 4) -> Classifier:
    """A model whose features are learnt."""
    with torch.random.fork_rng():
        torch.manual_seed(4)
        return Classifier(nn.Sequential(nn.Linear(3, 5), nn.Tanh()), nn.Linear(5, classes))


def recorded(
    method: str, params: dict[str, Any], fed: Federation | None = None, **changed: Any
) -> tuple[list[RunState], list[RoundRow]]:
    return played(Server(fed or federation(), make_method(method, params), two_layers(), settings(**changed)))


def run(method: str, params: dict[str, Any], fed: Federation | None = None, **changed: Any) -> list[RunState]:
    return recorded(method, params, fed, **changed)[0]


# -- independent formulas -----------------------------------------------------------------------------------

Seen = tuple[Tensor, Tensor]
"""Logits and features."""
Weights = Sequence[Tensor]
NAMES = ("encoder.0.weight", "encoder.0.bias", "head.weight", "head.bias")


def seen(weights: Weights, x: Tensor) -> Seen:
    features = torch.tanh(x @ weights[0].T + weights[1])
    return features @ weights[2].T + weights[3], features


Formula = Callable[[Seen, Seen, Seen, Tensor, Tensor], Tensor]
"""The loss besides the cross entropy: of the model, the received and the previous one, labels and label counts."""


def smoothed(model: Seen, received: Seen, before: Seen, y: Tensor, counts: Tensor) -> Tensor:
    even = -log_softmax(model[0], 1).mean()
    return 0.3 * (even - nn.functional.cross_entropy(model[0], y))


def weighted(model: Seen, received: Seen, before: Seen, y: Tensor, counts: Tensor) -> Tensor:
    weights = torch.tensor([1.0, 0.5, 2.0, 4.0], dtype=torch.float64)
    return ((weights[y] - 1) * nn.functional.cross_entropy(model[0], y, reduction="none")).mean()


def balanced(model: Seen, received: Seen, before: Seen, y: Tensor, counts: Tensor) -> Tensor:
    """With scikit-learn's weights of the client's labels."""
    labels = np.repeat(np.arange(len(counts)), counts.long().numpy())
    present = np.unique(labels)
    found = dict(zip(present, compute_class_weight("balanced", classes=present, y=labels), strict=True))
    weights = torch.tensor([found[int(c)] for c in y], dtype=torch.float64)
    return ((weights - 1) * nn.functional.cross_entropy(model[0], y, reduction="none")).mean()


def focal(model: Seen, received: Seen, before: Seen, y: Tensor, counts: Tensor) -> Tensor:
    p = softmax(model[0], 1)[torch.arange(len(y)), y]
    return (-((1 - p) ** 1.5) * p.log()).mean() - nn.functional.cross_entropy(model[0], y)


def divergence(teacher: Tensor, student: Tensor) -> Tensor:
    return kl_div(log_softmax(student, -1), softmax(teacher, -1), reduction="sum")


def all_classes(model: Seen, received: Seen, before: Seen, y: Tensor, counts: Tensor) -> Tensor:
    return 0.7 * 4 * divergence(received[0] / 2, model[0] / 2) / len(y)


def own_classes(model: Seen, received: Seen, before: Seen, y: Tensor, counts: Tensor) -> Tensor:
    own = counts > 0
    return 0.7 * 4 * divergence(received[0][:, own] / 2, model[0][:, own] / 2) / len(y)


def decoupled(model: Seen, received: Seen, before: Seen, y: Tensor, counts: Tensor) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for student, teacher, target in zip(model[0] / 2, received[0] / 2, y, strict=True):
        others = torch.arange(len(counts)) != target
        p, q = softmax(teacher, -1)[target], softmax(student, -1)[target]
        pair = p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()
        total = total + 0.6 * pair + 3.0 * divergence(teacher[others], student[others])
    return 4 * total / len(y)


def even_others(model: Seen, received: Seen, before: Seen, y: Tensor, counts: Tensor) -> Tensor:
    rows = [row[torch.arange(len(counts)) != target] / 2 for row, target in zip(model[0], y, strict=True)]
    return 0.7 * 4 * sum(divergence(torch.zeros_like(row), row) for row in rows) / len(y)  # type: ignore[return-value]


def contrast(model: Seen, received: Seen, before: Seen, y: Tensor, counts: Tensor) -> Tensor:
    near, far = (cosine_similarity(model[1], other[1]).div(0.4).exp() for other in (received, before))
    return -0.8 * (near / (near + far)).log().mean()


def off_diagonal(features: Tensor) -> Tensor:
    standard = (features - features.mean(0)) / (features.var(0) + 1e-8).sqrt()
    matrix = standard.T @ standard
    return matrix[~torch.eye(len(matrix), dtype=torch.bool)].square().mean()


def decorrelated(model: Seen, received: Seen, before: Seen, y: Tensor, counts: Tensor) -> Tensor:
    return 0.2 * off_diagonal(model[1]) / len(y)


def decorrelated_by_class(model: Seen, received: Seen, before: Seen, y: Tensor, counts: Tensor) -> Tensor:
    groups = [model[1][y == c] for c in range(len(counts)) if counts[c] > 1]
    return 0.2 * torch.stack([off_diagonal(g) for g in groups]).sum() / sum(map(len, groups))


@pytest.mark.parametrize(
    ("method", "params", "formula"),
    [
        ("label-smoothing", {"smoothing": 0.3}, smoothed),
        ("focal-loss", {"gamma": 1.5}, focal),
        ("weighted-ce", {}, balanced),
        ("weighted-ce", {"weights": [1.0, 0.5, 2.0, 4.0]}, weighted),
        ("fedkd", {"beta": 0.7, "temperature": 2.0}, all_classes),
        ("fedekd", {"beta": 0.7, "temperature": 2.0}, own_classes),
        ("feddkd", {"alpha": 0.6, "beta": 3.0, "temperature": 2.0}, decoupled),
        ("fedntd-tf", {"beta": 0.7, "temperature": 2.0}, even_others),
        ("moon", {"mu": 0.8, "temperature": 0.4}, contrast),
        ("feddecorr", {"beta": 0.2}, decorrelated),
        ("fedmr", {"mu": 0.2}, decorrelated_by_class),
    ],
)
def test_rounds_of_some_clients(method: str, params: dict[str, Any], formula: Formula) -> None:
    """Two of three clients take part, so that MOON's previous models have different ages."""
    fed, some = federation(), {"rounds": 5, "clients_per_round": 2}
    states, rows = recorded(method, params, fed, **some)
    assert {tuple(row.clients) for row in rows} > {(0, 1), (1, 2)}
    expected: Weights = [states[0].model.params[name] for name in NAMES]
    previous: dict[int, Weights] = {}
    for round_number, row in enumerate(rows):
        made = [descended(fed, k, expected, previous.get(k, expected), formula, round_number) for k in row.clients]
        previous |= dict(zip(row.clients, made, strict=True))
        sizes = torch.tensor(fed.sizes[row.clients], dtype=torch.float64)
        expected = [torch.tensordot(sizes / sizes.sum(), torch.stack(w), dims=1) for w in zip(*made, strict=True)]
        for name, w in zip(NAMES, expected, strict=True):
            torch.testing.assert_close(states[round_number + 1].model.params[name], w, rtol=1e-10, atol=1e-11)


def descended(
    fed: Federation, k: int, sent: Weights, previous: Weights, formula: Formula, round_number: int
) -> Weights:
    """One client's local training."""
    config, samples = settings(), fed.indices[k]
    x, y = torch.tensor(fed.dataset.train.x[samples]).double(), torch.tensor(fed.dataset.train.y[samples])
    frozen = seen(sent, x), seen(previous, x)
    weights = [w.clone().requires_grad_() for w in sent]
    lr = config.lr * config.lr_decay**round_number
    optimiser = torch.optim.SGD(weights, lr, momentum=config.momentum, weight_decay=config.weight_decay)
    for _ in range(config.local_epochs):
        optimiser.zero_grad()
        model = seen(weights, x)
        extra = formula(model, *frozen, y, torch.tensor(fed.label_counts[k]))
        (nn.functional.cross_entropy(model[0], y) + extra).backward()
        optimiser.step()
    return [w.detach() for w in weights]


# -- special cases ----------------------------------------------------------------------------------------


def last(method: str, params: dict[str, Any], **changed: Any) -> Array:
    params_of = run(method, params, **changed)[-1].model.params
    return np.concatenate([p.numpy().ravel() for p in params_of.values()])


@pytest.mark.parametrize("engine", ["plain", "stacked"])
@pytest.mark.parametrize(
    ("method", "params", "other", "others_params"),
    [
        ("label-smoothing", {"smoothing": 0.0}, "fedavg", {}),
        ("weighted-ce", {"weights": [1.0, 1.0, 1.0, 1.0]}, "fedavg", {}),
        ("logit-adjustment", {"tau": 0.0}, "fedavg", {}),
        ("focal-loss", {"gamma": 0.0}, "fedavg", {}),
        ("fedkd", {"beta": 0.0}, "fedavg", {}),
        ("fedekd", {"beta": 0.0}, "fedavg", {}),
        ("feddkd", {"alpha": 0.0, "beta": 0.0}, "fedavg", {}),
        ("feddkd", {"alpha": 0.0, "beta": 0.7, "temperature": 2.0}, "fedntd", {"beta": 0.7, "temperature": 2.0}),
        ("fedntd-tf", {"beta": 0.0}, "fedavg", {}),
        ("moon", {"mu": 0.0}, "fedavg", {}),
        ("feddecorr", {"beta": 0.0}, "fedavg", {}),
        ("fedmr", {"mu": 0.0}, "fedavg", {}),
        ("fedavg-kd", {}, "fedkd", {}),
    ],
)
def test_special_cases_equal_another_method(
    method: str, params: dict[str, Any], other: str, others_params: dict[str, Any], engine: str
) -> None:
    found = last(method, params, batch_size=4, engine=engine)
    np.testing.assert_allclose(found, last(other, others_params, batch_size=4, engine=engine), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    "method",
    [
        "weighted-ce",
        "logit-adjustment",
        "label-smoothing",
        "focal-loss",
        "fedkd",
        "fedekd",
        "feddkd",
        "fedntd-tf",
        "moon",
        "feddecorr",
        "fedmr",
    ],
)
def test_with_its_defaults_it_differs_from_fedavg(method: str) -> None:
    assert np.abs(last(method, {}) - last("fedavg", {})).max() > 1e-7


def test_without_vacant_classes_fedekd_is_fedkd() -> None:
    fed = federation(np.array([[5, 2, 1, 1], [2, 1, 4, 1]]))
    np.testing.assert_allclose(last("fedekd", {}, fed=fed), last("fedkd", {}, fed=fed), rtol=1e-13)


def test_a_client_with_one_class_distils_nothing() -> None:
    fed = federation(COUNTS[2:])
    np.testing.assert_allclose(last("fedekd", {}, fed=fed), last("fedavg", {}, fed=fed), rtol=1e-13)


def test_for_clients_with_one_class_fedmr_is_feddecorr() -> None:
    fed = federation(np.array([[5, 0, 0, 0], [0, 0, 4, 0]]))
    np.testing.assert_allclose(
        last("fedmr", {"mu": 0.3}, fed=fed), last("feddecorr", {"beta": 0.3}, fed=fed), rtol=1e-12
    )


def test_label_masking_of_even_clients_without_a_teacher_is_fedntd_tf() -> None:
    even = federation(np.array([[2, 2, 2, 2], [3, 3, 3, 3]]))
    np.testing.assert_allclose(final("fedntd-tf", federation=even), final("fedlmd-tf", federation=even), rtol=1e-13)


def test_decoupled_distillation_adds_up_to_distillation() -> None:
    """KL = KL(b^g ‖ b) + (1 − p_y^g)·KL over the others, sample by sample."""
    rng = torch.Generator().manual_seed(0)
    z, t = (torch.randn(1, 5, generator=rng, dtype=torch.float64) for _ in range(2))
    y = torch.tensor([3])
    doubt = 1 - softmax(t / 2, -1)[0, 3]
    parts = losses.target_distillation(z, t, y, 2.0) + doubt * losses.not_true_distillation(z, t, y, 2.0)
    torch.testing.assert_close(parts, losses.distillation(z, t, y, 2.0), rtol=1e-13, atol=1e-15)


def test_with_two_classes_fedntd_tf_is_fedavg() -> None:
    z = torch.tensor([[0.3, -2.0]], dtype=torch.float64, requires_grad=True)
    loss = losses.teacher_free_not_true(z, torch.tensor([1]), 2.0)
    assert loss.item() == 0
    assert (torch.autograd.grad(loss, z)[0] == 0).all()


@pytest.mark.parametrize("gamma", [0.0, 0.5, 1.0, 2.0])
def test_focal_loss_of_a_certain_sample_has_a_finite_gradient(gamma: float) -> None:
    z = torch.tensor([[900.0, -900.0], [-900.0, 900.0]], requires_grad=True)
    loss = losses.focal_cross_entropy(z, torch.tensor([0, 0]), gamma)
    assert loss.item() == pytest.approx(900)
    assert torch.autograd.grad(loss, z)[0].isfinite().all()


# -- features ---------------------------------------------------------------------------------------------


def test_a_new_client_has_no_previous_model_to_contrast_with() -> None:
    np.testing.assert_allclose(last("moon", {"mu": 5.0}, rounds=1), last("fedavg", {}, rounds=1), rtol=1e-12)


def test_a_client_keeps_its_last_model() -> None:
    """For a single client, it is also the next global model."""
    states = run("moon", {}, federation(COUNTS[:1]))
    kept = states[-1].clients.read("global", [0])[0]
    for name, w in states[-1].model.params.items():
        torch.testing.assert_close(kept[f"previous/{name}"], w, rtol=0, atol=0)


def test_both_frozen_models_of_moon_have_the_same_mode() -> None:
    assert MOON().companions() == {"teacher": "train", "state/previous": "train"}
    assert MOON(teacher_mode="eval").companions() == {"teacher": "eval", "state/previous": "eval"}


FEATURES = torch.randn(6, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
LABELS = torch.tensor([0, 2, 0, 0, 2, 1])


FEATURE_LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "contrast": lambda f, y: losses.model_contrast(f, f.detach().flip(1), -f.detach().roll(1, 1), y),
    "decorrelation": losses.decorrelation,
    "class decorrelation": losses.class_decorrelation,
}

every_feature_loss = pytest.mark.parametrize("loss", FEATURE_LOSSES.values(), ids=list(FEATURE_LOSSES))


def slope(loss: Callable[[Tensor, Tensor], Tensor], features: Tensor, y: Tensor) -> Tensor:
    leaf = features.clone().requires_grad_()
    return torch.autograd.grad(loss(leaf, y), leaf, materialize_grads=True)[0]


@every_feature_loss
def test_padded_rows_change_neither_value_nor_gradient(loss: Callable[[Tensor, Tensor], Tensor]) -> None:
    longer = torch.cat([FEATURES, torch.full((2, 4), 7.0, dtype=torch.float64)])
    labels = torch.cat([LABELS, torch.tensor([IGNORE, IGNORE])])
    torch.testing.assert_close(loss(longer, labels), loss(FEATURES, LABELS), rtol=1e-13, atol=0)
    padded = slope(loss, longer, labels)
    torch.testing.assert_close(padded[:6], slope(loss, FEATURES, LABELS), rtol=1e-11, atol=1e-14)
    assert (padded[6:] == 0).all()


@every_feature_loss
@pytest.mark.parametrize("scale", [0.0, 1e-20, 1e6])
def test_dead_and_large_features_have_finite_gradients(loss: Callable[[Tensor, Tensor], Tensor], scale: float) -> None:
    features = FEATURES.float() * scale
    assert loss(features, LABELS).isfinite()
    assert slope(loss, features, LABELS).isfinite().all()


@every_feature_loss
def test_a_batch_of_padding_only_is_zero(loss: Callable[[Tensor, Tensor], Tensor]) -> None:
    nothing = torch.full((6,), IGNORE)
    assert float(loss(FEATURES, nothing)) == 0
    assert (slope(loss, FEATURES, nothing) == 0).all()


@pytest.mark.parametrize("loss", [losses.decorrelation, losses.class_decorrelation])
def test_one_sample_and_one_dimension_have_nothing_to_decorrelate(loss: Callable[[Tensor, Tensor], Tensor]) -> None:
    assert float(loss(FEATURES[:1], LABELS[:1])) == 0
    assert float(loss(FEATURES[:, :1], LABELS)) == pytest.approx(0, abs=1e-14)


def test_a_class_with_a_single_sample_is_left_out() -> None:
    several = torch.tensor([True, True, True, True, True, False])
    alone = losses.class_decorrelation(FEATURES[several], LABELS[several])
    torch.testing.assert_close(losses.class_decorrelation(FEATURES, LABELS), alone, rtol=1e-13, atol=0)


@pytest.mark.parametrize("method", ["moon", "feddecorr", "fedmr"])
def test_a_model_without_features_is_refused_before_any_training(method: str) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(3, 4))
    with pytest.raises(UserError, match=f"method '{method}' needs features, but Sequential") as error:
        fs.run(federation(), method, model=model, rounds=1)
    assert "\n" not in str(error.value)
    fs.run(federation(), method, model=linear_model(), rounds=1, local_epochs=1)


# -- bad hyper-parameters -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "name", "value", "expected"),
    [
        ("label-smoothing", "smoothing", -0.1, "a number from 0 to 1"),
        ("label-smoothing", "smoothing", 1.5, "a number from 0 to 1"),
        ("focal-loss", "gamma", -1, "a number ≥ 0"),
        ("fedkd", "beta", -1, "a number ≥ 0"),
        ("fedkd", "temperature", 0, "a number > 0"),
        ("fedekd", "temperature", 0, "a number > 0"),
        ("feddkd", "alpha", -1, "a number ≥ 0"),
        ("feddkd", "beta", -1, "a number ≥ 0"),
        ("feddkd", "temperature", 0, "a number > 0"),
        ("fedntd-tf", "beta", -1, "a number ≥ 0"),
        ("fedntd-tf", "temperature", 0, "a number > 0"),
        ("moon", "mu", -1, "a number ≥ 0"),
        ("moon", "temperature", 0, "a number > 0"),
        ("moon", "teacher_mode", "evil", "did you mean 'eval'"),
        ("feddecorr", "beta", -1, "a number ≥ 0"),
        ("fedmr", "mu", -1, "a number ≥ 0"),
    ],
)
def test_a_bad_hyper_parameter_is_refused_in_one_line(method: str, name: str, value: Any, expected: str) -> None:
    with pytest.raises(UserError, match=expected) as error:
        make_method(method, {name: value})
    assert name in str(error.value)
    assert "\n" not in str(error.value)
