"""Metrics of predicted probabilities: AUROC, AUPRC, sensitivity and specificity, Brier score and calibration.

AUROC, AUPRC, sensitivity and specificity score one class against the rest. With two classes, this is the positive
class. With more classes, or with several labels per sample, the scores are means over the classes. A class to which all
test samples or none belong is left out.

In a simulation, all probabilities are known, and `score_probabilities` is exact. In a federation, the probabilities
stay at the sites, which send histograms instead (score_histograms.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

BINS = 15
"""Bins of the reliability diagram, of equal width, as in Guo et al., "On Calibration of Modern Neural Networks"."""
SPECIFICITY = 0.95
"""The specificity at which sensitivity is reported, unless the configuration sets `specificity`."""


@dataclass(frozen=True)
class ClassScores:
    """One class against the rest. A value is None if all test samples, or none, are of the class."""

    samples: int
    auroc: float | None = None
    auprc: float | None = None
    """Area under the precision-recall curve, as average precision."""
    sensitivity: float | None = None
    """Share of the class's samples with a probability above 0.5."""
    specificity: float | None = None
    """Share of the other samples with a probability of at most 0.5."""
    threshold: float | None = None
    """The lowest threshold with at least the target specificity. Samples at or above the threshold count as the class.
    None if only a threshold above all probabilities reaches that specificity."""
    sensitivity_at_specificity: float | None = None
    """Share of the class's samples at or above `threshold`."""


@dataclass(frozen=True)
class Reliability:
    """The bins of a reliability diagram.

    With two classes, samples are binned by the probability of the positive class. With more classes, they are binned by
    the probability of the predicted class. With several labels per sample, each label counts as a sample.
    """

    samples: tuple[int, ...] = ()
    probability: tuple[float | None, ...] = ()
    """Mean predicted probability per bin. None for an empty bin."""
    frequency: tuple[float | None, ...] = ()
    """Share of positive samples per bin, or of correct predictions. None for an empty bin."""

    @classmethod
    def from_sums(cls, sums: Floats) -> Reliability:
        """Make the diagram from the sums per bin [3, bins]: samples, probabilities, and hits.

        A hit is a positive sample, or a correct prediction.
        """
        samples, probability, hits = sums.tolist()
        filled = [(p / n, h / n) if n else (None, None) for n, p, h in zip(samples, probability, hits, strict=True)]
        return cls(tuple(map(int, samples)), tuple(p for p, _ in filled), tuple(f for _, f in filled))

    @property
    def calibration_error(self) -> float | None:
        """Expected calibration error: the mean distance between probability and frequency, weighted by samples."""
        gaps = [
            n * abs(p - f)
            for n, p, f in zip(self.samples, self.probability, self.frequency, strict=True)
            if p is not None and f is not None
        ]
        return math.fsum(gaps) / sum(self.samples) if gaps else None


@dataclass(frozen=True)
class Scores:
    """Metrics of a model's probabilities on a test set."""

    auroc: float | None = None
    auprc: float | None = None
    sensitivity: float | None = None
    specificity: float | None = None
    sensitivity_at_specificity: float | None = None
    """Sensitivity at `target_specificity`."""
    brier: float | None = None
    """Brier score: with one class per sample, scikit-learn's. It is at most 1 with two classes or with several labels
    per sample. It is at most 2 with more than two classes."""
    calibration_error: float | None = None
    target_specificity: float = SPECIFICITY
    positive: int | None = None
    """The positive class of two. None with more classes, or with several labels per sample."""
    auroc_error: float = 0.0
    """A bound on the error of `auroc`. It is 0 if all probabilities are known."""
    auprc_error: float = 0.0
    classes: tuple[ClassScores, ...] = ()
    reliability: Reliability = field(default_factory=Reliability)

    def to_json(self) -> dict[str, Any]:
        """Return the scores as JSON values."""
        bins = {name: list(values) for name, values in asdict(self.reliability).items()}
        return asdict(self) | {"classes": [asdict(one) for one in self.classes], "reliability": bins}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Scores:
        """Read scores that any version wrote. Unknown keys are ignored, and missing ones get their defaults."""
        values = _known(cls, data)
        values["classes"] = tuple(ClassScores(**_known(ClassScores, one)) for one in data.get("classes", ()))
        bins = {name: tuple(per_bin) for name, per_bin in _known(Reliability, data.get("reliability", {})).items()}
        return cls(**values | {"reliability": Reliability(**bins)})


def _known(kind: type[Scores | ClassScores | Reliability], data: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in data.items() if name in kind.__dataclass_fields__}


def summarise(
    by_class: Sequence[ClassScores],
    brier: float,
    reliability: Reliability,
    specificity: float,
    positive: int | None,
) -> Scores:
    """Return the scores of the positive class, or the means over the classes if none is positive."""
    chosen = by_class if positive is None else [by_class[positive]]

    def mean(name: str) -> float | None:
        known = [value for one in chosen if (value := getattr(one, name)) is not None]
        return math.fsum(known) / len(known) if known else None

    return Scores(
        auroc=mean("auroc"),
        auprc=mean("auprc"),
        sensitivity=mean("sensitivity"),
        specificity=mean("specificity"),
        sensitivity_at_specificity=mean("sensitivity_at_specificity"),
        brier=brier,
        calibration_error=reliability.calibration_error,
        target_specificity=specificity,
        positive=positive,
        classes=tuple(by_class),
        reliability=reliability,
    )


