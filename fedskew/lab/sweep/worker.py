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
    from fedskew.lab.sweep.execution import execute
    from fedskew.lab.sweep.job import Job, Terms

    def answer(content: dict[str, Any]) -> None:
        answers.write(json.dumps(content) + "\n")
        answers.flush()

    last_report = 0.0

    def report(done: int, total: int, accuracy: float | None) -> None:
        nonlocal last_report
        if time.monotonic() - last_report > _APART:
            last_report = time.monotonic()
            answer({"done": done, "total": total, "accuracy": accuracy})

    for line in jobs:
        asked = json.loads(line)
        outcome = execute(Job.from_json(asked["job"]), Terms(**asked["terms"]), report)
        spent = outcome.status == "failed" and not _gpu_answers()
        answer({"outcome": outcome.to_json(), "spent": spent})


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
