"""Run jobs on a Ray cluster. fedskew must be installed on every machine."""

from __future__ import annotations

import json
import logging
import socket
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from fedskew.errors import UserError
from fedskew.lab.sweep.job import Job, Terms
from fedskew.lab.sweep.pool import Watcher
from fedskew.lab.sweep.records import Outcome
from fedskew.workers import GPU_WORKERS

LOCAL = "local"
"""The address of a new cluster on this machine, for trying it out."""
_TIMEOUT = 5.0
"""Seconds to wait for a connection."""


def run_jobs_on_ray(jobs: Sequence[Job], terms: Terms, address: str, watcher: Watcher) -> None:
    """Run all jobs. They start in order, and several share a GPU."""
    ray = _connect(address)
    try:
        task = ray.remote(max_retries=0, **_share(ray))(_execute)
        plain = json.dumps(replace(terms, alone=False).to_json())
        running = {task.remote(json.dumps(job.to_json()), plain): job for job in jobs}
        while running:
            (done, *_), _ = ray.wait(list(running))
            job = running.pop(done)
            watcher.on_outcome(job, _outcome(ray, done))
    finally:
        ray.shutdown()


def _connect(address: str) -> Any:
    try:
        import ray
    except ImportError as error:
        raise UserError("--ray needs Ray: pip install 'fedskew[ray]'") from error
    _require_server(address)
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, include_dashboard=False)
    except Exception as error:  # Ray raises many kinds of errors here
        raise UserError(f"no Ray cluster at {address!r} ({error}); expected an address, or {LOCAL!r}") from error
    return ray


def _require_server(address: str) -> None:
    """Refuse an address without a server at once. Ray would try for minutes."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not colon:
        return
    try:
        socket.create_connection((host, int(port)), _TIMEOUT).close()
    except (OSError, ValueError) as error:
        raise UserError(f"no Ray cluster at {address!r} ({error}); expected HOST:PORT, or {LOCAL!r}") from error


def _share(ray: Any) -> dict[str, float]:
    """The resources of one run: a CPU core and, if there are GPUs, a fraction of one."""
    gpus = ray.cluster_resources().get("GPU", 0)
    return {"num_cpus": 1, **({"num_gpus": 1 / GPU_WORKERS} if gpus else {})}


def _execute(job: str, terms: str) -> str:
    """Run a job on a machine of the cluster. Takes and returns JSON."""
    from fedskew.lab.sweep.execution import execute

    outcome = execute(Job.from_json(json.loads(job)), Terms(**json.loads(terms)), lambda *_: None)
    return json.dumps(outcome.to_json())


def _outcome(ray: Any, done: Any) -> Outcome:
    try:
        return Outcome.from_json(json.loads(ray.get(done)))
    except Exception as error:  # the process or its machine died
        return Outcome("failed", reason=" ".join(f"{type(error).__name__}: {error}".split())[:300])
