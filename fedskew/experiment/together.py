"""Several runs in lockstep: the clients of a round of all of them are trained as one stack.

A run does not know: it gives its round's work and is sent what came of it (`run.rounds_of`). Runs are joined round by
round, wherever their rounds allow it, and go on one after another where they do not; one that ends or fails leaves the
others to go on.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from fedskew.engine import RoundResult, StackedEngine, joinable, joint_work, shared_out
from fedskew.experiment.result import Result
from fedskew.experiment.round.phases import RoundInProgress
from fedskew.experiment.round.server import Server
from fedskew.experiment.run import Rounds

Trained = tuple[RoundResult, float]
Ended = Result | Exception


@dataclass(eq=False)
class _Run:
    place: int
    server: Server
    rounds: Rounds
    under_way: RoundInProgress | None = None
    apart: bool = False
    """Whether training it with others went wrong."""

    @property
    def now(self) -> RoundInProgress:
        assert self.under_way is not None
        return self.under_way

    @property
    def stacks(self) -> bool:
        """Whether others may join its round, as far as the engine goes; that of a later stage may be its own."""
        engine = self.now.engine
        return isinstance(engine, StackedEngine) and engine is self.server.engine and not self.apart


def run_together(runs: Sequence[tuple[Server, Rounds]]) -> Iterator[tuple[int, Ended]]:
    """The runs' results or errors, each with its place, in the order of their ends.

    One leads, to its end, with all whose rounds fit its own at the time: the others wait, for an engine that went from
    one kind of round to another and back, as with PKD's runs of other groups, would make its programs anew each time.
    The furthest behind is the first.
    """
    live = [_Run(place, server, rounds) for place, (server, rounds) in enumerate(runs)]
    try:
        for run in list(live):
            yield from _ended(run, live, None)
        while live:
            leader = min(live, key=lambda run: run.now.state.round)
            while leader in live:
                yield from _advanced([run for run in live if run is leader or _fit(leader, run)], live)
    except BaseException as error:  # such as ^C: their folders are left as they should be
        for run in live:
            _throw(run, error)
        raise


def _advanced(group: Sequence[_Run], live: list[_Run]) -> Iterator[tuple[int, Ended]]:
    """Take a group through one round, of which nothing is held afterwards: the next one needs its memory."""
    for run, trained in _in_turn(list(zip(group, _trained(group), strict=True))):
        yield from _ended(run, live, trained)


def _ended(run: _Run, live: list[_Run], sent: Trained | Exception | None) -> Iterator[tuple[int, Ended]]:
    """Take a run to the next round that it wants trained; if it comes to an end instead, its end."""
    try:
        if isinstance(sent, Exception):
            run.under_way = run.rounds.throw(sent)
        else:
            run.under_way = next(run.rounds) if sent is None else run.rounds.send(sent)
    except StopIteration as end:
        live.remove(run)
        yield run.place, end.value
    except Exception as error:
        live.remove(run)
        yield run.place, error


def _in_turn(served: list[tuple[_Run, Trained | Exception]]) -> list[tuple[_Run, Trained | Exception]]:
    """Another one first each round: a device may still train, and who asks first for what came of it waits for all."""
    first = served[0][0].now.state.round % len(served)
    return served[first:] + served[:first]


def _throw(run: _Run, error: BaseException) -> None:
    try:
        run.rounds.throw(error)
    except BaseException as same:
        if same is not error:
            error.add_note(f"and then: {same!r}")


def _fit(one: _Run, other: _Run) -> bool:
    both_stack = one.stacks and other.stacks and one.now.engine is other.now.engine
    return both_stack and joinable(one.now.work, other.now.work)


def _trained(group: Sequence[_Run]) -> list[Trained | Exception]:
    """What came of each run's round; where training them together fails, each is trained by itself: once if one of them
    was the cause, which then shows, and else from now on.

    A run that is left alone stays in the form of several, for which programs are there.
    """
    if not group[0].stacks:
        return [_trained_alone(run) for run in group]
    try:
        return list(_trained_as_one(group))
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    alone = [_trained_alone(run) for run in group]
    if not any(isinstance(trained, Exception) for trained in alone):
        for run in group:
            run.apart = True
        group[0].now.engine.notices.append(f"runs cannot be trained as one, so each is by itself: {reason}")
    return alone


def _trained_as_one(group: Sequence[_Run]) -> list[Trained]:
    works, first = [run.now.work for run in group], group[0]
    began = time.perf_counter()
    result = first.server.train(replace(first.now, work=joint_work(works)))
    return _seconds_shared(shared_out(result, works), time.perf_counter() - began)


def _seconds_shared(results: Sequence[RoundResult], seconds: float) -> list[Trained]:
    """To each run its part of the time, by the samples that its clients visited."""
    visits = np.array([result.visits.sum() for result in results], dtype=np.float64) + 1e-9
    return list(zip(results, (seconds * visits / visits.sum()).tolist(), strict=True))


def _trained_alone(run: _Run) -> Trained | Exception:
    began = time.perf_counter()
    try:
        result = run.server.train(run.now)
    except Exception as error:
        return error
    return result, time.perf_counter() - began
