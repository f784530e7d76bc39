"""The rounds of a run, one after another.

This loop runs on a CPU and on Apple's GPU. `overlap` has the loop for CUDA, and `flower.loop` the one for sites on
other machines.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from fedskew.experiment.recorder import Recorder
from fedskew.experiment.round.aggregate import read_report
from fedskew.experiment.round.record import RoundRow
from fedskew.experiment.round.server import Server
from fedskew.experiment.round.state import RunState
from fedskew.methods import Stage

RunRounds = Callable[[RunState, Recorder], RunState]
"""Runs the remaining rounds and returns the state after the last one."""


def run_rounds(server: Server, state: RunState, recorder: Recorder) -> RunState:
    """Run rounds until the schedule ends or a callback stops the run."""
    while (stage := server.next_stage(state)) is not None:
        state, row = run_round(server, stage, state)
        recorder.add(row, state)
        if recorder.stopped:
            break
    return state


def run_round(server: Server, stage: Stage, state: RunState) -> tuple[RunState, RoundRow]:
    """Run one round. Its clients' models are freed on return, because the next round needs the memory."""
    clock = Stopwatch()
    plan = server.plan(stage, state)
    result = server.train(plan)
    report = read_report(result, plan.start.model)
    clock.lap("train")
    aggregated = server.aggregate(plan, result, report)
    clock.lap("server")
    evaluation = server.evaluate(plan, result, aggregated)
    clock.lap("evaluate")
    row = server.record(plan, result, aggregated)
    return aggregated.after, replace(row, **evaluation, time=clock.laps, seconds=clock.total)


class Stopwatch:
    """Measures the seconds per step of a round."""

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._start = self._last_lap = time.perf_counter()

    def lap(self, step: str) -> None:
        """Record the time since the last lap, or since the start, under this step's name."""
        now = time.perf_counter()
        self.laps[step], self._last_lap = now - self._last_lap, now

    @property
    def total(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self._start
