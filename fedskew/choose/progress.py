"""Show the progress of a race: a live table in a notebook or a terminal, and lines elsewhere if requested."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from html import escape

from rich.console import Console
from rich.live import Live
from rich.table import Table

from fedskew.choose.race import scored_rounds
from fedskew.choose.trial import Trial, TrialResult
from fedskew.choose.trials import RaceWatcher
from fedskew.display import html_table
from fedskew.errors import UserError
from fedskew.experiment.config import Config
from fedskew.notebook import OutputArea, bar, in_notebook
from fedskew.report.race import MAX_ROWS, mean_lead, standings_table
from fedskew.results.race import RaceRecord, Standing, repeats

SECONDS_BETWEEN_LINES = 15.0
_MAX_LISTED = 3
"""The maximum number of candidates in a line of a log."""


class RaceProgress(RaceWatcher):
    """Tracks the trials of a rung, or of the final: their rounds and their scores."""

    def __init__(self, config: Config, rank_by: str) -> None:
        self._config, self._rank_by = config, rank_by
        self.repeats = repeats(config.to_mapping())
        self._start = time.monotonic()
        self.heading, self.trials_to_run, self.done = "", 0, 0
        self._running: dict[str, int] = {}
        """The last round that each running trial has finished, by the trial's key."""
        self._scores: dict[str, tuple[Trial, dict[int, float]]] = {}
        """By the key of a candidate: one of its trials, and its scores by seed."""

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._start

    @property
    def standings(self) -> list[Standing]:
        """The candidates of this rung with a result, the best first."""
        found = [
            Standing(t.candidate.method, t.candidate.label, t.candidate.lr, t.candidate.params, dict(scores), True)
            for t, scores in list(self._scores.values())  # a copy: another thread draws the live table
        ]
        return sorted(found, key=lambda standing: -standing.mean)

    def on_notice(self, line: str) -> None:
        _notice(line)

    def on_trials(self, heading: str, trials: Sequence[Trial]) -> None:
        self.heading, self.trials_to_run, self.done = heading, len(trials), 0
        self._scores, self._running = {}, {}
        self.show()

    def on_round(self, trial: Trial, round: int) -> None:
        self._running[trial.key] = round
        self.show()

    def on_trial(self, trial: Trial, measured: TrialResult | None) -> None:
        self.done += 1
        self._running.pop(trial.key, None)
        if measured is not None:
            self._keep_score(trial, measured)
        self.show()

    def on_known_trial(self, trial: Trial, measured: TrialResult) -> None:
        self._keep_score(trial, measured)

    def _keep_score(self, trial: Trial, measured: TrialResult) -> None:
        last = scored_rounds(self._config, trial.until)
        _, scores = self._scores.setdefault(trial.candidate.key, (trial, {}))
        scores[trial.seed] = measured.score(self._rank_by, trial.until, last)

    def describe(self) -> str:
        """Return the progress of the rung in one line."""
        rounds = ", ".join(map(str, list(self._running.values())))
        running = f", running trials at round {rounds}" if rounds else ""
        return f"{self.seconds:.0f} s, {self.heading}: {self.done} of {self.trials_to_run} trials done{running}"

    def show(self) -> None:
        """Show the current state."""


class _Lines(RaceProgress):
    """Prints a line when a rung begins, then one at most every 15 seconds, and the best candidates when it ends."""

    def __init__(self, config: Config, rank_by: str) -> None:
        super().__init__(config, rank_by)
        self._printed_at = 0.0

    def on_trials(self, heading: str, trials: Sequence[Trial]) -> None:
        self._printed_at = 0.0
        super().on_trials(heading, trials)

    def show(self) -> None:
        if self.trials_to_run and time.monotonic() - self._printed_at > SECONDS_BETWEEN_LINES:
            self._printed_at = time.monotonic()
            _notice(self.describe())

    def on_standings(self, race: RaceRecord) -> None:
        standings = race.rungs[-1].standings
        baseline = next(s for s in standings if s.method == "fedavg")
        best = ", ".join(_score(standing, baseline) for standing in standings[:_MAX_LISTED])
        _notice(f"best after round {race.rungs[-1].rounds}: {best}; fedavg {100 * baseline.mean:.1f} %")


def _score(standing: Standing, baseline: Standing) -> str:
    lead = mean_lead(standing, baseline)
    score = f"{standing.label} at lr {standing.lr:g}: {100 * standing.mean:.1f} %"
    return f"{score} ({lead})" if lead else score


class _Table(RaceProgress):
    """Shows the best candidates of the rung in a terminal, as results come in."""

    def __init__(self, config: Config, rank_by: str, console: Console) -> None:
        super().__init__(config, rank_by)
        self.display = Live(console=console, transient=True, get_renderable=self._table, refresh_per_second=2)

    def on_notice(self, line: str) -> None:
        self.display.console.print(line, style="dim", markup=False, soft_wrap=True)

    def _table(self) -> Table:
        return standings_table(self.describe(), self.standings, self.repeats)


class NotebookRace(RaceProgress):
    """Shows the best candidates of the rung in a notebook, as results come in."""

    def __init__(self, config: Config, rank_by: str) -> None:
        super().__init__(config, rank_by)
        self._area = OutputArea()
        self._notices: list[str] = []

    def on_notice(self, line: str) -> None:
        self._notices.append(line)

    def show(self) -> None:
        if self._area.is_due():
            self.show_now()

    def show_now(self) -> None:
        """Redraw the output now, even if `show` has just drawn it."""
        self._area.show(self.html())

    def html(self) -> str:
        """Return the state of the race and its best candidates."""
        standings = self.standings[:MAX_ROWS]
        records = [
            {
                "method": s.label,
                "learning rate": s.lr,
                self.repeats.many: len(s.scores),
                "mean %": f"{100 * s.mean:.1f}",
            }
            for s in standings
        ]
        notices = "".join(f"<div>{escape(line)}</div>" for line in self._notices)
        table = html_table(records) if records else ""
        return f"{bar(self.done, self.trials_to_run)}<div>{escape(self.describe())}</div>{table}{notices}"


@contextmanager
def showing_race(progress: bool | None, config: Config, rank_by: str) -> Iterator[RaceWatcher]:
    """Yield a watcher that shows a race.

    None shows the race in a notebook, or if standard error is a terminal. True always shows it, and False never.
    """
    if progress is not None and not isinstance(progress, bool):
        raise UserError(f"progress is {progress!r}; expected True, False or None")
    console = _stderr()
    if progress is not False and in_notebook():
        shown = NotebookRace(config, rank_by)
        yield shown
        shown.show_now()
    elif progress is not False and console.is_terminal:
        table = _Table(config, rank_by, console)
        with table.display:
            yield table
    elif progress:
        yield _Lines(config, rank_by)
    else:
        yield RaceWatcher()


def _stderr() -> Console:
    return Console(stderr=True, highlight=False)


def _notice(line: str) -> None:
    """Print one line on standard error."""
    _stderr().print(line, style="dim", markup=False, soft_wrap=True)
