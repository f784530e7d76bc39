"""`fedskew choose` on the command line."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fedskew.choose.trial import RACE_METRICS
from fedskew.choose.trials import TRIALS
from fedskew.cli import main
from fedskew.results.ranking import METRICS

TINY = ["choose", "--data", "synthetic", "--set", "data.samples=300", "--methods", "fedprox,fedlmd", "--clients", "4",
        "--beta", "0.3", "--rounds", "3", "--local-epochs", "1", "--device", "cpu", "--workers", "1"]  # fmt: skip


def test_a_race_is_shown_and_repeated_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = [*TINY, "--budget", "50r", "--out", str(tmp_path / "race")]
    assert main(command) == 0
    shown = capsys.readouterr()
    assert re.search(r"^Use (fedavg|fedprox|fedlmd)", shown.out, re.MULTILINE)
    splits = re.search(r"^The mean is over all (\d+) splits, the gain over the (\d+) fresh", shown.out, re.MULTILINE)
    assert splits is not None
    assert f"mean of {splits[1]} splits." in shown.out
    assert int(splits[2]) < int(splits[1])
    assert f"fedskew run -c {tmp_path / 'race' / 'chosen.yaml'}" in shown.out
    assert "rung 1 of 2: 9 candidates, to round 1" in shown.err
    assert "best after round 3" in shown.err
    assert main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["answer"][0] in shown.out.replace("\n", " ")
    assert len(found["final"][0]["standing"]["scores"]) == int(splits[2])
    assert ("that was tried" in shown.out) == (found["final"][found["chosen"]]["standing"]["lr"] != 0.05)
    assert found["final"][found["chosen"]]["standing"]["method"] in ("fedavg", "fedprox", "fedlmd")
    assert main([*command, "--quiet"]) == 0
    assert "already finished" in capsys.readouterr().err


def test_the_help_names_only_metrics_that_a_race_can_rank_by(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    assert main(["choose", "--help"]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if "--rank-by" in line)
    assert {name for name in METRICS if re.search(rf"(?<![\w-]){name}(?![\w-])", line)} == set(RACE_METRICS)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--budget", "20r"], r"racing 3 methods over 3 rounds needs about 35 rounds"),
        (["--budget", "soon"], r"expected a time such as 5m or 200s, or rounds such as 2000r"),
        (["--budget", "60r", "--methods", "fedproxx"], r"did you mean 'fedprox'"),
        (["--budget", "60r", "--rank-by", "x"], r"choose from: accuracy, balanced-accuracy, macro-f1, worst-class\n"),
        (["--budget", "60r", "--rank-by", "auroc"], r"known only after the last round"),
        (["--budget", "60r", "--clients-per-round", "9"], r"at most 4, the number of clients"),
    ],
)
def test_mistakes_are_one_line(
    options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*TINY, *options, "--out", str(tmp_path / "race")]) == 2
    error = capsys.readouterr().err
    assert re.search(message, error)
    assert error.count("\n") == 1
    assert not (tmp_path / "race").exists()


@pytest.mark.slow
def test_a_race_that_is_killed_continues_with_the_same_command(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "fedskew", *TINY, "--workers", "2", "--budget", "60r", "--json", "--out"]
    whole = subprocess.run([*command, str(tmp_path / "whole")], capture_output=True, check=True)
    killed = subprocess.Popen([*command, str(tmp_path / "race")], stdout=subprocess.DEVNULL)
    trials = tmp_path / "race" / TRIALS
    while not (trials.is_file() and trials.read_text().count("\n") >= 5):
        assert killed.poll() is None
        time.sleep(0.02)
    os.kill(killed.pid, signal.SIGKILL)
    killed.wait()
    before = trials.read_text()
    again = subprocess.run([*command, str(tmp_path / "race")], capture_output=True, check=True)
    assert trials.read_text().startswith(before[: before.rindex("\n") + 1])
    one, other = (json.loads(done.stdout) for done in (whole, again))
    assert one["rungs"] == other["rungs"]
    assert one["chosen"] == other["chosen"]