def score_probabilities(
    probabilities: Floats, true: Ints, specificity: float = SPECIFICITY, positive: int | None = None
) -> Scores | None:
    """Score the probabilities [samples, classes]. Return None without samples, or if a probability is not finite.

    `true` holds class numbers [samples]. For several labels per sample, it holds 0 and 1 [samples, labels]. `positive`
    is the positive class of two, by default the second one.
    """
    if not len(true) or not np.isfinite(probabilities).all():
        return None
    classes = probabilities.shape[1]
    positive = None if true.ndim == 2 else positive_of_two(classes, positive)
    inside = memberships(true, classes)
    by_class = [_score_class(probabilities[:, c], inside[:, c], specificity) for c in range(classes)]
    brier = brier_sum(probabilities, true) / len(true)
    reliability = Reliability.from_sums(reliability_sums(probabilities, true, positive))
    return summarise(by_class, brier, reliability, specificity, positive)


def memberships(true: Ints, classes: int) -> npt.NDArray[np.bool_]:
    """Mark the classes or labels of each sample: [samples, classes]."""
    marked: npt.NDArray[np.bool_] = true == 1 if true.ndim == 2 else true[:, None] == np.arange(classes)
    return marked


def positive_of_two(classes: int, positive: int | None) -> int | None:
    """Return the positive class of two: the given one, or the second one by default. None with more classes."""
    return (1 if positive is None else positive) if classes == 2 else None


def _score_class(column: Floats, inside: npt.NDArray[np.bool_], specificity: float) -> ClassScores:
    """Score one class against the rest. `column` has its probabilities, and `inside` marks its samples."""
    samples, others = int(inside.sum()), int((~inside).sum())
    if not samples or not others:
        return ClassScores(samples)
    hits, others_above, thresholds = _counts_above(column, inside)
    true_rate, false_rate = hits / samples, others_above / others
    precision = hits[1:] / (hits[1:] + others_above[1:])
    chosen = int(np.flatnonzero(false_rate <= 1 - specificity + 1e-12)[-1])  # the tolerance absorbs rounding errors
    above = column > 0.5
    return ClassScores(
        samples=samples,
        auroc=float((np.diff(false_rate) * (true_rate[1:] + true_rate[:-1]) / 2).sum()),
        auprc=float((np.diff(true_rate) * precision).sum()),
        sensitivity=float(above[inside].mean()),
        specificity=float(1 - above[~inside].mean()),
        threshold=float(thresholds[chosen - 1]) if chosen else None,
        sensitivity_at_specificity=float(true_rate[chosen]),
    )


def _counts_above(column: Floats, inside: npt.NDArray[np.bool_]) -> tuple[Ints, Ints, Floats]:
    """Count the samples of the class, and the other samples, at or above each threshold.

    Return both counts and the thresholds, from high to low. Both counts begin with a 0 that has no threshold.
    scikit-learn has such a function, but importing it takes longer than a short run.
    """
    order = np.argsort(-column, kind="stable")
    sorted_scores = column[order]
    last_of_equal = np.append(np.flatnonzero(np.diff(sorted_scores)), len(column) - 1)
    hits = np.cumsum(inside[order])[last_of_equal]
    return np.append(0, hits), np.append(0, last_of_equal + 1 - hits), sorted_scores[last_of_equal]


def brier_sum(probabilities: Floats, true: Ints) -> float:
    """Return the sum of the samples' Brier scores. With two classes, each score is halved, as usual.

    With several labels per sample, the score of a sample is the mean over the labels.
    """
    if true.ndim == 2:
        return float(((probabilities - true) ** 2).mean(axis=1).sum())
    squares = (probabilities**2).sum(axis=1) - 2 * probabilities[np.arange(len(true)), true] + 1
    return float(squares.sum()) / (2 if probabilities.shape[1] == 2 else 1)


def reliability_sums(probabilities: Floats, true: Ints, positive: int | None) -> Floats:
    """Return the sums per bin [3, bins] for `Reliability.from_sums`. The sums of several sites can be added."""
    if true.ndim == 2:
        shown, hits = probabilities.ravel(), true.ravel() == 1
    elif positive is None:
        predicted = probabilities.argmax(axis=1)
        shown, hits = probabilities[np.arange(len(true)), predicted], predicted == true
    else:
        shown, hits = probabilities[:, positive], true == positive
    bins = np.clip(np.ceil(shown * BINS).astype(np.int64) - 1, 0, BINS - 1)
    counted = [np.bincount(bins, weights, BINS) for weights in (None, shown, hits.astype(np.float64))]
    return np.asarray(counted, np.float64)
