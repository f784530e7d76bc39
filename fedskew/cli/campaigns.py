"""Run many jobs and show progress, for `sweep` and `reproduce`."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from fedskew.cli.commands import INTERRUPTED, Settings
from fedskew.cli.terminal import notice, stderr
from fedskew.experiment.config.values import integer, real
from fedskew.lab.sweep.campaign import Campaign
from fedskew.lab.sweep.job import Job
from fedskew.lab.sweep.pool import Watcher
from fedskew.lab.sweep.records import Outcome

FAILED = 1
"""The exit status if a run failed."""
SECONDS_BETWEEN_LINES = 15.0


def parse_count(name: str, value: str | None) -> int | None:
    return None if value is None else int(integer(1)(name, value))


def parse_seconds(name: str, value: str | None) -> float | None:
    return None if value is None else float(real(above=0)(name, value))


def job_values(settings: Settings) -> Mapping[str, Any]:
    """The user's values by dotted key, with an absolute `data_dir`, because workers may run in another folder."""
    values = dict(settings.values)
    if values.get("data_dir") is not None:
        values["data_dir"] = str(Path(values["data_dir"]).expanduser().absolute())
    return values


def run_campaign(campaign: Campaign, jobs: Sequence[Job], quiet: bool) -> None:
    """Run the jobs that are not done, and show progress. Ctrl-C ends the program with one line."""
    done, todo = sum(map(campaign.is_done, jobs)), campaign.todo(jobs)
    if done and not quiet:
        notice(f"{done} of {len(jobs)} runs {'is' if done == 1 else 'are'} already done")
    try:
        with _show_progress(todo, quiet, stderr()) as progress:
            campaign.run(todo, progress)
    except KeyboardInterrupt as interrupt:
        notice("stopped; repeat the command to resume")
        raise typer.Exit(INTERRUPTED) from interrupt


def conclude(campaign: Campaign) -> None:
    """Print how many runs the time limit left unfinished, and which failed. If any failed, exit with status 1."""
    if campaign.stopped:
        count = len(campaign.stopped)
        unfinished = "1 run is unfinished" if count == 1 else f"{count} runs are unfinished"
        notice(f"time limit reached: {unfinished}; repeat the command to resume")
    for label, reason in campaign.failures.items():
        notice(f"failed: {label}: {reason}")
    if campaign.failures:
        raise typer.Exit(FAILED)


class JobProgress(Watcher):
    """Counts runs and rounds. Subclasses display them."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        self.runs, self.done, self.failed = len(jobs), 0, 0
        self._total_rounds = {job.label: job.config.rounds for job in jobs}
        self._rounds: dict[str, int] = {}
        self._running: set[str] = set()
        self._start = time.monotonic()

    @property
    def rounds(self) -> int:
        """Number of rounds done. A run that has ended, for whatever reason, counts in full."""
        return sum(self._rounds.values())

    @property
    def total_rounds(self) -> int:
        """Number of rounds of all runs. A run that has not begun counts as configured."""
        return sum(self._total_rounds.values())

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._start

    def on_progress(self, job: Job, done: int, total: int, accuracy: float | None) -> None:  # noqa: ARG002
        self._total_rounds[job.label], self._rounds[job.label] = total, done
        self._running.add(job.label)
        self.show()

    def on_outcome(self, job: Job, outcome: Outcome) -> None:
        self._running.discard(job.label)
        self._rounds[job.label] = self._total_rounds[job.label]
        self.done += 1
        self.failed += outcome.status == "failed"
        self.show_end(job, outcome)
        self.show()

    def on_notice(self, line: str) -> None:
        notice(line)

    def describe_runs(self) -> str:
        """Return the numbers of runs that ended, failed and are running, as text."""
        failed = f", {self.failed} failed" if self.failed else ""
        return f"{self.done}/{self.runs} runs{failed}, {len(self._running)} running"

    def show(self) -> None:
        """Show the current state."""

    def show_end(self, job: Job, outcome: Outcome) -> None:
        """Show that a run has ended."""


class _LogLines(JobProgress):
    """Prints lines for logs: at most one in `SECONDS_BETWEEN_LINES` about all runs, and one for each run that ends."""

    def __init__(self, jobs: Sequence[Job], console: Console) -> None:
        super().__init__(jobs)
        self._console, self._printed_at = console, 0.0

    def show(self) -> None:
        if time.monotonic() - self._printed_at > SECONDS_BETWEEN_LINES:
            self._printed_at = time.monotonic()
            self._print(f"{self.seconds:.0f} s: {self.describe_runs()}, {self.rounds}/{self.total_rounds} rounds")

    def show_end(self, job: Job, outcome: Outcome) -> None:
        if outcome.status != "stopped" or outcome.record is not None:  # a stopped run without a result gets no line
            self._print(f"{self.seconds:.0f} s: {self.done}/{self.runs} {_describe_outcome(job, outcome)}")

    def _print(self, line: str) -> None:
        self._console.print(line, style="dim", markup=False, soft_wrap=True)


class _Bar(JobProgress):
    """Shows one bar in a terminal, over the rounds of all runs."""

    def __init__(self, jobs: Sequence[Job], console: Console) -> None:
        super().__init__(jobs)
        columns = (TextColumn("{task.description}"), BarColumn(bar_width=20), TextColumn("{task.percentage:.0f} %"))
        self.display = Progress(
            *columns, TimeElapsedColumn(), TimeRemainingColumn(elapsed_when_finished=True), console=console,
            transient=True,
        )  # fmt: skip
        self._task = self.display.add_task(self.describe_runs(), total=max(1, self.total_rounds))

    def show(self) -> None:
        total = max(1, self.total_rounds)
        self.display.update(self._task, description=self.describe_runs(), completed=self.rounds, total=total)

    def on_notice(self, line: str) -> None:
        self.display.console.print(line, style="dim", markup=False, soft_wrap=True)

    def show_end(self, job: Job, outcome: Outcome) -> None:
        if outcome.status == "failed":
            self.display.console.print(_describe_outcome(job, outcome), style="dim", markup=False, soft_wrap=True)


def _describe_outcome(job: Job, outcome: Outcome) -> str:
    """Describe how a run failed, or the results that it recorded."""
    record = outcome.record
    if record is None:
        return f"{job.label}: failed: {outcome.reason}"
    accuracy = f"best {100 * record.summary().best.accuracy:.2f} %, last {100 * record.curve[-1][1]:.2f} %"
    stopped = "" if outcome.status == "finished" else "stopped, "
    rounds = f"{record.rounds} round{'s' if record.rounds != 1 else ''}"
    return f"{job.label}: {stopped}{rounds}, {accuracy}, {record.seconds:.1f} s"


@contextmanager
def _show_progress(jobs: Sequence[Job], quiet: bool, console: Console) -> Iterator[JobProgress]:
    """Show a bar in a terminal, lines in a log, or only notices if `quiet`."""
    if quiet:
        yield JobProgress(jobs)
    elif console.is_terminal:
        bar = _Bar(jobs, console)
        with bar.display:
            yield bar
    else:
        yield _LogLines(jobs, console)
