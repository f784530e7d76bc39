"""Rounds that overlap, as on a GPU, are the rounds one after another, to the last bit; and each is recorded once."""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from toy_runs import config, finished, image_federation, linear, norm_and_dropout, same_bits, server

import fedskew as fs
from fedskew.engine import RoundResult
from fedskew.experiment import round_loop
from fedskew.experiment.preparation import Prepared, prepare
from fedskew.experiment.round_loop import RoundDone, RoundLoop
from fedskew.experiment.round_under_way import LaunchedRound, RoundInProgress, SettledRound
from fedskew.experiment.rounds_file import Row
from fedskew.experiment.run import run_prepared
from fedskew.experiment.run_folder import RunFolder
from fedskew.experiment.run_state import RunState
from fedskew.experiment.server import Server
from fedskew.losses import cross_entropy
from fedskew.methods import Client, Objective, Outputs, ServerRule, Tensors, Trained, Updates

RUNS: dict[str, dict[str, Any]] = {
    "fedavg": {},
    "fedavgm": {},
    "scaffold": {},
    "fedvls": {},
    "fedgr": {},
    "local-only": {},
    "centralised": {},
    "fedlmd-switch+scaffold": {},
    "fedconcat+fedavgm": {"clusters": 2, "encoder_rounds": 1},
    "pkd": {"warmup_rounds": 1, "expert_rounds": 2},
}
ENGINES = pytest.mark.parametrize("engine", ["plain", "stacked"])


@pytest.fixture(autouse=True)
def every_round_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(round_loop, "_SHORT", math.inf)


def timeless(row: Row) -> Row:
    return {name: value for name, value in row.items() if name not in ("time", "seconds")}


def driven(this: Server, record: Callable[[RoundDone], None], state: RunState | None = None) -> RunState:
    """The loop's rounds, with their clients trained by the server."""
    rounds = RoundLoop(this, record).rounds(state or this.start())
    try:
        under_way = next(rounds)
        while True:
            try:
                trained = this.train(under_way), 0.0
            except BaseException as error:
                rounds.throw(error)
                raise
            under_way = rounds.send(trained)
    except StopIteration as end:
        after: RunState = end.value
        return after


def overlapped(this: Server, state: RunState | None = None) -> tuple[RunState, list[Row]]:
    """What `finished` does, with rounds that overlap."""
    this.overlaps = True
    done: list[RoundDone] = []
    state = driven(this, done.append, state)
    assert not done or done[-1].state is state
    return state, [timeless(one.row) for one in done]


@ENGINES
@pytest.mark.parametrize("method", RUNS)
def test_overlapping_rounds_are_the_rounds_one_after_another(method: str, engine: str) -> None:
    def fresh() -> Server:
        return server(
            image_federation(), method, norm_and_dropout(), RUNS[method], engine=engine, rounds=4, clients_per_round=3,
            precision="float32", lr_decay=0.9,
        )  # fmt: skip

    (state, rows), (expected, expected_rows) = overlapped(fresh()), finished(fresh())
    assert same_bits(state, expected)
    assert rows == expected_rows


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("method", RUNS)
def test_they_are_on_a_gpu_too(method: str) -> None:
    def fresh() -> Server:
        return server(
            image_federation(), method, norm_and_dropout(), RUNS[method], engine="stacked", rounds=4, device="cuda",
            clients_per_round=3, precision="float32",
        )  # fmt: skip

    one_after_another = fresh()
    one_after_another.overlaps = False
    (state, rows), (expected, expected_rows) = overlapped(fresh()), finished(one_after_another)
    assert same_bits(state, expected)
    assert rows == expected_rows


@pytest.mark.parametrize("settings", [{"eval_every": 2}, {"eval_every": 9}, {"eval_local": True}])
def test_whatever_is_tested_and_when(settings: dict[str, Any]) -> None:
    def fresh() -> Server:
        return server(image_federation(), "fedvls", norm_and_dropout(), engine="stacked", rounds=5, **settings)

    (state, rows), (expected, expected_rows) = overlapped(fresh()), finished(fresh())
    assert same_bits(state, expected)
    assert rows == expected_rows


# -- guesses that are wrong -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Explosive(Objective):
    """Cross entropy, but not finite for clients without a sample of class 0."""

    def loss(self, out: Outputs, y: Tensor, client: Client) -> Tensor:
        return cross_entropy(out.logits, y) * torch.where(client.label_counts[0] == 0, torch.nan, 1.0)


@dataclass(frozen=True)
class Overflowing(ServerRule):
    """A server step that is not finite though the updates are."""

    def aggregate(self, sent: Tensors, updates: Updates, state: Tensors) -> tuple[Tensors, Tensors]:
        return {name: w * torch.inf for name, w in updates.mean().items()}, {}


@dataclass(frozen=True)
class Particular(ServerRule):
    """A server step that refuses what is not finite."""

    def aggregate(self, sent: Tensors, updates: Updates, state: Tensors) -> tuple[Tensors, Tensors]:
        mean = updates.mean()
        if any(bool(w.isnan().any()) for w in mean.values()):
            raise RuntimeError("not a number")
        return mean, state


