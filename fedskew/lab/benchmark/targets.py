"""Ratios between measurements, and the targets of a benchmark."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from fedskew.lab.benchmark.peers import (
    JAX,
    MAX_FLOAT32_ROUND,
    MAX_SHARE_OF_JAX,
    MIN_JAX_PER_ROUND,
    MIN_JAX_START_UP,
    OURS,
    PeerTime,
)
from fedskew.lab.benchmark.results import (
    BARE,
    LIMIT,
    LOOP,
    REFERENCES,
    TUNED_LOOP,
    Level,
    Measurement,
    Results,
    fastest,
)
from fedskew.lab.benchmark.scale import MAX_HOST_MEMORY
from fedskew.lab.benchmark.whole_runs import (
    FIRST,
    FIRST_FEDVLS,
    IMPORTS,
    MAX_FIRST_SECONDS,
    MAX_SECOND_SECONDS,
    ONE_ROUND,
    ONE_ROUND_FEDVLS,
)


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
    same_format: tuple[tuple[str, float], ...] = ()
    """Each number format with fedskew's speed relative to the loop in that format."""

    @property
    def over_loop(self) -> float | None:
        return _speed_ratio(self.ours, self.loop)

    @property
    def share_of_limit(self) -> float | None:
        return _speed_ratio(self.ours, self.limit)


@dataclass(frozen=True)
class RoundsRow:
    """Whole rounds of one method, to be compared with FedAvg, bare steps and the plain loop."""

    ours: Measurement
    fedavg: Measurement | None
    bare: Measurement | None
    loop: Measurement | None

    @property
    def time_over_fedavg(self) -> float | None:
        """This method's time per sample divided by FedAvg's."""
        return _speed_ratio(self.fedavg, self.ours)

    @property
    def share_of_bare_steps(self) -> float | None:
        return _speed_ratio(self.ours, self.bare)

    @property
    def over_loop(self) -> float | None:
        return _speed_ratio(self.ours, self.loop)


def steps_rows(measurements: Sequence[Measurement], device_kind: str) -> list[StepsRow]:
    """Make one row per model, number of clients and method.

    On a GPU, fedskew is compared with the faster of the plain and the tuned loop. On a CPU, it is compared with the
    plain loop. The engine that `auto` chooses represents fedskew. If `auto` was not measured, the fastest engine does.
    """
    loops = (LOOP, TUNED_LOOP) if device_kind == "cuda" else (LOOP,)
    steps = _at_level("steps", measurements)
    rows = []
    for model, clients, batch_size, method in dict.fromkeys(
        (m.model, m.clients, m.batch_size, m.method) for m in steps
    ):
        case = [m for m in steps if (m.model, m.clients, m.method) == (model, clients, method)]
        ours = [m for m in case if m.contender not in REFERENCES]
        ours = [m for m in ours if m.asked == "auto"] or ours
        references = [m for m in case if m.contender in loops]
        loop = fastest(references)
        limit = fastest([m for m in case if m.contender == LIMIT])
        same_format = _same_format_ratios(ours, references)
        rows.append(StepsRow(model, clients, batch_size, method, fastest(ours), loop, limit, same_format))
    return rows


def _same_format_ratios(ours: Sequence[Measurement], loops: Sequence[Measurement]) -> tuple[tuple[str, float], ...]:
    ratios = []
    for precision in dict.fromkeys(m.precision for m in ours):
        sides = (fastest([m for m in side if m.precision == precision]) for side in (ours, loops))
        if ratio := _speed_ratio(*sides):
            ratios.append((precision, ratio))
    return tuple(ratios)


def rounds_rows(measurements: Sequence[Measurement]) -> list[RoundsRow]:
    """Make one row per measurement of fedskew's whole rounds."""
    rounds = _at_level("rounds", measurements)
    return [_rounds_row(m, rounds) for m in rounds if m.contender not in (*REFERENCES, BARE)]


def _rounds_row(ours: Measurement, rounds: Sequence[Measurement]) -> RoundsRow:
    same_case = [
        m for m in rounds if (m.model, m.clients, m.precision) == (ours.model, ours.clients, ours.precision)
    ]  # fmt: skip
    fedavg = [m for m in same_case if m.method == "fedavg"]
    same_engine = [m for m in fedavg if m.contender not in (*REFERENCES, BARE) and _engine(m) == _engine(ours)]
    fedavg_rounds = [m for m in same_engine if m.sizes == ours.sizes and m is not ours]
    bare = [m for m in fedavg if m.contender == BARE] if ours.method == "fedavg" else []
    loop = [m for m in fedavg if m.contender == LOOP] if ours.method == "fedavg" else []
    return RoundsRow(ours, fastest(fedavg_rounds), fastest(bare), fastest(loop))


