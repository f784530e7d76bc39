"""Run one or several experiments with progress, a live report and logs, for `run`, `compare`, `demo` and `pretrain`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, NamedTuple

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from fedskew.cli.commands import INTERRUPTED
from fedskew.cli.terminal import notice, print_json, stderr, stdout
from fedskew.experiment.callbacks import Callback
from fedskew.experiment.compare import run_comparison
from fedskew.experiment.config import Config, changed_method_params, run_folder
from fedskew.experiment.preparation import Prepared, default_threads
from fedskew.experiment.result import Result
from fedskew.experiment.round.record import RoundRow
from fedskew.experiment.round.state import RunState
from fedskew.experiment.run import run_prepared
from fedskew.experiment.storage.run_folder import RunFolder
from fedskew.report.terminal import class_accuracy_table, comparison_table
from fedskew.report.verdict import conclusion
from fedskew.results import Comparison, compare_runs
from fedskew.results.ranking import DEFAULT_METRIC

if TYPE_CHECKING:
    from fedskew.tracking.trackers import Tracker

FolderOf = Callable[[Prepared], Path]
"""Returns the folder of a run."""
SECONDS_BETWEEN_LINES = 5.0
_NO_ROUND = "before completing a round"
SMOOTHING = 0.8
"""The weight of earlier rounds in the running mean of seconds per round."""


@dataclass
class RunStatus:
    """A run's progress and accuracy."""

    label: str
    classes: tuple[str, ...]
    round: int = 0
    total: int = 0
    stage: str = "train"
    accuracy: float = 0.0
    best: float = 0.0
    worst: str = ""
    """The class with the lowest accuracy, and this accuracy. Empty if no class has an accuracy."""
    seconds_per_round: float = 0.0
    """Mean seconds per round. Recent rounds count most."""

    def update(self, row: RoundRow, ahead: int) -> None:
        self.round, self.total = row.round, row.round + ahead
        self.stage = row.stage
        if self.round:
            before = self.seconds_per_round or row.seconds
            self.seconds_per_round = SMOOTHING * before + (1 - SMOOTHING) * row.seconds
        if row.is_evaluated:
            self.accuracy = row.accuracy
            self.best = max(self.best, self.accuracy)
            accuracies = zip(row.required_evaluation.class_accuracy, self.classes, strict=True)
            known = [(accuracy, name) for accuracy, name in accuracies if accuracy is not None]
            if known:  # with several labels per sample, it may be that no test sample has any label
                lowest, name = min(known)
                self.worst = f"{name[:12]}: {100 * lowest:.0f} %"

    @property
    def time_left(self) -> str:
        """The estimated time left. Empty if it is unknown or the run has ended."""
        ahead = self.total - self.round
        return f"{format_duration(self.seconds_per_round * ahead)} left" if self.seconds_per_round and ahead else ""

    @property
    def stage_note(self) -> str:
        return "" if self.stage == "train" else f" {self.stage}"


def format_duration(seconds: float) -> str:
    """Format a duration as 9.5 s, 42 s, 3:07 or 1:02:03."""
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d}" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


class RunProgress(Callback):
    """Follows one run after another. This base class prints only notices."""

    def __init__(self, folder_of: FolderOf) -> None:
        self._folder_of = folder_of
        self.status: RunStatus | None = None
        """The status of the current run. None between runs."""
        self.finished = 0
        """Number of finished runs."""
        self._noticed: set[str] = set()

    def on_start(self, prepared: Prepared, state: RunState, rounds_ahead: int) -> None:
        config = prepared.config
        self.status = RunStatus(_run_label(config), prepared.federation.dataset.classes)
        for row in RunFolder(self._folder_of(prepared)).rounds():
            self.status.update(row, state.round + rounds_ahead - row.round)
        if state.round:
            self.on_notice(f"{self.status.label}: resumes after round {state.round}")
        self.show(self.status)

    def on_round(self, row: RoundRow, rounds_ahead: int) -> None:
        if self.status is not None:
            self.status.update(row, rounds_ahead)
            self.show(self.status)

    def on_notice(self, line: str) -> None:
        """Print a line once, even if several runs of a comparison give it."""
        if line not in self._noticed:
            self._noticed.add(line)
            self.print_notice(line)

    def print_notice(self, line: str) -> None:
        notice(line)

    def on_end(self, result: Result) -> None:  # noqa: ARG002
        self.status = None
        self.finished += 1

    def show(self, status: RunStatus) -> None:
        """Display the status of the current run."""


