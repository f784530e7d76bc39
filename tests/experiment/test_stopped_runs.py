"""A run that a callback stopped continues, unless the callbacks of the next call would have stopped it as well."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import fedskew as fs
from fedskew.experiment.overlap import run_overlapping_rounds
from fedskew.experiment.preparation import prepare
from fedskew.experiment.round.record import RoundRow
from fedskew.experiment.round.server import Server
from fedskew.experiment.run import run_prepared

SHORT: dict[str, Any] = {"rounds": 6, "local_epochs": 1, "clients_per_round": 2}


class StopAfter(fs.Callback):
    """Stops after this number of rounds, which it counts. It has no `on_resume`."""

    def __init__(self, rounds: int) -> None:
        self.rounds, self.seen = rounds, 0

    def on_start(self, *_: Any) -> None:
        self.seen = 0

    def on_round(self, row: RoundRow, rounds_ahead: int) -> bool:
        self.seen += 1
        return self.seen >= self.rounds


class Notices(fs.Callback):
    def __init__(self) -> None:
        self.lines: list[str] = []
        self.rounds: list[int] = []

    def on_round(self, row: RoundRow, rounds_ahead: int) -> None:
        self.rounds.append(row.round)

    def on_notice(self, line: str) -> None:
        self.lines.append(line)


def patience(evaluations: int) -> fs.EarlyStopping:
    """Stops after one evaluation more than this, because no gain is large enough."""
    return fs.EarlyStopping(patience=evaluations, min_delta=1.0)


@pytest.fixture(scope="module")
def federation() -> fs.Federation:
    return fs.federation("digits", fs.Dirichlet(clients=4, beta=0.5), seed=0)


def assert_equal(found: fs.Result, expected: fs.Result) -> None:
    assert found.accuracy_curve == expected.accuracy_curve
    assert found.stopped_early == expected.stopped_early
    for name, tensor in expected.model.state_dict().items():
        torch.testing.assert_close(found.model.state_dict()[name], tensor, rtol=0, atol=0)


@pytest.mark.parametrize(("method", "every"), [("scaffold", 1), ("fedavgm", 2)])
def test_a_call_without_the_callback_continues_to_the_bits_of_the_whole_run(
    method: str, every: int, tmp_path: Path, federation: fs.Federation
) -> None:
    """SCAFFOLD's clients keep states. The second run was stopped between two checkpoints."""
    settings = SHORT | {"out": tmp_path / "run", "checkpoint_every": every}
    assert fs.run(federation, method, callbacks=[patience(2)], **settings).rounds == 3
    notices = Notices()
    continued = fs.run(federation, method, callbacks=[notices], **settings)
    assert notices.rounds == ([4, 5, 6] if every == 1 else [3, 4, 5, 6])
    line = f"{tmp_path / 'run'}: a callback stopped this run after round 3; now it continues"
    assert line in notices.lines
    whole = fs.run(federation, method, **SHORT)
    assert_equal(continued, whole)
    assert_equal(fs.load_run(tmp_path / "run"), whole)
    assert "stopped_by" not in json.loads((tmp_path / "run" / "summary.json").read_text())


@pytest.mark.parametrize("again", [patience(2), patience(1), StopAfter(3), StopAfter(2)])
def test_a_callback_that_would_have_stopped_the_run_gets_its_result(
    again: fs.Callback, tmp_path: Path, federation: fs.Federation
) -> None:
    stopped_by = patience(2) if isinstance(again, fs.EarlyStopping) else StopAfter(3)
    settings = SHORT | {"out": tmp_path / "run"}
    stopped = fs.run(federation, "fedavg", callbacks=[stopped_by], **settings)
    notices = Notices()
    found = fs.run(federation, "fedavg", callbacks=[notices, again], **settings)
    assert_equal(found, stopped)
    assert notices.rounds == []
    line = "is already finished: a callback stopped it after round 3 of 6; nothing was run"
    assert notices.lines == [f"{tmp_path / 'run'} {line}"]


@pytest.mark.parametrize("later", [patience(4), StopAfter(5)])
def test_a_callback_that_stops_later_continues_the_run(
    later: fs.Callback, tmp_path: Path, federation: fs.Federation
) -> None:
    settings = SHORT | {"out": tmp_path / "run"}
    earlier = StopAfter(3)
    fs.run(federation, "fedavg", callbacks=[earlier], **settings)
    found = fs.run(federation, "fedavg", callbacks=[later], **settings)
    if isinstance(later, fs.EarlyStopping):
        assert_equal(found, fs.run(federation, "fedavg", callbacks=[patience(4)], **SHORT))
    assert found.rounds > 3


def test_a_callback_that_counts_sees_only_the_trained_rounds_of_this_run(
    tmp_path: Path, federation: fs.Federation
) -> None:
    settings = SHORT | {"out": tmp_path / "run"}
    fs.run(federation, "fedavg", callbacks=[StopAfter(2)], **settings)
    other = StopAfter(3)
    assert fs.run(federation, "fedavg", callbacks=[other], **SHORT).rounds == other.seen == 3
    # It forgets the other run, and row 0 is the initial model. So it would have stopped later.
    assert fs.run(federation, "fedavg", callbacks=[other], **settings).rounds > 2


