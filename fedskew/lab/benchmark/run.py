"""Run a benchmark: measure one group of contenders after another until the time is up."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime

import torch

from fedskew.errors import UserError
from fedskew.experiment.storage import about
from fedskew.lab.benchmark.commands import CommandTime, time_commands
from fedskew.lab.benchmark.peers import measure_peers, peer_case
from fedskew.lab.benchmark.plan import Group, Plan, groups
from fedskew.lab.benchmark.results import PEERS, SCALE, Failure, Results
from fedskew.lab.benchmark.scale import measure_scale, scale_case
from fedskew.lab.benchmark.timing import ContenderTimer
from fedskew.platforms import usable_cores

ShowProgress = Callable[[int, int, str, str], None]
"""Receives the number of finished groups, the number of groups, the current group, and what is running now."""


class Benchmark:
    """A benchmark. Its `results` are valid at any time, even after an interruption."""

    def __init__(self, plan: Plan, command: str) -> None:
        self._plan, self._groups = plan, groups(plan)
        extras = {PEERS: self._add_peers, SCALE: self._add_scale}
        self._extras = [measure for level, measure in extras.items() if level in plan.levels]
        self._total = len(self._groups) + len(self._extras)
        self._device = torch.device(plan.device)
        self._start = time.monotonic()
        self._timer = ContenderTimer(self._device, plan.length, self._is_late)
        now = datetime.now(UTC).replace(microsecond=0).isoformat()
        self.results = Results(_machine(self._device), about.versions(), command, now)
        # The same lists as the timer's, which adds to them.
        self.results.failures, self.results.notices = self._timer.failures, self._timer.notices

    def run(self, show_progress: ShowProgress, save: Callable[[Results], None] = lambda _: None) -> Results:
        """Measure the groups until the time is up, and then `PEERS` and `SCALE`, if requested.

        `save` is called after each of them, in case the process is killed.
        """
        try:
            for done, group in enumerate(self._groups):
                if self._is_late():
                    self.results.left_out = [skipped.title for skipped in self._groups[done:]]
                    break
                self._measure(group, done, show_progress)
                self.results.seconds = round(self._elapsed(), 1)
                save(self.results)
            for done, measure in enumerate(self._extras, len(self._groups)):
                measure(done, show_progress)
                self.results.seconds = round(self._elapsed(), 1)
                save(self.results)
        finally:
            self.results.seconds = round(self._elapsed(), 1)
        return self.results

    def _measure(self, group: Group, done: int, show_progress: ShowProgress) -> None:
        def show(line: str) -> None:
            show_progress(done, self._total, group.title, line)

        if group.commands:
            try:
                self.results.commands += self._time_group(group, show)
            except UserError as error:
                self.results.failures.append(Failure.from_error(group.title, error))
            return
        contenders = group.contenders
        for together in [contenders] if group.interleaved else [(contender,) for contender in contenders]:
            try:
                self.results.measurements += self._timer.measure(together, show)
            except (RuntimeError, UserError) as error:  # out of memory, for example; other groups may fit
                self.results.failures.append(Failure.from_error(group.title, error))

    def _time_group(self, group: Group, show: Callable[[str], None]) -> list[CommandTime]:
        if not group.fill_caches:
            return time_commands(group.commands, self._plan.length.repetitions, show)
        time_commands(group.fill_caches, 1, show, warm_up=False)
        return time_commands(group.commands, 1, show, warm_up=False)

    def _add_peers(self, done: int, show_progress: ShowProgress) -> None:
        case, title = peer_case(self._plan.device, self._plan.precisions, self._plan.is_quick), "a JAX script"
        try:
            times, skipped = measure_peers(case, lambda line: show_progress(done, self._total, title, line))
        except UserError as error:
            self.results.failures.append(Failure.from_error(title, error))
            return
        self.results.peers += times
        self.results.failures += [Failure(title, reason) for reason in skipped]

    def _add_scale(self, done: int, show_progress: ShowProgress) -> None:
        case = scale_case(self._plan.device, self._plan.scale_clients)
        title = f"a run on {case.clients:,} clients"
        show_progress(done, self._total, title, title)
        try:
            self.results.scale.append(measure_scale(case))
        except (RuntimeError, UserError) as error:
            self.results.failures.append(Failure.from_error(title, error))

    def _elapsed(self) -> float:
        return time.monotonic() - self._start

    def _is_late(self) -> bool:
        return self._elapsed() > self._plan.budget


def _machine(device: torch.device) -> dict[str, str | int]:
    found: dict[str, str | int] = {**about.machine(str(device)), "device": device.type, "cores": usable_cores()}
    if device.type == "cuda":
        found["gpu_memory_bytes"] = torch.cuda.get_device_properties(device).total_memory
    return found