def _run_label(config: Config) -> str:
    """Name a run by its method, the settings that differ from the method's defaults, and its seed."""
    settings = ", ".join(f"{name}={value}" for name, value in changed_method_params(config).items())
    return f"{config.method}{f' ({settings})' if settings else ''} seed {config.seed}"


class LogLines(RunProgress):
    """Prints lines for logs: one before the first run, at most one per tenth of a run, and one at the end of a run."""

    def __init__(self, folder_of: FolderOf) -> None:
        super().__init__(folder_of)
        self._tenth = 0
        self._printed_at = time.monotonic()
        self._announced = False

    def on_start(self, prepared: Prepared, state: RunState, rounds_ahead: int) -> None:
        if not self._announced:  # only the first run of a comparison is described
            self._announced = True
            notice(_describe(prepared))
        self._tenth = 10 * state.round // max(1, state.round + rounds_ahead)
        super().on_start(prepared, state, rounds_ahead)

    def show(self, status: RunStatus) -> None:
        tenth = 10 * status.round // max(1, status.total)
        printed_recently = time.monotonic() - self._printed_at < SECONDS_BETWEEN_LINES
        if tenth == self._tenth or (printed_recently and status.round < status.total):
            return
        self._tenth, self._printed_at = tenth, time.monotonic()
        notice(
            f"{status.label}:{status.stage_note} round {status.round}/{status.total}, "
            f"accuracy {100 * status.accuracy:.1f} %, best {100 * status.best:.1f} %, "
            + (f"worst class {status.worst}, " if status.worst else "")
            + f"{status.seconds_per_round:.2f} s per round"
            + (f", {status.time_left}" if status.time_left else "")
        )


def _describe(prepared: Prepared) -> str:
    """Describe a run in one line."""
    config, clients = prepared.config, prepared.federation.clients
    return (
        f"{config.method} on {config.data}, {clients} client{'s' * (clients != 1)}, {config.model}: "
        f"{config.rounds} round{'s' * (config.rounds != 1)}, "
        f"engine {config.engine}, {config.device}, {config.precision}"
    )


class ProgressBar(RunProgress):
    """Shows the progress of the current run in a terminal, and which of the runs it is."""

    def __init__(self, folder_of: FolderOf, runs: int, console: Console) -> None:
        super().__init__(folder_of)
        self._runs = runs
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

    def print_notice(self, line: str) -> None:
        self._console.print(line, style="dim", markup=False, soft_wrap=True)

    def show(self, status: RunStatus) -> None:
        count = f" ({self.finished + 1}/{self._runs})" if self._runs > 1 else ""
        self.display.update(
            self._task,
            description=status.label + count + status.stage_note,
            completed=status.round,
            total=status.total,
            numbers=f"{100 * status.accuracy:.1f} % best {100 * status.best:.1f} % "
            + (f"worst {status.worst} " if status.worst else "")
            + status.time_left,
        )


@contextmanager
def showing_runs(folder_of: FolderOf, runs: int, quiet: bool) -> Iterator[RunProgress]:
    """Show progress as a bar in a terminal and as lines in a log. Ctrl-C ends the program with one line."""
    console = stderr()
    progress: RunProgress
    if quiet:
        progress = RunProgress(folder_of)
    elif console.is_terminal:
        progress = ProgressBar(folder_of, runs, console)
    else:
        progress = LogLines(folder_of)
    try:
        if isinstance(progress, ProgressBar):
            with progress.display:
                yield progress
        else:
            yield progress
    except KeyboardInterrupt as interrupt:
        raise _stopped(_reached(progress, runs)) from interrupt


def _reached(progress: RunProgress, runs: int) -> str:
    """Say how far the runs came: which round the current run reached and, of several runs, how many are finished."""
    status, finished = progress.status, f"with {progress.finished} of {runs} runs finished"
    if status is not None and status.round:
        place = f"after round {status.round}"
        return place if runs == 1 else f"{finished} and {status.label} {place}"
    if runs > 1:
        return finished
    return "after the last round" if progress.finished else _NO_ROUND


