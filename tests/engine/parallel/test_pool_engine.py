"""The pool gives the plain engine's bits, survives the death of a worker, and leaves no process behind."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from method_cases import PARAMS, by_kind, slow
from parallel_engines import pooled
from torch import Tensor, nn
from toy_runs import (
    advance,
    distance,
    finished,
    image_federation,
    linear,
    norm_and_dropout,
    same_bits,
    server,
    text_federation,
    use_engine,
)

import fedskew as fs
from fedskew.engine import PlainEngine, StackedEngine
from fedskew.engine.parallel.pool import PoolEngine
from fedskew.errors import UserError
from fedskew.experiment.round.record import RoundRow
from fedskew.experiment.round.server import Server
from fedskew.experiment.round.state import RunState
from fedskew.methods import METHODS
from fedskew.models import DataShape, make_model

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="workers are forked under Linux only"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="torch with a GPU cannot take gradients in a forked process"),
]

SUPPORT = Path(__file__).parents[2] / "support"


def in_a_pool(
    this: Server, inner: type[PlainEngine] | type[StackedEngine] = PlainEngine
) -> tuple[RunState, list[RoundRow]]:
    engine = pooled(this, inner)
    try:
        end = finished(this)
    finally:
        engine.close()
    assert engine.notices == []
    return end


@pytest.mark.parametrize("method", by_kind((*METHODS, "fedlmd+scaffold", "fedvls+fedprox+fedavgm")))
def test_every_method_has_the_plain_engine_s_bits(method: str) -> None:
    settings: dict[str, Any] = {"precision": "float32", "clients_per_round": 3, "local_epochs": 1, "lr": 0.02}

    def fresh() -> Server:
        return server(image_federation(), method, norm_and_dropout(), PARAMS.get(method), **settings)

    plain, pool = finished(fresh()), in_a_pool(fresh())
    assert same_bits(plain[0], pool[0])
    assert plain[1] == pool[1]


@pytest.mark.parametrize("method", ["fedvls", "scaffold", "pkd"])
def test_stacked_workers_agree_to_rounding(method: str) -> None:
    def fresh() -> Server:
        return server(image_federation(), method, linear(), PARAMS.get(method), rounds=3)

    assert distance(finished(fresh())[0], in_a_pool(fresh(), StackedEngine)[0]) < 1e-9


def test_texts() -> None:
    federation = text_federation()
    model = make_model("fasttext", DataShape(federation.dataset.input_shape, 4, federation.dataset.vocabulary))
    plain, pool = finished(server(federation, "fedvls", model)), in_a_pool(server(federation, "fedvls", model))
    assert same_bits(plain[0], pool[0])


def test_more_workers_than_clients_and_clients_without_a_step() -> None:
    this = server(image_federation(((0, 1, 0, 0), (0, 0, 1, 0))), "fedlmd", norm_and_dropout(), batch_size=3)
    expected = finished(
        server(image_federation(((0, 1, 0, 0), (0, 0, 1, 0))), "fedlmd", norm_and_dropout(), batch_size=3)
    )
    engine = pooled(this, workers=5)
    assert same_bits(finished(this)[0], expected[0])
    assert len(engine._workers) == 2
    engine.close()


def test_it_tells_what_the_workers_noticed_once() -> None:
    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.out = nn.Linear(64, 4)

        def forward(self, x: Tensor) -> Tensor:
            logits: Tensor = self.out(x.flatten(1))
            return logits * 2 if logits.sum() > 0 else logits

    this = server(image_federation(), "fedavg", Branching())
    engine = pooled(this, StackedEngine)
    finished(this)
    engine.close()
    assert len(engine.notices) == 1
    assert "cannot be stacked" in engine.notices[0]
    engine.notices.clear()  # as a run does when it has told them
    finished(this)  # by new workers
    engine.close()
    assert engine.notices == []


# -- what can go wrong ------------------------------------------------------------------------------------


def test_a_worker_that_was_killed_is_replaced() -> None:
    this = server(image_federation(), "scaffold", norm_and_dropout(), precision="float32", rounds=3)
    engine = pooled(this)
    state, _ = advance(this, this.start())
    victim = engine._workers[0].pid
    os.kill(victim, signal.SIGKILL)
    state, _ = finished(this, state)
    assert engine._workers[0].pid != victim
    engine.close()
    expected = finished(server(image_federation(), "scaffold", norm_and_dropout(), precision="float32", rounds=3))
    assert same_bits(state, expected[0])


@dataclass(frozen=True)
class Deadly(fs.Objective):
    """Ends whatever process computes it, but for the tests'."""

    spared: int = 0

    def loss(self, out: fs.Outputs, y: Tensor, client: fs.Client) -> Tensor:
        if os.getpid() != self.spared:
            os.kill(os.getpid(), signal.SIGKILL)
        return fs.losses.cross_entropy(out.logits, y)


