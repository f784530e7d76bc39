"""Hooks that watch a run."""

from __future__ import annotations

from fedskew.experiment.preparation import Prepared
from fedskew.experiment.result import Result
from fedskew.experiment.round.state import RunState
from fedskew.experiment.storage.history import Row


class Callback:
    """Watches a run; every hook does nothing unless overridden."""

    def on_start(self, prepared: Prepared, state: RunState, rounds_ahead: int) -> None:
        """Before the first round, or before the first one after a resume."""

    def on_round(self, row: Row, rounds_ahead: int) -> None:
        """After each round."""

    def on_notice(self, line: str) -> None:
        """Something the user should know."""

    def on_end(self, result: Result) -> None:
        """After the last round."""
