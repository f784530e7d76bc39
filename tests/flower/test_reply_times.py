"""Late sites, on a clock that the tests set: nothing here sleeps."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from datetime import UTC, datetime, tzinfo
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Message
from flwr.proto.node_pb2 import NodeInfo
from in_process import Case, case, small_data

from fedskew.data import Dirichlet, federation
from fedskew.experiment.config import Config, with_values
from fedskew.experiment.result import Result
from fedskew.flower import admission, chained_log, server_app, sites, superlink_calls
from fedskew.flower.chained_log import read_chain
from fedskew.flower.reply_times import ReplyTimes, kind_of_work
from fedskew.flower.run_status import read_status
from fedskew.flower.server_app import run_federation
from fedskew.flower.settings import FederationSettings
from fedskew.flower.wire import Facts

BY_SITES = {"evaluation": "sites", "site_metrics": "total", "test_data": None}
"""The default settings: each request for training from the second round on also asks for tests."""
WORKS = TRAIN, TRAIN_AND_TEST, TEST = "train, stage 0", "train, stage 0, tests", "evaluate, model global"


class Clock:
    """Stands in for the module `time`: to sleep is to move the hands."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Calendar:
    """Stands in for the class `datetime`, with the time of a clock."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def now(self, zone: tzinfo) -> datetime:
        return datetime.fromtimestamp(self._clock.now, zone)


def _use_clock(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (admission, sites, superlink_calls):
        monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(chained_log, "datetime", Calendar(clock))


def slow_down(made: Case, clock: Clock, seconds: dict[tuple[str, int], float]) -> None:
    """Have (site, round) take so many seconds to train; all others take 10."""
    grid, due = made.grid, {}
    deliver, pull = grid._deliver, grid.pull_messages

    def deliver_later(message: Message) -> str:
        number = deliver(message)
        name, _ = grid._sites[message.metadata.dst_node_id]
        round = message.metadata.group_id
        due[number] = clock.now + (seconds.get((name, int(round)), 10.0) if round else 0.0)
        return number

    def pull_when_due(message_ids: Iterable[str]) -> Iterable[Message]:
        return pull([number for number in message_ids if due[number] <= clock.now])

    grid._deliver, grid.pull_messages = deliver_later, pull_when_due  # type: ignore[method-assign]


def run(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    seconds: dict[tuple[str, int], float],
    changed: dict[str, Any] | None = None,
    **own: Any,
) -> tuple[list[dict[str, Any]], Clock]:
    clock = Clock()
    _use_clock(clock, monkeypatch)
    data = small_data(tmp_path)
    split = federation(str(data), Dirichlet(beta=0.5, clients=4), seed=0)
    values = {"partition.clients": 4, "rounds": 3, "local_epochs": 1, "device": "cpu", **(changed or {})}
    made = case(tmp_path, split, data, with_values(Config(), values), **{"minimum": 2, "begin_with": 4, **own})
    slow_down(made, clock, seconds)
    run_federation(made.grid, made.context)
    lines = (tmp_path / "run" / "rounds.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines], clock


def test_a_late_site_is_left_out_of_its_round_and_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", logger="flwr"):
        rows, clock = run(tmp_path, monkeypatch, {("site-3", 2): 3000.0})
    assert rows[1]["failed"] == rows[3]["failed"] == {}
    reason = "it is late: no reply after 60 s, but 3 other sites replied; its usual time is 10 s"
    assert rows[2]["failed"] == {"site-3": reason}
    assert f"round 2: no update of site-3 is used: {reason}" in caplog.text
    assert clock.now < 1000 + 10 + 61 + 10 + 5


@pytest.mark.parametrize(
    ("slow_rounds", "changed", "own"),
    [
        ((1, 2, 3), {}, {}),
        ((1, 2, 3), {}, BY_SITES),  # it tests the first model at once
        ((2, 3), {}, BY_SITES),  # its tests take long
        ((3, 4), {"method": "fedlmd-switch", "rounds": 4}, {}),  # the second stage takes long
    ],
)
def test_a_site_that_is_always_slow_is_waited_for(
    slow_rounds: tuple[int, ...],
    changed: dict[str, Any],
    own: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At first nothing is known about such work, and later the site's usual time for it counts."""
    rows, clock = run(tmp_path, monkeypatch, {("site-3", round): 500.0 for round in slow_rounds}, changed, **own)
    assert not any(row["failed"] for row in rows[1:])
    assert clock.now >= 1000 + 500 * len(slow_rounds)


