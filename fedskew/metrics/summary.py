"""Summaries of a learning curve: best, last, mean of the last rounds, rounds to a target, speed-up.

A curve is the evaluated (round, accuracy) pairs in order of rounds; round 0 is the initial model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple


class Attained(NamedTuple):
    """An accuracy and the round that attained it."""

    round: int
    accuracy: float


class MeanOfLast(NamedTuple):
    """A mean accuracy and the evaluated rounds it was taken over."""

    accuracy: float
    first_round: int
    last_round: int
    evaluations: int


class MeanStd(NamedTuple):
    """Mean and standard deviation."""

    mean: float
    std: float
    """NaN if there is one value only."""

    def __str__(self) -> str:
        return self.in_percent(2)

    def in_percent(self, digits: int) -> str:
        """Such as 71.4 ± 0.2; without the deviation if it is unknown, and a dash without a mean."""
        if math.isnan(self.mean):
            return "–"
        spread = "" if math.isnan(self.std) else f" ± {100 * self.std:.{digits}f}"
        return f"{100 * self.mean:.{digits}f}{spread}"


Curve = Sequence[tuple[int, float]]


def best(curve: Curve) -> Attained:
    """The highest accuracy and the first round that attained it."""
    round_, accuracy = max(_checked(curve), key=lambda point: point[1])
    return Attained(round_, accuracy)


def last(curve: Curve) -> Attained:
    """The accuracy of the last evaluation."""
    return Attained(*_checked(curve)[-1])


def mean_of_last(curve: Curve, rounds: int) -> MeanOfLast:
    """Mean over the evaluations that fall in the last `rounds` rounds.

    Rounds and not evaluations are counted: the last 50 rounds evaluated every 10 are 5 numbers. The initial
    model counts only if nothing else was evaluated.
    """
    if rounds < 1:
        raise ValueError(f"mean of the last {rounds} rounds")
    end = _checked(curve)[-1][0]
    tail = [point for point in curve if point[0] > max(end - rounds, 0)] or [curve[-1]]
    mean = math.fsum(accuracy for _, accuracy in tail) / len(tail)
    return MeanOfLast(mean, tail[0][0], end, len(tail))


def first_round_reaching(curve: Curve, target: float) -> int | None:
    """The first evaluated round with at least the target accuracy."""
    return next((round_ for round_, accuracy in curve if accuracy >= target), None)


def speed_up(baseline: Curve, method: Curve) -> float:
    """How much sooner the method attains the baseline's best accuracy (FedLMD's definition).

    (round at which the baseline first attains its best) / (round at which the method does); 1 if it never
    does. Round 0, the untrained model, counts as round 1.
    """
    target = best(baseline)
    reached = first_round_reaching(method, target.accuracy)
    return 1.0 if reached is None else max(target.round, 1) / max(reached, 1)


def mean_std(values: Sequence[float]) -> MeanStd:
    """Mean and sample standard deviation, usually over seeds: the spread to expect of further seeds."""
    if not values:
        raise ValueError("mean of no values")
    mean = math.fsum(values) / len(values)
    if len(values) == 1:
        return MeanStd(mean, math.nan)
    return MeanStd(mean, math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)))


def population_mean_std(values: Sequence[float]) -> MeanStd:
    """Mean and population standard deviation, as the programs of papers print them."""
    found = mean_std(values)
    spread = 0.0 if len(values) == 1 else found.std * math.sqrt((len(values) - 1) / len(values))
    return MeanStd(found.mean, spread)


@dataclass(frozen=True)
class CurveSummary:
    """The three accuracies that papers report, each with its rounds."""

    best: Attained
    last: Attained
    mean_last: MeanOfLast

    @classmethod
    def from_curve(cls, curve: Curve, mean_last: int) -> CurveSummary:
        return cls(best(curve), last(curve), mean_of_last(curve, mean_last))

    def to_json(self) -> dict[str, Any]:
        return {name: value._asdict() for name, value in vars(self).items()}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> CurveSummary:
        return cls(Attained(**data["best"]), Attained(**data["last"]), MeanOfLast(**data["mean_last"]))


def _checked(curve: Curve) -> Curve:
    if not curve:
        raise ValueError("an empty curve")
    return curve
