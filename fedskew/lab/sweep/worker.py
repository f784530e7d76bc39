"""A worker process, seen from both sides: it receives jobs and sends reports as lines of JSON.

It is started as `python -m fedskew.lab.sweep.worker`, never by fork: a process that has used a GPU cannot be forked,
and a crash stays in one process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

import fedskew
from fedskew.lab.sweep.job import Job, Terms

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


_LAST_LINES = 2000
"""Characters of a log in which the reason of a crash is looked for."""


class WorkerProcess:
    """One process; `stream` becomes readable when it says something or dies."""

    def __init__(self, log: Path, environment: Mapping[str, str]) -> None:
        self.job: Job
        """The job that it was given last."""
        self._log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        package = str(Path(fedskew.__file__).parent.parent)
        paths = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH", "")]))
        with log.open("w", encoding="utf-8") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "fedskew.lab.sweep.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env={**os.environ, **environment, "PYTHONPATH": paths},
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._jobs, self.stream = self._process.stdin, self._process.stdout
        self._unread = b""

    def give(self, job: Job, terms: Terms) -> None:
        self.job = job
        asked = {"job": job.to_json(), "terms": terms.to_json()}
        try:
            self._jobs.write(json.dumps(asked).encode() + b"\n")
            self._jobs.flush()
        except OSError:  # it died; its stream says so
            return

    def said(self) -> Iterator[dict[str, Any]]:
        """What it has said since; raises EOFError at its death."""
        content = os.read(self.stream.fileno(), 1 << 20)
        if not content:
            raise EOFError
        *lines, self._unread = (self._unread + content).split(b"\n")
        yield from (json.loads(line) for line in lines)

    def why_it_died(self) -> str:
        code = self._process.wait()
        how = f"killed by signal {-code}" if code < 0 else f"ended with status {code}"
        text = self._log.read_text(encoding="utf-8", errors="replace")[-_LAST_LINES:].strip()
        last = text.splitlines()[-1] if text else ""
        return f"its process was {how}" + (f": {last}" if last else "")

    def dismiss(self) -> None:
        """Let it end, as it has nothing to do."""
        try:
            self._jobs.close()
        except OSError:
            self._process.kill()
        self._process.wait()
        self.stream.close()

    def kill(self) -> None:
        """At once; a run's folder survives that."""
        self._process.kill()
        self._process.wait()
        self.stream.close()
        self._jobs.close()
