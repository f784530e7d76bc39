"""A progress bar in the terminal, for runs that are started from Python, and lines in a log.

The command line has its own bar.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from fedskew.errors import plural
from fedskew.experiment.callbacks import Callback
from fedskew.experiment.preparation import Prepared
from fedskew.experiment.result import Result
from fedskew.experiment.round.record import RoundRow
from fedskew.experiment.round.state import RunState

SECONDS_BETWEEN_LINES = 15.0


class TerminalBar(Callback):
    """Shows the current run: its rounds, its accuracy and the time left."""

    def __init__(self, runs: int, display: Progress) -> None:
        self._runs, self._started, self._display = runs, 0, display
        self._task = display.add_task("preparing", total=1, accuracy="")

    def on_start(self, prepared: Prepared, state: RunState, rounds_ahead: int) -> None:
        self._started += 1
        count = f" ({self._started}/{self._runs})" if self._runs > 1 else ""
        label = f"{prepared.config.method} seed {prepared.config.seed}{count}"
        self._display.reset(
            self._task, description=label, total=state.round + rounds_ahead, completed=state.round, accuracy=""
        )

    def on_round(self, row: RoundRow, rounds_ahead: int) -> None:
        self._display.update(self._task, completed=row.round, total=row.round + rounds_ahead)
        if row.is_evaluated:
            self._display.update(self._task, accuracy=f"{100 * row.accuracy:.1f} %")

    def on_notice(self, line: str) -> None:
        self._display.console.print(line, style="dim", markup=False, soft_wrap=True)


class ProgressLines(Callback):
    """Prints the progress as lines where no bar can be drawn: at most one every 15 seconds, and one at each run's end.

    Notices are printed at once.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._run, self._accuracy, self._printed_at = "", "", 0.0

    def on_start(self, prepared: Prepared, state: RunState, rounds_ahead: int) -> None:  # noqa: ARG002
        self._run = f"{prepared.config.method} seed {prepared.config.seed}"
        self._accuracy, self._printed_at = "", time.monotonic()

    def on_round(self, row: RoundRow, rounds_ahead: int) -> None:
        if row.is_evaluated:
            self._accuracy = f", accuracy {100 * row.accuracy:.1f} %"
        if rounds_ahead and time.monotonic() - self._printed_at >= SECONDS_BETWEEN_LINES:
            self._printed_at = time.monotonic()
            self.on_notice(f"{self._run}: round {row.round} of {row.round + rounds_ahead}{self._accuracy}")

    def on_notice(self, line: str) -> None:
        self._console.print(line, markup=False, soft_wrap=True)

    def on_end(self, result: Result) -> None:
        rounds = plural(result.rounds, "round")
        self.on_notice(f"{result.method} seed {result.seed}: {rounds}, accuracy {100 * result.accuracy:.1f} %")


@contextmanager
def terminal_bar(runs: int, console: Console | None = None) -> Iterator[TerminalBar | ProgressLines]:
    """Show the bar on standard error inside the `with` block, and remove it afterwards. In a log, print lines."""
    console = console or Console(stderr=True, highlight=False)
    if not console.is_terminal or console.is_dumb_terminal:
        yield ProgressLines(console)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        TextColumn("{task.completed:.0f}/{task.total:.0f} {task.fields[accuracy]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as display:
        yield TerminalBar(runs, display)
