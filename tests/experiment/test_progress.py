"""Progress of runs that Python users start: shown in a terminal, not in a log, and only as requested."""

from __future__ import annotations

import io
import os
import subprocess
import sys

import pytest
from rich.console import Console

import fedskew as fs
from fedskew.errors import UserError
from fedskew.experiment.progress import MAX_LISTED, NotebookProgress, RunLine
from fedskew.experiment.terminal_bar import terminal_bar

SHORT = {"rounds": 2, "local_epochs": 1, "device": "cpu"}


@pytest.fixture(scope="module")
def federation() -> fs.Federation:
    return fs.federation("digits", fs.Dirichlet(clients=3, beta=1.0), seed=0)


def test_a_bar_has_the_run_its_rounds_and_its_accuracy(federation: fs.Federation) -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=100, legacy_windows=False)
    with terminal_bar(1, console) as shown:
        result = fs.run(federation, "fedavg", callbacks=[shown], **SHORT)
        shown._display.refresh()
    for words in ("fedavg seed 0", "2/2", f"{100 * result.accuracy:.1f} %"):
        assert words in screen.getvalue()


def test_nothing_is_shown_outside_terminals_and_notebooks(
    federation: fs.Federation, capfd: pytest.CaptureFixture[str]
) -> None:
    fs.run(federation, "fedavg", **SHORT)
    fs.compare(federation, ["fedavg"], seeds=1, **SHORT)
    assert capfd.readouterr() == ("", "")
    with pytest.raises(UserError, match="progress is 'yes'; expected True, False or None"):
        fs.run(federation, "fedavg", progress="yes", **SHORT)  # type: ignore[arg-type]


def test_a_log_shows_lines_on_request(
    federation: fs.Federation, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedskew.experiment.terminal_bar.SECONDS_BETWEEN_LINES", 0.0)
    result = fs.run(federation, "fedavg", progress=True, **SHORT)
    first, last = capfd.readouterr().err.splitlines()
    assert first == f"fedavg seed 0: round 1 of 2, accuracy {100 * result.history[1].accuracy:.1f} %"
    assert last == f"fedavg seed 0: 2 rounds, accuracy {100 * result.accuracy:.1f} %"


def test_a_terminal_shows_a_bar_unless_silenced() -> None:
    program = """
import sys
import fedskew as fs
fed = fs.federation("digits", fs.Dirichlet(clients=3, beta=1.0), seed=0)
fs.run(fed, "fedavg", rounds=2, local_epochs=1, device="cpu")
print("silenced", file=sys.stderr)
fs.run(fed, "fedprox", rounds=2, local_epochs=1, device="cpu", progress=False)
print("end", file=sys.stderr)
"""
    pty = pytest.importorskip("pty", reason="Windows has other terminals")
    ours, theirs = pty.openpty()
    run = subprocess.Popen([sys.executable, "-c", program], stderr=theirs, env=os.environ | {"TERM": "xterm"})
    assert run.wait() == 0
    shown, silenced = os.read(ours, 1 << 16).decode().split("silenced")
    os.close(ours)
    os.close(theirs)
    assert "fedavg seed 0" in shown
    assert silenced.split() == ["end"]


def test_many_runs_of_a_notebook_are_counted_not_listed() -> None:
    shown = NotebookProgress(10)
    shown._lines = [RunLine("fedavg", seed, 2, 4, 3.0, [(0, 10.0), (2, 20.0)]) for seed in range(9)]
    html = shown.html()
    assert html.count("<tr>") == MAX_LISTED
    assert "run 9 of 10" in html
    assert "3 earlier runs are finished" in html
    assert "3 s left" in html
    assert html.count("<polyline") == 9
    shown._lines = shown._lines[: MAX_LISTED + 1]
    assert "1 earlier run is finished" in shown.html()


def test_a_resumed_run_keeps_its_curve(federation: fs.Federation, tmp_path) -> None:
    class Interrupt(fs.Callback):
        def on_round(self, row, rounds_ahead):
            raise KeyboardInterrupt

    class Shown(NotebookProgress):
        def show(self) -> None:
            self.last = self.html()

    with pytest.raises(KeyboardInterrupt):
        fs.run(federation, "fedavg", out=tmp_path / "run", callbacks=[Interrupt()], **SHORT)
    shown = Shown()
    fs.run(federation, "fedavg", out=tmp_path / "run", callbacks=[shown], **SHORT)
    assert len(shown._lines[0].curve) == 3
    assert "2/2" in shown.last


def test_a_stopped_run_has_no_time_left(federation: fs.Federation, monkeypatch: pytest.MonkeyPatch) -> None:
    class Stop(fs.Callback):
        def on_round(self, row: fs.RoundRow, rounds_ahead: int) -> bool:
            assert "s left" in progress.html()
            return row.round == 2

    monkeypatch.setattr(NotebookProgress, "show", lambda self: None)
    progress = NotebookProgress()
    fs.run(federation, "fedavg", rounds=9, callbacks=[progress, Stop()])
    assert "2/9" in progress.html()
    assert "s left" not in progress.html()
