"""How a sweep is doing: one bar for all its rounds in a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from fedskew.lab.sweep.job import Job, Outcome
from fedskew.lab.sweep.pool import Watcher

LINES_APART = 15.0
"""Seconds."""


class SweepProgress(Watcher):
    """Counts runs and rounds."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        self.runs, self.done, self.failed = len(jobs), 0, 0
        self._rounds = {job.label: job.config.rounds for job in jobs}
        self._at: dict[str, int] = {}
        self._under_way: dict[str, float | None] = {}
        self._began = time.monotonic()

    @property
    def rounds(self) -> int:
        return sum(self._at.values())

    @property
    def total(self) -> int:
        return sum(self._rounds.values())

    def on_progress(self, job: Job, done: int, total: int, accuracy: float | None) -> None:
        self._rounds[job.label], self._at[job.label] = total, done
        self._under_way[job.label] = accuracy
        self.show()

    def on_outcome(self, job: Job, outcome: Outcome) -> None:
        self._under_way.pop(job.label, None)
        self._at[job.label] = self._rounds[job.label]
        self.done += 1
        self.failed += outcome.status == "failed"
        self.ended(job, outcome)
        self.show()

    def state(self) -> str:
        failed = f", {self.failed} failed" if self.failed else ""
        return f"{self.done}/{self.runs} runs{failed}, {len(self._under_way)} under way"

    def show(self) -> None:
        """Tell the user where it stands."""

    def ended(self, job: Job, outcome: Outcome) -> None:
        """Tell the user of a run's end."""

    def seconds(self) -> float:
        return time.monotonic() - self._began


class Lines(SweepProgress):
    """For logs."""

    def __init__(self, jobs: Sequence[Job], console: Console) -> None:
        super().__init__(jobs)
        self._console, self._spoke = console, 0.0

    def show(self) -> None:
        if time.monotonic() - self._spoke > LINES_APART:
            self._spoke = time.monotonic()
            self._say(f"{self.seconds():.0f} s: {self.state()}, {self.rounds}/{self.total} rounds")

    def ended(self, job: Job, outcome: Outcome) -> None:
        if outcome.status != "stopped" or outcome.record is not None:  # there was no time for it
            self._say(f"{self.seconds():.0f} s: {self.done}/{self.runs} {told(job, outcome)}")

    def _say(self, line: str) -> None:
        self._console.print(line, style="dim", markup=False, soft_wrap=True)


class Bar(SweepProgress):
    """For terminals."""

    def __init__(self, jobs: Sequence[Job], console: Console) -> None:
        super().__init__(jobs)
        columns = (TextColumn("{task.description}"), BarColumn(bar_width=20), TextColumn("{task.percentage:.0f} %"))
        self.display = Progress(
            *columns, TimeElapsedColumn(), TimeRemainingColumn(elapsed_when_finished=True), console=console,
            transient=True,
        )  # fmt: skip
        self._task = self.display.add_task(self.state(), total=max(1, self.total))

    def show(self) -> None:
        self.display.update(self._task, description=self.state(), completed=self.rounds, total=max(1, self.total))

    def ended(self, job: Job, outcome: Outcome) -> None:
        if outcome.status == "failed":
            self.display.console.print(told(job, outcome), style="dim", markup=False, soft_wrap=True)


def told(job: Job, outcome: Outcome) -> str:
    """A run's end in a line."""
    if outcome.status == "failed":
        return f"{job.label}: failed: {outcome.reason}"
    record = outcome.record
    if record is None:
        return f"{job.label}: stopped before its first evaluation"
    accuracy = f"best {100 * record.summary().best.accuracy:.2f} %, last {100 * record.curve[-1][1]:.2f} %"
    stopped = "" if outcome.status == "finished" else "stopped, "
    rounds = f"{record.rounds} round{'s' if record.rounds != 1 else ''}"
    return f"{job.label}: {stopped}{rounds}, {accuracy}, {record.seconds:.1f} s"


@contextmanager
def showing(jobs: Sequence[Job], quiet: bool, console: Console) -> Iterator[SweepProgress]:
    """What suits the stream."""
    if quiet:
        yield SweepProgress(jobs)
    elif console.is_terminal:
        bar = Bar(jobs, console)
        with bar.display:
            yield bar
    else:
        yield Lines(jobs, console)
