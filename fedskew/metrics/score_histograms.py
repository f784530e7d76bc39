"""Scores from histograms. Sites of a federation send histograms instead of the probabilities of their samples.

For each class, one histogram counts the samples of the class and another counts all other samples. The bins are
intervals of the log-odds of the class's probability.

A probability of 0.5 is the edge between two bins. It belongs to the lower bin, because it does not predict the class.
So sensitivity and specificity at 0.5 are exact. Brier score and reliability diagram are exact, too, because their sums
add up over sites. AUROC and AUPRC are not exact, because the order of samples within a bin is unknown. Bounds on their
errors follow from the counts:

- AUROC is computed from pairs of a sample of the class and another sample. A pair in the same bin counts as one half.
  The true value of the pair is 0, 1 or one half. So the error is at most half the share of such pairs.
- AUPRC goes through the bins from the highest score to the lowest, and uses the precision after each bin. The lower
  bound assumes that, within a bin, all samples of other classes score higher than those of the class. The upper bound
  leaves out the bin's samples of other classes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from fedskew.metrics.scores import (
    BINS,
    SPECIFICITY,
    ClassScores,
    Floats,
    Ints,
    Reliability,
    Scores,
    brier_sum,
    memberships,
    positive_of_two,
    reliability_sums,
    summarise,
)

WIDTH = 0.02
"""Width of a bin, in log-odds."""
REACH = 20.0
"""Log-odds above this value are counted in the last bin, and those below its negative in the first."""
SCORE_BINS = round(2 * REACH / WIDTH)


@dataclass(frozen=True, eq=False)
class ScoreHistograms:
    """The histograms and sums of one site's test samples, or of several sites' together."""

    own: Ints
    """[classes, SCORE_BINS]: samples of the class. The row sums are label counts."""
    others: Ints
    """[classes, SCORE_BINS]: samples of other classes."""
    reliability: Floats
    """[3, BINS]: see `Reliability.from_sums`."""
    brier: float
    """The sum of the samples' Brier scores."""
    multi_label: bool = False
    """Whether a sample may have several labels. If so, it counts once per label in the reliability diagram."""

    @property
    def samples(self) -> int:
        return int(self.own[0].sum() + self.others[0].sum())

    @classmethod
    def from_probabilities(cls, probabilities: Floats, true: Ints, positive: int | None = None) -> ScoreHistograms:
        """Count the samples with these probabilities [samples, classes]."""
        classes = probabilities.shape[1]
        with np.errstate(divide="ignore"):
            log_odds = np.log(probabilities) - np.log1p(-probabilities)
        middle, above = SCORE_BINS // 2, probabilities > 0.5
        bins = np.clip(np.floor(log_odds / WIDTH), -middle, middle - 1).astype(np.int64)
        # Rounding of the log-odds must not move a probability across 0.5.
        bins = middle + np.where(above, np.maximum(bins, 0), np.minimum(bins, -1))
        own, others = np.zeros((2, classes, SCORE_BINS), np.int64)
        inside = memberships(true, classes)
        for c in range(classes):
            own[c] = np.bincount(bins[inside[:, c], c], minlength=SCORE_BINS)
            others[c] = np.bincount(bins[~inside[:, c], c], minlength=SCORE_BINS)
        sums = reliability_sums(probabilities, true, positive_of_two(classes, positive))
        return cls(own, others, sums, brier_sum(probabilities, true), true.ndim == 2)

    @classmethod
    def total(cls, parts: Iterable[ScoreHistograms]) -> ScoreHistograms:
        """Add up the histograms of several sites, in order."""
        listed = list(parts)
        return cls(
            np.sum([one.own for one in listed], axis=0),
            np.sum([one.others for one in listed], axis=0),
            np.sum([one.reliability for one in listed], axis=0),
            math.fsum(one.brier for one in listed),
            listed[0].multi_label,
        )

    def is_consistent(self) -> bool:
        """Whether these can be the histograms of a test set, in which every class counts every sample once."""
        has_shape = self.own.ndim == 2 and self.own.shape == self.others.shape == (len(self.own), SCORE_BINS)
        if not has_shape or self.reliability.shape != (3, BINS):
            return False
        has_counts = min(self.own.min(), self.others.min()) >= 0 and self.samples > 0
        numbers, samples = self.reliability, self.samples
        has_reliability = (
            np.isfinite(numbers).all()
            and numbers.min() >= 0
            and numbers[0].sum() == samples * (len(self.own) if self.multi_label else 1)
            and (numbers[1:] <= numbers[0] * (1 + 1e-9)).all()
        )
        adds_up = ((self.own + self.others).sum(axis=1) == samples).all()
        adds_up = adds_up and (self.multi_label or self.own.sum() == samples)
        return bool(has_counts and has_reliability and adds_up and 0 <= self.brier <= 2 * samples)

    def scores(self, specificity: float = SPECIFICITY, positive: int | None = None) -> Scores:
        """Compute the metrics, with bounds on the errors of AUROC and AUPRC."""
        classes = len(self.own)
        positive = None if self.multi_label else positive_of_two(classes, positive)
        scored = [_score_class(own, others, specificity) for own, others in zip(self.own, self.others, strict=True)]
        chosen = scored if positive is None else [scored[positive]]
        known = [errors for one, errors in chosen if one.auroc is not None] or [(0.0, 0.0)]
        auroc_error, auprc_error = np.mean(known, axis=0).tolist()
        reliability = Reliability.from_sums(self.reliability)
        by_class = [one for one, _ in scored]
        found = summarise(by_class, self.brier / self.samples, reliability, specificity, positive)
        return replace(found, auroc_error=auroc_error, auprc_error=auprc_error)


