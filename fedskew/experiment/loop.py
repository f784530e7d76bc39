"""The rounds of a run, one after another; a device that works by itself is never kept waiting for the host.

Where it does, a round's training, aggregation and test are given to it in one go. While it trains, the host records the
round before and makes the round after ready; while it tests, the host gives it that next round. So a row is complete,
and recorded, when the next round is under way, or when there is none; rows stay in order, and each is recorded once.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Generator
from dataclasses import replace
from typing import NamedTuple

from fedskew.engine import Fetch, RoundResult
from fedskew.experiment.round.phases import RoundInProgress, SettledRound
from fedskew.experiment.round.row import RoundRow
from fedskew.experiment.round.server import Server
from fedskew.experiment.round.state import RunState

_SHORT = 1.0
"""Seconds of a round up to which waiting for its test counts; the row of a longer one is not held back."""


class RoundDone(NamedTuple):
    """A round with its row."""

    state: RunState
    """After it."""
    row: RoundRow
    secured: Fetch | None
    """What was to be fetched of the state."""


class _Unread(NamedTuple):
    """A round whose test is not read yet."""

    settled: SettledRound
    secured: Fetch | None
    seconds: float


Rounds = Generator[RoundInProgress, tuple[RoundResult, float], RunState]
"""Gives the work of each round, is sent what came of it and the seconds that were spent on it, and returns the state
after the last."""


class RoundLoop:
    """The rounds of one run."""

    def __init__(
        self,
        server: Server,
        record: Callable[[RoundDone], None],
        secure: Callable[[RunState], Fetch | None] = lambda _: None,
    ) -> None:
        """`record` takes each round in order; `secure` says, when a round is settled, what of its state to fetch."""
        self._server, self._record, self._secure = server, record, secure
        self._ahead: RoundInProgress | None = None
        self._unread: _Unread | None = None
        self._seconds = math.inf
        """Of the last round."""

    def rounds(self, state: RunState) -> Rounds:
        """All rounds that are left; whatever ends them, what was computed is recorded first."""
        try:
            while self._server.stage(state) is not None:
                under_way = self._next(state)
                state = self._finished(under_way, *(yield under_way))  # by no name: the next round needs its memory
        except BaseException:
            with contextlib.suppress(Exception):  # what went wrong first is what the user must know
                self._read()
            raise
        self._read()
        return state

    def _next(self, state: RunState) -> RoundInProgress:
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead.state is state:  # the guess was right
            return ahead
        return self._server.begin(state)

    def _finished(self, under_way: RoundInProgress, result: RoundResult, seconds: float) -> RunState:
        """The state after a round, whose row is recorded now or later."""
        began = time.perf_counter() - under_way.seconds - seconds
        if not self._server.overlaps:
            state, row = self._server.finish(under_way, result, seconds)
            row = replace(row, seconds=time.perf_counter() - began)
            self._record(RoundDone(state, row, self._secure(state)))
            return state
        launched = self._server.launch(under_way, result, seconds)
        self._read(beside=True)
        short = self._seconds <= _SHORT
        if short:
            self._ahead = self._server.foresee(launched)
        settled = self._server.settle(launched)
        secured, self._seconds = self._secure(settled.state), time.perf_counter() - began
        self._unread = _Unread(settled, secured, self._seconds)
        if not short:
            self._read()
        return settled.state

    def _read(self, beside: bool = False) -> None:
        """Complete and record the round whose test was left to the device; what that takes `beside` the next round is
        part of the next one's time."""
        if self._unread is None:
            return
        settled, secured, seconds = self._unread
        began = time.perf_counter()
        row = settled.row()
        waited = 0.0 if beside else time.perf_counter() - began
        self._unread = None  # not before: who interrupts the waiting finds the round there, to be read again
        self._record(RoundDone(settled.state, replace(row, seconds=seconds + waited), secured))
