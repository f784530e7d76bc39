"""Scores from histograms are within their error bounds, whatever the probabilities are."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedskew.metrics.score_histograms import SCORE_BINS, ScoreHistograms
from fedskew.metrics.scores import score_probabilities


def probabilities(seed: int, classes: int, samples: int, scale: float, digits: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    true = rng.integers(0, classes, samples)
    logits = (scale * (rng.normal(size=(samples, classes)) + np.eye(classes)[true])).round(digits)
    odds = np.exp(logits - logits.max(axis=1, keepdims=True))
    return odds / odds.sum(axis=1, keepdims=True), true


@given(
    seed=st.integers(0, 10_000),
    classes=st.sampled_from([2, 3, 5]),
    samples=st.integers(2, 80),
    scale=st.sampled_from([0.01, 0.1, 1.0, 5.0, 50.0]),  # from all in a few bins to all at the ends
    digits=st.sampled_from([0, 2, 12]),
)
def test_the_error_is_within_its_bound(seed: int, classes: int, samples: int, scale: float, digits: int) -> None:
    shares, true = probabilities(seed, classes, samples, scale, digits)
    exact, histograms = score_probabilities(shares, true), ScoreHistograms.from_probabilities(shares, true)
    assert exact is not None
    assert histograms.is_consistent()
    found = histograms.scores()
    for name in ("sensitivity", "specificity", "brier", "calibration_error"):
        assert getattr(found, name) == pytest.approx(getattr(exact, name), abs=1e-9), name
    if exact.auroc is None or exact.auprc is None:
        assert found.auroc is None
        return
    assert abs(found.auroc - exact.auroc) <= found.auroc_error + 1e-12
    assert abs(found.auprc - exact.auprc) <= found.auprc_error + 1e-12
    assert found.sensitivity_at_specificity <= exact.sensitivity_at_specificity + 1e-12, "it promises no more"


def test_the_bound_is_small_for_an_ordinary_model() -> None:
    shares, true = probabilities(0, 5, 5000, 2.0, 12)
    exact, found = score_probabilities(shares, true), ScoreHistograms.from_probabilities(shares, true).scores()
    assert exact is not None
    assert found.auroc_error < 2e-3
    assert abs(found.auroc - exact.auroc) < 1e-4
    assert found.sensitivity_at_specificity == pytest.approx(exact.sensitivity_at_specificity, abs=0.01)


def test_sites_add_up_to_the_whole() -> None:
    shares, true = probabilities(1, 3, 90, 2.0, 12)
    parts = [ScoreHistograms.from_probabilities(shares[rows], true[rows]) for rows in (slice(0, 50), slice(50, 90))]
    whole, total = ScoreHistograms.from_probabilities(shares, true), ScoreHistograms.total(parts)
    assert np.array_equal(whole.own, total.own)
    assert np.array_equal(whole.others, total.others)
    assert (whole.scores().auroc, whole.scores().auprc) == (total.scores().auroc, total.scores().auprc)
    assert np.allclose(whole.reliability, total.reliability)
    assert whole.brier == pytest.approx(total.brier)


@pytest.mark.parametrize("change", ["own", "others", "reliability", "hits", "negative", "brier"])
def test_impossible_counts_are_recognised(change: str) -> None:
    shares, true = probabilities(2, 3, 40, 2.0, 12)
    good = ScoreHistograms.from_probabilities(shares, true)
    own, others, reliability = good.own.copy(), good.others.copy(), good.reliability.copy()
    brier = good.brier
    if change == "own":
        own[0, 0] += 1
    elif change == "others":
        others = np.zeros((3, SCORE_BINS - 1), np.int64)
    elif change == "reliability":
        reliability[0, 0] += 1
    elif change == "hits":  # more correct predictions than samples in the highest bin
        reliability[2, -1] = reliability[0, -1] + 1
    elif change == "negative":
        own[0, :2] += (-1, 1)
        own[0, 0] = -1
    else:
        brier = float("nan")
    assert good.is_consistent()
    assert not ScoreHistograms(own, others, reliability, brier).is_consistent()


def test_specificity_0_is_reached_by_the_threshold_0() -> None:
    """Every sample counts, even one with probability 0."""
    first = np.array([0.0, 0.6, 0.0, 0.3])
    shares, true = np.stack([first, 1 - first], axis=1), np.array([0, 0, 1, 1])
    found = ScoreHistograms.from_probabilities(shares, true).scores(specificity=0).classes[0]
    assert (found.threshold, found.sensitivity_at_specificity) == (0, 1)


def test_a_specificity_that_is_reached_exactly_counts_as_reached() -> None:
    """In floats, 0.55 · 100 is more than 55."""
    others = np.linspace(0.01, 0.99, 100)
    first = np.concatenate([[0.2, 0.9], others])
    shares, true = np.stack([first, 1 - first], axis=1), np.array([0] * 2 + [1] * 100)
    found = ScoreHistograms.from_probabilities(shares, true).scores(specificity=0.55).classes[0]
    assert found.threshold is not None
    assert (others < found.threshold).sum() == 55


def test_samples_at_the_threshold_count_even_if_it_is_a_half() -> None:
    """Three of four others are at 0.5, which predicts no class, so the lowest threshold is above 0.5."""
    own = np.array([0.5, 0.5, 0.6, 0.7])
    first = np.concatenate([own, [0.5, 0.5, 0.5, 0.8]])
    shares, true = np.stack([first, 1 - first], axis=1), np.array([0] * 4 + [1] * 4)
    found = ScoreHistograms.from_probabilities(shares, true).scores(specificity=0.75).classes[0]
    assert found.threshold is not None
    assert 0.5 < found.threshold < 0.501
    assert found.sensitivity_at_specificity == (own >= found.threshold).mean() == 0.5
