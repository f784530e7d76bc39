"""A worker process: jobs come in as lines of JSON, and what happens goes out as lines of JSON.

Started as `python -m fedskew.lab.sweep.worker`, never by fork: a process that has used a GPU cannot be forked, and one
that crashes takes nobody along.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any, TextIO

_APART = 0.25
"""Seconds between two lines about the progress of one run."""


def main() -> None:
    """Serve until the other side hangs up."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whatever a library prints is not an answer
    try:
        _serve(sys.stdin, answers)
    except (KeyboardInterrupt, BrokenPipeError):
        os._exit(130)  # the parent tells the user; what was on disk stays good


def _serve(jobs: TextIO, answers: TextIO) -> None:
    from fedskew.lab.sweep.job import Job, Terms
    from fedskew.lab.sweep.joint_execution import execute_together

    def answer(content: dict[str, Any]) -> None:
        answers.write(json.dumps(content) + "\n")
        answers.flush()

    spoke: dict[int, float] = {}

    def tell(place: int, done: int, total: int, accuracy: float | None) -> None:
        if time.monotonic() - spoke.get(place, 0.0) > _APART:
            spoke[place] = time.monotonic()
            answer({"place": place, "done": done, "total": total, "accuracy": accuracy})

    for line in jobs:
        asked = json.loads(line)
        bundle = [Job.from_json(job) for job in asked["jobs"]]
        for place, outcome in execute_together(bundle, Terms(**asked["terms"]), tell):
            spent = outcome.status == "failed" and not _gpu_answers()
            answer({"place": place, "outcome": outcome.to_json(), "spent": spent})


def _gpu_answers() -> bool:
    """An operation that went wrong on a GPU leaves a process that can use it no more."""
    import torch

    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return True
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


if __name__ == "__main__":
    main()
