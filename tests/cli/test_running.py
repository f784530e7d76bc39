"""What is seen of a run while it runs."""

from __future__ import annotations

import io
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import typer
from rich.console import Console

import fedskew as fs
from fedskew.cli.running import LogLines, ProgressBar, RunStatus, format_duration, showing_runs
from fedskew.experiment.round.record import RoundRow
from fedskew.metrics.confusion import Evaluation

SETTINGS = {"rounds": 3, "local_epochs": 1, "clients_per_round": 2}


@pytest.fixture(scope="module")
def federation():
    return fs.federation("digits", fs.Dirichlet(clients=6, beta=0.5))


def evaluation(*class_accuracy: float | None) -> Evaluation:
    """Of ten test samples per class, none for a class without an accuracy."""
    matrix = np.zeros((len(class_accuracy), len(class_accuracy)), dtype=int)
    for c, share in enumerate(class_accuracy):
        if share is not None:
            matrix[c, c], matrix[c, c - 1] = round(10 * share), 10 - round(10 * share)
    return Evaluation(matrix)


def test_a_terminal_sees_rounds_accuracy_worst_class_and_time_left(federation, tmp_path):
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=80, legacy_windows=False)
    live = ProgressBar(lambda _: tmp_path / "run", 1, console)
    with live.display:
        fs.run(federation, "fedavg", out=tmp_path / "run", callbacks=[live], **SETTINGS)
        live.display.refresh()
    seen = screen.getvalue()
    for word in ("fedavg seed 0", "3/3", "best", "worst"):
        assert word in seen


def test_the_status_follows_the_global_model_only():
    status = RunStatus("x", ("cat", "dog", "cow"))
    status.update(RoundRow(round=0, evaluation=evaluation(0.5, 0.1, None)), 4)
    status.update(RoundRow(round=1, evaluation=evaluation(0.9, 0.7, None), seconds=2.0), 3)
    tested = evaluation(0.0, 1.0, None)
    status.update(RoundRow(round=2, model="expert.0", stage="expert 0", evaluation=tested, seconds=2.0), 2)
    assert (status.accuracy, status.best, status.worst) == (pytest.approx(0.8), pytest.approx(0.8), "dog: 70 %")
    assert (status.round, status.total, status.stage_note) == (2, 4, " expert 0")
    assert status.time_left == "4.0 s left"


@pytest.mark.parametrize("is_terminal", [False, True])
def test_without_an_accuracy_by_class_no_worst_class_is_named(tmp_path, capsys, is_terminal):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(40, 4)), np.arange(120).reshape(40, 3) % 2
    no_label = (rng.normal(size=(6, 4)), np.zeros((6, 3), int))
    federation = fs.federation((x, y), fs.IID(clients=2), test=no_label)
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=80, legacy_windows=False)
    callback = ProgressBar(lambda _: tmp_path, 1, console) if is_terminal else LogLines(lambda _: tmp_path)
    display = callback.display if is_terminal else nullcontext()
    with display:
        fs.run(federation, "fedavg", rounds=2, callbacks=[callback])
    shown = screen.getvalue() if is_terminal else capsys.readouterr().err
    assert "best" in shown
    assert "worst" not in shown


def test_the_best_before_a_resume_is_remembered(federation, tmp_path):
    class Interruption(fs.Callback):
        def on_round(self, row, rounds_ahead):
            if row.round == 2:
                raise KeyboardInterrupt

    class Recorded(ProgressBar):
        def show(self, status):
            self.seen = getattr(self, "seen", None) or (status.round, status.best)

    folder = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        fs.run(federation, "fedavg", out=folder, callbacks=[Interruption()], **SETTINGS)
    console = Console(file=io.StringIO())
    live = Recorded(lambda _: folder, 1, console)
    result = fs.run(federation, "fedavg", out=folder, callbacks=[live], **SETTINGS)
    before = max(accuracy for round_, accuracy in result.accuracy_curve if round_ <= 2)
    assert live.seen == (2, before)
    assert "fedavg seed 0: resumes after round 2" in console.file.getvalue()


class InterruptAfter(fs.Callback):
    """Presses Ctrl-C after a round, or in the first one if the round is 0."""

    def __init__(self, round_: int) -> None:
        self.round = round_

    def on_start(self, prepared, state, rounds_ahead):
        self.on_round(RoundRow(round=0), rounds_ahead)

    def on_round(self, row, rounds_ahead):
        if row.round == self.round:
            raise KeyboardInterrupt


def run_until_interrupt(federation, runs, finished, round_):
    """Finish some of the runs. Then press Ctrl-C at once, if the round is None, or in the next run."""
    with showing_runs(lambda _: Path("none"), runs, quiet=True) as progress:
        for _ in range(finished):
            fs.run(federation, "fedavg", callbacks=[progress], **SETTINGS)
        if round_ is None:
            raise KeyboardInterrupt
        fs.run(federation, "fedavg", callbacks=[progress, InterruptAfter(round_)], **SETTINGS)


@pytest.mark.parametrize(
    ("runs", "finished", "round_", "place"),
    [
        (3, 0, 0, "with 0 of 3 runs finished"),
        (3, 1, None, "with 1 of 3 runs finished"),
        (3, 1, 0, "with 1 of 3 runs finished"),
        (3, 2, 2, "with 2 of 3 runs finished and fedavg seed 0 after round 2"),
        (1, 0, 0, "before completing a round"),
        (1, 0, 2, "after round 2"),
        (1, 1, None, "after the last round"),
    ],
)
def test_an_interrupt_says_which_runs_and_rounds_are_done(federation, capsys, runs, finished, round_, place):
    with pytest.raises(typer.Exit):
        run_until_interrupt(federation, runs, finished, round_)
    assert capsys.readouterr().err == f"stopped {place}; repeat the command to resume\n"


@pytest.mark.parametrize(("seconds", "words"), [(3.14, "3.1 s"), (42, "42 s"), (61, "1:01"), (3725, "1:02:05")])
def test_durations(seconds, words):
    assert format_duration(seconds) == words
