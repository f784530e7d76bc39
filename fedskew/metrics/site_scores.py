"""The scores of a model on one site's test samples, with an interval for the AUROC, and how unequal the sites are.

The interval is DeLong's (DeLong, DeLong and Clarke-Pearson, Biometrics 1988). It is computed on the logit scale, so it
stays between 0 and 1. With more than two classes, or with several labels per sample, the AUROC is the mean over the
classes, each against the rest. `score_site` then averages the components of DeLong's variance over the classes for each
sample. This accounts for the correlation between the classes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from fedskew.metrics.score_histograms import SCORE_BINS, ScoreHistograms, auroc_from_counts
from fedskew.metrics.scores import Floats, Ints, Reliability, brier_sum, positive_of_two, reliability_sums

_QUANTILE = 1.959963984540054
"""The 97.5 % quantile of the normal distribution."""


@dataclass(frozen=True)
class SiteScore:
    """The results of a model on one site's test samples. A value is None if it is undefined."""

    samples: int
    accuracy: float
    auroc: float | None = None
    auroc_low: float | None = None
    """Lower end of the 95 % interval. None if the AUROC is 0, 1 or None, or if its standard deviation is 0 or unknown.
    The deviation is unknown if a class, or the rest, has only one sample."""
    auroc_high: float | None = None
    brier: float | None = None
    calibration_error: float | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> SiteScore:
        """Read a score. Keys that a later version added are ignored."""
        return cls(**{name: value for name, value in data.items() if name in cls.__dataclass_fields__})


def score_site(probabilities: Floats, true: Ints, positive: int | None = None) -> SiteScore:
    """Score the probabilities [samples, classes] of a site's test samples.

    `true` holds class numbers [samples]. For several labels per sample, it holds 0 and 1 [samples, labels]. With two
    classes, the AUROC is that of the class `positive`. If a probability is not finite, only the accuracy is computed.
    """
    accuracy = float(correct_shares(probabilities, true).mean())
    if not np.isfinite(probabilities).all():
        return SiteScore(len(true), accuracy)
    positive = None if true.ndim > 1 else positive_of_two(probabilities.shape[1], positive)
    auroc, deviation = _auroc(probabilities, true, _scored_classes(probabilities.shape[1], positive))
    reliability = Reliability.from_sums(reliability_sums(probabilities, true, positive))
    brier = brier_sum(probabilities, true) / len(true)
    low, high = interval(auroc, deviation)
    return SiteScore(len(true), accuracy, auroc, low, high, brier, reliability.calibration_error)


def correct_shares(probabilities: Floats, true: Ints) -> Floats:
    """Return each sample's share of correct predictions. With one class per sample, the share is 0 or 1."""
    correct = (probabilities > 0.5) == (true == 1) if true.ndim > 1 else (probabilities.argmax(axis=1) == true)[:, None]
    return np.asarray(correct.mean(axis=1), np.float64)


def score_site_histograms(histograms: ScoreHistograms, positive: int | None = None) -> SiteScore:
    """Score a site by its histograms.

    With more than two classes, or with several labels per sample, the interval is conservative. Histograms do not show
    how the AUROCs of the classes are correlated, so full correlation is assumed.
    """
    classes = len(histograms.own)
    positive = None if histograms.multi_label else positive_of_two(classes, positive)
    counts = [(histograms.own[c], histograms.others[c]) for c in _scored_classes(classes, positive)]
    accuracy = _accuracy(histograms)
    counts = [(own, others) for own, others in counts if own.any() and others.any()]
    areas = [auroc_from_counts(own, others)[0] for own, others in counts]
    deviations = [_deviation(own, others) for own, others in counts]
    auroc = math.fsum(areas) / len(areas) if areas else None
    known = [d for d in deviations if d is not None]
    deviation = math.fsum(known) / len(known) if known and len(known) == len(areas) else None
    low, high = interval(auroc, deviation)
    error = Reliability.from_sums(histograms.reliability).calibration_error
    samples = histograms.samples
    return SiteScore(samples, accuracy, auroc, low, high, histograms.brier / samples, error)