def test_after_its_first_survey_a_slow_site_trains_in_every_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FedConcat asks for label counts before it trains, and the last stage trains all sites."""
    changed = {"method": "fedconcat", "method.clusters": 1, "method.encoder_rounds": 1, "rounds": 2}
    rows, _ = run(tmp_path, monkeypatch, {("site-3", round): 500.0 for round in (1, 2)}, changed)
    assert [row["clients"] for row in rows[1:]] == [[0, 1, 2, 3]] * 3
    assert not any(row["failed"] for row in rows[1:])


@pytest.mark.parametrize("settings", [{}, BY_SITES])
def test_a_site_that_never_replies_costs_one_time_out(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    never = {("site-3", round): 1e6 for round in (1, 2, 3)}
    rows, clock = run(tmp_path, monkeypatch, never, round_timeout=900, **settings)
    assert rows[1]["failed"] == {"site-3": "it did not reply within 900 s"}
    assert all("it is late" in row["failed"]["site-3"] for row in rows[2:])
    assert clock.now < 1000 + 900 + 2 * 61 + 5


def test_a_slow_site_that_missed_a_time_out_does_not_stay_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first usual time is that of the others. The replies that come too late show its own."""
    find_limits = watch_limits(monkeypatch)
    slow = {("site-3", round): seconds for round, seconds in ((1, 1e6), (2, 170.0), (3, 400.0), (4, 150.0), (5, 300.0))}
    rows, clock = run(tmp_path, monkeypatch, slow, {"rounds": 5}, round_timeout=900)
    assert [list(row["failed"]) for row in rows[1:]] == [["site-3"]] * 3 + [[]] * 2
    assert clock.now < 1000 + 900 + 2 * 61 + 150 + 300 + 10
    late = [entry for entry in read_chain(tmp_path / "run" / "audit.jsonl").entries if entry["event"] == "too late"]
    assert [(entry["site"], entry["round"], entry["work"]) for entry in late] == [("site-3", n, TRAIN) for n in (2, 3)]
    assert all("tensors" in entry for entry in late)
    live, resumed = find_limits()
    assert resumed == pytest.approx(live)
    status = read_status(tmp_path / "run", datetime.now(UTC)).sites[3]
    assert (status.state, status.missed, status.updates) == ("connected", 3, 2)


def two_sites(tmp_path: Path, changed: dict[str, Any] | None = None, **own: Any) -> Case:
    """Prepare one round of two sites."""
    data = small_data(tmp_path)
    split = federation(str(data), Dirichlet(beta=0.5, clients=2), seed=0)
    values = {"partition.clients": 2, "rounds": 1, "local_epochs": 1, "device": "cpu", **(changed or {})}
    return case(tmp_path, split, data, with_values(Config(), values), **own)


def test_a_site_whose_greeting_was_lost_is_greeted_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Flower delivers a message at most once. A SuperNode that is killed loses what it has not answered."""
    clock = Clock()
    _use_clock(clock, monkeypatch)
    here = two_sites(tmp_path)
    here.grid.silent = {"site-1"}
    deliver = here.grid._deliver

    def deliver_the_second_one(message: Message) -> str:
        number = deliver(message)
        if message.metadata.dst_node_id == 1001:
            here.grid.silent.clear()
        return number

    here.grid._deliver = deliver_the_second_one  # type: ignore[method-assign]
    with caplog.at_level("INFO", logger="flwr"):
        result = run_federation(here.grid, here.context)
    assert result.history[1].clients == [0, 1]
    assert caplog.text.count("site-1 is connected") == 1
    assert 1000 + 60 < clock.now < 1000 + 60 + 5


def test_a_refused_site_that_reads_its_data_is_not_greeted_again_before_its_greeting_may_be_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second greeting is lost. Half a minute later, the site may still be reading its data to answer it."""
    clock = Clock()
    _use_clock(clock, monkeypatch)
    greeted: list[float] = []

    def refuse(site: str, asked: Facts, facts: Facts, answer: bytes) -> tuple[Facts, bytes]:
        is_first = (site, asked["kind"], len(greeted)) == ("site-1", "hello", 1)
        return ({"refused": "no data yet"}, b"") if is_first else (facts, answer)

    here = two_sites(tmp_path, meddle=refuse)
    deliver = here.grid._deliver

    def deliver_all_but_the_second(message: Message) -> str:
        if message.metadata.dst_node_id == 1001 and "hello" in str(message.content.config_records["facts"]["json"]):
            greeted.append(clock.now)
            here.grid.silent = {"site-1"} if len(greeted) == 2 else set()
        return deliver(message)

    here.grid._deliver = deliver_all_but_the_second  # type: ignore[method-assign]
    run_federation(here.grid, here.context)
    first, second, third = greeted
    assert 30 < second - first < 35
    assert 60 < third - second < 65


