"""What the engines are held to, and whether a benchmark shows it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fedskew.lab.benchmark.ratios import growth, largest_change, last_cost_ratio, rounds_rows, steps_rows
from fedskew.lab.benchmark.results import Results

OVER_LOOP = {
    "cuda": {("cnn", 10): 15.0, ("cnn", 100): 17.0, ("mobilenetv2", 10): 8.0, ("dnn", 10): 25.0},
    "cpu": {("dnn", 10): 2.0, ("lenet5", 10): 1.5, ("cnn", 10): 1.2},
}
"""Samples a second over the plain loop's, by model and clients in a round."""
OF_LIMIT = {
    "cuda": {("cnn", 10): 0.60, ("cnn", 100): 0.50, ("mobilenetv2", 10): 0.60, ("dnn", 10): 0.50},
}
ROUND_OF_STEPS = 0.8
"""On a GPU: samples a second of whole rounds over those of bare steps."""
FEDVLS_OVER_FEDAVG = 1.45
"""On a GPU: seconds of a whole round."""
FEDERATION_GROWTH = 0.10
"""From the smallest federation to the largest."""
COST_GROWTH = 1.10
"""Seconds per participant with the most participants over those with the next fewer: linear growth, and noise."""


@dataclass(frozen=True)
class Target:
    """A number that a benchmark should show."""

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
    """Those of which the benchmark measured both sides."""
    rounds = _rounds(results) if results.kind == "cuda" else ()
    return [*_steps(results), *rounds, *_growth(results)]


def _steps(results: Results) -> Iterator[Target]:
    for row in steps_rows(results.measurements, results.kind):
        if row.method != "fedavg":
            continue
        where, name = (row.model, row.clients), f"{row.model}, {row.clients} × {row.batch_size}"
        bound = OVER_LOOP.get(results.kind, {}).get(where)
        if bound is not None and row.over_loop is not None:
            yield Target(f"{name}: steps / plain loop", row.over_loop, bound)
        bound = OF_LIMIT.get(results.kind, {}).get(where)
        if bound is not None and row.of_limit is not None:
            yield Target(f"{name}: steps / limit", row.of_limit, bound)


def _rounds(results: Results) -> Iterator[Target]:
    for row in rounds_rows(results.measurements):
        m = row.ours
        name = f"{m.model}, {m.clients} × {m.batch_size}, {m.precision}"
        if m.sizes != "equal":
            continue
        if m.method == "fedavg" and row.of_bare_steps is not None:
            yield Target(f"{name}: whole round / bare steps", row.of_bare_steps, ROUND_OF_STEPS)
        if m.method == "fedvls" and row.time_over_fedavg is not None:
            yield Target(f"{name}: time of FedVLS / FedAvg", row.time_over_fedavg, FEDVLS_OVER_FEDAVG, False)


def _growth(results: Results) -> Iterator[Target]:
    federation = growth(results.measurements, "federation")
    change = largest_change(m.time for m in federation)
    if change is not None:
        sizes = f"{federation[0].federation:,} to {federation[-1].federation:,} clients"
        yield Target(f"{sizes}: change of a round's time", change, FEDERATION_GROWTH, False)
        memory = largest_change(m.memory for m in federation if m.memory)
        if memory is not None and results.kind == "cuda":  # on a CPU the system tells it too coarsely
            yield Target(f"{sizes}: change of the memory", memory, FEDERATION_GROWTH, False)
    participants = growth(results.measurements, "participants")
    cost = last_cost_ratio(participants)
    if cost is not None:
        numbers = f"{participants[-2].clients} to {participants[-1].clients} participants"
        yield Target(f"{numbers}: time per participant", cost, COST_GROWTH, False)
