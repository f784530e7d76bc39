"""Scores by site: DeLong's interval against its definition, histograms against probabilities, fairness."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score

from fedskew.metrics.score_histograms import ScoreHistograms
from fedskew.metrics.site_scores import SiteScore, _auroc, fairness, interval, score_site, score_site_histograms
from fedskew.task import TASKS


def binary(seed: int, samples: int, digits: int = 12) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    true = rng.permutation(np.arange(samples) % 3 == 0).astype(np.int64)
    share = 1 / (1 + np.exp(-(rng.normal(size=samples) + true).round(digits)))
    return np.stack([1 - share, share], axis=1), true


def delong_by_definition(shares: np.ndarray, true: np.ndarray) -> float:
    """The variance of the AUROC, pair by pair (DeLong et al. 1988, equations 3 to 5)."""
    own, others = shares[true == 1], shares[true == 0]
    kernel = (own[:, None] > others[None]) + 0.5 * (own[:, None] == others[None])
    return float(kernel.mean(axis=1).var(ddof=1) / len(own) + kernel.mean(axis=0).var(ddof=1) / len(others))


@given(seed=st.integers(0, 1000), samples=st.integers(6, 60), digits=st.sampled_from([0, 1, 12]))
def test_the_interval_of_two_classes_is_delongs(seed: int, samples: int, digits: int) -> None:
    shares, true = binary(seed, samples, digits)
    found, variance = score_site(shares, true), delong_by_definition(shares[:, 1], true)
    assert found.auroc == pytest.approx(roc_auc_score(true, shares[:, 1]), abs=1e-12)
    if found.auroc in (0.0, 1.0) or variance < 1e-15:
        assert (found.auroc_low, found.auroc_high) == (None, None)
        return
    half = 1.959963984540054 * math.sqrt(variance) / (found.auroc * (1 - found.auroc))
    centre = math.log(found.auroc / (1 - found.auroc))
    assert found.auroc_low == pytest.approx(1 / (1 + math.exp(half - centre)), rel=1e-6)
    assert found.auroc_high == pytest.approx(1 / (1 + math.exp(-half - centre)), rel=1e-6)


def test_the_deviation_of_more_classes_is_that_of_the_jackknife() -> None:
    rng = np.random.default_rng(0)
    true = np.arange(150) % 3
    logits = rng.normal(size=(150, 3)) + np.eye(3)[true]
    shares = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    _, deviation = _auroc(shares, true, range(3))
    kept = [np.arange(150) != i for i in range(150)]
    left_out = [_auroc(shares[rows], true[rows], range(3))[0] for rows in kept]
    assert deviation == pytest.approx(math.sqrt(149 / 150 * ((left_out - np.mean(left_out)) ** 2).sum()), rel=0.02)


def test_intervals_cover_the_true_value_about_as_often_as_they_say() -> None:
    """Scores of a shifted normal distribution have the AUROC Φ(1/√2) = 0.7602."""
    found = [score_site(*binary(seed, 120)) for seed in range(400)]
    covered = sum(one.auroc_low <= 0.76025 <= one.auroc_high for one in found)
    assert 0.92 <= covered / 400 <= 0.98


def test_a_single_sample_of_a_class_has_an_auroc_but_no_interval() -> None:
    shares = np.array([[0.1, 0.9], [0.2, 0.8], [0.05, 0.95]])
    found = score_site(shares, np.array([1, 0, 0]))
    assert (found.auroc, found.auroc_low) == (0.5, None)
    assert score_site(shares, np.array([1, 1, 1])).auroc is None
    assert interval(None, None) == (None, None)


def test_histograms_have_no_interval_either_if_one_of_three_classes_has_a_single_sample() -> None:
    rng = np.random.default_rng(3)
    shares, true = rng.dirichlet(np.ones(3), 31), np.append(np.arange(30) % 2, 2)
    found = score_site_histograms(ScoreHistograms.from_probabilities(shares, true))
    assert found.auroc == pytest.approx(score_site(shares, true).auroc, abs=1e-2)
    assert (found.auroc_low, found.auroc_high) == (None, None)
    assert score_site(shares, true).auroc_low is None


@pytest.mark.parametrize("classes", [2, 4])
def test_histograms_give_nearly_the_same(classes: int) -> None:
    rng = np.random.default_rng(1)
    true = rng.integers(0, classes, 600)
    logits = 2 * rng.normal(size=(600, classes)) + 2 * np.eye(classes)[true]
    shares = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    exact, found = score_site(shares, true), score_site_histograms(ScoreHistograms.from_probabilities(shares, true))
    assert (found.samples, found.accuracy) == (600, pytest.approx(exact.accuracy))
    assert found.auroc == pytest.approx(exact.auroc, abs=1e-3)
    assert found.brier == pytest.approx(exact.brier)
    assert found.calibration_error == pytest.approx(exact.calibration_error)
    assert found.auroc_low <= exact.auroc_low + 1e-3, "conservative for more than two classes"
    if classes == 2:
        assert found.auroc_high == pytest.approx(exact.auroc_high, abs=1e-3)


@pytest.mark.parametrize("labels", [2, 3])
def test_with_several_labels_per_sample_every_label_counts(labels: int) -> None:
    rng = np.random.default_rng(2)
    shares = rng.uniform(size=(80, labels))
    true = (rng.uniform(size=(80, labels)) < shares).astype(np.int64)
    found = score_site_histograms(ScoreHistograms.from_probabilities(shares, true))
    assert found.samples == 80
    assert found.accuracy == pytest.approx(((shares > 0.5) == true).mean())
    assert found.auroc == pytest.approx(roc_auc_score(true, shares, average="macro"), abs=5e-3)
    assert found.brier == pytest.approx(((shares - true) ** 2).mean())


@pytest.mark.parametrize("positive", [0, 1])
def test_a_probability_of_one_half_predicts_the_first_of_two_classes_everywhere(positive: int) -> None:
    shares, true = np.array([[0.5, 0.5]] * 4 + [[0.1, 0.9]]), np.array([0, 0, 0, 1, 1])
    histograms = ScoreHistograms.from_probabilities(shares, true, positive)
    assert score_site(shares, true, positive).accuracy == 0.8
    assert score_site_histograms(histograms, positive).accuracy == 0.8
    second = histograms.scores(positive=positive).classes[1]
    assert (second.sensitivity, second.specificity) == (0.5, 1.0)


def test_a_probability_of_one_half_predicts_no_label_everywhere() -> None:
    shares, true = np.array([[0.5, 0.5], [0.5, 0.9]]), np.array([[0, 1], [0, 1]])
    counts = torch.zeros(8, dtype=torch.int64)
    TASKS["multi-label"].count(counts, torch.tensor(shares).logit(), torch.tensor(true))
    assert counts.tolist() == [2, 0, 0, 0, 0, 0, 1, 1]
    histograms = ScoreHistograms.from_probabilities(shares, true)
    assert score_site(shares, true).accuracy == score_site_histograms(histograms).accuracy == 0.75
    assert histograms.scores().classes[1].samples == 2


def test_fairness_is_over_sites() -> None:
    values = {f"site {k}": k / 20 for k in range(20)} | {"empty": None}
    found = fairness(values)
    assert found is not None
    assert (found.sites, found.worst_site, found.worst, found.worst_decile) == (20, "site 0", 0.0, pytest.approx(0.025))
    assert found.mean == pytest.approx(19 / 40)
    assert found.deviation == pytest.approx(np.std([k / 20 for k in range(20)]))
    assert fairness({"empty": None}) is None


def test_the_worst_tenth_of_19_sites_is_one_site_and_that_of_20_are_two() -> None:
    values = {str(site): site / 100 for site in range(20)}
    two, one = fairness(values), fairness({site: value for site, value in values.items() if site != "0"})
    assert two is not None
    assert one is not None
    assert (two.worst_decile, one.worst_decile) == (pytest.approx(0.005), pytest.approx(0.01))


def test_a_score_survives_json() -> None:
    score = score_site(*binary(0, 30))
    assert SiteScore.from_json(score.to_json() | {"of a later version": 1}) == score