def lose_a_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: dict[str, Any], **own: Any
) -> tuple[Result, list[str], Clock]:
    """Run one round of two sites. The SuperNode of the second one starts again and loses its request."""
    clock = Clock()
    _use_clock(clock, monkeypatch)
    here = two_sites(tmp_path, changed, **own)
    deliver, nodes, started = here.grid._deliver, here.grid.get_nodes, {1000: "first", 1001: "first"}

    def lose_the_first_one(message: Message) -> str:
        node = message.metadata.dst_node_id
        is_lost = message.metadata.group_id == "1" and started[node] == "first" and node == 1001
        here.grid.silent = {"site-1"} if is_lost else set()
        number = deliver(message)
        if is_lost:
            started[node] = "second"
        return number

    def get_nodes() -> list[NodeInfo]:
        return [NodeInfo(node_id=n.node_id, name=n.name, last_activated_at=started[n.node_id]) for n in nodes()]

    here.grid._deliver, here.grid.get_nodes = lose_the_first_one, get_nodes  # type: ignore[method-assign]
    result = run_federation(here.grid, here.context)
    return result, [message.site for message in here.grid.sent if message.kind == "train"], clock


def test_a_site_that_started_again_gets_its_request_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first request was lost with its SuperNode; the round need not wait for its time-out."""
    result, trained, clock = lose_a_request(tmp_path, monkeypatch, {})
    assert result.history[1].failed == {}
    assert trained == ["site-0", "site-1"]
    assert clock.now < 1000 + 10


@pytest.mark.parametrize(
    ("privacy", "changed"),
    [("local", {"average": "uniform"}), ("example", {"method": "fedavg", "example_clip": 1.0, "example_noise": 4.0})],
)
def test_a_site_that_adds_noise_trains_a_round_once(
    privacy: str, changed: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have sent its update before it started again, and a second one would cost privacy."""
    own = {"privacy": privacy, "share_loss": False, "attempts": 1, "minimum": 1}
    result, trained, _ = lose_a_request(tmp_path, monkeypatch, changed, **own)
    assert list(result.history[1].failed) == ["site-1"]
    assert trained == ["site-0"]


def test_a_run_that_resumes_knows_the_usual_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise, a site that hangs would hold the first round after every restart for the whole time-out."""

    class Killed(Exception):
        pass

    def die(site: str, asked: dict[str, Any], facts: dict[str, Any], answer: bytes) -> tuple[dict[str, Any], bytes]:
        if asked["kind"] == "train" and asked["key"]["round"] == 1:
            raise Killed
        return facts, answer

    with pytest.raises(Killed):
        run(tmp_path, monkeypatch, {}, meddle=die)
    rows, clock = run(tmp_path, monkeypatch, {("site-3", 2): 1e6})
    assert "it is late: no reply after 60 s" in rows[2]["failed"]["site-3"]
    assert clock.now < 1000 + 61 + 10 + 5


Limits = dict[tuple[int, str], float]


def watch_limits(monkeypatch: pytest.MonkeyPatch) -> Callable[[], tuple[Limits, Limits]]:
    """Return a function for the time after a run. It returns the run's limits, and those with which it would resume."""
    read = server_app._reply_times
    calls: list[tuple[FederationSettings, Path, ReplyTimes]] = []

    def read_and_keep(settings: FederationSettings, audit: Path) -> ReplyTimes:
        calls.append((settings, audit, read(settings, audit)))
        return calls[-1][-1]

    def limits(times: ReplyTimes) -> Limits:
        return {(client, work): times.limit(client, work) for client in range(4) for work in WORKS}

    monkeypatch.setattr(server_app, "_reply_times", read_and_keep)
    return lambda: (limits(calls[0][-1]), limits(read(*calls[0][:2])))


