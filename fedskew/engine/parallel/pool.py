"""The pool engine: a round's clients shared out to worker processes of one thread each.

On a CPU, the layers of small networks gain little from a second thread, but two clients at a time gain almost twofold.
Workers are forked when they are first needed, so that network, data and method are simply there, and stay for the next
rounds; models and results travel through shared memory (`messages`). With `plain` inside, a client's numbers are those
of the plain engine with one thread, bit for bit, whichever worker it falls to.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import warnings
import weakref
from collections.abc import Sequence

from fedskew.engine.contract import Engine, RoundResult, RoundWork
from fedskew.engine.parallel.messages import Facts, Parcel, receive
from fedskew.engine.parallel.pool_worker import live
from fedskew.engine.parallel.round_messages import result_of, work_facts, work_tensors
from fedskew.engine.parallel.shares import Share, balanced_shares, joined, local_steps
from fedskew.engine.same_parts import same_parts
from fedskew.errors import UserError
from fedskew.methods.parts import Part, Tensors

Reply = tuple[Facts, Tensors]


def usable_cores() -> int:
    """How many processes may compute at a time: the cores that this one may use, but no more than OMP_NUM_THREADS."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else 1
    limit = os.environ.get("OMP_NUM_THREADS", "")
    return min(cores, int(limit)) if limit.isdecimal() and int(limit) else cores


class PoolEngine(Engine):
    """Trains as many clients at a time as there are workers, each with an engine of its own."""

    def __init__(self, inner: Engine, workers: int | None = None) -> None:
        """Each worker has a copy of the `inner` engine, which itself never trains."""
        self._engine = inner
        self.name = "pool" if inner.name == "plain" else f"pool-{inner.name}"
        self.notices: list[str] = []
        self._said: set[str] = set()
        self._most = workers or usable_cores()
        self._parts: tuple[Part, ...] = ()
        self._workers: list[_Worker] = []
        weakref.finalize(self, _end, self._workers, os.getpid())

    def train(self, work: RoundWork) -> RoundResult:
        shares = balanced_shares(local_steps(work), self._most)
        self._hire(work.parts, len(shares))
        parcel = Parcel(work_tensors(work))
        try:
            return joined(self._results(parcel, work_facts(work), shares), shares)
        except BaseException:
            self.close()  # what the others still train is of no use
            raise
        finally:
            parcel.close()

    def close(self) -> None:
        """End the workers; the next round forks new ones."""
        _end(self._workers, os.getpid())

    def _hire(self, parts: Sequence[Part], number: int) -> None:
        """Workers that know these parts, and as many as are needed."""
        if not same_parts(parts, self._parts):
            self.close()
            self._parts = tuple(parts)
        while len(self._workers) < number:
            self._workers.append(_Worker(self._engine, self._parts))

    def _results(self, parcel: Parcel, facts: Facts, shares: Sequence[Share]) -> list[RoundResult]:
        for worker, share in zip(self._workers, shares, strict=False):
            worker.send(parcel, facts | {"share": share})
        return [self._result(place, parcel, facts | {"share": share}) for place, share in enumerate(shares)]

    def _result(self, place: int, parcel: Parcel, facts: Facts) -> RoundResult:
        """What a worker has trained; one that died is replaced once."""
        reply = self._workers[place].reply()
        if reply is None:
            self._workers[place].end()
            self._workers[place] = _Worker(self._engine, self._parts)
            self._workers[place].send(parcel, facts)
            reply = self._workers[place].reply()
        if reply is None:
            how = self._workers[place].end()
            raise UserError(
                f"a worker process of engine {self.name!r} died twice ({how}), perhaps for want of memory; "
                "expected it to live: choose --engine plain or stacked"
            )
        about, tensors = reply
        fresh = [line for line in about.get("notices", ()) if line not in self._said]  # every worker says its own
        self.notices += fresh
        self._said.update(fresh)
        if "refused" in about:
            raise UserError(about["refused"])
        if "failed" in about:
            raise RuntimeError(f"a worker process failed:\n{about['failed']}")
        return result_of(tensors)


class _Worker:
    """The parent's side of one forked process."""

    def __init__(self, engine: Engine, parts: tuple[Part, ...]) -> None:
        self._connection, far_end = socket.socketpair()
        # A Ctrl-C at this moment must not make the child run what its parent does then, such as ending the workers.
        unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            with warnings.catch_warnings():
                # Python warns of threads beside the one that forks: the child needs none of them, nor their locks.
                warnings.simplefilter("ignore", DeprecationWarning)
                self.process = os.fork()
            if self.process == 0:
                self._connection.close()
                live(far_end, engine, parts)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
        far_end.close()
        self._how = ""

    def send(self, parcel: Parcel, facts: Facts) -> None:
        """That a worker is dead shows when its reply is asked for."""
        try:
            parcel.send(self._connection, facts)
        except ConnectionError:
            return

    def reply(self) -> Reply | None:
        """Wait for it; None if the worker died."""
        return receive(self._connection)

    def end(self) -> str:
        """Leave no process behind, whatever happened; in words, how it ended."""
        if self._how:
            return self._how
        self._connection.close()
        try:
            os.kill(self.process, signal.SIGKILL)
            status = os.waitpid(self.process, 0)[1]
        except (ProcessLookupError, ChildProcessError):
            self._how = "ended by another"
            return self._how
        code = os.waitstatus_to_exitcode(status)
        self._how = f"signal {-code}" if code < 0 else f"exit status {code}"
        return self._how


def _end(workers: list[_Worker], owner: int) -> None:
    """A forked copy of the engine does not own the workers."""
    if os.getpid() == owner:
        while workers:
            workers.pop().end()