@ENGINES
@pytest.mark.parametrize("part", [Explosive(), Overflowing()])
def test_a_guess_that_was_wrong_is_undone(part: Objective | ServerRule, engine: str) -> None:
    def fresh() -> Server:
        return server(image_federation(), part, linear(), engine=engine, rounds=6, clients_per_round=2)

    (state, rows), (expected, expected_rows) = overlapped(fresh()), finished(fresh())
    assert any(row["diverged"] for row in rows)
    assert same_bits(state, expected)
    assert rows == expected_rows


def test_a_server_rule_that_refuses_a_wrong_guess_is_asked_again() -> None:
    method = fs.methods.make_method(Explosive())
    both = fs.methods.Method(**{**vars(method), "server": Particular()})
    (state, rows), (expected, expected_rows) = (
        overlapped(server(image_federation(), both, linear(), rounds=3)),
        finished(server(image_federation(), both, linear(), rounds=3)),
    )
    assert [row["diverged"] for row in rows] == [[1, 3]] * 3
    assert same_bits(state, expected)
    assert rows == expected_rows


@dataclass(frozen=True)
class Burdened(Objective):
    """Cross entropy; clients without a sample of class 0 come to keep what is not finite, though all else is."""

    def loss(self, out: Outputs, y: Tensor, client: Client) -> Tensor:
        return cross_entropy(out.logits, y)

    def client_state(self, params: Tensors) -> Tensors:
        return {"kept": torch.zeros(())}

    def next_state(self, trained: Trained, client: Client) -> Tensors:
        return {"kept": torch.where(client.label_counts[0] == 0, torch.inf, client.state["kept"] + 1)}


@ENGINES
def test_a_client_whose_state_is_not_finite_is_left_out_too(engine: str) -> None:
    def fresh() -> Server:
        return server(image_federation(), Burdened(), linear(), engine=engine)

    (state, rows), (expected, expected_rows) = overlapped(fresh()), finished(fresh())
    assert [row["diverged"] for row in expected_rows] == [[1, 3]] * 2
    assert state.clients.versions == {"global": {0: 2, 2: 2, 4: 2}}
    assert same_bits(state, expected)
    assert rows == expected_rows


@dataclass(frozen=True)
class ParticularDownlink(ServerRule):
    """A server that sends nothing that is not finite."""

    def server_state(self, params: Tensors) -> Tensors:
        return {"mean": next(iter(params.values())).clone()}

    def aggregate(self, sent: Tensors, updates: Updates, state: Tensors) -> tuple[Tensors, Tensors]:
        mean = updates.mean()
        return mean, {"mean": next(iter(mean.values()))}

    def downlink(self, state: Tensors) -> Tensors:
        if not bool(state["mean"].isfinite().all()):
            raise RuntimeError("not finite")
        return state


class ParticularModel(fs.models.Classifier):
    """Refuses numbers that are not finite when it is tested."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = super().forward(x)
        if not self.training and not bool(out.isfinite().all()):
            raise RuntimeError("not finite")
        return out


@pytest.mark.parametrize("of", ["server", "model"])
def test_what_would_be_done_with_a_wrong_guess_may_fail(of: str) -> None:
    """Neither the next round, which is made ready on it, nor the test of it is the run's."""
    method, model = fs.methods.make_method(Explosive()), linear()
    if of == "server":
        method = fs.methods.Method(**{**vars(method), "server": ParticularDownlink()})
    else:
        model = ParticularModel(model.encoder, model.head)

    def fresh() -> Server:
        return server(image_federation(), method, model, rounds=3)

    (state, rows), (expected, expected_rows) = overlapped(fresh()), finished(fresh())
    assert [row["diverged"] for row in rows] == [[1, 3]] * 3
    assert same_bits(state, expected)
    assert rows == expected_rows


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
    assert [one.row["round"] for one in done] == [1, 2]


def test_an_error_of_a_server_rule_is_told_all_the_same() -> None:
    @dataclass(frozen=True)
    class Broken(ServerRule):
        def aggregate(self, sent: Tensors, updates: Updates, state: Tensors) -> tuple[Tensors, Tensors]:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        overlapped(server(image_federation(), Broken(), linear()))


# -- the order of things --------------------------------------------------------------------------------------


class Diary(Server):
    """Notes what it is asked to do."""

    def begin(self, state: RunState) -> RoundInProgress:
        self.notes = [*getattr(self, "notes", []), f"begin {state.round + 1}"]
        return super().begin(state)

    def train(self, under_way: RoundInProgress) -> RoundResult:
        self.notes.append(f"train {under_way.state.round + 1}")
        return super().train(under_way)


