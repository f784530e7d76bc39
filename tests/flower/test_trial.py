"""`fedskew federate up` as a real process: killed, taken over, and refused with other settings."""

from __future__ import annotations

import os
import re
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
from in_process import small_data
from real_federation import processes

from fedskew.flower.guardian import marked_processes
from fedskew.flower.supervised_run import read_progress

PATIENCE = 300.0
TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00 ")


def until(condition: bool | object, what: str, process: subprocess.Popen[str] | None = None) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < end, f"waited {PATIENCE:g} s for {what}"
        assert process is None or process.poll() is None, f"it ended before {what}"
        time.sleep(0.2)


@pytest.mark.slow
def test_a_killed_trial_leaves_no_process_and_the_same_command_takes_over(tmp_path: Path) -> None:
    folder = tmp_path / "trial"
    command = [sys.executable, "-m", "fedskew", "federate", "up", str(folder), "--data", str(small_data(tmp_path))]
    command += ["--sites", "2", "--method", "fedavg", "--rounds", "2", "--local-epochs", "1"]
    with subprocess.Popen(command, text=True) as killed:
        until((folder / "run" / "rounds.jsonl").exists, "the first row", killed)
        (server_app,) = set(processes("flwr-serverapp")) & set(marked_processes(str(folder)))
        os.kill(server_app, signal.SIGSTOP)  # so that the run is not finished before it is killed
        beside = subprocess.run(command, capture_output=True, text=True, check=False)
        killed.kill()
    assert beside.returncode == 2
    assert f"is being written by another process ({killed.pid} on" in beside.stderr
    until(lambda: not marked_processes(str(folder)), "the end of all processes")

    again = subprocess.run(command, capture_output=True, text=True, check=False)
    assert again.returncode == 0, again.stderr
    line = r"fedavg: accuracy [\d.]+ % after 2 rounds, all 2 sites in every round; run saved in .*\n"
    assert re.fullmatch(line, again.stdout)
    assert not marked_processes(str(folder))

    other = subprocess.run([*command, "--lr", "0.3"], capture_output=True, text=True, check=False)
    assert (other.returncode, other.stdout) == (2, "")
    assert f"error: {folder} holds a run that differs in lr" in other.stderr

    private = [folder / "superlink.db", folder / "run" / "model.safetensors", *(folder / "logs").iterdir()]
    assert [path.name for path in private if stat.S_IMODE(path.stat().st_mode) & 0o077] == []
    lines = (folder / "logs" / "site-1.log").read_text(encoding="utf-8").splitlines()
    assert lines
    assert [line for line in lines if not TIME.match(line) or "\x1b" in line] == []


@pytest.mark.slow
def test_a_trial_goes_on_after_its_serverapp_and_its_superlink_are_killed(tmp_path: Path) -> None:
    folder = tmp_path / "trial"
    command = [sys.executable, "-m", "fedskew", "federate", "up", str(folder), "--data", str(small_data(tmp_path))]
    command += ["--sites", "2", "--method", "fedavg", "--rounds", "6", "--local-epochs", "1"]

    def rounds() -> int:
        return read_progress(folder / "run").rounds

    with subprocess.Popen(command, text=True, stderr=subprocess.PIPE, stdout=subprocess.PIPE) as trial:
        until(lambda: rounds() >= 1, "the first round", trial)
        (server_app,) = set(processes("flwr-serverapp")) & set(marked_processes(str(folder)))
        os.kill(server_app, signal.SIGKILL)
        until(lambda: rounds() >= 3, "a round of the second ServerApp", trial)
        (superlink,) = processes("fedskew.flower.superlink", str(folder / "superlink.db"))
        os.kill(superlink, signal.SIGKILL)
        output, errors = trial.communicate(timeout=PATIENCE)
    assert trial.returncode == 0, errors
    assert "after 6 rounds, all 2 sites in every round" in output
    assert len(re.findall(r"the run failed .*; restart 1 of 6 resumes after round \d", errors)) == 2
    assert "the SuperLink ended; starting it again" in errors
    assert not marked_processes(str(folder))


@pytest.mark.slow
def test_thirty_sites_take_part_in_every_round(tmp_path: Path) -> None:
    """With Flower's own programs, more than a dozen sites lost messages to a locked database."""
    folder = tmp_path / "trial"
    command = [sys.executable, "-m", "fedskew", "federate", "up", str(folder), "--data", "digits", "--model", "dnn"]
    command += ["--sites", "30", "--method", "fedavg", "--rounds", "2", "--local-epochs", "1"]
    trial = subprocess.run(command, capture_output=True, text=True, check=False)
    assert trial.returncode == 0, trial.stderr
    assert "after 2 rounds, all 30 sites in every round" in trial.stdout
    assert "the SuperLink failed" not in trial.stderr
    assert "database is locked" not in (folder / "logs" / "superlink.log").read_text()
    assert not marked_processes(str(folder))
