"""The pool engine: single-threaded worker processes share a round's clients.

On a CPU, small networks gain little from a second thread. Two processes, each with its own clients, are almost twice as
fast as one. Workers are started when they are first needed, and they stay for the next rounds.

On Linux, workers are forked and inherit network, data and method. Models and results are sent through shared memory
(`messages`). Elsewhere, workers are spawned (`spawned_worker`).

If the workers use the plain engine, a client's result does not depend on the worker. It has the same bits as with the
plain engine and one thread.
"""

from __future__ import annotations

import os
import signal
import socket
import weakref
from collections.abc import Sequence
from typing import Any

from fedskew.engine.contract import Engine, RoundResult, RoundWork, same_parts
from fedskew.engine.parallel.messages import Facts, Parcel, PortableParcel, receive
from fedskew.engine.parallel.pool_worker import serve
from fedskew.engine.parallel.round_messages import unpack_result, work_facts, work_tensors
from fedskew.engine.parallel.shares import Share, balanced_shares, client_costs, join_results, require_same_form
from fedskew.engine.parallel.spawned_worker import SpawnedWorker
from fedskew.errors import UserError
from fedskew.methods.parts import Part, Tensors
from fedskew.platforms import CAN_FORK, fork, kill, usable_cores

Reply = tuple[Facts, Tensors]


class PoolEngine(Engine):
    """Trains a share of the round's clients in each worker process."""

    def __init__(self, inner: Engine, workers: int | None = None, can_fork: bool = CAN_FORK) -> None:
        """Each worker has a copy of the `inner` engine. The original never trains."""
        self._engine = inner
        self._parcel_class: type[Parcel] | type[PortableParcel] = Parcel if can_fork else PortableParcel
        self._worker_class: type[_ForkedWorker] | type[SpawnedWorker] = _ForkedWorker if can_fork else SpawnedWorker
        self.name = "pool" if inner.name == "plain" else f"pool-{inner.name}"
        self.notices: list[str] = []
        self._noticed: set[str] = set()
        self._max_workers = workers or usable_cores()
        self._parts: tuple[Part, ...] = ()
        self._workers: list[Any] = []
        """The parent's side of each worker, an object of `_worker_class`."""
        weakref.finalize(self, _end_workers, self._workers, os.getpid())

    def train(self, work: RoundWork) -> RoundResult:
        shares = balanced_shares(client_costs(work), self._max_workers)
        self._ensure_workers(work.parts, len(shares))
        parcel = self._parcel_class(work_tensors(work))
        try:
            results = self._results(parcel, work_facts(work), shares)
            require_same_form(work, results, shares)
            return join_results(results, shares)
        except BaseException:
            self.close()  # the other workers' results are no longer needed
            raise
        finally:
            parcel.close()

    def close(self) -> None:
        """End the workers. The next round starts new ones."""
        _end_workers(self._workers, os.getpid())

    def _ensure_workers(self, parts: Sequence[Part], number: int) -> None:
        """End the workers if the method's parts have changed. Start workers until there are `number` of them."""
        if not same_parts(parts, self._parts):
            self.close()
            self._parts = tuple(parts)
        while len(self._workers) < number:
            self._workers.append(self._worker_class(self._engine, self._parts))

    def _results(self, parcel: Parcel | PortableParcel, facts: Facts, shares: Sequence[Share]) -> list[RoundResult]:
        for worker, share in zip(self._workers, shares, strict=False):
            worker.send(parcel, facts | {"share": share})
        return [self._result(place, parcel, facts | {"share": share}) for place, share in enumerate(shares)]

    def _result(self, place: int, parcel: Parcel | PortableParcel, facts: Facts) -> RoundResult:
        """Return the result of a worker. If the worker died, replace it once and send the work again."""
        reply = self._workers[place].reply()
        if reply is None:
            self._workers[place].end()
            self._workers[place] = self._worker_class(self._engine, self._parts)
            self._workers[place].send(parcel, facts)
            reply = self._workers[place].reply()
        if reply is None:
            how = self._workers[place].end()
            raise UserError(
                f"a worker process of engine {self.name!r} died twice ({how}), perhaps because memory ran out; "
                "choose --engine plain or stacked"
            )
        reported, tensors = reply
        # Several workers may report the same notice.
        fresh = [line for line in reported.get("notices", ()) if line not in self._noticed]
        self.notices += fresh
        self._noticed.update(fresh)
        if "refused" in reported:
            raise UserError(reported["refused"])
        if "failed" in reported:
            raise RuntimeError(f"a worker process failed:\n{reported['failed']}")
        return unpack_result(tensors)


class _ForkedWorker:
    """The parent's side of one forked process."""

    def __init__(self, engine: Engine, parts: tuple[Part, ...]) -> None:
        self._connection, far_end = socket.socketpair()
        # Block Ctrl-C during the fork. The child must not run its parent's handler, which ends the workers.
        unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self.pid = fork()
            if self.pid == 0:
                self._connection.close()
                serve(far_end, engine, parts)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
        far_end.close()
        self._end_reason = ""

    def send(self, parcel: Parcel, facts: Facts) -> None:
        """Send work. If the worker is dead, `reply` returns None."""
        try:
            parcel.send(self._connection, facts)
        except ConnectionError:
            return

    def reply(self) -> Reply | None:
        """Wait for the reply. Return None if the worker died."""
        return receive(self._connection)

    def end(self) -> str:
        """End the process and describe how it ended."""
        if self._end_reason:
            return self._end_reason
        self._connection.close()
        try:
            kill(self.pid)
            status = os.waitpid(self.pid, 0)[1]
        except (ProcessLookupError, ChildProcessError):
            self._end_reason = "ended by another process"
            return self._end_reason
        code = os.waitstatus_to_exitcode(status)
        self._end_reason = f"signal {-code}" if code < 0 else f"exit status {code}"
        return self._end_reason


def _end_workers(workers: list[Any], owner: int) -> None:
    """End the workers, but only from the process that owns them, not from a forked copy."""
    if os.getpid() == owner:
        while workers:
            workers.pop().end()
