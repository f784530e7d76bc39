"""What was measured of one contender: seconds for a known number of samples, several times over."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from statistics import median
from typing import Any, Literal

from fedskew.errors import UserError

Level = Literal["steps", "rounds", "federation", "participants"]
"""Local steps alone; whole rounds; rounds against the federation's size; rounds against the participants."""

LEVELS: tuple[Level, ...] = ("steps", "rounds", "federation", "participants")

LOOP, TUNED_LOOP, LIMIT, BARE = "loop", "tuned loop", "limit", "bare steps"
"""Contenders that are no engines; `bare steps` are those of an engine, measured beside its whole rounds."""
NOT_OURS = (LOOP, TUNED_LOOP, LIMIT)


@dataclass(frozen=True)
class Measurement:
    """One contender on one case."""

    level: Level
    contender: str
    """One of the names above, or the engine's."""
    model: str
    clients: int
    """In a round."""
    federation: int
    batch_size: int
    method: str
    precision: str
    sizes: str
    samples: int
    """Trained on in one call."""
    seconds: tuple[float, ...]
    """Of one call, each repetition's mean."""
    memory: int | None
    """Bytes that the contender took at most, beyond what was taken before it."""
    asked: str = ""
    """The engine that was asked for: `auto` where it chose by itself."""

    @property
    def time(self) -> float:
        return median(self.seconds)

    @property
    def rate(self) -> float:
        """Samples a second."""
        return self.samples / self.time

    @property
    def spread(self) -> float:
        """Half of the range over the repetitions, relative to the median."""
        return (max(self.seconds) - min(self.seconds)) / 2 / self.time

    def to_json(self) -> dict[str, Any]:
        derived = {"samples_per_second": self.rate, "median_seconds": self.time, "spread": self.spread}
        return asdict(self) | {"seconds": list(self.seconds)} | derived

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Measurement:
        try:
            known = {spec.name: value[spec.name] for spec in fields(cls)}
            made = cls(**known | {"seconds": tuple(float(s) for s in known["seconds"])})
            valid = made.seconds and min(made.seconds) > 0 and made.level in LEVELS
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(f"a measurement is damaged: {type(error).__name__}: {error}") from error
        if not valid:
            raise UserError(f"a measurement is damaged: level {made.level!r}, seconds {list(made.seconds)}")
        return made


def fastest(measurements: list[Measurement]) -> Measurement | None:
    """The one with the most samples a second."""
    return max(measurements, key=lambda m: m.rate, default=None)
