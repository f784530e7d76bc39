"""Both sides of a worker process, which receives one job at a time and sends reports, as lines of JSON.

It is started as `python -m fedskew.lab.sweep.worker`, not by fork, because a process that has used a GPU cannot be
forked. A crash affects only this process.
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

_SECONDS_BETWEEN_REPORTS = 0.25
_LOG_TAIL = 2000
"""Characters to read from the end of a log, to find the cause of a crash."""


class WorkerProcess:
    """The sweep's side of a worker. `stream` becomes readable when the worker reports or dies."""

    def __init__(self, log: Path, environment: Mapping[str, str]) -> None:
        self.job: Job
        """The current job."""
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

    def send(self, job: Job, terms: Terms) -> None:
        self.job = job
        request = {"job": job.to_json(), "terms": terms.to_json()}
        try:
            self._jobs.write(json.dumps(request).encode() + b"\n")
            self._jobs.flush()
        except OSError:  # the worker died; reading its stream will show that
            return

    def reports(self) -> Iterator[dict[str, Any]]:
        """Read the new reports. Raises EOFError if the worker died."""
        content = os.read(self.stream.fileno(), 1 << 20)
        if not content:
            raise EOFError
        *lines, self._unread = (self._unread + content).split(b"\n")
        yield from (json.loads(line) for line in lines)

    def cause_of_death(self) -> str:
        code = self._process.wait()
        how = f"killed by signal {-code}" if code < 0 else f"ended with status {code}"
        text = self._log.read_text(encoding="utf-8", errors="replace")[-_LOG_TAIL:].strip()
        last = text.splitlines()[-1] if text else ""
        return f"its process was {how}" + (f": {last}" if last else "")

    def dismiss(self) -> None:
        """Let an idle worker end."""
        try:
            self._jobs.close()
        except OSError:
            self._process.kill()
        self._process.wait()
        self.stream.close()

    def kill(self) -> None:
        """Kill the worker. Its run can be resumed."""
        self._process.kill()
        self._process.wait()
        self.stream.close()
        self._jobs.close()


def main() -> None:
    """Run jobs until stdin is closed."""
    reports = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # libraries may print, which must not mix with the reports
    try:
        _serve(sys.stdin, reports)
    except (KeyboardInterrupt, BrokenPipeError):
        os._exit(130)  # the parent process tells the user


def _serve(jobs: TextIO, reports: TextIO) -> None:
    from fedskew.lab.sweep.execution import execute

    def report(content: dict[str, Any]) -> None:
        reports.write(json.dumps(content) + "\n")
        reports.flush()

    last_report = 0.0

    def report_progress(done: int, total: int, accuracy: float | None) -> None:
        nonlocal last_report
        if time.monotonic() - last_report > _SECONDS_BETWEEN_REPORTS:
            last_report = time.monotonic()
            report({"done": done, "total": total, "accuracy": accuracy})

    for line in jobs:
        request = json.loads(line)
        outcome = execute(Job.from_json(request["job"]), Terms(**request["terms"]), report_progress)
        broken = outcome.status == "failed" and not _gpu_works()
        report({"outcome": outcome.to_json(), "broken": broken})


def _gpu_works() -> bool:
    """Whether this process can still use its GPU. After a CUDA error it cannot."""
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
