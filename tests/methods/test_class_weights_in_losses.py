"""Class weights: scikit-learn's formula, PyTorch's losses, and every method of the catalogue."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.utils.class_weight import compute_class_weight
from torch import Tensor

import fedskew as fs
from fedskew.losses import (
    IGNORE,
    balanced_label_weights,
    balanced_weights,
    binary_cross_entropy,
    cross_entropy,
    focal_cross_entropy,
    smoothed_cross_entropy,
)
from fedskew.methods import METHODS, Client, Outputs, Updates, make_method
from fedskew.methods.class_weights import (
    FederationLabelWeights,
    FederationWeights,
    describe_weights,
    entries_with_weights,
    revealed_labels,
    takes_weights,
)
from fedskew.methods.fedkd import FedKD

LIKE = torch.zeros((), dtype=torch.float64)
COUNTS = st.lists(st.integers(0, 10**6), min_size=1, max_size=20).filter(any)


@given(COUNTS)
def test_balanced_weights_are_scikit_learns_and_vacant_classes_have_none(counts: list[int]) -> None:
    n = np.array(counts)
    weights = balanced_weights(torch.tensor(counts), LIKE).numpy()
    present = np.flatnonzero(n)
    y = np.concatenate([present, np.repeat(present, np.minimum(n[present], 30) - 1)])
    capped = balanced_weights(torch.tensor(np.minimum(n, 30)), LIKE).numpy()
    expected = compute_class_weight("balanced", classes=present, y=y)
    np.testing.assert_allclose(capped[present], expected, rtol=1e-12)
    assert np.isfinite(weights).all()
    assert (weights[n == 0] == 0).all()
    np.testing.assert_allclose((weights * n)[present], n.sum() / len(present), rtol=1e-12)


def test_a_client_with_one_class_has_weight_one() -> None:
    assert balanced_weights(torch.tensor([0, 7, 0]), LIKE).tolist() == [0, 1, 0]


@given(st.lists(st.integers(0, 50), min_size=1, max_size=8), st.integers(50, 60))
def test_label_weights_are_negatives_over_positives(positives: list[int], samples: int) -> None:
    weights = balanced_label_weights(torch.tensor(positives), torch.tensor(samples), LIKE).tolist()
    expected = [(samples - p) / p if 0 < p < samples else 1.0 for p in positives]
    assert weights == pytest.approx(expected, rel=1e-12)


@settings(deadline=None)
@given(st.integers(0, 2**32 - 1), st.lists(st.floats(0, 100), min_size=5, max_size=5))
def test_losses_are_pytorchs_sum_divided_by_the_samples(seed: int, values: list[float]) -> None:
    generator, weights = torch.Generator().manual_seed(seed), torch.tensor(values, dtype=torch.float64)
    logits = torch.randn(9, 5, generator=generator, dtype=torch.float64)
    y = torch.randint(5, (9,), generator=generator)
    summed = F.cross_entropy(logits, y, weights, reduction="sum")
    torch.testing.assert_close(cross_entropy(logits, y, weights), summed / 9, rtol=1e-12, atol=1e-12)
    smooth = F.cross_entropy(logits, y, weights, reduction="sum", label_smoothing=0.3)
    torch.testing.assert_close(smoothed_cross_entropy(logits, y, 0.3, weights), smooth / 9, rtol=1e-12, atol=1e-12)
    focal = focal_cross_entropy(logits, y, 0.0, weights)
    torch.testing.assert_close(focal, summed / 9, rtol=1e-12, atol=1e-12)
    if weights[y].sum() > 0:  # PyTorch's own mean is over the weights
        mean = F.cross_entropy(logits, y, weights) * weights[y].sum() / 9
        torch.testing.assert_close(cross_entropy(logits, y, weights), mean, rtol=1e-9, atol=1e-12)


def test_pytorchs_mean_would_ignore_the_weight_of_a_batch_of_one_class() -> None:
    logits, y = torch.randn(4, 3, dtype=torch.float64), torch.zeros(4, dtype=torch.int64)
    weights = torch.tensor([8.0, 1.0, 1.0], dtype=torch.float64)
    plain = F.cross_entropy(logits, y)
    torch.testing.assert_close(F.cross_entropy(logits, y, weights), plain)
    torch.testing.assert_close(cross_entropy(logits, y, weights), 8 * plain)


def test_the_binary_loss_is_pytorchs_with_pos_weight() -> None:
    logits = torch.randn(6, 3, dtype=torch.float64)
    y = torch.tensor([[1, 0, 1], [0, 0, 1], [1, 1, 1], [0, 0, 0], [0, 1, 0], [1, 0, 0]])
    weights = torch.tensor([0.5, 3.0, 1.0], dtype=torch.float64)
    expected = F.binary_cross_entropy_with_logits(logits, y.double(), pos_weight=weights)
    torch.testing.assert_close(binary_cross_entropy(logits, y, weights), expected, rtol=1e-12, atol=0)


def test_padding_has_no_weight() -> None:
    logits, weights = torch.randn(5, 3, dtype=torch.float64), torch.tensor([9.0, 1.0, 2.0])
    y = torch.tensor([1, 2, 0, IGNORE, IGNORE])
    for loss in (cross_entropy, focal_cross_entropy, smoothed_cross_entropy):
        padded, bare = loss(logits, y, weights=weights), loss(logits[:3], y[:3], weights=weights)  # type: ignore[operator]
        torch.testing.assert_close(padded, bare, rtol=1e-12, atol=0)


# -- every method of the catalogue --------------------------------------------------------------------------

WITHOUT_TRAINING = ("afl", "fed3r", "fedncm")
"""Methods that compute the head from sums, without a loss."""
WITH_OBJECTIVE = sorted(
    name
    for name, entry in METHODS.items()
    if name not in WITHOUT_TRAINING
    and (name in ("fedavg", "ditto", "fedper") or {"objective", "stages", "bound"} & set(entry.kinds))
)


@pytest.fixture(scope="module")
def federation() -> fs.Federation:
    digits = fs.load("digits")
    (x, y), test = ((part.x[:300], part.y[:300]) for part in (digits.train, digits.test))
    return fs.federation((x, y), fs.Dirichlet(clients=3, beta=0.3), seed=1, test=test)


@pytest.mark.parametrize("method", WITH_OBJECTIVE)
def test_weights_of_one_change_nothing_and_others_do(method: str, federation: fs.Federation) -> None:
    assert takes_weights(make_method(method).objective)
    quick = {"pkd": {"groups": [[0, 1]], "warmup_rounds": 1, "expert_rounds": 1}, "creff": {"head_epochs": 1}}
    params = quick.get(method, {})
    shared = {"rounds": 2, "local_epochs": 1, "method_params": params, "precision": "float64", "engine": "plain"}
    shared["batch_size"] = 200
    ones, rising = {str(c): 1.0 for c in range(10)}, {str(c): 3.0 + c for c in range(10)}
    runs = [fs.run(federation, method, class_weights=weights, **shared) for weights in (None, ones, rising)]  # type: ignore[arg-type]
    losses = [[row.loss for row in run.history if row.loss is not None] for run in runs]
    assert len(losses[0]) >= 2
    if method != "weighted-ce":  # it balances the classes if it has no other weights
        assert losses[1] == pytest.approx(losses[0], rel=1e-9)
    assert all(weighted > 1.5 * plain for plain, weighted in zip(losses[1], losses[2], strict=True))


@pytest.mark.parametrize("method", WITHOUT_TRAINING)
def test_a_method_without_a_loss_is_refused_by_name(method: str, federation: fs.Federation) -> None:
    with pytest.raises(fs.UserError, match=f"the loss of method '{method}' does not take class weights"):
        fs.run(federation, method, rounds=1, class_weights="balanced")


@dataclass(frozen=True)
class Ignoring(FedKD):
    """A loss that does not know of class weights, although its base class does."""

    def loss(self, out: Outputs, y: Tensor, client: Client) -> Tensor:
        return out.logits.square().mean()


def test_a_class_that_overrides_the_loss_must_declare_it_again(federation: fs.Federation) -> None:
    assert takes_weights(FedKD())
    assert not takes_weights(Ignoring())
    with pytest.raises(fs.UserError, match=r"loss of method 'ignoring' does not take class weights; expected a method"):
        fs.run(federation, Ignoring(), rounds=1, class_weights="balanced")


# -- counts of the federation -------------------------------------------------------------------------------


def updates(**uplink: Tensor) -> Updates:
    return Updates({}, torch.ones(2) / 2, uplink, lr=0.1, participation=1.0)


def test_the_server_adds_up_counts_and_an_unseen_class_has_the_largest_weight() -> None:
    rule = FederationWeights(4)
    state = rule.server_state({"w": torch.zeros(1)})
    assert rule.downlink(state)["class_weights"].tolist() == [1, 1, 1, 1]
    counts = torch.tensor([[3, 0, 1, 0], [3, 2, 0, 0]])
    state |= rule.next_server_state(updates(weight_counts=counts), state)
    assert state["weight_counts"].tolist() == [6, 2, 1, 0]
    assert rule.downlink(state)["class_weights"].tolist() == [9 / 18, 9 / 6, 3, 3]


def test_the_server_adds_up_positives_and_samples() -> None:
    rule = FederationLabelWeights(2)
    state = rule.server_state({"w": torch.zeros(1)})
    assert rule.downlink(state)["class_weights"].tolist() == [1, 1]
    sent = updates(weight_counts=torch.tensor([[1, 0], [3, 0]]), weight_samples=torch.tensor([4, 6]))
    state |= rule.next_server_state(sent, state)
    assert rule.downlink(state)["class_weights"].tolist() == [6 / 4, 1]


def test_only_counts_reveal_label_counts() -> None:
    assert revealed_labels(entries_with_weights("fedavg", "balanced")) == "nothing"
    assert revealed_labels(entries_with_weights("fedavg+fedprox", "counts")) == "label counts"
    assert revealed_labels(entries_with_weights("fedgr", "counts")) == "label presence, label counts"


def test_settings_are_described() -> None:
    assert [describe_weights(s) for s in (None, "balanced", {"a": 1.0, "b": 2.5})] == ["none", "balanced", "a 1, b 2.5"]
