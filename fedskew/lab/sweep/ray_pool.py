"""Run jobs on a Ray cluster. fedskew must be installed on every machine.

If a node dies, its jobs move to other nodes. They resume if the run folders are in a folder that all nodes share. The
pool checks whether each node sees that folder. Without a shared folder, a job that moves to another node starts over.

Checkpoints are not in Ray's object store. It loses the objects of a dead node, and every checkpoint would send the
states of all clients over the network.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import socket
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedskew.errors import UserError
from fedskew.lab.sweep.job import Job, SweepSettings
from fedskew.lab.sweep.pool import GRACE, Watcher
from fedskew.lab.sweep.records import Outcome
from fedskew.workers import GPU_WORKERS

LOCAL = "local"
"""The address that starts a new cluster on this machine, to try Ray out."""
MAX_MOVES = 3
"""How often a job may start again because its process or its node died. The next time, it counts as failed."""
_TIMEOUT = 5.0
"""Seconds to wait for a connection, or for an answer from `_StatusBoard`."""
_SECONDS_BETWEEN_CHECKS = 1.0
"""The minimum time in seconds between two checks of the nodes, and between two progress reports of a run."""
_PROBE_TIMEOUT = 60.0
"""Seconds in which a node must start a process and look for the shared folder."""
_LOCK_TIMEOUT = 120.0
"""Seconds that a moved job waits for its folder. A process of the dead node, or the file server, may still lock it."""
_HOW_TO_AUTHENTICATE = (
    "set RAY_AUTH_TOKEN to what `ray get-auth-token` prints on the cluster's head node, "
    "or RAY_AUTH_MODE=token if this machine has the token in ~/.ray/auth_token"
)


def run_jobs_on_ray(jobs: Sequence[Job], settings: SweepSettings, address: str, watcher: Watcher) -> None:
    """Run all jobs. They start in order, and several share a GPU."""
    with _connection(address) as ray, _with_marker(settings.folder) as marker:
        _RayJobs(ray, replace(settings, is_alone_on_machine=False), marker, watcher).run(jobs)


@dataclass(frozen=True)
class _Attempt:
    """One try of a job on a node."""

    job: Job
    moves: int = 0
    """How often the job was started before this attempt."""

    @property
    def key(self) -> AttemptKey:
        """The key includes the number of rounds, because jobs of one experiment may differ in it (`merge_jobs`)."""
        return f"{self.job.identity}, {self.job.config.rounds} rounds", self.moves


class _RayJobs:
    """The jobs of a sweep on a cluster.

    If a machine is cut off, Ray takes minutes to report that the machine's processes died. So each process reports its
    node, and this class watches the nodes.
    """

    def __init__(self, ray: Any, settings: SweepSettings, marker: Path | None, watcher: Watcher) -> None:
        self._ray, self._settings, self._watcher = ray, settings, watcher
        this_node = _pinned_to(ray.get_runtime_context().get_node_id())
        self._board = ray.remote(num_cpus=0, **this_node)(_StatusBoard).remote()
        self._is_shared = marker is not None and self._is_seen_by_all(marker)
        self._task = ray.remote(max_retries=0, **_run_resources(ray))(_execute)
        self._running: dict[Any, _Attempt] = {}
        self._has_warned = False

    def run(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            self._start(_Attempt(job))
        while self._running:
            done, _ = self._ray.wait(list(self._running), timeout=_SECONDS_BETWEEN_CHECKS)
            for reference in done:
                self._receive(reference)
            if not done:
                self._check_nodes()
                self._stop_if_late()

    def _start(self, attempt: _Attempt) -> None:
        settings = self._settings if not attempt.moves else replace(self._settings, lock_timeout=_LOCK_TIMEOUT)
        content = json.dumps(attempt.job.to_json()), json.dumps(settings.to_json())
        self._running[self._task.remote(*content, self._board, attempt.key)] = attempt

    def _receive(self, reference: Any) -> None:
        attempt = self._running.pop(reference)
        try:
            outcome = Outcome.from_json(json.loads(self._ray.get(reference)))
        except Exception as error:  # the process or its node died, or fedskew is not installed there
            if isinstance(error, _death_errors(self._ray)):
                self._move(attempt, _describe_death(error))
                return
            outcome = Outcome("failed", reason=" ".join(f"{type(error).__name__}: {error}".split())[:300])
        self._watcher.on_outcome(attempt.job, outcome)

    def _check_nodes(self) -> None:
        """Show the progress of jobs, move the jobs of dead nodes, and warn once if no CPU core is left."""
        try:
            reports = self._ray.get(self._board.read.remote(), timeout=_TIMEOUT)
        except Exception:  # the board is too slow; look again later
            return
        dead = {node["NodeID"]: node["NodeManagerAddress"] for node in self._ray.nodes() if not node["Alive"]}
        for reference, attempt in list(self._running.items()):
            node, progress = reports.get(attempt.key, (None, None))
            if node in dead:
                del self._running[reference]
                self._move(attempt, f"node {dead[node]} died")
            elif progress is not None:
                self._watcher.on_progress(attempt.job, *progress)
        if not self._has_warned and self._ray.cluster_resources().get("CPU", 0) < 1:
            self._has_warned = True
            self._watcher.on_notice("the Ray cluster has no CPU core left; the sweep waits for a node to join")

    def _move(self, attempt: _Attempt, reason: str) -> None:
        """Start the job again on a node that works, unless it was started too often."""
        if attempt.moves == MAX_MOVES:
            reason = f"{reason}, after {MAX_MOVES} restarts"
            self._watcher.on_outcome(attempt.job, Outcome("failed", reason=reason))
            return
        moved = replace(attempt, moves=attempt.moves + 1)
        if self._is_shared:
            start = "resumes from its last checkpoint on a node that works"
        else:
            start = "starts over on a node that works, or resumes if that node has its checkpoint"
        self._watcher.on_notice(
            f"{attempt.job.label}: {reason}; the run {start} (restart {moved.moves} of at most {MAX_MOVES})"
        )
        self._start(moved)

    def _stop_if_late(self) -> None:
        """Cancel jobs that still run well after the deadline. Jobs stop by themselves if their nodes respond."""
        if self._settings.deadline is None or time.time() <= self._settings.deadline + GRACE:
            return
        for reference, attempt in self._running.items():
            self._ray.cancel(reference, force=True)
            self._watcher.on_outcome(attempt.job, Outcome("stopped"))
        self._running.clear()

    def _is_seen_by_all(self, marker: Path) -> bool:
        """Whether all nodes see the folder with the marker. If not, inform the user."""
        see = self._ray.remote(num_cpus=0, max_retries=0)(_sees_marker)
        nodes = [node for node in self._ray.nodes() if node["Alive"]]
        if len(nodes) < 2:
            return True
        probes = {
            see.options(**_pinned_to(node["NodeID"])).remote(str(marker)): node["NodeManagerAddress"] for node in nodes
        }
        self._ray.wait(list(probes), num_returns=len(probes), timeout=_PROBE_TIMEOUT)
        without_folder = [address for probe, address in probes.items() if not self._probe_result(probe)]
        if without_folder:
            nodes_text = f"node{'s' if len(without_folder) > 1 else ''} {', '.join(without_folder)}"
            self._watcher.on_notice(
                f"{marker.parent} was not found on {nodes_text}: if a node dies, its runs may start over; choose a "
                "shared folder with --out to let them resume"
            )
        return not without_folder

    def _probe_result(self, probe: Any) -> bool:
        try:
            return bool(self._ray.get(probe, timeout=0))
        except Exception:  # the node is too slow, or dead
            return False


Progress = tuple[int, int, float | None]
"""Finished rounds, total rounds and last accuracy."""
AttemptKey = tuple[str, int]
"""The job, and how often it was started before."""


class _StatusBoard:
    """Keeps the last report of each attempt: its node and its progress. It runs in a separate process."""

    def __init__(self) -> None:
        self._reports: dict[AttemptKey, tuple[str, Progress | None]] = {}

    def write(self, attempt: AttemptKey, node: str, progress: Progress | None) -> None:
        self._reports[attempt] = node, progress

    def read(self) -> dict[AttemptKey, tuple[str, Progress | None]]:
        return self._reports


def _execute(job: str, settings: str, board: Any, attempt: AttemptKey) -> str:
    """Run a job on a node of the cluster. The job, the settings and the result are JSON."""
    import ray

    from fedskew.lab.sweep.execution import execute

    node = ray.get_runtime_context().get_node_id()
    board.write.remote(attempt, node, None)
    last_report = 0.0

    def report(done: int, total: int, accuracy: float | None) -> None:
        nonlocal last_report
        if time.monotonic() - last_report > _SECONDS_BETWEEN_CHECKS:
            last_report = time.monotonic()
            board.write.remote(attempt, node, (done, total, accuracy))

    return json.dumps(execute(Job.from_json(json.loads(job)), SweepSettings(**json.loads(settings)), report).to_json())


def _pinned_to(node: str) -> dict[str, Any]:
    """The option that makes Ray run something on this node only."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return {"scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False)}


