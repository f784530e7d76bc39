"""Follow a run to its end. A run that fails is started again and resumes from its last checkpoint.

`flwr run --stream` ends with status 0 even if the run failed. So the outcome is read from the lines that fedskew's
ServerApp logs:

    finished …   the run is complete
    stopped: …   a person must act, for example because a setting is wrong
    failed: …    an error that may be temporary

If the ServerApp or the SuperLink is killed, or if `flwr run` cannot start the run, none of these lines appears. This
counts as a failure.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from filelock import FileLock, Timeout

from fedskew.errors import UserError
from fedskew.experiment.storage.files import wait_until_unlocked
from fedskew.experiment.storage.run_folder import RunFolder
from fedskew.flower.processes import Process

WAIT_SECONDS = (0.0, 5.0, 10.0, 20.0, 40.0, 80.0)
"""Seconds before each restart. If a whole series of restarts brings no new update from a site, the run has failed."""
_POLL_SECONDS = 0.3
_STOP_SECONDS = 60.0
"""Seconds in which `flwr stop` must end. After that, the stopped run has as many seconds to unlock its folder."""
_QUIET_SECONDS = 60.0
"""Seconds without a line of the ServerApp after which the user is told where to look."""
_LOGGED = re.compile(r"fedskew: (.*)")
_RUN_ID = re.compile(r"Successfully started run (\d+)")


class FlowerRun:
    """`flwr run` for one app, started once or several times."""

    def __init__(
        self,
        app: Path,
        connection: str | None,
        log: Path,
        env: Mapping[str, str],
        changed: Mapping[str, str] | None = None,
    ) -> None:
        """`connection` is a SuperLink's name in Flower's config.toml. None means the default SuperLink.

        `changed` has settings that replace those of the app in this run.
        """
        changes = " ".join(f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in (changed or {}).items())
        self._options = ["--run-config", changes] if changes else []
        self._app, self._connection = str(app), [connection] if connection else []
        self._log, self._env = log, env
        self.process: Process | None = None

    def start(self) -> Process:
        """Start the run. First stop the previous attempt, because its ServerApp may still be running."""
        if self.process is not None:
            self._stop(self.process)
        command = ["flwr", "run", self._app, *self._connection, "--stream", *self._options]
        self.process = Process("run", command, self._log, self._env)
        return self.process

    def stop_left_over(self, folder: Path, log: Callable[[str], None]) -> None:
        """Stop the run of this folder if an earlier command ended and left it at the SuperLink.

        If that run went on, it would keep the folder locked. Call this within `only_command`, which ensures that the
        run does not belong to a command that is still running.
        """
        run = _unfinished_run(self._log)
        if run is not None and self._stop_run(run):
            log(
                f"warning: an earlier command left run {run} at the SuperLink; it was stopped, and this command "
                "resumes it"
            )
            wait_until_unlocked(RunFolder(folder).lock_path, _STOP_SECONDS)

    def _stop(self, run: Process) -> None:
        run.kill()
        if started := _RUN_ID.search(run.output()):
            self._stop_run(started[1])

    def _stop_run(self, number: str) -> bool:
        """Stop a run at the SuperLink. Return False if it has ended, or if the SuperLink does not answer."""
        stop = Process("stop", ["flwr", "stop", number, *self._connection], self._log, self._env)
        status = stop.wait(_STOP_SECONDS)
        stop.kill()
        return status == 0


def _unfinished_run(log: Path) -> str | None:
    """Return the number of the run that was started last. None if the log has no run, or has the last run's outcome."""
    text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    started = list(_RUN_ID.finditer(text))
    if not started:
        return None
    outcomes = (_outcome(line.strip()) for line in _LOGGED.findall(text, started[-1].end()))
    return None if any(outcomes) else started[-1][1]


@contextlib.contextmanager
def only_command(folder: Path) -> Iterator[None]:
    """Make sure that only one command at a time trains the run in this folder. Refuse if there is another one."""
    path = folder.with_name(f".{folder.name}.command.lock")
    lock = FileLock(path, thread_local=False, fallback_to_soft=False)
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
    try:
        lock.acquire(timeout=0)
    except Timeout as error:
        raise UserError(
            f"another command trains the run in {folder}; expected one at a time, so wait for it or end it"
        ) from error
    except OSError:  # no lock is possible here; if the folder cannot be written, the run itself says so
        pass
    try:
        yield
    finally:
        lock.release()


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    finished: bool
    needs_user: bool
    """Whether a person must act before another start."""
    reason: str


