"""Runs a benchmark: one group of contenders after another until the time is used up."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime

import torch

from fedskew.errors import UserError
from fedskew.lab.benchmark.machine import machine, versions
from fedskew.lab.benchmark.plan import Group, Plan, groups
from fedskew.lab.benchmark.results import Results
from fedskew.lab.benchmark.timing import Failure, Stopwatch

Tell = Callable[[int, int, str, str], None]
"""Is told how many groups are done, of how many, which one is measured, and what of it."""


class Benchmark:
    """One benchmark; `results` can be looked at any time, also after an interruption."""

    def __init__(self, plan: Plan, command: str) -> None:
        self._plan, self._groups = plan, groups(plan)
        self._device = torch.device(plan.device)
        self._start = time.monotonic()
        self._stopwatch = Stopwatch(self._device, plan.patience, self._is_late)
        now = datetime.now(UTC).replace(microsecond=0).isoformat()
        self.results = Results(machine(self._device), versions(), command, now)
        self.results.failures, self.results.notices = self._stopwatch.failures, self._stopwatch.notices

    def run(self, tell: Tell, keep: Callable[[Results], None] = lambda _: None) -> Results:
        """`keep` is given the results after each group: a benchmark that is killed leaves what it has."""
        try:
            for done, group in enumerate(self._groups):
                if self._is_late():
                    self.results.left_out = [left.title for left in self._groups[done:]]
                    break
                self._measure(group, done, tell)
                self.results.seconds = round(self._elapsed(), 1)
                keep(self.results)
        finally:
            self.results.seconds = round(self._elapsed(), 1)
        return self.results

    def _measure(self, group: Group, done: int, tell: Tell) -> None:
        def say(line: str) -> None:
            tell(done, len(self._groups), group.title, line)

        contenders = group.contenders
        for together in [contenders] if group.in_turn else [(alone,) for alone in contenders]:
            try:
                self.results.measurements += self._stopwatch.measure(together, say)
            except (RuntimeError, UserError) as error:  # such as out of memory: others may be smaller
                self.results.failures.append(Failure.of(group.title, error))

    def _elapsed(self) -> float:
        return time.monotonic() - self._start

    def _is_late(self) -> bool:
        return self._elapsed() > self._plan.budget