def _sees_marker(marker: str) -> bool:
    return Path(marker).exists()


@contextlib.contextmanager
def _with_marker(folder: str | None) -> Iterator[Path | None]:
    """Put a file with a unique name into the folder. By this file, other nodes recognise the folder."""
    if folder is None:
        yield None
        return
    marker = Path(folder) / f".ray-{uuid.uuid4().hex}"
    marker.touch()
    try:
        yield marker
    finally:
        marker.unlink(missing_ok=True)


def _death_errors(ray: Any) -> tuple[type[Exception], ...]:
    """The errors that Ray raises if a process or its node died. Which of them a dead node causes depends on timing."""
    names = ("NodeDiedError", "WorkerCrashedError", "LocalRayletDiedError", "OutOfMemoryError", "ObjectLostError")
    return tuple(getattr(ray.exceptions, name) for name in names)


def _describe_death(error: Exception) -> str:
    node = re.search(r"Node IP: ([\w.:]+)", str(error))
    return f"node {node[1]} died" if node else f"its process died ({type(error).__name__})"


def _run_resources(ray: Any) -> dict[str, float]:
    """The resources of one run: a CPU core and, if there are GPUs, a fraction of one."""
    gpus = ray.cluster_resources().get("GPU", 0)
    return {"num_cpus": 1, **({"num_gpus": 1 / GPU_WORKERS} if gpus else {})}


