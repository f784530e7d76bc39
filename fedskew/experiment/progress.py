"""The progress of runs that are started from Python: bars and a live curve in a notebook, a bar in a terminal.

Elsewhere, such as in a log, progress is shown only on request, as lines.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from html import escape

from fedskew.errors import UserError
from fedskew.experiment.callbacks import Callback
from fedskew.experiment.preparation import Prepared
from fedskew.experiment.result import Result
from fedskew.experiment.round.record import RoundRow
from fedskew.experiment.round.state import RunState
from fedskew.notebook import OutputArea, bar, curves, in_notebook

MAX_LISTED = 6
"""Rows of a notebook's table of runs. Earlier runs are only counted."""
MAX_CURVES = 24
"""Runs in a notebook's plot. More curves would be hard to tell apart."""


@contextmanager
def showing_progress(progress: bool | None, runs: int = 1) -> Iterator[list[Callback]]:
    """Yield a list with a callback that shows the progress of `runs` runs, or an empty list.

    By default (None), progress is shown in a notebook, or if standard error is a terminal. True always shows it, and
    False never.
    """
    if progress is not None and not isinstance(progress, bool):
        raise UserError(f"progress is {progress!r}; expected True, False or None")
    if progress is not False and in_notebook():
        shown = NotebookProgress(runs)
        yield [shown]
        shown.show()
    elif progress or (progress is None and sys.stderr.isatty()):
        from fedskew.experiment.terminal_bar import terminal_bar

        with terminal_bar(runs) as bar_callback:
            yield [bar_callback]
    else:
        yield []


@dataclass
class RunLine:
    """One run in a notebook's table."""

    method: str
    seed: int
    round: int = 0
    total: int = 0
    seconds: float = 0.0
    curve: list[tuple[float, float]] = field(default_factory=list)
    """(Round, accuracy in percent) of the global model. Rounds in which another model was trained are not counted."""
    is_ended: bool = False
    """Whether the run is finished, or was stopped by a callback."""

    def update(self, row: RoundRow, rounds_ahead: int) -> None:
        self.round, self.total = row.round, row.round + rounds_ahead
        self.seconds += row.seconds
        if row.is_evaluated:
            self.curve.append((row.model_round, 100 * row.accuracy))

    def cells(self) -> list[str]:
        accuracy = f"{self.curve[-1][1]:.1f} %" if self.curve else ""
        ahead = 0 if self.is_ended else self.total - self.round
        time = f"{self.seconds / self.round * ahead:.0f} s left" if self.round and ahead else f"{self.seconds:.1f} s"
        label = escape(f"{self.method}, seed {self.seed}")
        return [label, bar(self.round, self.total), f"{self.round}/{self.total}", accuracy, time]


class NotebookProgress(Callback):
    """Shows a bar per run and the accuracy over the rounds, in the output of a cell."""

    def __init__(self, runs: int = 1) -> None:
        self._runs = runs
        self._lines: list[RunLine] = []
        self._notices: list[str] = []
        self._area = OutputArea()

    def on_start(self, prepared: Prepared, state: RunState, rounds_ahead: int) -> None:
        config = prepared.config
        self._lines.append(RunLine(config.method, config.seed, state.round, state.round + rounds_ahead))
        self.show()

    def on_resume(self, rows: Sequence[RoundRow]) -> None:
        for row in rows:
            self._lines[-1].update(row, self._lines[-1].total - row.round)
        self.show()

    def on_round(self, row: RoundRow, rounds_ahead: int) -> None:
        self._lines[-1].update(row, rounds_ahead)
        if self._area.is_due():
            self.show()

    def on_notice(self, line: str) -> None:
        if line not in self._notices:  # the runs of a comparison often give the same notices
            self._notices.append(line)

    def on_end(self, result: Result) -> None:  # noqa: ARG002
        if self._lines:
            self._lines[-1].is_ended = True
            self.show()

    def show(self) -> None:
        """Redraw the output."""
        self._area.show(self.html())

    def html(self) -> str:
        """Return the runs as a table, and their curves."""
        listed = self._lines[-MAX_LISTED:]
        hidden = len(self._lines) - len(listed)
        rows = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in line.cells()) + "</tr>" for line in listed)
        count = f"<div>run {len(self._lines)} of {self._runs}</div>" if self._runs > 1 else ""
        runs_are = "run is" if hidden == 1 else "runs are"
        earlier = f"<div>{hidden} earlier {runs_are} finished</div>" if hidden else ""
        by_method: dict[str, list[list[tuple[float, float]]]] = {}
        for line in self._lines[-MAX_CURVES:]:
            by_method.setdefault(line.method, []).append(line.curve)
        notices = "".join(f"<div>{escape(line)}</div>" for line in self._notices)
        return f"{count}{earlier}<table>{rows}</table>{curves(by_method)}{notices}"