def _engine(m: Measurement) -> str:
    """The requested engine. Methods are compared under the same request, because `auto` may choose another engine for
    each method."""
    return m.asked or m.contender


def sorted_by_size(measurements: Sequence[Measurement], level: Level) -> list[Measurement]:
    """The measurements by federation size or participants, smallest first."""
    return sorted(_at_level(level, measurements), key=lambda m: (m.federation, m.clients))


def largest_change(values: Iterable[float]) -> float | None:
    """The relative difference between the largest and the smallest value."""
    measured = list(values)
    return max(measured) / min(measured) - 1 if len(measured) > 1 else None


def last_cost_ratio(measured: Sequence[Measurement]) -> float | None:
    """Time per participant in the largest measured round, divided by that in the second largest."""
    if len(measured) < 2:
        return None
    before, last = measured[-2], measured[-1]
    return (last.time / last.clients) / (before.time / before.clients)


def _at_level(level: Level, measurements: Sequence[Measurement]) -> list[Measurement]:
    return [m for m in measurements if m.level == level]


def _speed_ratio(measured: Measurement | None, reference: Measurement | None) -> float | None:
    return measured.rate / reference.rate if measured and reference else None


MIN_OVER_LOOP = {
    "cuda": {("cnn", 10): 15.0, ("cnn", 100): 17.0, ("mobilenetv2", 10): 8.0, ("dnn", 10): 25.0},
    "cpu": {("dnn", 10): 2.0, ("lenet5", 10): 1.5, ("cnn", 10): 1.2},
}
"""The minimum speed of FedAvg's local steps relative to the loop, by device, model and clients per round."""
MIN_OVER_LIMIT = {
    "cuda": {
        ("cnn", 10): 0.60,
        ("cnn", 100): 0.50,
        ("mobilenetv2", 10): 1.2,
        ("resnet18", 10): 0.85,
        ("dnn", 10): 0.50,
    },
}
"""The minimum speed of FedAvg's local steps relative to one step on one large batch (`LIMIT`), by device, model and
clients per round. If it is above 1, stacked clients must be faster than that step."""
MIN_OVER_STEPS_BY_MODEL = {"dnn": 0.6}
"""The minimum speed of whole rounds relative to bare steps on a GPU, for models whose rounds take milliseconds."""
MIN_OVER_STEPS = 0.8
"""The minimum speed of whole rounds relative to bare steps on a GPU, for other models."""
MIN_OVER_STEPS_UNEQUAL = 0.75
"""The minimum speed of whole rounds relative to bare steps on a GPU, if clients have unequal numbers of samples."""
MAX_FEDVLS_OVER_FEDAVG = 1.45
"""The largest time per sample of FedVLS relative to FedAvg, on a GPU."""
MAX_FEDERATION_CHANGE = 0.10
"""The largest relative change of time or memory between federations of different sizes."""
MAX_COST_RATIO = 1.10
"""The largest accepted `last_cost_ratio`. Linear growth has the ratio 1; 0.1 is left for noise."""


@dataclass(frozen=True)
class Target:
    """A bound on a measured number."""

    what: str
    value: float
    bound: float
    at_least: bool = True

    @property
    def met(self) -> bool:
        return self.value >= self.bound if self.at_least else self.value <= self.bound

    def to_json(self) -> dict[str, str | float | bool]:
        sign = ">=" if self.at_least else "<="
        return {"what": self.what, "value": self.value, "sign": sign, "bound": self.bound, "met": self.met}


def targets(results: Results) -> list[Target]:
    """The targets whose measurements exist."""
    rounds = _rounds(results) if results.kind == "cuda" else ()
    return [
        *_steps(results), *rounds, *_growth(results), *_commands(results), *_peers(results), *_scale(results)
    ]  # fmt: skip


def _commands(results: Results) -> Iterator[Target]:
    for command in results.commands:
        if command.bound is not None:
            yield Target(f"{command.command}: seconds to its {command.until}", command.time, command.bound, False)
    times = {command.command: command.time for command in results.commands}
    bounds = {
        FIRST: MAX_FIRST_SECONDS,
        FIRST_FEDVLS: MAX_FIRST_SECONDS,
        ONE_ROUND["bf16"]: MAX_SECOND_SECONDS,
        ONE_ROUND_FEDVLS: MAX_SECOND_SECONDS,
    }
    for name, bound in bounds.items():
        if name in times and IMPORTS in times:
            yield Target(f"{name}: seconds after the imports", times[name] - times[IMPORTS], bound, False)