# -- the connection ----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _connection(address: str) -> Iterator[Any]:
    """Connect to the cluster. Ray's messages about dead nodes are hidden, because stdout is for the results."""
    ray = _connect(address)
    with open(os.devnull, "w", encoding="utf-8") as nowhere, contextlib.redirect_stdout(nowhere):
        try:
            yield ray
        finally:
            ray.shutdown()


def _connect(address: str) -> Any:
    if "RAY_AUTH_TOKEN" in os.environ or "RAY_AUTH_TOKEN_PATH" in os.environ:
        os.environ.setdefault("RAY_AUTH_MODE", "token")  # otherwise, Ray sends no token to an explicit address
    try:
        import ray
    except ImportError as error:
        raise UserError("--ray needs Ray: pip install 'fedskew[ray]'") from error
    _require_server(address)
    try:
        _require_access(address)
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, include_dashboard=False)
    except ray.exceptions.AuthenticationError as error:
        raise UserError(
            f"the Ray cluster at {address!r} refused {_describe_token()}; {_HOW_TO_AUTHENTICATE}"
        ) from error
    except Exception as error:  # Ray raises many kinds of errors here
        raise UserError(f"no Ray cluster at {address!r} ({error}); expected an address, or {LOCAL!r}") from error
    return ray


def _describe_token() -> str:
    """Say where the refused token came from. The token itself must not appear in a log."""
    if os.environ.get("RAY_AUTH_MODE", "").lower() != "token":
        return "a connection without a token"
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        if os.environ.get(name):
            return f"the token of {name}"
    return "the token of ~/.ray/auth_token"


def _require_server(address: str) -> None:
    """Raise `UserError` within seconds if no server listens at HOST:PORT. Ray would try for minutes."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not colon:
        return
    try:
        socket.create_connection((host, int(port)), _TIMEOUT).close()
    except (OSError, ValueError) as error:
        raise UserError(f"no Ray cluster at {address!r} ({error}); expected HOST:PORT, or {LOCAL!r}") from error


def _require_access(address: str) -> None:
    """Let a wrong token fail at once. `ray.init` would print the error once per second, and then not raise it."""
    if ":" not in address or address.startswith("ray://"):
        return
    from ray import _raylet

    if make_client := getattr(_raylet, "GcsClient", None):
        with _silent_stderr():
            make_client(address=address)


@contextlib.contextmanager
def _silent_stderr() -> Iterator[None]:
    """Hide the output of Ray's native code. It bypasses `sys.stderr`."""
    sys.stderr.flush()
    stderr = os.dup(2)
    try:
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