def _stopped(where: str) -> typer.Exit:
    """Print where the command stopped, and return the exception that ends the program."""
    notice(f"stopped {where}; repeat the command to resume")
    return typer.Exit(INTERRUPTED)


class Observers(NamedTuple):
    """Where a run is shown or logged besides the terminal."""

    live: bool = False
    log: str | None = None
    """Names of tracking tools, comma-separated."""
    rank_by: str = DEFAULT_METRIC
    """The metric that decides which method is best."""


def run_one(prepared: Prepared, folder: Path, quiet: bool, observers: Observers) -> Result:
    """Run or resume one experiment. If it is finished, read its result."""
    _set_threads(prepared.config)
    _show_notes([prepared])
    with _callbacks(observers, lambda _: folder, [folder], quiet) as callbacks:
        return run_prepared(prepared, folder, callbacks)


def run_all(runs: Sequence[Prepared], out: Path, quiet: bool, observers: Observers | None = None) -> Comparison:
    """Run the experiments that are not finished yet, each in its folder under `out`."""

    def folder_of(prepared: Prepared) -> Path:
        return run_folder(out, prepared.config)

    _set_threads(runs[0].config)
    _show_notes(runs)
    folders = [folder_of(prepared) for prepared in runs]
    observers = observers or Observers()
    with _callbacks(observers, folder_of, folders, quiet) as callbacks:
        return compare_runs(run_comparison(runs, out, callbacks), rank_by=observers.rank_by)


def _show_notes(runs: Sequence[Prepared]) -> None:
    """Print the notes on how loading and the partition changed the data. Each note is printed once."""
    for note in dict.fromkeys(note for prepared in runs for note in prepared.federation.notes):
        notice(note)


def _set_threads(config: Config) -> None:
    if threads := default_threads(config):
        torch.set_num_threads(threads)


@contextmanager
def _callbacks(
    observers: Observers, folder_of: FolderOf, folders: Sequence[Path], quiet: bool
) -> Iterator[list[Callback]]:
    """Yield callbacks that show progress and log to trackers. Serve the live report, if requested, within the block."""
    trackers: list[Tracker] = []
    if observers.log is not None:
        from fedskew.tracking.choice import make_trackers

        trackers += make_trackers(observers.log, folder_of)
    shown = folders if observers.live else ()
    with _live_report(shown, observers.rank_by), showing_runs(folder_of, len(folders), quiet) as progress:
        yield [progress, *trackers]
        if trackers and trackers[0].skipped:
            progress.on_notice(_not_logged(trackers[0].skipped, len(folders)))


def _not_logged(skipped: int, runs: int) -> str:
    """Say that trackers got nothing from the runs that were finished before."""
    were = f"{skipped} of {runs} runs {'was' if skipped == 1 else 'were'}" if runs > 1 else "the run was"
    return f"{were} already finished, so --log wrote nothing about {'it' if skipped == 1 else 'them'}"


@contextmanager
def _live_report(folders: Sequence[Path], rank_by: str) -> Iterator[None]:
    if not folders:
        yield
        return
    from fedskew.live.process import live_page

    with ExitStack() as stack:
        try:
            url = stack.enter_context(live_page(folders, rank_by))
        except KeyboardInterrupt as interrupt:
            raise _stopped(_NO_ROUND) from interrupt
        notice(f"live report: {url}")
        yield


def print_comparison(comparison: Comparison, as_json: bool, format: str | None = None) -> None:
    """Print the tables and the verdict of a comparison, or the comparison as JSON, or one table in this format."""
    if as_json:
        print_json(comparison.to_json())
        return
    if format is not None:
        print(comparison.table(format), end="")
        return
    console = stdout()
    console.print(comparison_table(comparison))
    for line in conclusion(comparison):
        console.print(line, markup=False, highlight=False)
    if comparison.ranking:
        console.print(class_accuracy_table(comparison, console.width))
    folders = {folder.parent for run in comparison.runs if (folder := run.folder)}
    for folder in sorted(folders):
        command = f"fedskew report {quote(str(folder))}"
        console.print(f"runs saved in {folder}; for a report: {command}", markup=False, soft_wrap=True)
