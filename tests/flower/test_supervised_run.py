"""Runs that fail are resumed; small programs take the place of `flwr run`, and log what a ServerApp logs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from fedskew.cli import main
from fedskew.errors import UserError
from fedskew.flower import supervised_run
from fedskew.flower.chained_log import ChainedLog
from fedskew.flower.processes import Process
from fedskew.flower.supervised_run import (
    WAIT_SECONDS,
    FlowerRun,
    Progress,
    follow,
    only_command,
    read_progress,
    run_to_end,
)

NO_WAITS = (0.0, 0.0, 0.0)


class Attempts:
    """Starts one program after another. Each logs its lines; the last one is repeated."""

    def __init__(self, folder: Path, *outputs: Sequence[str]) -> None:
        self._log, self._outputs, self.started = folder / "run.log", outputs, 0

    def start(self) -> Process:
        lines = self._outputs[min(self.started, len(self._outputs) - 1)]
        self.started += 1
        text = "".join(f"INFO :      {line}\n" for line in lines)
        return Process("run", [sys.executable, "-c", f"print({text!r}, end='')"], self._log, {})


def supervise(attempts: Attempts, progress: Callable[[], Progress] = lambda: Progress(2)) -> list[str]:
    logged: list[str] = []
    run_to_end(attempts.start, progress, logged.append, wait_seconds=NO_WAITS)
    return logged


def test_a_run_that_fails_is_resumed(tmp_path: Path) -> None:
    attempts = Attempts(
        tmp_path,
        ["something of Flower's", "fedskew: failed: ObjectPushError: no object"],
        ["fedskew: site-1 is here"],  # killed: it ends without a word
        ["fedskew: finished with accuracy 90 %"],
    )
    silent = f"it ended without a reason; see {tmp_path / 'run.log'}"
    assert supervise(attempts) == [
        "failed: ObjectPushError: no object",
        "warning: the run failed (ObjectPushError: no object); restart 1 of 3 resumes after round 2",
        "site-1 is here",
        f"warning: the run failed ({silent}); restart 2 of 3 resumes after round 2",
        "finished with accuracy 90 %",
    ]


def test_the_reason_why_flower_did_not_start_the_run_is_named(tmp_path: Path) -> None:
    frame = "╭─ Error ────╮\n│ Connection to the SuperLink │\n│ is unavailable. │\n╰────────────╯\n"
    program = [sys.executable, "-c", f"import sys; print({frame!r}); sys.exit(1)"]
    outcome = follow(Process("run", program, tmp_path / "run.log", {"PYTHONUTF8": "1"}), str, lambda: None)
    assert outcome.reason == f"Connection to the SuperLink is unavailable; see {tmp_path / 'run.log'}"
    killed = [sys.executable, "-c", "print('INFO : fedskew: round 1 of 2')"]
    outcome = follow(Process("run", killed, tmp_path / "run.log", {}), str, lambda: None)
    assert outcome.reason == f"it ended without a reason; see {tmp_path / 'run.log'}"


def test_the_user_is_told_once_if_the_server_app_does_not_begin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervised_run, "_QUIET_SECONDS", 0.0)
    ends = tmp_path / "end"
    program = [sys.executable, "-c", f"import os\nwhile not os.path.exists({str(ends)!r}): pass"]
    lines: list[str] = []

    def log(line: str) -> None:
        lines.append(line)
        ends.touch()

    process = Process("run", program, tmp_path / "run.log", {})
    assert not follow(process, log, lambda: None).finished
    assert lines == [f"warning: the ServerApp has not begun yet; {process.log} and the SuperLink's log may say why"]


def test_a_mistake_of_the_user_ends_the_run_at_once(tmp_path: Path) -> None:
    attempts = Attempts(tmp_path, ["fedskew: stopped: lr is -1; expected a positive number"])
    with pytest.raises(UserError, match=r"^lr is -1; expected a positive number$"):
        supervise(attempts)
    assert attempts.started == 1


def test_restarts_are_bounded_unless_updates_arrive(tmp_path: Path) -> None:
    attempts = Attempts(tmp_path, ["fedskew: failed: it is broken"])
    with pytest.raises(UserError, match="failed 4 times in a row, last with: it is broken"):
        supervise(attempts)
    assert attempts.started == 1 + len(NO_WAITS)

    slow = Attempts(tmp_path, *[["fedskew: failed: it is broken"]] * 6, ["fedskew: finished"])
    supervise(slow, lambda: Progress(rounds=0, updates=slow.started))
    assert slow.started == 7


def test_a_superlink_that_is_down_for_two_minutes_does_not_end_the_run(tmp_path: Path) -> None:
    """The waits grow, so that a SuperLink has time to come back; others are watched meanwhile."""
    assert sum(WAIT_SECONDS) > 120
    assert list(WAIT_SECONDS) == sorted(WAIT_SECONDS)
    attempts, logged, watched = Attempts(tmp_path, ["fedskew: failed: no SuperLink"], ["fedskew: finished"]), [], []
    run_to_end(attempts.start, Progress, logged.append, lambda: watched.append(attempts.started), wait_seconds=[0.01])
    assert logged[1] == "warning: the run failed (no SuperLink); restart 1 of 1 resumes after round 0 in 0.01 s"
    assert watched


def test_progress_is_the_rows_after_the_first_and_the_updates_that_arrived(tmp_path: Path) -> None:
    assert read_progress(tmp_path) == Progress(0, 0)
    (tmp_path / "rounds.jsonl").write_text("{}\n{}\n{}\n")
    log = ChainedLog(tmp_path / "audit.jsonl")
    for event, kind in (("request", "train"), ("reply", "train"), ("reply", "hello"), ("failed", "train")):
        log.append({"site": "a", "kind": kind, "round": 1, "event": event})
    assert read_progress(tmp_path) == Progress(rounds=2, updates=1)


STARTED = "🎊 Successfully started run {}\n"


def left_over(folder: Path, log: str, status: int = 0) -> tuple[list[str], str]:
    """What a new command logs, and which commands of Flower it runs, if the log of the run ends like this."""
    flower = folder / "bin" / "flwr"
    flower.parent.mkdir()
    flower.write_text(f'#!/bin/sh\necho "$@" >> {folder / "commands"}\nexit {status}\n')
    flower.chmod(0o755)
    (folder / "run.log").write_text(log)
    logged: list[str] = []
    runs = FlowerRun(folder / "app", "federation", folder / "run.log", {"PATH": f"{flower.parent}:/usr/bin:/bin"})
    runs.stop_left_over(folder / "run", logged.append)
    commands = folder / "commands"
    return logged, commands.read_text() if commands.exists() else ""


def test_a_run_that_a_killed_command_left_is_stopped(tmp_path: Path) -> None:
    before = STARTED.format(7) + "INFO : fedskew: failed: it is broken\n"
    logged, commands = left_over(tmp_path, before + STARTED.format(42) + "INFO : fedskew: round 1\n")
    assert commands == "stop 42 federation\n"
    assert logged == [
        "warning: an earlier command left run 42 at the SuperLink; it was stopped, and this command resumes it"
    ]


def test_a_run_that_has_ended_is_not_stopped(tmp_path: Path) -> None:
    """Its end may be missing in the log, because the killed command wrote the log. Then `flwr stop` fails."""
    for number, log in enumerate(("", STARTED.format(42) + "INFO : fedskew: finished with accuracy 90 %\n")):
        (folder := tmp_path / str(number)).mkdir()
        assert left_over(folder, log) == ([], "")
    (folder := tmp_path / "ended").mkdir()
    assert left_over(folder, STARTED.format(42), status=1) == ([], "stop 42 federation\n")


def test_a_second_command_for_the_same_run_is_refused(tmp_path: Path) -> None:
    """It would stop the run of the first one."""
    with only_command(tmp_path / "run"):
        with only_command(tmp_path / "other"):
            pass
        refusal = r"another command trains the run in .*run; expected one at a time"
        with pytest.raises(UserError, match=refusal), only_command(tmp_path / "run"):
            pass
    with only_command(tmp_path / "run"):
        pass


def test_the_run_lies_where_the_command_says_even_if_the_server_app_runs_in_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options: list[str] = []

    def start(run: FlowerRun) -> Process:
        options.extend(run._options)
        return Process("run", ["echo", "fedskew: finished"], run._log, {})

    monkeypatch.setattr(FlowerRun, "start", start)
    monkeypatch.chdir(tmp_path)
    folder = ["--federation", "folder=runs/first", "--federation", "survey=true"]
    assert main(["federate", "init", "app", "--sites", "a,b", "--data", "digits", *folder]) == 0
    assert main(["federate", "run", "app"]) == 0
    assert f"the run's folder is {tmp_path / 'runs' / 'first'}" in capsys.readouterr().err
    (tmp_path / "runs" / "first-survey").mkdir()
    (tmp_path / "runs" / "first-survey" / "survey.json").write_text(
        '{"classes": [], "sites": {}, "declined": {}, "absent": []}'
    )
    assert main(["federate", "survey", "app"]) == 0
    place = f'federation.folder="{tmp_path / "runs" / "first"}"'
    assert options == ["--run-config", place, "--run-config", f'federation.purpose="survey" {place}']
