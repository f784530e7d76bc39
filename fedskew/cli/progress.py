"""Progress of runs: a live line in a terminal, an occasional line elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from fedskew.cli import INTERRUPTED
from fedskew.cli.terminal import notice, stderr
from fedskew.experiment.callbacks import Callback
from fedskew.experiment.preparation import Prepared
from fedskew.experiment.result import Result
from fedskew.experiment.round.record import RoundRow
from fedskew.experiment.round.state import RunState
from fedskew.experiment.storage.run_folder import RunFolder

FolderOf = Callable[[Prepared], Path]
SECONDS_BETWEEN_LINES = 5.0


@dataclass
class Standing:
    """Where a run stands."""

    label: str
    classes: tuple[str, ...]
    round: int = 0
    total: int = 0
    stage: str = "train"
    accuracy: float = 0.0
    best: float = 0.0
    worst: str = ""
    pace: float = 0.0
    """Seconds per round; recent rounds count most."""

    def update(self, row: RoundRow, ahead: int) -> None:
        self.round, self.total = row.round, row.round + ahead
        self.stage = row.stage
        if self.round:
            self.pace = 0.8 * self.pace + 0.2 * row.seconds if self.pace else row.seconds
        if row.is_evaluated:
            self.accuracy = row.accuracy
            self.best = max(self.best, self.accuracy)
            tested = [(a, name) for a, name in zip(row.tested.class_accuracy, self.classes, strict=True)
                      if a is not None]  # fmt: skip
            lowest, name = min(tested)
            self.worst = f"{name[:12]}: {100 * lowest:.0f} %"

    @property
    def left(self) -> str:
        """The estimated time left; empty while it is unknown, and at the end."""
        ahead = self.total - self.round
        return f"{clock(self.pace * ahead)} left" if self.pace and ahead else ""

    @property
    def stage_note(self) -> str:
        return "" if self.stage == "train" else f" {self.stage}"


def clock(seconds: float) -> str:
    """A duration such as 9.5 s, 42 s, 3:07 or 1:02:03."""
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d}" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


class RunProgress(Callback):
    """Follows one run after another; this base class prints notices only."""

    def __init__(self, folder_of: FolderOf) -> None:
        self._folder_of = folder_of
        self.standing: Standing | None = None
        """Of the current run."""

    def on_start(self, prepared: Prepared, state: RunState, rounds_ahead: int) -> None:
        config = prepared.config
        self.standing = Standing(f"{config.method} seed {config.seed}", prepared.federation.dataset.classes)
        for row in RunFolder(self._folder_of(prepared)).rounds():
            self.standing.update(row, state.round + rounds_ahead - row.round)
        if state.round:
            self.on_notice(f"{self.standing.label}: resumes after round {state.round}")
        self.show(self.standing)

    def on_round(self, row: RoundRow, rounds_ahead: int) -> None:
        if self.standing is not None:
            self.standing.update(row, rounds_ahead)
            self.show(self.standing)

    def on_notice(self, line: str) -> None:
        notice(line)

    def on_end(self, result: Result) -> None:  # noqa: ARG002
        self.standing = None

    def show(self, standing: Standing) -> None:
        """Show it to the user."""


class Lines(RunProgress):
    """For logs: a line after each tenth of a run, but not too often, and one at its end."""

    def __init__(self, folder_of: FolderOf) -> None:
        super().__init__(folder_of)
        self._tenth = 0
        self._printed_at = time.monotonic()

    def on_start(self, prepared: Prepared, state: RunState, rounds_ahead: int) -> None:
        self._tenth = 10 * state.round // max(1, state.round + rounds_ahead)
        super().on_start(prepared, state, rounds_ahead)

    def show(self, standing: Standing) -> None:
        tenth = 10 * standing.round // max(1, standing.total)
        soon = time.monotonic() - self._printed_at < SECONDS_BETWEEN_LINES
        if tenth == self._tenth or (soon and standing.round < standing.total):
            return
        self._tenth, self._printed_at = tenth, time.monotonic()
        notice(
            f"{standing.label}:{standing.stage_note} round {standing.round}/{standing.total}, "
            f"accuracy {100 * standing.accuracy:.1f} %, best {100 * standing.best:.1f} %, "
            f"worst class {standing.worst}, {standing.pace:.2f} s per round"
            + (f", {standing.left}" if standing.left else "")
        )


class Bar(RunProgress):
    """For terminals: a progress bar of the current run, and the number of finished runs."""

    def __init__(self, folder_of: FolderOf, runs: int, console: Console) -> None:
        super().__init__(folder_of)
        self._runs, self._done = runs, 0
        self._console = console
        self.display = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=12),
            TextColumn("{task.completed:.0f}/{task.total:.0f}"),
            TextColumn("{task.fields[numbers]}"),
            console=console,
            transient=True,
        )
        self._task: TaskID = self.display.add_task("preparing", total=1, numbers="")

    def on_notice(self, line: str) -> None:
        self._console.print(line, style="dim", markup=False, soft_wrap=True)

    def on_end(self, result: Result) -> None:
        super().on_end(result)
        self._done += 1

    def show(self, standing: Standing) -> None:
        count = f" ({self._done + 1}/{self._runs})" if self._runs > 1 else ""
        self.display.update(
            self._task,
            description=standing.label + count + standing.stage_note,
            completed=standing.round,
            total=standing.total,
            numbers=f"{100 * standing.accuracy:.1f} % best {100 * standing.best:.1f} % "
            f"worst {standing.worst} {standing.left}",
        )


@contextmanager
def showing_runs(folder_of: FolderOf, runs: int, quiet: bool) -> Iterator[RunProgress]:
    """The progress display that suits the stream; ^C ends the program with one line."""
    console = stderr()
    progress: RunProgress
    if quiet:
        progress = RunProgress(folder_of)
    elif console.is_terminal:
        progress = Bar(folder_of, runs, console)
    else:
        progress = Lines(folder_of)
    try:
        if isinstance(progress, Bar):
            with progress.display:
                yield progress
        else:
            yield progress
    except KeyboardInterrupt as interrupt:
        round_ = progress.standing.round if progress.standing else 0
        where = f"after round {round_}" if round_ else "before the first round"
        notice(f"stopped {where}; repeat the command to resume")
        raise typer.Exit(INTERRUPTED) from interrupt