def _steps(results: Results) -> Iterator[Target]:
    for row in steps_rows(results.measurements, results.kind):
        if row.method != "fedavg":
            continue
        key, name = (row.model, row.clients), f"{row.model}, {row.clients} × {row.batch_size}"
        bound = MIN_OVER_LOOP.get(results.kind, {}).get(key)
        if bound is not None and row.over_loop is not None:
            yield Target(f"{name}: steps / loop", row.over_loop, bound)
        bound = MIN_OVER_LIMIT.get(results.kind, {}).get(key)
        if bound is not None and row.share_of_limit is not None:
            yield Target(f"{name}: steps / limit", row.share_of_limit, bound)


def _rounds(results: Results) -> Iterator[Target]:
    for row in rounds_rows(results.measurements):
        m = row.ours
        name = f"{m.model}, {m.clients} × {m.batch_size}, {m.precision}"
        if m.method == "fedavg" and row.share_of_bare_steps is not None:
            bound = MIN_OVER_STEPS_BY_MODEL.get(m.model, MIN_OVER_STEPS)
            unequal = m.sizes != "equal"
            yield Target(
                f"{name}: whole round{' of unequal clients' if unequal else ''} / bare steps",
                row.share_of_bare_steps,
                MIN_OVER_STEPS_UNEQUAL if unequal else bound,
            )
        if m.method == "fedvls" and row.time_over_fedavg is not None:
            yield Target(f"{name}: time of FedVLS / FedAvg", row.time_over_fedavg, MAX_FEDVLS_OVER_FEDAVG, False)


def _growth(results: Results) -> Iterator[Target]:
    by_federation = sorted_by_size(results.measurements, "federation")
    change = largest_change(m.time for m in by_federation)
    if change is not None:
        sizes = f"{by_federation[0].federation:,} to {by_federation[-1].federation:,} clients"
        yield Target(f"{sizes}: change in time per round", change, MAX_FEDERATION_CHANGE, False)
        memory = largest_change(m.memory for m in by_federation if m.memory)
        if memory is not None and results.kind == "cuda":  # on a CPU, the measured memory is too coarse
            yield Target(f"{sizes}: change in memory", memory, MAX_FEDERATION_CHANGE, False)
    by_participants = sorted_by_size(results.measurements, "participants")
    cost = last_cost_ratio(by_participants)
    if cost is not None:
        numbers = f"{by_participants[-2].clients} to {by_participants[-1].clients} participants"
        yield Target(f"{numbers}: ratio of times per participant", cost, MAX_COST_RATIO, False)


def _peers(results: Results) -> Iterator[Target]:
    """The target for fedskew's rounds in float32 on a GPU, and those against the JAX script in the same format."""
    ours, theirs = ({p.precision: p for p in results.peers if p.peer == name} for name in (OURS, JAX))
    if results.kind == "cuda" and "float32" in ours:
        yield Target("fedskew on the JAX script's work, float32: ms per round",
                     1000 * ours["float32"].seconds_per_round, 1000 * MAX_FLOAT32_ROUND, False)  # fmt: skip
    for precision in ours:
        if precision in theirs:
            yield from _against_jax(ours[precision], theirs[precision], results.kind)


def _against_jax(ours: PeerTime, jax: PeerTime, kind: str) -> Iterator[Target]:
    per_round = MIN_JAX_PER_ROUND.get(kind, {}).get(ours.precision)
    if per_round is not None:
        yield Target(f"{ours.precision}: JAX / fedskew, per round", jax.seconds_per_round / ours.seconds_per_round,
                     per_round)  # fmt: skip
    if kind in MIN_JAX_START_UP:
        yield Target(f"{ours.precision}: JAX / fedskew, to the end of the first round", jax.start_up / ours.start_up,
                     MIN_JAX_START_UP[kind])  # fmt: skip
    if kind in MAX_SHARE_OF_JAX:
        yield Target(f"{ours.precision}: fedskew / JAX, {ours.rounds} rounds", ours.whole_run / jax.whole_run,
                     MAX_SHARE_OF_JAX[kind], False)  # fmt: skip


def _scale(results: Results) -> Iterator[Target]:
    for m in results.scale:
        yield Target(f"{m.case.clients:,} clients: peak host memory, GB", m.memory / 1e9, MAX_HOST_MEMORY / 1e9, False)
