"""The loop of rounds: in which order things are done, what is held meanwhile, and whose time it is."""

from __future__ import annotations

import time
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from overlapping import ENGINES, RUNS, driven, serving
from torch import Tensor
from toy_runs import config, everything, image_federation, linear, norm_and_dropout, trained

import fedskew as fs
from fedskew.engine import RoundResult
from fedskew.experiment import loop
from fedskew.experiment.round.phases import LaunchedRound, RoundInProgress, SettledRound
from fedskew.experiment.round.row import RoundRow
from fedskew.experiment.round.server import Server
from fedskew.experiment.round.state import RunState
from fedskew.experiment.run import run_prepared

pytestmark = pytest.mark.usefixtures("every_round_is_short")


class Diary(Server):
    """Notes what it is asked to do."""

    def begin(self, state: RunState) -> RoundInProgress:
        self.notes = [*getattr(self, "notes", []), f"begin {state.round + 1}"]
        return super().begin(state)

    def train(self, under_way: RoundInProgress) -> RoundResult:
        self.notes.append(f"train {under_way.state.round + 1}")
        return super().train(under_way)

    def settle(self, launched: LaunchedRound) -> SettledRound:
        self.notes.append(f"settle {launched.under_way.state.round + 1}")
        return super().settle(launched)


def diary(method: str = "fedavg", **settings: Any) -> Diary:
    this = Diary(
        image_federation(), fs.methods.make_method(method), linear(), config(rounds=3, engine="stacked", **settings)
    )
    this.overlaps = True
    driven(this, lambda done: this.notes.append(f"record {done.row.round}"))
    return this


def test_a_round_is_recorded_when_the_next_one_trains_and_each_is_made_ready_once() -> None:
    assert diary().notes == [
        "begin 1", "train 1", "begin 2", "settle 1", "train 2", "record 1", "begin 3", "settle 2", "train 3",
        "record 2", "settle 3", "record 3",
    ]  # fmt: skip


def test_a_round_that_depends_on_what_clients_keep_waits_for_it() -> None:
    assert diary("scaffold").notes == [
        "begin 1", "train 1", "settle 1", "begin 2", "train 2", "record 1", "settle 2", "begin 3", "train 3",
        "record 2", "settle 3", "record 3",
    ]  # fmt: skip


def test_the_row_of_a_long_round_is_not_held_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "_SHORT", 0.0)
    assert diary().notes == [
        f"{what} {number}" for number in (1, 2, 3) for what in ("begin", "train", "settle", "record")
    ]


class Frugal(Server):
    """Sees to it that of the rounds before nothing is held when a round is trained."""

    seen: Sequence[weakref.ref[Tensor]] = ()

    def train(self, under_way: RoundInProgress) -> RoundResult:
        assert not any(tensor() is not None for tensor in self.seen), under_way.state.round
        result = super().train(under_way)
        self.seen = [weakref.ref(t) for t in (*result.trained.params.values(), *result.states.values(), result.loss)]
        return result


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("method", ["fedavg", "scaffold"])
def test_a_round_s_clients_are_let_go_before_the_next_one_s_are_trained(method: str, overlaps: bool) -> None:
    """All their models at once are most of what a device holds."""
    ready, this = serving(Frugal, method)
    this.overlaps = overlaps
    run_prepared(ready, server=this)
    assert this.seen  # type: ignore[attr-defined]


@ENGINES
@pytest.mark.parametrize("method", RUNS)
def test_what_is_kept_of_a_round_has_memory_of_its_own(method: str, engine: str) -> None:
    """A row of all its clients' models would hold them all."""
    settings = {"engine": engine, "clients_per_round": 3, "local_epochs": 1}
    state, _ = trained(image_federation(), method, norm_and_dropout(), RUNS[method], **settings)
    kept = list(everything(state).values())
    held = {storage.data_ptr(): storage.nbytes() for storage in (t.untyped_storage() for t in kept)}
    assert sum(held.values()) <= sum(t.nbytes for t in kept)


@pytest.mark.parametrize("overlaps", [False, True])
def test_all_time_is_some_round_s_and_none_is_two_s(overlaps: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that an onlooker and the training move on, and nothing else."""
    clock = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])

    class Slow(Server):
        def train(self, under_way: RoundInProgress) -> RoundResult:
            clock[0] += 1.0
            return super().train(under_way)

        def settle(self, launched: LaunchedRound) -> SettledRound:
            settled = super().settle(launched)
            read = settled.test
            assert read is not None

            def after_a_while() -> RoundRow:
                clock[0] += 16.0
                return read()

            return replace(settled, test=after_a_while)

    rows: list[RoundRow] = []
    ready, this = serving(Slow)
    this.overlaps = overlaps
    run_prepared(ready, callbacks=[_Keeping(rows)], server=this)
    assert sum(row.seconds for row in rows) == clock[0] == 5 * 17.0
    assert all(row.time["evaluate"] == 16.0 for row in rows)
    assert all(row.seconds > 0 for row in rows)


class _Keeping(fs.Callback):
    def __init__(self, rows: list[RoundRow]) -> None:
        self._rows = rows

    def on_round(self, row: RoundRow, rounds_ahead: int) -> None:
        self._rows.append(row)
