"""A short measurement of engines on a round's work: seconds at most, however large the model."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

from fedskew.engine.contract import Assignment, Engine, RoundWork

_SECONDS = 0.3
"""What one trial of one engine should take."""
_TRIALS = 4
_PROBE = 8
"""Samples in the batches that tell how long a trial of a given size would take."""
_HOPELESS = 2.0
"""How many times slower than the best an engine is after one trial, if it gets no other."""


@dataclass(frozen=True)
class Trial:
    """How much of a round is tried."""

    clients: int
    steps: int
    batch_size: int


def measured_rates(engines: Mapping[str, Engine], work: RoundWork, smallest_batch: int) -> dict[str, float]:
    """Samples per second of each engine; the first of them is tried first, to find the size of the trials."""
    probe = Trial(2, 1, max(smallest_batch, min(_PROBE, work.local.batch_size)))
    gauge = next(iter(engines.values()))
    _seconds(gauge, part_of(work, probe))
    step = _seconds(gauge, part_of(work, probe)) / 2
    tried = part_of(work, size_of_trial(work, step * work.local.batch_size / probe.batch_size, smallest_batch))
    samples = tried.local.epochs * sum(len(a.samples) for a in tried.assignments)
    seconds: dict[str, list[float]] = {name: [] for name, engine in engines.items() if _is_able(engine, tried)}
    for _ in range(_TRIALS):
        for name, taken in seconds.items():
            if not taken or min(taken) <= _HOPELESS * min(min(t) for t in seconds.values() if t):
                taken.append(_seconds(engines[name], tried))
    return {name: samples / min(taken) for name, taken in seconds.items()}  # what else the machine did only adds time


def _is_able(engine: Engine, work: RoundWork) -> bool:
    """Whether it can train at all; what it does once, such as forking or probing, is done then."""
    try:
        engine.train(work)
    except (RuntimeError, MemoryError):
        if engine.name == "plain":
            raise
        return False
    engine.notices.clear()
    return True


def size_of_trial(work: RoundWork, step: float, smallest_batch: int) -> Trial:
    """As many clients and steps as fit the time when a step takes `step` seconds; or smaller batches."""
    affordable = int(_SECONDS / step)
    clients = max(2, min(len(work.assignments), affordable))
    batch_size = work.local.batch_size
    if affordable < clients:
        batch_size = max(smallest_batch, 2, int(batch_size * _SECONDS / (clients * step)))
    return Trial(clients, max(1, affordable // clients), min(batch_size, work.local.batch_size))


def part_of(work: RoundWork, trial: Trial) -> RoundWork:
    """The largest clients with their first samples, in as many epochs as they take to the steps, or as the round has:
    what an engine does once a round must not weigh more than it will."""
    largest = sorted(work.assignments, key=lambda a: -len(a.samples))[: trial.clients]
    wanted = trial.steps * trial.batch_size
    epochs = min(work.local.epochs, max(1, wanted // len(largest[0].samples)))

    def cut(assignment: Assignment) -> Assignment:
        return replace(assignment, samples=assignment.samples[:wanted])

    local = replace(work.local, epochs=epochs, batch_size=trial.batch_size)
    return replace(work, assignments=[cut(a) for a in largest], local=local)


def _seconds(engine: Engine, work: RoundWork) -> float:
    began = time.perf_counter()
    engine.train(work)
    return max(time.perf_counter() - began, 1e-9)
