"""Writing that a run need not wait for."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor


class Background:
    """A thread for one job at a time; what goes wrong in a job is raised to whoever waits for it next."""

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None
        self._job: Future[None] | None = None

    def start(self, job: Callable[[], None]) -> None:
        """Begin a job, when the one before is done."""
        self.wait()
        self._thread = self._thread or ThreadPoolExecutor(1)
        self._job = self._thread.submit(job)

    def wait(self) -> None:
        """Until nothing is under way."""
        job, self._job = self._job, None
        if job is not None:
            job.result()

    def close(self) -> None:
        """End the thread, when its job is done."""
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None
