"""Which runs of a sweep are trained as one: those that differ in who trains on what, and in numbers of the method.

Runs of small models leave a GPU idle between their steps. The clients of several such runs in one stack cost little
more than those of one, for it is the same program with more rows, whichever seed or split these rows come from.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence

import torch

from fedskew.errors import UserError
from fedskew.experiment.config import Config
from fedskew.lab.sweep.job import Job
from fedskew.methods import make_method

Bundle = list[Job]

USUAL = 8
"""Runs in one stack, where the user does not say."""

_MAY_DIFFER = ("seed", "partition", "clients_per_round")
"""Keys of which a stack's program knows nothing, beside numbers of the method."""


def usual_together(config: Config) -> int:
    """How many such runs suit the machine: several where a GPU stacks them, for a CPU is busy with one."""
    on_gpu = config.device != "cpu" and torch.cuda.is_available()
    return USUAL if on_gpu and config.engine in ("auto", "stacked") else 1


def bundled(jobs: Sequence[Job], workers: int, together: int | None = None) -> list[Bundle]:
    """The jobs in bundles of at most so many, or of what is usual, each in the place of its first; and in no larger
    ones than leave every worker something to do. Those of a kind are of like sizes."""
    share = max(1, len(jobs) // workers)
    kinds = [_kind(job) for job in jobs]
    number = Counter(kinds)
    bundles: list[Bundle] = []
    open_: dict[str, Bundle] = {}
    for kind, job in zip(kinds, jobs, strict=True):
        most = min(share, together or usual_together(job.config))
        size = -(-number[kind] // -(-number[kind] // most))
        if kind not in open_ or len(open_[kind]) >= size:
            open_[kind] = []
            bundles.append(open_[kind])
        open_[kind].append(job)
    return bundles


def _kind(job: Job) -> str:
    """The same for jobs that differ in nothing else; one that begins with another run's model is like no other."""
    config = {key: value for key, value in job.config.to_mapping().items() if key not in (*_MAY_DIFFER, "method")}
    apart = job.label if job.start is not None else ""
    return json.dumps([config, _method(job), job.validation, job.tag, apart], sort_keys=True, default=str)


def _method(job: Job) -> list[object]:
    """With those of its hyper-parameters that are no numbers to compute with."""
    try:
        method = make_method(job.config.method, job.config.method_params)
    except UserError:  # the run will say so
        return [job.label]
    return [method.name, {name: value for name, value in method.params.items() if not isinstance(value, float)}]
