"""The loops of rounds: the order of the steps, what stays in memory, and whose time it is."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
from overlapping import ENGINES, RUNS, run_overlapping, serving
from torch import Tensor
from toy_runs import ListRecorder, config, everything, image_federation, linear, norm_and_dropout, trained

import fedskew as fs
from fedskew.engine import Fetch, ModelState, RoundResult
from fedskew.experiment import overlap
from fedskew.experiment.loop import run_rounds
from fedskew.experiment.overlap import run_overlapping_rounds
from fedskew.experiment.round.aggregate import Aggregated
from fedskew.experiment.round.evaluate import Labels, RowFields, TestSet
from fedskew.experiment.round.plan import RoundPlan
from fedskew.experiment.round.record import RoundRow
from fedskew.experiment.round.server import Server
from fedskew.experiment.round.state import RunState
from fedskew.experiment.run import run_prepared
from fedskew.methods import Stage

pytestmark = pytest.mark.usefixtures("every_round_is_short")

LOOPS = pytest.mark.parametrize("loop", [run_rounds, run_overlapping_rounds])


class Diary(Server):
    """Writes down what it is asked to do."""

    def plan(self, stage: Stage, state: RunState) -> RoundPlan:
        self.notes = [*getattr(self, "notes", []), f"plan {state.round + 1}"]
        return super().plan(stage, state)

    def train(self, plan: RoundPlan) -> RoundResult:
        self.notes.append(f"train {plan.before.round + 1}")
        return super().train(plan)

    def record(self, plan: RoundPlan, result: RoundResult, aggregated: Aggregated) -> RoundRow:
        self.notes.append(f"settle {plan.before.round + 1}")
        return super().record(plan, result, aggregated)


class DiaryRecorder(ListRecorder):
    """Writes down when a round is recorded."""

    def __init__(self, server: Diary) -> None:
        super().__init__(server)
        self._diary = server

    def add(self, row: RoundRow, state: RunState, snapshot: Fetch | None = None) -> None:
        self._diary.notes.append(f"record {row.round}")
        super().add(row, state, snapshot)


def diary(method: str = "fedavg", **settings: Any) -> list[str]:
    this = Diary(image_federation(), fs.make_method(method), linear(), config(rounds=3, engine="stacked", **settings))
    run_overlapping(this, DiaryRecorder(this))
    return this.notes


def test_a_round_is_recorded_when_the_next_one_trains_and_each_is_planned_once() -> None:
    assert diary() == [
        "plan 1", "train 1", "plan 2", "settle 1", "train 2", "record 1", "plan 3", "settle 2", "train 3",
        "record 2", "settle 3", "record 3",
    ]  # fmt: skip


def test_a_round_that_depends_on_what_clients_keep_waits_for_it() -> None:
    assert diary("scaffold") == [
        "plan 1", "train 1", "settle 1", "plan 2", "train 2", "record 1", "settle 2", "plan 3", "train 3",
        "record 2", "settle 3", "record 3",
    ]  # fmt: skip


def test_the_row_of_a_long_round_is_not_held_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overlap, "_SHORT_ROUND_SECONDS", 0.0)
    assert diary() == [f"{step} {number}" for number in (1, 2, 3) for step in ("plan", "train", "settle", "record")]


class Frugal(Server):
    """Checks that nothing of the rounds before is in memory when a round is trained."""

    seen: Sequence[weakref.ref[Tensor]] = ()

    def train(self, plan: RoundPlan) -> RoundResult:
        assert not any(tensor() is not None for tensor in self.seen), plan.before.round
        result = super().train(plan)
        self.seen = [weakref.ref(t) for t in (*result.trained.params.values(), *result.states.values(), result.loss)]
        return result


@LOOPS
@pytest.mark.parametrize("method", ["fedavg", "scaffold"])
def test_a_round_s_clients_are_freed_before_those_of_the_next_one_are_trained(
    method: str, loop: Callable[..., RunState]
) -> None:
    """All their models at once are most of what a device holds."""
    ready, this = serving(Frugal, method)
    run_prepared(ready, server=this, loop=partial(loop, this))
    assert this.seen  # type: ignore[attr-defined]


@ENGINES
@pytest.mark.parametrize("method", RUNS)
def test_what_is_kept_of_a_round_has_memory_of_its_own(method: str, engine: str) -> None:
    """A row of the stack would keep the models of all clients in memory."""
    settings = {"engine": engine, "clients_per_round": 3, "local_epochs": 1}
    state, _ = trained(image_federation(), method, norm_and_dropout(), RUNS[method], **settings)
    kept = list(everything(state).values())
    held = {storage.data_ptr(): storage.nbytes() for storage in (t.untyped_storage() for t in kept)}
    assert sum(held.values()) <= sum(t.nbytes for t in kept)


@LOOPS
def test_all_time_belongs_to_some_round_and_none_to_two(
    loop: Callable[..., RunState], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock that training and tests move on, and nothing else."""
    clock = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])

    class Slow(Server):
        def train(self, plan: RoundPlan) -> RoundResult:
            clock[0] += 1.0
            return super().train(plan)

    def slow_test(self: TestSet, model: ModelState, labels: Labels = None) -> RowFields:
        clock[0] += 16.0
        return {"evaluation": self.evaluate(model, labels)}

    def slow_pending_test(self: TestSet, model: ModelState, labels: Labels = None) -> Callable[[], RowFields]:
        return lambda: slow_test(self, model, labels)

    monkeypatch.setattr(TestSet, "measure", slow_test)
    monkeypatch.setattr(TestSet, "begin_to_measure", slow_pending_test)
    ready, this = serving(Slow)
    rows = run_prepared(ready, server=this, loop=partial(loop, this)).history[1:]
    assert sum(row.seconds for row in rows) == clock[0] == 5 * 17.0
    assert all(row.time["evaluate"] == 16.0 for row in rows)
    assert all(row.seconds > 0 for row in rows)


@LOOPS
def test_a_run_ends_with_the_round_after_which_a_callback_stops_it(loop: Callable[..., RunState]) -> None:
    """On a GPU the next round is in training by then. It leaves no trace."""

    class Enough(fs.Callback):
        def on_round(self, row: RoundRow, rounds_ahead: int) -> bool:
            return row.round == 3

    ready, this = serving(Server)
    result = run_prepared(ready, callbacks=[Enough()], server=this, loop=partial(loop, this))
    assert [row.round for row in result.history] == [0, 1, 2, 3]
    assert result.stopped_early

    ready, this = serving(Server)
    whole = run_prepared(ready, server=this)
    assert not whole.stopped_early
    assert [row.evaluation for row in whole.history[:4]] == [row.evaluation for row in result.history]
    model = this.evaluate_model(ModelState(dict(result.model.named_parameters()), dict(result.model.named_buffers())))
    assert model == result.evaluation
