"""Summaries of a learning curve: best, last, mean of the last rounds, rounds to a target, speed-up.

A curve is a list of pairs (round, accuracy), one per evaluation. Round 0 is the initial model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple


class Attained(NamedTuple):
    """An accuracy and the round that reached it."""

    round: int
    accuracy: float


class MeanOfLast(NamedTuple):
    """A mean accuracy and the evaluated rounds that it covers."""

    accuracy: float
    first_round: int
    last_round: int
    evaluations: int


class MeanStd(NamedTuple):
    """Mean and standard deviation."""

    mean: float
    std: float
    """NaN if it is unknown, as the sample standard deviation of one value is."""

    def __str__(self) -> str:
        """Format in percent, with two decimals."""
        return self.in_percent(2)

    def in_percent(self, digits: int) -> str:
        """Format as 71.4 ± 0.2. An unknown deviation is left out, and an unknown mean is a dash."""
        return MeanStd(100 * self.mean, 100 * self.std).as_numbers(digits)

    def as_numbers(self, digits: int) -> str:
        """Format as 0.71 ± 0.02. An unknown deviation is left out, and an unknown mean is a dash."""
        if math.isnan(self.mean):
            return "–"
        spread = "" if math.isnan(self.std) else f" ± {self.std:.{digits}f}"
        return f"{self.mean:.{digits}f}{spread}"


Curve = Sequence[tuple[int, float]]


def best(curve: Curve) -> Attained:
    """Return the highest accuracy and the first round that reached it."""
    round_, accuracy = max(_non_empty(curve), key=lambda point: point[1])
    return Attained(round_, accuracy)


def last(curve: Curve) -> Attained:
    """Return the accuracy of the last evaluation."""
    return Attained(*_non_empty(curve)[-1])


def mean_of_last(curve: Curve, rounds: int) -> MeanOfLast:
    """Average the evaluations in the last `rounds` rounds.

    `rounds` counts rounds, not evaluations. For example, the last 50 rounds have 5 evaluations if every tenth round is
    evaluated. The initial model counts only if nothing else was evaluated.
    """
    if rounds < 1:
        raise ValueError(f"rounds is {rounds}; expected at least 1")
    end = _non_empty(curve)[-1][0]
    tail = [point for point in curve if point[0] > max(end - rounds, 0)] or [curve[-1]]
    mean = math.fsum(accuracy for _, accuracy in tail) / len(tail)
    return MeanOfLast(mean, tail[0][0], end, len(tail))


def first_round_reaching(curve: Curve, target: float) -> int | None:
    """Return the first evaluated round with at least the target accuracy, or None."""
    return next((round_ for round_, accuracy in curve if accuracy >= target), None)


def speed_up(baseline: Curve, method: Curve) -> float:
    """Return how much sooner the method reaches the baseline's best accuracy (FedLMD's definition).

    The speed-up is the first round in which the baseline has that accuracy, divided by the first round in which the
    method has it. It is 1 if the method never reaches that accuracy. Round 0 counts as round 1.
    """
    target = best(baseline)
    reached = first_round_reaching(method, target.accuracy)
    return 1.0 if reached is None else max(target.round, 1) / max(reached, 1)


def mean_std(values: Sequence[float]) -> MeanStd:
    """Return the mean and the sample standard deviation."""
    if not values:
        raise ValueError("no values to average")
    mean = math.fsum(values) / len(values)
    if len(values) == 1:
        return MeanStd(mean, math.nan)
    return MeanStd(mean, math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)))


def population_mean_std(values: Sequence[float]) -> MeanStd:
    """Return the mean and the population standard deviation, as the papers' code does.

    The deviation of one value is 0.
    """
    sample = mean_std(values)
    spread = 0.0 if len(values) == 1 else sample.std * math.sqrt((len(values) - 1) / len(values))
    return MeanStd(sample.mean, spread)


@dataclass(frozen=True)
class CurveSummary:
    """The three accuracies that papers report, each with the round or rounds it is from."""

    best: Attained
    last: Attained
    mean_last: MeanOfLast

    @classmethod
    def from_curve(cls, curve: Curve, mean_last: int) -> CurveSummary:
        """Summarise the curve. `mean_last` is the number of last rounds to average."""
        return cls(best(curve), last(curve), mean_of_last(curve, mean_last))

    def to_json(self) -> dict[str, Any]:
        return {name: value._asdict() for name, value in vars(self).items()}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> CurveSummary:
        return cls(Attained(**data["best"]), Attained(**data["last"]), MeanOfLast(**data["mean_last"]))


def _non_empty(curve: Curve) -> Curve:
    if not curve:
        raise ValueError("the curve is empty")
    return curve