def test_a_run_that_resumes_has_the_limits_of_the_live_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A site that refuses at once, such as outside its hours, has no usual time. A site that missed a time-out has."""
    find_limits = watch_limits(monkeypatch)

    def refuse(site: str, asked: dict[str, Any], facts: dict[str, Any], answer: bytes) -> tuple[dict[str, Any], bytes]:
        if (site, asked["kind"]) == ("site-1", "train"):
            return ({"refused": "no"} if asked["key"]["round"] == 0 else {"failed": "no"}), b""
        return facts, answer

    seconds = {("site-2", 1): 1e6, ("site-3", 1): 100.0, ("site-3", 2): 200.0, ("site-3", 3): 1e6}
    rows, _ = run(tmp_path, monkeypatch, seconds, meddle=refuse, round_timeout=900, **BY_SITES)
    assert [list(row["failed"]) for row in rows[1:]] == [["site-1", "site-2"], ["site-1"], ["site-1", "site-3"]]
    live, resumed = find_limits()
    assert live[1, TRAIN] == live[1, TRAIN_AND_TEST] == math.inf
    assert live[3, TRAIN] == pytest.approx(300, rel=0.02)
    assert live[2, TRAIN] == pytest.approx(165, rel=0.02)
    assert resumed == pytest.approx(live)


def test_a_repeated_request_counts_from_the_first_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That is how long the round waits. A run that resumes agrees."""
    find_limits = watch_limits(monkeypatch)
    lose_a_request(tmp_path, monkeypatch, {}, grace_seconds=0)
    live, resumed = find_limits()
    assert live[1, TRAIN] >= 3 * 5 > live[0, TRAIN]
    assert resumed == pytest.approx(live)


@pytest.mark.parametrize("own", [{"grace": 0}, {"minimum": 4}])
def test_without_grace_or_before_the_minimum_a_round_waits_for_its_time_out(
    own: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, _ = run(tmp_path, monkeypatch, {("site-3", 2): 3000.0}, **own)
    assert [row["failed"] for row in rows[1:]] == [{}, {}, {}]


def test_the_limit_is_a_multiple_of_the_usual_time() -> None:
    times = ReplyTimes(grace=3, at_least=20)
    assert times.limit(0, TRAIN) == math.inf
    for seconds in (10, 12, 100):
        times.add(0, TRAIN, seconds)
    times.add(0, TEST, 1)
    times.add(1, TEST, 1)
    assert times.limit(0, TRAIN) == 36
    assert times.limit(1, TRAIN) == math.inf  # perhaps it is always slow
    times.add_missed(1, TRAIN)
    assert times.limit(1, TRAIN) == 36  # no: it is compared with the others
    times.add(1, TRAIN, 5)
    assert times.limit(1, TRAIN) == 20
    for _ in range(5):
        times.add(0, TRAIN, 50)
    assert times.limit(0, TRAIN) == 150  # old replies are forgotten
    assert times.limit(0, TEST) == 20


def test_requests_that_take_different_times_are_different_kinds_of_work() -> None:
    test = {"model": "global", "round": 1, "frozen": []}
    assert kind_of_work("train", {"kind": "evaluate", **test}) == kind_of_work("evaluate", test) == TEST
    assert kind_of_work("evaluate", {**test, "round": 2}) == TEST
    assert kind_of_work("evaluate", {**test, "frozen": ["encoder.0"]}) == f"{TEST}, frozen"
    assert kind_of_work("train", {"stage": 0}) == TRAIN
    assert kind_of_work("train", {"stage": 0, "tests": test}) == TRAIN_AND_TEST
    assert kind_of_work("train", {"stage": 1, "local_tests": True}) == "train, stage 1, local_tests"
