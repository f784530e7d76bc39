"""Scores of probabilities equal scikit-learn's."""

from __future__ import annotations

import json
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn import metrics as sk

from fedskew.metrics.scores import BINS, Scores, reliability_sums, score_probabilities


def probabilities(seed: int, classes: int, samples: int = 400, digits: int = 12) -> tuple[np.ndarray, np.ndarray]:
    """Probabilities of a model that has learnt something. Few digits give many ties."""
    rng = np.random.default_rng(seed)
    true = rng.choice(classes, samples, p=rng.dirichlet([1.0] * classes))
    logits = (2 * rng.normal(size=(samples, classes)) + 2 * np.eye(classes)[true]).round(digits)
    odds = np.exp(logits - logits.max(axis=1, keepdims=True))
    return odds / odds.sum(axis=1, keepdims=True), true


@pytest.mark.parametrize("classes", [2, 3, 10])
@pytest.mark.parametrize("digits", [0, 12])
@pytest.mark.parametrize("seed", [0, 1])
def test_scores_are_those_of_scikit_learn(classes: int, digits: int, seed: int) -> None:
    shares, true = probabilities(seed, classes, digits=digits)
    found = score_probabilities(shares, true, specificity=0.9)
    assert found is not None
    present = [c for c in range(classes) if 0 < (true == c).sum() < len(true)]
    for c in present:
        one, inside = found.classes[c], true == c
        assert one.samples == inside.sum()
        assert one.auroc == pytest.approx(sk.roc_auc_score(inside, shares[:, c]), abs=1e-12)
        assert one.auprc == pytest.approx(sk.average_precision_score(inside, shares[:, c]), abs=1e-12)
        above = shares[:, c] > 0.5
        assert one.sensitivity == pytest.approx(sk.recall_score(inside, above))
        assert one.specificity == pytest.approx(sk.recall_score(~inside, ~above))
    shown = [1] if classes == 2 else present
    assert found.auroc == pytest.approx(np.mean([found.classes[c].auroc for c in shown]), abs=1e-12)
    brier = sk.brier_score_loss(true, shares[:, 1] if classes == 2 else shares, labels=range(classes))
    assert found.brier == pytest.approx(brier, abs=1e-12)


@given(seed=st.integers(0, 10_000), specificity=st.sampled_from([0.0, 0.5, 0.8, 0.95, 1.0]))
def test_the_threshold_is_the_lowest_with_the_chosen_specificity(seed: int, specificity: float) -> None:
    shares, true = probabilities(seed, 2, samples=30, digits=1)
    found = score_probabilities(shares, true, specificity)
    assert found is not None
    if found.auroc is None:
        return
    column, inside = shares[:, 1], true == 1
    reached = {t: ((column < t)[~inside].mean(), (column >= t)[inside].mean()) for t in [*column, np.inf]}
    best = max(own for others, own in reached.values() if others >= specificity - 1e-12)
    assert found.sensitivity_at_specificity == pytest.approx(best)
    threshold = np.inf if found.classes[1].threshold is None else found.classes[1].threshold
    assert reached[threshold][0] >= specificity - 1e-12
    assert reached[threshold][1] == pytest.approx(best)


def test_the_positive_class_is_the_second_unless_another_is_named() -> None:
    shares, true = probabilities(3, 2)
    second, first = score_probabilities(shares, true), score_probabilities(shares, true, positive=0)
    assert second is not None
    assert first is not None
    assert (second.positive, first.positive) == (1, 0)
    assert second.auroc == pytest.approx(first.auroc, abs=1e-12)
    assert second.auprc == pytest.approx(sk.average_precision_score(true == 1, shares[:, 1]))
    assert first.auprc == pytest.approx(sk.average_precision_score(true == 0, shares[:, 0]))


def test_the_calibration_error_of_more_than_two_classes_is_that_of_the_predicted_class() -> None:
    shares = np.array([[0.9, 0.05, 0.05], [0.92, 0.04, 0.04], [0.5, 0.3, 0.2]])
    found = score_probabilities(shares, np.array([0, 1, 0]))
    assert found is not None
    assert found.calibration_error == pytest.approx((abs(1.82 / 2 - 0.5) * 2 + abs(0.5 - 1.0)) / 3)
    assert sum(found.reliability.samples) == 3


def test_the_calibration_error_of_two_classes_is_that_of_the_positive_class() -> None:
    shares, true = probabilities(5, 2, samples=2000)
    sums = reliability_sums(shares, true, 1)
    edges = np.linspace(0, 1, BINS + 1)
    column = shares[:, 1]
    inside = [(column > low) & (column <= high) for low, high in pairwise(edges)]
    assert sums[0].tolist() == [rows.sum() for rows in inside]
    gaps = [abs(column[rows].sum() - (true == 1)[rows].sum()) for rows in inside]
    found = score_probabilities(shares, true)
    assert found is not None
    assert found.calibration_error == pytest.approx(sum(gaps) / 2000)


def test_a_probability_on_the_edge_of_two_bins_is_in_the_lower_one() -> None:
    column = np.array([0.0, 0.2, 0.4, 1.0])  # 0.2 and 0.4 are three and six fifteenths
    sums = reliability_sums(np.stack([1 - column, column], axis=1), np.array([0, 0, 1, 1]), 1)
    assert np.flatnonzero(sums[0]).tolist() == [0, 2, 5, 14]


def test_a_class_without_samples_does_not_count() -> None:
    shares = np.array([[0.9, 0.1, 0.0], [0.2, 0.8, 0.0], [0.8, 0.2, 0.0]])
    found = score_probabilities(shares, np.array([0, 1, 0]))
    assert found is not None
    assert (found.auroc, found.classes[2].auroc) == (1.0, None)
    alone = score_probabilities(shares, np.array([0, 0, 0]))
    assert alone is not None
    assert alone.auroc is None, "there is nothing to compare class 0 with"
    assert alone.brier is not None


def test_probabilities_that_are_not_finite_have_no_scores() -> None:
    assert score_probabilities(np.full((2, 2), np.nan), np.array([0, 1])) is None


@pytest.mark.parametrize("classes", [2, 4])
def test_scores_survive_strict_json(classes: int) -> None:
    found = score_probabilities(*probabilities(7, classes, samples=20))
    assert found is not None
    assert Scores.from_json(json.loads(json.dumps(found.to_json(), allow_nan=False))) == found
    assert Scores.from_json({"auroc": 0.5, "of a later version": 1}) == Scores(auroc=0.5)


def test_unknown_keys_are_ignored_at_every_depth() -> None:
    found = score_probabilities(*probabilities(7, 3, samples=20))
    assert found is not None
    later = found.to_json()
    later["classes"] = [one | {"of a later version": 1} for one in later["classes"]]
    later["reliability"] |= {"of a later version": [1]}
    assert Scores.from_json(later) == found