def _score_class(own: Ints, others: Ints, specificity: float) -> tuple[ClassScores, tuple[float, float]]:
    """Return the scores of one class, and bounds on the errors of its AUROC and AUPRC."""
    samples, rest = int(own.sum()), int(others.sum())
    if not samples or not rest:
        return ClassScores(samples), (0.0, 0.0)
    auroc, auroc_error = auroc_from_counts(own, others)
    auprc, auprc_error = _auprc(own, others)
    below = np.concatenate([[0], np.cumsum(others)])  # the number of other samples below each bin's lower edge
    chosen = int(np.flatnonzero(below >= specificity * rest - 1e-9)[0])  # the tolerance absorbs rounding errors
    middle = SCORE_BINS // 2
    found = ClassScores(
        samples=samples,
        auroc=auroc,
        auprc=auprc,
        sensitivity=float(own[middle:].sum() / samples),
        specificity=float(others[:middle].sum() / rest),
        threshold=_lowest_probability(chosen) if chosen < SCORE_BINS else None,
        sensitivity_at_specificity=float(own[chosen:].sum() / samples),
    )
    return found, (auroc_error, auprc_error)


def _lowest_probability(bin: int) -> float:
    """Return the lowest probability of a bin. The first bin begins at 0. The bin above 0.5 does not contain 0.5."""
    if bin == 0:
        return 0.0
    return math.nextafter(0.5, 1) if bin == SCORE_BINS // 2 else 1 / (1 + math.exp(REACH - bin * WIDTH))


def auroc_from_counts(own: Ints, others: Ints) -> tuple[float, float]:
    """Return the AUROC and a bound on its error, from counts by increasing score. Samples in one bin are tied."""
    pairs = int(own.sum()) * int(others.sum())
    below = np.cumsum(others) - others
    ties = int(own @ others)
    return (2 * int(own @ below) + ties) / (2 * pairs), ties / (2 * pairs)


def _auprc(own: Ints, others: Ints) -> tuple[float, float]:
    """Return the average precision and a bound on its error. Samples in one bin are tied."""
    samples = int(own.sum())
    own, others = own[::-1], others[::-1]
    hits, misses = np.cumsum(own), np.cumsum(others)
    filled = own > 0
    size, hits, misses, others = own[filled], hits[filled], misses[filled], others[filled]
    value = float((size * hits / (hits + misses)).sum()) / samples
    highest = float((size * hits / (hits + misses - others)).sum()) / samples
    position = np.arange(samples) - np.repeat(np.cumsum(size) - size, size) + 1  # of each sample within its bin
    hits_so_far = np.repeat(hits - size, size) + position
    lowest = float((hits_so_far / (hits_so_far + np.repeat(misses, size))).sum()) / samples
    return value, max(highest - value, value - lowest)
