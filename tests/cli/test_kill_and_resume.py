"""`kill -9` at any moment, the same command again: numbers and weights are those of an undisturbed run, bit for bit."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from method_cases import slow

from fedskew import IID, Callback, federation, run

SETTINGS = (
    "run", "--clients", "6", "--clients-per-round", "3", "--beta", "0.5", "--local-epochs", "2", "--batch-size", "20",
)  # fmt: skip
METHODS = {
    "scaffold": ("--method", "scaffold", "--rounds", "22", "--engine", "plain"),
    "pkd": ("--method", "pkd", "--rounds", "8", "--set", "method.expert_rounds=4", "--set", "checkpoint_every=2"),
}
SPARE_SECONDS = 120
LOOK_AGAIN = 0.001


def rows(folder: Path) -> list[dict[str, object]]:
    """What is recorded, but for the time it took."""
    lines = (folder / "rounds.jsonl").read_text().splitlines()
    return [{key: value for key, value in json.loads(line).items() if key not in ("seconds", "time")} for line in lines]


def written(folder: Path) -> int:
    try:
        return (folder / "rounds.jsonl").read_bytes().count(b"\n")
    except FileNotFoundError:
        return 0


def writes_checkpoint(folder: Path) -> bool:
    return any(name.endswith(".tmp") for name in os.listdir(folder / "checkpoint"))


def start(arguments: tuple[str, ...], folder: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "fedskew", *arguments, "--out", str(folder), "--quiet"]
    environment = os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads())}
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, preexec_fn=heed_interrupts
    )


def heed_interrupts() -> None:
    """What a shell starts in the background ignores them."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def stop_when(process: subprocess.Popen[bytes], moment: Callable[[], bool], number: int) -> None:
    """Send the signal as soon as `moment` has come; the process must still be running then."""
    while not moment():
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(LOOK_AGAIN)
        assert process.returncode is None, process.communicate()[1]
    process.send_signal(number)


def arguments_of(method: str) -> tuple[str, ...]:
    return (*SETTINGS, *METHODS[method])


@pytest.fixture
def undisturbed(cli, tmp_path):
    def run(method: str) -> Path:
        folder = tmp_path / f"undisturbed-{method}"
        assert cli(*arguments_of(method), "--out", str(folder), "--quiet").status == 0
        return folder

    return run


def assert_same_run(folder: Path, whole: Path) -> None:
    assert rows(folder) == rows(whole)
    assert (folder / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()


def damage_newest_checkpoint(folder: Path) -> None:
    newest = max((folder / "checkpoint").glob("round-*.safetensors"))
    damaged = bytearray(newest.read_bytes())
    damaged[len(damaged) // 2] ^= 0xFF
    newest.write_bytes(damaged)


@pytest.mark.parametrize("kills", [1, *slow(2)])
def test_a_run_killed_interrupted_and_damaged_ends_with_the_same_bits(kills, undisturbed, cli, tmp_path):
    """A method with state at every client; the last kill is in the middle of a checkpoint, if the clock allows."""
    whole, folder = undisturbed("scaffold"), tmp_path / "killed"
    moments: tuple[Callable[[], bool], ...] = (
        lambda: written(folder) >= 1,
        lambda: written(folder) >= 10 or (written(folder) >= 4 and writes_checkpoint(folder)),
    )
    for moment in moments[-kills:]:
        process = start(arguments_of("scaffold"), folder)
        stop_when(process, moment, signal.SIGKILL)
        process.communicate(timeout=SPARE_SECONDS)
        assert process.returncode == -signal.SIGKILL
        assert not (folder / "summary.json").exists()

    before = written(folder)
    process = start(arguments_of("scaffold"), folder)
    stop_when(process, lambda: written(folder) >= before + 2, signal.SIGINT)
    _, told = process.communicate(timeout=SPARE_SECONDS)
    assert process.returncode == 130
    *_, continues, stops = told.decode().splitlines()
    assert "resumes after round" in continues
    assert stops.startswith("stopped after round ")
    assert stops.endswith("; repeat the command to resume")

    damage_newest_checkpoint(folder)
    assert "is skipped" in cli(*arguments_of("scaffold"), "--out", str(folder), "--quiet").err
    assert_same_run(folder, whole)


@pytest.mark.slow
def test_a_staged_run_killed_in_its_stages_ends_with_the_same_bits(undisturbed, cli, tmp_path):
    whole, folder = undisturbed("pkd"), tmp_path / "killed"
    stages = [row.get("stage") for row in rows(whole)]
    assert stages[6] == "expert 0"
    assert stages[-3] == "distil"
    for enough in (7, len(stages) - 2):
        process = start(arguments_of("pkd"), folder)
        stop_when(process, lambda enough=enough: written(folder) >= enough, signal.SIGKILL)
        process.communicate(timeout=SPARE_SECONDS)
        assert process.returncode == -signal.SIGKILL
    assert cli(*arguments_of("pkd"), "--out", str(folder), "--quiet").status == 0
    assert_same_run(folder, whole)


def test_a_run_continues_with_the_threads_it_began_with(tmp_path):
    class Interruption(Callback):
        def on_round(self, row, rounds_ahead):
            raise KeyboardInterrupt

    class Notices(Callback):
        def __init__(self):
            self.lines, self.threads = [], None

        def on_notice(self, line):
            self.lines.append(line)

        def on_start(self, prepared, state, rounds_ahead):
            self.threads = torch.get_num_threads()

    fed = federation("digits", IID(clients=4))
    settings = {"rounds": 2, "local_epochs": 1, "out": tmp_path / "run"}
    began = torch.get_num_threads()
    with pytest.raises(KeyboardInterrupt):
        run(fed, "fedavg", callbacks=[Interruption()], **settings)
    torch.set_num_threads(began + 1)
    try:
        watch = Notices()
        run(fed, "fedavg", callbacks=[watch], **settings)
        assert watch.threads == began
        number = "1 CPU thread" if began == 1 else f"{began} CPU threads"
        assert watch.lines == [f"the run continues with {number}, the number it started with, instead of {began + 1}"]
    finally:
        torch.set_num_threads(began)