def diary(method: str = "fedavg", **settings: Any) -> Diary:
    this = Diary(
        image_federation(), fs.methods.make_method(method), linear(), config(rounds=3, engine="stacked", **settings)
    )
    this.overlaps = True
    driven(this, lambda done: this.notes.append(f"record {done.row['round']}"))
    return this


def test_a_round_is_recorded_when_the_next_one_trains_and_each_is_made_ready_once() -> None:
    assert diary().notes == [
        "begin 1", "train 1", "begin 2", "train 2", "record 1", "begin 3", "train 3", "record 2", "record 3",
    ]  # fmt: skip


def test_a_round_that_depends_on_what_clients_keep_waits_for_it() -> None:
    assert diary("scaffold").notes == [
        "begin 1", "train 1", "begin 2", "train 2", "record 1", "begin 3", "train 3", "record 2", "record 3",
    ]  # fmt: skip


def test_the_row_of_a_long_round_is_not_held_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(round_loop, "_SHORT", 0.0)
    assert diary().notes == [f"{what} {number}" for number in (1, 2, 3) for what in ("begin", "train", "record")]


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

            def after_a_while() -> Row:
                clock[0] += 16.0
                return read()

            return replace(settled, test=after_a_while)

    rows: list[Row] = []
    ready, this = serving(Slow)
    this.overlaps = overlaps
    run_prepared(ready, callbacks=[_Keeping(rows)], server=this)
    assert sum(row["seconds"] for row in rows) == clock[0] == 5 * 17.0
    assert all(row["time"]["evaluate"] == 16.0 for row in rows)
    assert all(row["seconds"] > 0 for row in rows)


class _Keeping(fs.Callback):
    def __init__(self, rows: list[Row]) -> None:
        self._rows = rows

    def on_round(self, row: Row, rounds_ahead: int) -> None:
        self._rows.append(row)


# -- ends of all kinds ----------------------------------------------------------------------------------------


class Stopped(Server):
    """Is interrupted when it has a round trained."""

    at = 3
    reason: type[BaseException] = KeyboardInterrupt

    def train(self, under_way: RoundInProgress) -> RoundResult:
        if under_way.state.round + 1 == self.at:
            raise self.reason
        return super().train(under_way)


def prepared(method: str = "fedavg") -> Prepared:
    federation = fs.federation("digits", fs.Dirichlet(beta=0.5, clients=6), seed=1)
    settings = config(rounds=5, engine="stacked", local_epochs=1, batch_size=64, clients_per_round=2)
    return prepare(settings, federation, method, norm_and_dropout(10))


def serving(kind: type[Server], method: str = "fedavg") -> tuple[Prepared, Server]:
    ready = prepared(method)
    this = kind(ready.federation, ready.method, ready.model, ready.config)
    this.overlaps = True
    return ready, this


def undisturbed(method: str, tmp_path: Path) -> tuple[list[Row], dict[str, Tensor]]:
    run_prepared(prepared(method), tmp_path / "undisturbed")
    folder = RunFolder(tmp_path / "undisturbed")
    return [timeless(row) for row in folder.rounds()], folder.load_model()[0]


def resumed(method: str, tmp_path: Path) -> tuple[list[Row], dict[str, Tensor]]:
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
    assert [row["round"] for row in folder.rounds()] == [0, 1, 2]
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

        def interrupted() -> Row:
            for interrupt in interrupts:
                raise interrupt
            return read()

        return replace(settled, test=interrupted) if settled.state.round == 2 else settled


@pytest.mark.parametrize("short", [math.inf, 0.0])
def test_an_interrupt_while_a_test_is_waited_for_does_not_cost_the_round(
    short: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(round_loop, "_SHORT", short)
    ready, this = serving(Impatient)
    with pytest.raises(KeyboardInterrupt):
        run_prepared(ready, tmp_path / "run", server=this)
    assert [row["round"] for row in RunFolder(tmp_path / "run").rounds()] == [0, 1, 2]
    assert agree("fedavg", tmp_path)


def test_an_onlooker_s_error_ends_the_run_and_no_row_is_there_twice(tmp_path: Path) -> None:
    seen: list[int] = []

    class Weary(fs.Callback):
        def on_round(self, row: Row, rounds_ahead: int) -> None:
            seen.append(row["round"])
            if row["round"] == 2:
                raise InterruptedError(rounds_ahead)

    ready, this = serving(Server)
    with pytest.raises(InterruptedError, match="3"):
        run_prepared(ready, tmp_path / "run", [Weary()], this)
    assert seen == [1, 2]
    assert [row["round"] for row in RunFolder(tmp_path / "run").rounds()] == [0, 1, 2]
    assert agree("fedavg", tmp_path)


def test_the_first_error_is_told_even_if_the_row_cannot_be_recorded() -> None:
    tried: list[int] = []

    def full(done: RoundDone) -> None:
        tried.append(done.row["round"])
        raise OSError

    _, this = serving(type("Stopped", (Stopped,), {"at": 2}))
    with pytest.raises(KeyboardInterrupt):
        driven(this, full)
    assert tried == [1]