def test_workers_that_die_again_are_reported_in_one_line() -> None:
    this = server(image_federation(), Deadly(os.getpid()), linear())
    engine = pooled(this)
    with pytest.raises(UserError, match=r"died twice \(signal 9\)") as caught:
        advance(this, this.start())
    assert "\n" not in str(caught.value)
    assert engine._workers == []


@dataclass(frozen=True)
class Failing(fs.Objective):
    """Raises what it is told to."""

    error: Exception

    def loss(self, out: fs.Outputs, y: Tensor, client: fs.Client) -> Tensor:
        raise self.error


def test_a_worker_s_error_is_raised_here() -> None:
    this = server(image_federation(), Failing(ValueError("no such thing")), linear())
    engine = pooled(this)
    with pytest.raises(RuntimeError, match="ValueError: no such thing"):
        advance(this, this.start())
    this = server(image_federation(), Failing(UserError("it is refused")), linear())
    engine = pooled(this)
    with pytest.raises(UserError, match="it is refused"):
        advance(this, this.start())
    assert engine._workers == []


def is_gone(process: int) -> bool:
    return not Path(f"/proc/{process}").exists()


def test_no_process_outlives_its_engine() -> None:
    this = server(image_federation(), "fedavg", linear())
    engine = pooled(this)
    advance(this, this.start())
    processes = [worker.pid for worker in engine._workers]
    assert len(processes) == 2
    engine.close()
    assert all(map(is_gone, processes))
    advance(this, this.start())
    processes = [worker.pid for worker in engine._workers]
    del engine, this
    assert all(map(is_gone, processes))


SCRIPT = """
import os, signal, sys, time
from dataclasses import dataclass
sys.path.insert(0, {support!r})
from parallel_engines import pooled
from toy_runs import advance, image_federation, linear, server
import fedskew as fs

@dataclass(frozen=True)
class Endless(fs.Objective):
    def loss(self, out, y, client):
        os.write(1, b"training\\n")
        time.sleep(3600)

this = server(image_federation(), Endless(), linear())
pooled(this)
try:
    advance(this, this.start())
except KeyboardInterrupt:
    os.write(1, b"stopped\\n")
"""


def heed_interrupts() -> None:
    """What a shell starts in the background ignores them."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.skipif(not hasattr(os, "killpg"), reason="Windows has neither these signals nor process groups")
@pytest.mark.parametrize("name", ["SIGINT", "SIGKILL", *slow("SIGTERM")])
def test_workers_end_with_their_parent_in_the_middle_of_a_round(name: str) -> None:
    """Its output ends only when the last process that could write to it is gone."""
    number = signal.Signals[name]
    script = SCRIPT.format(support=str(SUPPORT))
    parent = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, start_new_session=True, preexec_fn=heed_interrupts
    )
    assert parent.stdout is not None
    assert parent.stdout.readline() == b"training\n"
    if number == signal.SIGINT:
        os.killpg(parent.pid, number)  # as a terminal does
    else:
        parent.send_signal(number)
    rest, _ = parent.communicate(timeout=120)
    assert (b"stopped" in rest) == (number == signal.SIGINT)
    assert parent.returncode == (0 if number == signal.SIGINT else -number)


# -- spawned workers, as on macOS and Windows ----------------------------------------------------------------


def spawned(this: Server) -> PoolEngine:
    smallest = this.network.smallest_batch(this._runtimes.train_samples.inputs(torch.zeros(1, dtype=torch.int64)))
    return use_engine(
        this, PoolEngine(PlainEngine(this.network, this._runtimes.train_samples, smallest), 2, can_fork=False)
    )


@pytest.mark.slow
def test_a_spawned_worker_that_was_killed_is_replaced_and_the_bits_are_the_plain_engine_s() -> None:
    this = server(image_federation(), "scaffold", norm_and_dropout(), precision="float32", rounds=2)
    engine = spawned(this)
    state, _ = advance(this, this.start())
    victim, other = (worker.pid for worker in engine._workers)
    os.kill(victim, signal.SIGKILL)
    state, _ = finished(this, state)
    assert engine._workers[0].pid != victim
    engine.close()
    assert is_gone(victim)
    assert is_gone(other)
    expected = finished(server(image_federation(), "scaffold", norm_and_dropout(), precision="float32", rounds=2))
    assert same_bits(state, expected[0])


def test_what_cannot_be_sent_to_a_spawned_worker_is_refused_in_one_line() -> None:
    class Local(nn.Linear):
        """Defined inside a function, so another process cannot import it."""

    this = server(image_federation(), "fedavg", nn.Sequential(nn.Flatten(), Local(64, 4)))
    spawned(this)
    with pytest.raises(UserError, match="cannot send the model or the method to a worker process") as caught:
        advance(this, this.start())
    assert "\n" not in str(caught.value)


def test_a_worker_that_runs_a_script_without_a_guard_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multiprocessing.current_process(), "_inheriting", True, raising=False)  # as in such a worker
    this = server(image_federation(), "fedavg", linear())
    spawned(this)
    with pytest.raises(UserError, match="runs this script again; expected the code that trains inside `if __name__"):
        advance(this, this.start())