class Objects(fs.Callback):
    """Wants no further round when the run resumes."""

    def on_resume(self, rows: Sequence[RoundRow]) -> bool:
        return True


class Fails(fs.Callback):
    def on_start(self, *_: Any) -> None:
        raise ValueError("no")


def test_a_stopped_run_keeps_its_result_if_a_callback_fails_or_objects(
    tmp_path: Path, federation: fs.Federation
) -> None:
    settings = SHORT | {"out": tmp_path / "run", "checkpoint_every": 2}
    stopped = fs.run(federation, "fedavg", callbacks=[StopAfter(3)], **settings)
    with pytest.raises(ValueError, match="no"):
        fs.run(federation, "fedavg", callbacks=[Fails()], **settings)
    notices = Notices()
    found = fs.run(federation, "fedavg", callbacks=[Objects(), notices], **settings)
    assert_equal(found, stopped)
    assert_equal(fs.load_run(tmp_path / "run"), stopped)
    assert notices.lines == [
        f"{tmp_path / 'run'} is already finished: a callback stopped it after round 3 of 6; nothing was run"
    ]


def test_a_stopped_run_of_an_older_version_asks_every_callback(tmp_path: Path, federation: fs.Federation) -> None:
    settings = SHORT | {"out": tmp_path / "run"}
    stopped = fs.run(federation, "fedavg", callbacks=[StopAfter(3)], **settings)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary.pop("stopped_by") == [f"{__name__}.StopAfter"]
    (tmp_path / "run" / "summary.json").write_text(json.dumps(summary))
    assert_equal(fs.run(federation, "fedavg", callbacks=[StopAfter(3)], **settings), stopped)


def test_a_whole_run_is_not_asked_about_callbacks(tmp_path: Path, federation: fs.Federation) -> None:
    settings = SHORT | {"out": tmp_path / "run"}
    whole = fs.run(federation, "fedavg", **settings)
    assert_equal(fs.run(federation, "fedavg", callbacks=[patience(1)], **settings), whole)


def test_without_a_checkpoint_the_notice_says_what_to_do(tmp_path: Path, federation: fs.Federation) -> None:
    settings = SHORT | {"out": tmp_path / "run"}
    fs.run(federation, "fedavg", callbacks=[patience(2)], **settings)
    shutil.rmtree(tmp_path / "run" / "checkpoint")
    notices = Notices()
    found = fs.run(federation, "fedavg", callbacks=[notices], **settings)
    assert (found.rounds, found.stopped_early) == (3, True)
    assert notices.lines == [
        f"{tmp_path / 'run'} is already finished: a callback stopped it after round 3 of 6; nothing was run, because "
        "it has no checkpoint that can be used; to train all rounds, choose another --out"
    ]


def test_a_continued_run_that_is_killed_is_unfinished_and_continues_again(
    tmp_path: Path, federation: fs.Federation
) -> None:
    class Kill(fs.Callback):
        def on_round(self, row: RoundRow, rounds_ahead: int) -> None:
            if row.round == 4:
                raise KeyboardInterrupt

    settings = SHORT | {"out": tmp_path / "run"}
    fs.run(federation, "fedavg", callbacks=[patience(2)], **settings)
    with pytest.raises(KeyboardInterrupt):
        fs.run(federation, "fedavg", callbacks=[Kill()], **settings)
    killed = fs.load_run(tmp_path / "run")
    assert (killed.finished, killed.stopped_early, killed.rounds) == (False, False, 4)
    with pytest.raises(fs.UserError, match="because its run did not finish"):
        _ = killed.model
    assert_equal(fs.run(federation, "fedavg", **settings), fs.run(federation, "fedavg", **SHORT))


@pytest.mark.parametrize("method", ["fedavg", "scaffold"])
def test_a_run_in_overlapping_rounds_continues_to_the_same_bits(
    method: str, tmp_path: Path, federation: fs.Federation
) -> None:
    """This is the loop for CUDA. When the callback stops the run, the next round is in training."""
    ready = prepare(fs.Config(data="digits", method=method, **SHORT), federation)

    def run(*callbacks: fs.Callback, out: Path | None = None) -> fs.Result:
        server = Server(ready.federation, ready.method, ready.model, ready.config)
        return run_prepared(ready, out, callbacks, server, partial(run_overlapping_rounds, server))

    assert run(patience(2), out=tmp_path / "run").rounds == 3
    assert_equal(run(out=tmp_path / "run"), run())


def test_a_comparison_does_not_mix_stopped_and_whole_runs(tmp_path: Path, federation: fs.Federation) -> None:
    settings = SHORT | {"out": tmp_path, "seeds": 2}
    stopped = fs.compare(federation, ["fedavg"], callbacks=[patience(2)], **settings)
    assert [run.rounds for run in stopped.runs] == [3, 3]
    found = fs.compare(federation, ["fedavg", "fedvls"], **settings)
    assert [(run.rounds, run.stopped_early) for run in found.runs] == [(6, False)] * 4
