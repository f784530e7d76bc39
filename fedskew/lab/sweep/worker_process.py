"""A worker process seen from the sweep: give it a job, read what it says, know when it died."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import fedskew
from fedskew.lab.sweep.job import Job, Terms

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
