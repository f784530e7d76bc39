"""A progress bar in the terminal, for runs that are started from Python. The command line has its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from fedskew.experiment.callbacks import Callback
from fedskew.experiment.preparation import Prepared
from fedskew.experiment.round.record import RoundRow
from fedskew.experiment.round.state import RunState


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


@contextmanager
def terminal_bar(runs: int, console: Console | None = None) -> Iterator[TerminalBar]:
    """Show the bar on standard error inside the `with` block, and remove it afterwards."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        TextColumn("{task.completed:.0f}/{task.total:.0f} {task.fields[accuracy]}"),
        TimeRemainingColumn(),
    )
    console = console or Console(stderr=True, highlight=False)
    with Progress(*columns, console=console, transient=True) as display:
        yield TerminalBar(runs, display)
