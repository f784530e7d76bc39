"""What `auto` takes: by rule, by rates measured now or before, or by what a run began with."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from toy_runs import (
    advance,
    finished,
    image_federation,
    linear,
    norm_and_dropout,
    plan_round,
    same_bits,
    server,
    trained,
)

from fedskew.data import IID, federation
from fedskew.engine import auto, measurement
from fedskew.engine.auto import ENGINES, AutoEngine, fastest
from fedskew.engine.choice import SHORT_RUN, choose_engine
from fedskew.engine.contract import RoundWork
from fedskew.engine.cost import estimated_seconds, multiplications
from fedskew.engine.measurement import Trial, part_of, size_of_trial
from fedskew.engine.rates_file import RatesFile, rates_key
from fedskew.errors import UserError
from fedskew.experiment.callbacks import Callback
from fedskew.experiment.round.server import Server
from fedskew.experiment.run import run

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FEDSKEW_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "engine-rates.json"


def given_rates(monkeypatch: pytest.MonkeyPatch, rates: dict[str, float]) -> list[int]:
    """Instead of a measurement; how often one was asked for."""
    asked: list[int] = []

    def told(engines: dict[str, object], work: RoundWork, smallest: int) -> dict[str, float]:
        asked.append(len(work.assignments))
        return {name: rates[name] for name in engines if name in rates}

    monkeypatch.setattr(auto, "measured_rates", told)
    return asked


# -- the choice -------------------------------------------------------------------------------------------


def test_the_fastest_is_taken_unless_a_simpler_one_comes_close() -> None:
    assert fastest({"plain": 10, "stacked": 30, "pool": 20, "pool-stacked": 25}) == "stacked"
    assert fastest({"plain": 10, "stacked": 5, "pool": 10.5}) == "plain"
    assert fastest({"plain": 10, "stacked": 30, "pool": 32, "pool-stacked": 40}) == "pool-stacked"
    assert fastest({"plain": 10}) == "plain"


def test_before_the_run_only_a_long_one_on_a_cpu_is_left_open() -> None:
    assert choose_engine("auto", linear(), GPU, 1e6) == "stacked"
    assert choose_engine("auto", linear(), CPU, SHORT_RUN / 2) == "stacked"
    assert choose_engine("auto", norm_and_dropout(), CPU, SHORT_RUN / 2) == "plain"
    assert choose_engine("auto", linear(), CPU, SHORT_RUN * 2) == "auto"
    for name in ENGINES:
        assert choose_engine(name, linear(), CPU, 1e6) == name
    with pytest.raises(UserError, match="engine 'pool' is for a CPU"):
        choose_engine("pool", linear(), GPU)


def test_the_cost_of_a_run_grows_with_its_steps_and_its_model() -> None:
    image = torch.zeros(1, 1, 8, 8)
    assert multiplications(linear(), image) == 256
    assert multiplications(nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Conv2d(3, 2, 3)), image) == 36 * 27 + 16 * 54
    seconds = [estimated_seconds(linear(), image, steps, visits) for steps, visits in ((10, 100), (20, 100), (20, 1e9))]
    assert seconds == sorted(seconds)
    assert seconds[0] < SHORT_RUN < seconds[2]


# -- a run ------------------------------------------------------------------------------------------------


def automatic() -> tuple[Server, AutoEngine]:
    this = server(image_federation(), "fedvls", linear(), engine="auto")
    assert isinstance(this.engine, AutoEngine)
    return this, this.engine


def test_what_was_measured_is_said_and_remembered(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    asked = given_rates(monkeypatch, {"plain": 1234.5, "stacked": 99})
    monkeypatch.setattr(auto, "candidates", lambda clients: ["plain", "stacked"])
    this, engine = automatic()
    assert engine.name == "auto"
    state, _ = finished(this)
    assert engine.name == "plain"
    assert engine.notices == ["engine plain: samples a second measured here: plain 1,234, stacked 99"]
    assert same_bits(state, trained(image_federation(), "fedvls", linear())[0])
    this, engine = automatic()
    advance(this, this.start())
    assert engine.notices == ["engine plain: samples a second when last measured here: plain 1,234, stacked 99"]
    assert asked == [5]
    cache.write_text("{damaged")
    this, engine = automatic()
    advance(this, this.start())
    assert asked == [5, 5]


def test_the_measurement_itself() -> None:
    this, engine = automatic()
    work = plan_round(this, this.start()).work
    engines = {name: engine._make(name) for name in ("plain", "stacked")}
    rates = measurement.measured_rates(engines, work, 1)
    assert list(rates) == ["plain", "stacked"]
    assert all(rate > 0 for rate in rates.values())


def test_a_rate_counts_the_samples_of_every_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    this, engine = automatic()
    work = plan_round(this, this.start()).work
    several = replace(work, local=replace(work.local, epochs=3))
    monkeypatch.setattr(measurement, "_seconds", lambda *_: 1e-3)
    rates = measurement.measured_rates({"plain": engine._make("plain")}, several, 1)
    assert rates["plain"] == pytest.approx(3000 * sum(len(a.samples) for a in work.assignments))


def test_trials_take_the_same_time_for_any_model() -> None:
    this, _ = automatic()
    work = plan_round(this, this.start()).work
    assert size_of_trial(work, 0.001, 1) == Trial(5, 60, 5)
    assert size_of_trial(work, 0.08, 1) == Trial(3, 1, 5)
    assert size_of_trial(work, 0.3, 1) == Trial(2, 1, 2)
    assert size_of_trial(work, 100.0, 2) == Trial(2, 1, 2)
    part = part_of(work, Trial(2, 2, 4))
    assert [len(a.samples) for a in part.assignments] == [8, 8]
    assert (part.local.epochs, part.local.batch_size) == (1, 4)
    several = replace(work, local=replace(work.local, epochs=3))
    largest = max(len(a.samples) for a in work.assignments)
    assert part_of(several, Trial(2, largest, 2)).local.epochs == 2
    assert part_of(several, Trial(2, 1000, 5)).local.epochs == 3, "no more than the round has"


def test_an_engine_that_cannot_train_is_no_candidate() -> None:
    class Unable:
        name, notices = "stacked", list[str]()

        def train(self, work: RoundWork) -> None:
            raise RuntimeError("not enough memory")

    this, engine = automatic()
    work = plan_round(this, this.start()).work
    assert list(measurement.measured_rates({"plain": engine._make("plain"), "stacked": Unable()}, work, 1)) == ["plain"]


def test_a_resumed_run_continues_with_the_engine_that_it_began_with(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cache: Path
) -> None:
    class Interruption(Callback):
        def on_round(self, row: object, rounds_ahead: int) -> None:
            raise KeyboardInterrupt

    monkeypatch.setattr(auto, "candidates", lambda clients: ["plain", "stacked"])
    monkeypatch.setattr("fedskew.engine.choice.SHORT_RUN", 0.0)
    asked = given_rates(monkeypatch, {"plain": 2, "stacked": 1})
    fed = federation("digits", IID(clients=4))
    settings = {"rounds": 2, "local_epochs": 1, "out": tmp_path / "run"}
    with pytest.raises(KeyboardInterrupt):
        run(fed, "fedavg", callbacks=[Interruption()], **settings)
    cache.unlink()
    given_rates(monkeypatch, {"plain": 1, "stacked": 2})
    result = run(fed, "fedavg", **settings)
    assert (asked, result.engine, result.config.engine) == ([4], "plain", "auto")
    assert run(fed, "fedavg", **settings).engine == "plain"


# -- what is remembered -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content", ["", "[]", '{"k": 3}', '{"k": {}}', '{"k": {"plain": "fast"}}', '{"k": {"plain": NaN}}']
)
def test_a_file_that_holds_no_rates_is_ignored(content: str, cache: Path) -> None:
    cache.parent.mkdir()
    cache.write_text(content)
    assert RatesFile().get("k") is None
    assert RatesFile().put("k", {"plain": 1.0}) == {"plain": 1.0}
    assert RatesFile().get("k") == {"plain": 1.0}


def test_the_first_to_measure_is_right_and_others_stay(cache: Path) -> None:
    RatesFile().put("k", {"plain": 1.0})
    assert RatesFile().put("k", {"plain": 2.0}) == {"plain": 1.0}
    RatesFile().put("other", {"plain": 3.0})
    assert json.loads(cache.read_text()) == {"k": {"plain": 1.0}, "other": {"plain": 3.0}}


def test_a_cache_that_cannot_be_written_is_done_without(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("FEDSKEW_CACHE", str(tmp_path / "file"))
    assert RatesFile().put("k", {"plain": 1.0}) == {"plain": 1.0}
    assert RatesFile().get("k") is None


def test_rates_are_of_one_model_method_and_size() -> None:
    def key(method: str = "fedavg", model: nn.Module | None = None, **settings: object) -> str:
        this = server(image_federation(), method, model or linear(), **settings)
        work = plan_round(this, this.start()).work
        return rates_key(this.network, this._runtimes.train.x.shape[1:], work, ["plain"])

    keys = [key(), key("fedvls"), key(model=norm_and_dropout()), key(batch_size=3), key(clients_per_round=2)]
    keys += [key(precision="float32"), key(precision="bf16")]
    assert len(set(keys)) == len(keys)
    assert key() == keys[0]
    assert key(lr=0.001) == keys[0]
