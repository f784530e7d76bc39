"""Show a race on the command line. Ctrl-C ends the program with one line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer

from fedskew.choose.progress import showing_race
from fedskew.choose.trials import RaceWatcher
from fedskew.cli.commands import INTERRUPTED
from fedskew.cli.terminal import notice
from fedskew.experiment.config import Config


class QuietRace(RaceWatcher):
    """Prints only notices."""

    def on_notice(self, line: str) -> None:
        notice(line)


@contextmanager
def racing(config: Config, rank_by: str, quiet: bool) -> Iterator[RaceWatcher]:
    """Yield a watcher that shows the race on stderr, or only its notices if `quiet`."""
    try:
        if quiet:
            yield QuietRace()
        else:
            with showing_race(True, config, rank_by) as watcher:
                yield watcher
    except KeyboardInterrupt as interrupt:
        notice("stopped; repeat the command to continue the race")
        raise typer.Exit(INTERRUPTED) from interrupt