class Progress(NamedTuple):
    """What a run has achieved so far."""

    rounds: int = 0
    """Completed rounds."""
    updates: int = 0
    """Updates that the server received. Without secure aggregation, a restart does not lose them."""


def run_to_end(
    start: Callable[[], Process],
    progress: Callable[[], Progress],
    log: Callable[[str], None],
    watch: Callable[[], None] = lambda: None,
    wait_seconds: Sequence[float] = WAIT_SECONDS,
) -> None:
    """Start a run, and start it again if it fails.

    Raise a UserError if a person must act, or if restart after restart brings no new update.

    `watch` is called every few tenths of a second until this function returns.
    """
    failures, before = 0, progress()
    while True:
        outcome = follow(start(), log, watch)
        if outcome.finished:
            return
        if outcome.needs_user:
            raise UserError(outcome.reason)
        now = progress()
        failures, before = (1 if now.updates > before.updates else failures + 1), now
        if failures > len(wait_seconds):
            raise UserError(f"the run failed {failures} times in a row, last with: {outcome.reason}")
        restart = f"restart {failures} of {len(wait_seconds)} resumes after round {now.rounds}"
        seconds = wait_seconds[failures - 1]
        log(f"warning: the run failed ({outcome.reason}); {restart}" + (f" in {seconds:g} s" if seconds else ""))
        _wait(seconds, watch)


def _wait(seconds: float, watch: Callable[[], None]) -> None:
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        watch()
        time.sleep(min(_POLL_SECONDS, left))


def follow(run: Process, log: Callable[[str], None], watch: Callable[[], None]) -> Outcome:
    """Pass on what the ServerApp logs until `flwr run` ends. Return how the run ended."""
    outcome: Outcome | None = None
    has_begun, told_at = False, time.monotonic() + _QUIET_SECONDS
    for line in _logged_lines(run):
        if line:
            log(line)
            outcome, has_begun = _outcome(line) or outcome, True
        elif not has_begun and time.monotonic() > told_at:
            log(f"warning: the ServerApp has not begun yet; {run.log} and the SuperLink's log may say why")
            told_at = math.inf
        watch()
    if outcome is not None:
        return outcome
    # `flwr run` itself fails if, for example, it does not reach the SuperLink.
    reason = run.last_message() if (run.wait() or 0) > 0 else "it ended without a reason"
    return Outcome(finished=False, needs_user=False, reason=f"{reason.rstrip('.')}; see {run.log}")


def _outcome(line: str) -> Outcome | None:
    if line.startswith("finished"):
        return Outcome(finished=True, needs_user=False, reason="")
    for word, needs_user in (("stopped: ", True), ("failed: ", False)):
        if line.startswith(word):
            return Outcome(finished=False, needs_user=needs_user, reason=line.removeprefix(word))
    return None


def read_progress(folder: Path) -> Progress:
    """Read the progress of the run in a folder."""
    run = RunFolder(folder)
    rows = run.rounds_path.read_bytes().count(b"\n") if run.rounds_path.exists() else 0
    entries = run.audit_path.read_bytes().split(b"\n") if run.audit_path.exists() else []
    rounds = max(0, rows - 1)  # the first row is round 0, the model before any training
    return Progress(rounds, sum(b'"kind":"train"' in e and b'"event":"reply"' in e for e in entries))


def _logged_lines(run: Process) -> Iterator[str]:
    """Yield the ServerApp's lines as they arrive, and empty text whenever no new line has arrived."""
    with run.log.open(encoding="utf-8", errors="replace") as file:
        file.seek(run.log_start)
        while True:
            is_running = run.running
            run.wait_for_log()
            while line := file.readline():
                if match := _LOGGED.search(line):
                    yield match[1].strip()
            if not is_running:
                return
            yield ""
            time.sleep(_POLL_SECONDS)
