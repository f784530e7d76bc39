"""A run's way through the stages of its method: which is next, and what is concluded where one ends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from fedskew.experiment.config import Config
from fedskew.experiment.round.state import RunState
from fedskew.methods import Method, Stage, Survey

Ask = Callable[[Stage, RunState], Survey]
"""Has the clients tell what a stage that ends asks them."""


class RunStages:
    """The stages of one run."""

    def __init__(self, method: Method, config: Config) -> None:
        self._method, self._config = method, config

    def known(self, state: RunState) -> list[Stage]:
        """The stages known so far."""
        return self._method.stages(self._config.rounds, self._config.local_epochs, state.notes)

    def next(self, state: RunState) -> Stage | None:
        """The stage that the next round belongs to; None at the end."""
        stages = self.known(state)
        return stages[state.stage] if state.stage < len(stages) else None

    def rounds_ahead(self, state: RunState) -> int:
        """Rounds still to come, as far as the stages are known."""
        return sum(stage.rounds for stage in self.known(state)[state.stage :]) - state.stage_round

    def past_empty(self, state: RunState, ask: Ask) -> RunState:
        """The state at the next round that there is, with what the stages that end before it taught."""
        state = replace(state, survey=None)
        while (stage := self.next(state)) is not None and state.stage_round >= stage.rounds:
            if stage.survey:
                told = ask(stage, state)
                state = replace(state, notes={**state.notes, **self._method.conclude(stage, told)}, survey=told)
            state = replace(state, stage=state.stage + 1, stage_round=0)
        return state
