"""What the measurements say of one another; everything here is computed from them, nothing is kept."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fedskew.lab.benchmark.measurement import BARE, LIMIT, LOOP, NOT_OURS, TUNED_LOOP, Level, Measurement, fastest


@dataclass(frozen=True)
class StepsRow:
    """The contenders for one model, number of clients and method, each in its fastest number format."""

    model: str
    clients: int
    batch_size: int
    method: str
    ours: Measurement | None
    loop: Measurement | None
    limit: Measurement | None

    @property
    def over_loop(self) -> float | None:
        return _quotient(self.ours, self.loop)

    @property
    def of_limit(self) -> float | None:
        return _quotient(self.ours, self.limit)


@dataclass(frozen=True)
class RoundsRow:
    """Whole rounds of one method beside those of FedAvg, bare steps and the plain loop."""

    ours: Measurement
    fedavg: Measurement | None
    bare: Measurement | None
    loop: Measurement | None

    @property
    def time_over_fedavg(self) -> float | None:
        """For as many samples: seconds of this method against seconds of FedAvg."""
        return _quotient(self.fedavg, self.ours)

    @property
    def of_bare_steps(self) -> float | None:
        return _quotient(self.ours, self.bare)

    @property
    def over_loop(self) -> float | None:
        return _quotient(self.ours, self.loop)


def steps_rows(measurements: Sequence[Measurement], kind: str) -> list[StepsRow]:
    """A row for each model, number of clients and method.

    On a GPU the loop counts in its fastest form. On a CPU it counts as PyTorch has it by default, and ours is what
    the engine `auto` takes.
    """
    loops = (LOOP, TUNED_LOOP) if kind == "cuda" else (LOOP,)
    steps = _at("steps", measurements)
    rows = []
    for model, clients, batch_size, method in dict.fromkeys(
        (m.model, m.clients, m.batch_size, m.method) for m in steps
    ):
        here = [m for m in steps if (m.model, m.clients, m.method) == (model, clients, method)]
        ours = [m for m in here if m.contender not in NOT_OURS]
        counting = [m for m in ours if m.asked == "auto"] or ours
        loop = fastest([m for m in here if m.contender in loops])
        limit = fastest([m for m in here if m.contender == LIMIT])
        rows.append(StepsRow(model, clients, batch_size, method, fastest(counting), loop, limit))
    return rows


def rounds_rows(measurements: Sequence[Measurement]) -> list[RoundsRow]:
    """A row for each of our whole rounds."""
    rounds = _at("rounds", measurements)
    return [_rounds_row(m, rounds) for m in rounds if m.contender not in (*NOT_OURS, BARE)]


def _rounds_row(ours: Measurement, rounds: Sequence[Measurement]) -> RoundsRow:
    same = [
        m for m in rounds if (m.model, m.clients, m.precision) == (ours.model, ours.clients, ours.precision)
    ]  # fmt: skip
    fedavg = [m for m in same if m.method == "fedavg"]
    of_engine = [m for m in fedavg if m.contender not in (*NOT_OURS, BARE) and _engine(m) == _engine(ours)]
    engine = [m for m in of_engine if m.sizes == ours.sizes and m is not ours]
    bare = [m for m in fedavg if m.contender == BARE] if ours.method == "fedavg" else []
    loop = [m for m in fedavg if m.contender == LOOP] if ours.method == "fedavg" else []
    return RoundsRow(ours, fastest(engine), fastest(bare), fastest(loop))


def _engine(m: Measurement) -> str:
    """As the user names it: what `auto` takes may differ from method to method."""
    return m.asked or m.contender


def growth(measurements: Sequence[Measurement], level: Level) -> list[Measurement]:
    """The measurements against the federation's size or the participants, smallest first."""
    return sorted(_at(level, measurements), key=lambda m: (m.federation, m.clients))


def largest_change(times: Iterable[float]) -> float | None:
    """By how much the slowest exceeds the fastest, relative to it."""
    known = list(times)
    return max(known) / min(known) - 1 if len(known) > 1 else None


def last_cost_ratio(measured: Sequence[Measurement]) -> float | None:
    """Seconds per participant with the most participants, against those with the next fewer."""
    if len(measured) < 2:
        return None
    before, last = measured[-2], measured[-1]
    return (last.time / last.clients) / (before.time / before.clients)


def _at(level: Level, measurements: Sequence[Measurement]) -> list[Measurement]:
    return [m for m in measurements if m.level == level]


def _quotient(a: Measurement | None, b: Measurement | None) -> float | None:
    return a.rate / b.rate if a and b else None
