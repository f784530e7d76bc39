"""A round from its beginning to its row: what is known of it at each point.

`begin` makes a `RoundInProgress`, training and `launch` a `LaunchedRound`, `settle` a `SettledRound`, whose row can be
read when its test is done. In between a device works on while the host does something else.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fedskew.data.federation import Federation
from fedskew.engine import Engine, LocalTraining, RoundResult, RoundWork
from fedskew.experiment.round.report import AskedReport
from fedskew.experiment.round.row import RoundRow
from fedskew.experiment.round.sampler import Participants
from fedskew.experiment.round.state import RunState, Trainee
from fedskew.experiment.round.workbench import Workbench
from fedskew.methods import Part, Stage

ReadTest = Callable[[], dict[str, Any]]
"""Waits for a test and returns the fields of `RoundRow` that it fills."""


@dataclass(frozen=True)
class Round:
    """One round in the making."""

    stage: Stage
    parts: tuple[Part, ...]
    """Those of the stage, one by one."""
    trainee: Trainee
    participants: Participants
    local: LocalTraining
    bench: Workbench

    @property
    def clients(self) -> npt.NDArray[np.int64]:
        return self.participants.clients

    @property
    def federation(self) -> Federation:
        return self.participants.federation


@dataclass(frozen=True)
class RoundInProgress:
    """A round whose clients are to be trained."""

    state: RunState
    """Before the round."""
    this: Round
    work: RoundWork
    seconds: float
    """What making it ready took."""

    @property
    def engine(self) -> Engine:
        """What trains the clients unless the caller has something better."""
        return self.this.bench.engine


@dataclass(frozen=True)
class Guess:
    """What a round comes to if all its numbers are finite, as nearly always: made before the host knows."""

    trainee: Trainee
    after: RunState | None
    """The state after the round; None if something must be fetched from the device for it."""

    @property
    def tensors(self) -> list[torch.Tensor]:
        return made_by(self.trainee)


def made_by(trainee: Trainee) -> list[torch.Tensor]:
    """What a server's step makes."""
    return [*trainee.model.params.values(), *trainee.server.values()]


@dataclass(frozen=True)
class LaunchedRound:
    """A round that the device is given to its end, as far as that can be guessed."""

    under_way: RoundInProgress
    result: RoundResult
    report: AskedReport
    guess: Guess | None
    test: ReadTest | None
    """Of the guess."""
    began: float
    """When its training did, by the clock that `seconds` are counted with."""


@dataclass(frozen=True)
class SettledRound:
    """A round of which all is decided, though perhaps not yet known what the test says."""

    state: RunState
    """After the round."""
    known: RoundRow
    test: ReadTest | None
    times: dict[str, float]

    def row(self) -> RoundRow:
        """What is recorded, as soon as it is known."""
        began = time.perf_counter()
        told = {} if self.test is None else self.test()
        waited = time.perf_counter() - began
        return replace(self.known, **told, time={**self.times, "evaluate": self.times["evaluate"] + waited})