def _accuracy(histograms: ScoreHistograms) -> float:
    """Return the share of correct predictions. With several labels per sample, every label is a prediction.

    With two classes, the second is predicted if its probability is above 0.5, so its histograms give the number of
    correct predictions. With more classes, the reliability diagram gives this number.
    """
    classes = len(histograms.own)
    if classes != 2 and not histograms.multi_label:
        return float(histograms.reliability[2].sum()) / histograms.samples
    decided = range(classes) if histograms.multi_label else [1]
    middle = SCORE_BINS // 2  # the first bin with probabilities above 0.5
    correct = sum(int(histograms.own[c, middle:].sum() + histograms.others[c, :middle].sum()) for c in decided)
    return correct / (histograms.samples * len(decided))


def _scored_classes(classes: int, positive: int | None) -> Sequence[int]:
    return range(classes) if positive is None else [positive]


def interval(auroc: float | None, deviation: float | None) -> tuple[float | None, float | None]:
    """Return both ends of the 95 % interval of an AUROC with this standard deviation, or None for both."""
    if auroc is None or not deviation or not 0 < auroc < 1:
        return None, None
    centre, half = math.log(auroc / (1 - auroc)), _QUANTILE * deviation / (auroc * (1 - auroc))
    limit = 700.0  # math.exp overflows above 709
    low, high = (1 / (1 + math.exp(-max(-limit, min(limit, x)))) for x in (centre - half, centre + half))
    return low, high


def _auroc(probabilities: Floats, true: Ints, classes: Iterable[int]) -> tuple[float | None, float | None]:
    """Return the AUROC and its standard deviation.

    With several `classes`, this is the mean AUROC. A class to which all samples or none belong is left out.
    """
    areas, components = [], np.zeros(len(true))
    for c in classes:
        inside = true[:, c] == 1 if true.ndim > 1 else true == c
        m, n = int(inside.sum()), int((~inside).sum())
        if not m or not n:
            continue
        _, group = np.unique(probabilities[:, c], return_inverse=True)
        own, others = (np.bincount(group[rows], minlength=int(group.max()) + 1) for rows in (inside, ~inside))
        area = auroc_from_counts(own, others)[0]
        own_components, other_components = _components(own, others)
        areas.append(area)
        if min(m, n) > 1:
            components[inside] += (own_components[group[inside]] - area) / math.sqrt(m * (m - 1))
            components[~inside] += (other_components[group[~inside]] - area) / math.sqrt(n * (n - 1))
        else:
            components[:] = math.nan
    if not areas:
        return None, None
    variance = float((components**2).sum()) / len(areas) ** 2
    return math.fsum(areas) / len(areas), None if math.isnan(variance) else math.sqrt(variance)


def _components(own: Ints, others: Ints) -> tuple[Floats, Floats]:
    """Return the components of DeLong's variance at each score. `own` and `others` are counts by increasing score.

    The components are the share of the others below each score, and the share of the class's samples above it. Ties
    count half.
    """
    below = (np.cumsum(others) - others / 2) / others.sum()
    above = (own.sum() - np.cumsum(own) + own / 2) / own.sum()
    return below, above


def _deviation(own: Ints, others: Ints) -> float | None:
    """Return DeLong's standard deviation of an AUROC, from counts by increasing score.

    None if `own` or `others` has a single sample.
    """
    m, n = int(own.sum()), int(others.sum())
    if min(m, n) < 2:
        return None
    area = auroc_from_counts(own, others)[0]
    own_components, other_components = _components(own, others)
    own_variance = float(own @ (own_components - area) ** 2) / (m * (m - 1))
    return math.sqrt(own_variance + float(others @ (other_components - area) ** 2) / (n * (n - 1)))


@dataclass(frozen=True)
class Fairness:
    """How unequal the sites are in a metric for which higher is better. Every site counts once."""

    sites: int
    mean: float
    deviation: float
    """Standard deviation of the population, because all sites are known."""
    worst: float
    worst_site: str
    worst_decile: float
    """Mean over the worst tenth of the sites. Their number is rounded down, but at least 1."""


def fairness(values: Mapping[str, float | None]) -> Fairness | None:
    """Summarise a metric over the sites. `values` maps site names to the metric. Sites with None are left out."""
    known = sorted((value, name) for name, value in values.items() if value is not None)
    if not known:
        return None
    numbers: Sequence[float] = [value for value, _ in known]
    tenth = max(1, len(known) // 10)
    return Fairness(
        sites=len(known),
        mean=math.fsum(numbers) / len(numbers),
        deviation=float(np.std(numbers)),
        worst=numbers[0],
        worst_site=known[0][1],
        worst_decile=math.fsum(numbers[:tenth]) / tenth,
    )
