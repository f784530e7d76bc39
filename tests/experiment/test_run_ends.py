"""However a run with overlapping rounds ends: what was computed is recorded, once, and it can go on from there."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pytest
import torch
from overlapping import prepared, run_overlapping, serving
from torch import Tensor
from toy_runs import ListRecorder, image_federation, linear, server, timeless

import fedskew as fs
from fedskew.engine import Fetch, ModelState, RoundResult
from fedskew.experiment import overlap
from fedskew.experiment.loop import run_rounds
from fedskew.experiment.overlap import run_overlapping_rounds
from fedskew.experiment.preparation import Prepared
from fedskew.experiment.round.evaluate import Labels, RowFields, TestSet
from fedskew.experiment.round.plan import RoundPlan
from fedskew.experiment.round.record import RoundRow
from fedskew.experiment.round.server import Server
from fedskew.experiment.round.state import RunState
from fedskew.experiment.run import run_prepared
from fedskew.experiment.storage.run_folder import RunFolder
from fedskew.methods import ServerRule, Tensors, Updates

pytestmark = pytest.mark.usefixtures("every_round_is_short")


def overlapping(ready: Prepared, this: Server, out: Path, *callbacks: fs.Callback) -> None:
    run_prepared(ready, out, callbacks, this, partial(run_overlapping_rounds, this))


class Stopped(Server):
    """Is interrupted when it has a round trained."""

    at = 3
    reason: type[BaseException] = KeyboardInterrupt

    def train(self, plan: RoundPlan) -> RoundResult:
        if plan.before.round + 1 == self.at:
            raise self.reason
        return super().train(plan)


def undisturbed(method: str, tmp_path: Path) -> tuple[list[RoundRow], dict[str, Tensor]]:
    run_prepared(prepared(method), tmp_path / "undisturbed")
    folder = RunFolder(tmp_path / "undisturbed")
    return [timeless(row) for row in folder.rounds()], folder.load_model()[0]


def resumed(method: str, tmp_path: Path) -> tuple[list[RoundRow], dict[str, Tensor]]:
    overlapping(*serving(Server, method), tmp_path / "run")
    folder = RunFolder(tmp_path / "run")
    return [timeless(row) for row in folder.rounds()], folder.load_model()[0]


def agree(method: str, tmp_path: Path) -> bool:
    (rows, model), (expected, of_expected) = resumed(method, tmp_path), undisturbed(method, tmp_path)
    return rows == expected and all(torch.equal(model[name], tensor) for name, tensor in of_expected.items())


@pytest.mark.parametrize("loop", [run_rounds, run_overlapping_rounds])
def test_checkpoints_are_written_every_n_rounds_and_after_the_last(
    loop: Callable[..., RunState], tmp_path: Path
) -> None:
    ready = prepared()
    ready = replace(ready, config=replace(ready.config, checkpoint_every=3))
    this = Server(ready.federation, ready.method, ready.model, ready.config)
    run_prepared(ready, tmp_path / "run", server=this, loop=partial(loop, this))
    assert {path.stem for path in (tmp_path / "run" / "checkpoint").iterdir()} == {"round-000003", "round-000005"}


@pytest.mark.parametrize("method", ["fedavg", "scaffold"])
@pytest.mark.parametrize("reason", [KeyboardInterrupt, RuntimeError])
def test_what_was_computed_is_recorded_before_a_run_ends(
    method: str, reason: type[BaseException], tmp_path: Path
) -> None:
    ready, this = serving(type("Stopped", (Stopped,), {"reason": reason}), method)
    with pytest.raises(reason):
        overlapping(ready, this, tmp_path / "run")
    folder = RunFolder(tmp_path / "run")
    assert [row.round for row in folder.rounds()] == [0, 1, 2]
    checkpoint = folder.load_checkpoint()
    assert checkpoint is not None
    assert checkpoint.round == 2
    assert agree(method, tmp_path)


@pytest.mark.parametrize("short", [math.inf, 0.0])
def test_an_interrupt_while_a_test_is_waited_for_does_not_cost_the_round(
    short: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overlap, "_SHORT_ROUND_SECONDS", short)
    real, begun, interrupts = TestSet.begin_to_measure, [0], iter([KeyboardInterrupt])

    def begin(self: TestSet, model: ModelState, labels: Labels = None) -> Callable[[], RowFields]:
        read = real(self, model, labels)
        begun[0] += 1

        def interrupted() -> RowFields:
            for interrupt in interrupts:
                raise interrupt
            return read()

        return interrupted if begun[0] == 2 else read

    ready, this = serving(Server)
    with monkeypatch.context() as patched:
        patched.setattr(TestSet, "begin_to_measure", begin)
        with pytest.raises(KeyboardInterrupt):
            overlapping(ready, this, tmp_path / "run")
    assert [row.round for row in RunFolder(tmp_path / "run").rounds()] == [0, 1, 2]
    assert agree("fedavg", tmp_path)


def test_an_error_of_a_callback_ends_the_run_and_no_row_is_written_twice(tmp_path: Path) -> None:
    seen: list[int] = []

    class Weary(fs.Callback):
        def on_round(self, row: RoundRow, rounds_ahead: int) -> None:
            seen.append(row.round)
            if row.round == 2:
                raise InterruptedError(rounds_ahead)

    ready, this = serving(Server)
    with pytest.raises(InterruptedError, match="3"):
        overlapping(ready, this, tmp_path / "run", Weary())
    assert seen == [1, 2]
    assert [row.round for row in RunFolder(tmp_path / "run").rounds()] == [0, 1, 2]
    assert agree("fedavg", tmp_path)


def test_the_first_error_is_shown_even_if_the_row_cannot_be_recorded() -> None:
    tried: list[int] = []

    class Full(ListRecorder):
        def add(self, row: RoundRow, state: RunState, snapshot: Fetch | None = None) -> None:
            tried.append(row.round)
            raise OSError

    _, this = serving(type("Stopped", (Stopped,), {"at": 2}))
    with pytest.raises(KeyboardInterrupt):
        run_overlapping(this, Full(this))
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

    this = server(image_federation(), Tired(), linear(), rounds=4)
    recorder = ListRecorder(this)
    with pytest.raises(ZeroDivisionError):
        run_overlapping(this, recorder)
    assert [row.round for row in recorder.rows] == [1, 2]


def test_an_error_of_a_server_rule_is_shown() -> None:
    @dataclass(frozen=True)
    class Broken(ServerRule):
        def aggregate(self, sent: Tensors, updates: Updates, state: Tensors) -> tuple[Tensors, Tensors]:
            raise ZeroDivisionError

    this = server(image_federation(), Broken(), linear())
    recorder = ListRecorder(this)
    with pytest.raises(ZeroDivisionError):
        run_overlapping(this, recorder)
    assert recorder.rows == []
