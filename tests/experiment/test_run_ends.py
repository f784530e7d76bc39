"""However a run with overlapping rounds ends: what was computed is recorded, once, and it can go on from there."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from overlapping import driven, prepared, serving, timeless
from torch import Tensor
from toy_runs import image_federation, linear, server

import fedskew as fs
from fedskew.engine import RoundResult
from fedskew.experiment import loop
from fedskew.experiment.loop import RoundDone
from fedskew.experiment.round.phases import LaunchedRound, RoundInProgress, SettledRound
from fedskew.experiment.round.row import RoundRow
from fedskew.experiment.round.server import Server
from fedskew.experiment.run import run_prepared
from fedskew.experiment.storage.run_folder import RunFolder
from fedskew.methods import ServerRule, Tensors, Updates

pytestmark = pytest.mark.usefixtures("every_round_is_short")


class Stopped(Server):
    """Is interrupted when it has a round trained."""

    at = 3
    reason: type[BaseException] = KeyboardInterrupt

    def train(self, under_way: RoundInProgress) -> RoundResult:
        if under_way.state.round + 1 == self.at:
            raise self.reason
        return super().train(under_way)


def undisturbed(method: str, tmp_path: Path) -> tuple[list[RoundRow], dict[str, Tensor]]:
    run_prepared(prepared(method), tmp_path / "undisturbed")
    folder = RunFolder(tmp_path / "undisturbed")
    return [timeless(row) for row in folder.rounds()], folder.load_model()[0]


def resumed(method: str, tmp_path: Path) -> tuple[list[RoundRow], dict[str, Tensor]]:
    ready, this = serving(Server, method)
    run_prepared(ready, tmp_path / "run", server=this)
    folder = RunFolder(tmp_path / "run")
    return [timeless(row) for row in folder.rounds()], folder.load_model()[0]


def agree(method: str, tmp_path: Path) -> bool:
    (rows, model), (expected, of_expected) = resumed(method, tmp_path), undisturbed(method, tmp_path)
    return rows == expected and all(torch.equal(model[name], tensor) for name, tensor in of_expected.items())


@pytest.mark.parametrize("overlaps", [False, True])
def test_checkpoints_are_of_the_rounds_that_are_asked_for_and_of_the_last(overlaps: bool, tmp_path: Path) -> None:
    ready = prepared()
    ready = replace(ready, config=replace(ready.config, checkpoint_every=3))
    this = Server(ready.federation, ready.method, ready.model, ready.config)
    this.overlaps = overlaps
    run_prepared(ready, tmp_path / "run", server=this)
    assert {path.stem for path in (tmp_path / "run" / "checkpoint").iterdir()} == {"round-000003", "round-000005"}


@pytest.mark.parametrize("method", ["fedavg", "scaffold"])
@pytest.mark.parametrize("reason", [KeyboardInterrupt, RuntimeError])
def test_what_was_computed_is_recorded_before_a_run_ends(
    method: str, reason: type[BaseException], tmp_path: Path
) -> None:
    ready, this = serving(type("Stopped", (Stopped,), {"reason": reason}), method)
    with pytest.raises(reason):
        run_prepared(ready, tmp_path / "run", server=this)
    folder = RunFolder(tmp_path / "run")
    assert [row.round for row in folder.rounds()] == [0, 1, 2]
    checkpoint = folder.load_checkpoint()
    assert checkpoint is not None
    assert checkpoint.round == 2
    assert agree(method, tmp_path)


class Impatient(Server):
    """Is interrupted while it waits for a round's test."""

    def settle(self, launched: LaunchedRound) -> SettledRound:
        settled, interrupts = super().settle(launched), iter([KeyboardInterrupt])
        read = settled.test
        assert read is not None

        def interrupted() -> RoundRow:
            for interrupt in interrupts:
                raise interrupt
            return read()

        return replace(settled, test=interrupted) if settled.state.round == 2 else settled


@pytest.mark.parametrize("short", [math.inf, 0.0])
def test_an_interrupt_while_a_test_is_waited_for_does_not_cost_the_round(
    short: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "_SHORT", short)
    ready, this = serving(Impatient)
    with pytest.raises(KeyboardInterrupt):
        run_prepared(ready, tmp_path / "run", server=this)
    assert [row.round for row in RunFolder(tmp_path / "run").rounds()] == [0, 1, 2]
    assert agree("fedavg", tmp_path)


def test_an_onlooker_s_error_ends_the_run_and_no_row_is_there_twice(tmp_path: Path) -> None:
    seen: list[int] = []

    class Weary(fs.Callback):
        def on_round(self, row: RoundRow, rounds_ahead: int) -> None:
            seen.append(row.round)
            if row.round == 2:
                raise InterruptedError(rounds_ahead)

    ready, this = serving(Server)
    with pytest.raises(InterruptedError, match="3"):
        run_prepared(ready, tmp_path / "run", [Weary()], this)
    assert seen == [1, 2]
    assert [row.round for row in RunFolder(tmp_path / "run").rounds()] == [0, 1, 2]
    assert agree("fedavg", tmp_path)


def test_the_first_error_is_told_even_if_the_row_cannot_be_recorded() -> None:
    tried: list[int] = []

    def full(done: RoundDone) -> None:
        tried.append(done.row.round)
        raise OSError

    _, this = serving(type("Stopped", (Stopped,), {"at": 2}))
    with pytest.raises(KeyboardInterrupt):
        driven(this, full)
    assert tried == [1]


def test_an_error_of_the_next_round_does_not_cost_the_one_before() -> None:
    @dataclass(frozen=True)
    class Tired(ServerRule):
        """Refuses to send a third time."""

        def server_state(self, params: Tensors) -> Tensors:
            return {"rounds": next(iter(params.values())).new_zeros(())}

        def aggregate(self, sent: Tensors, updates: Updates, state: Tensors) -> tuple[Tensors, Tensors]:
            return updates.mean(), {"rounds": state["rounds"] + 1}

        def downlink(self, state: Tensors) -> Tensors:
            if float(state["rounds"]) == 2:
                raise ZeroDivisionError
            return state

    this, done = server(image_federation(), Tired(), linear(), rounds=4), []
    this.overlaps = True
    with pytest.raises(ZeroDivisionError):
        driven(this, done.append)
    assert [one.row.round for one in done] == [1, 2]


def test_an_error_of_a_server_rule_is_told_all_the_same() -> None:
    @dataclass(frozen=True)
    class Broken(ServerRule):
        def aggregate(self, sent: Tensors, updates: Updates, state: Tensors) -> tuple[Tensors, Tensors]:
            raise ZeroDivisionError

    this, done = server(image_federation(), Broken(), linear()), []
    this.overlaps = True
    with pytest.raises(ZeroDivisionError):
        driven(this, done.append)
    assert done == []
