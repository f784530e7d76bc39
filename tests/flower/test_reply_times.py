"""Late sites, on a clock that the tests set: nothing here sleeps."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Message
from flwr.proto.node_pb2 import NodeInfo
from in_process import Case, case, small_data

from fedskew.data import Dirichlet, federation
from fedskew.experiment.config import Config, with_values
from fedskew.experiment.result import Result
from fedskew.flower import admission, sites, superlink_calls
from fedskew.flower.reply_times import ReplyTimes
from fedskew.flower.server_app import run_federation


class Clock:
    """Stands in for the module `time`: to sleep is to move the hands."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def _use_clock(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (admission, sites, superlink_calls):
        monkeypatch.setattr(module, "time", clock)


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
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: dict[tuple[str, int], float], **own: Any
) -> tuple[list[dict[str, Any]], Clock]:
    clock = Clock()
    _use_clock(clock, monkeypatch)
    data = small_data(tmp_path)
    split = federation(str(data), Dirichlet(beta=0.5, clients=4), seed=0)
    config = with_values(Config(), {"partition.clients": 4, "rounds": 3, "local_epochs": 1, "device": "cpu"})
    made = case(tmp_path, split, data, config, **{"minimum": 2, "begin_with": 4, **own})
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
    assert f"round 2: the update of site-3 is discarded: {reason}" in caplog.text
    assert clock.now < 1000 + 10 + 61 + 10 + 5


def test_a_site_that_is_always_slow_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the first round nothing is known, and later its usual time counts."""
    rows, _ = run(tmp_path, monkeypatch, {("site-3", round): 500.0 for round in (1, 2, 3)})
    assert [row["failed"] for row in rows[1:]] == [{}, {}, {}]


def test_a_site_that_never_replies_costs_one_time_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    never = {("site-3", round): 1e6 for round in (1, 2, 3)}
    rows, clock = run(tmp_path, monkeypatch, never, round_timeout=900)
    assert rows[1]["failed"] == {"site-3": "it did not reply within 900 s"}
    assert all("it is late" in row["failed"]["site-3"] for row in rows[2:])
    assert clock.now < 1000 + 900 + 2 * 61 + 5


def test_a_site_whose_greeting_was_lost_is_greeted_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Flower delivers a message at most once. A SuperNode that is killed loses what it has not answered."""
    clock = Clock()
    _use_clock(clock, monkeypatch)
    data = small_data(tmp_path)
    split = federation(str(data), Dirichlet(beta=0.5, clients=2), seed=0)
    config = with_values(Config(), {"partition.clients": 2, "rounds": 1, "local_epochs": 1, "device": "cpu"})
    here = case(tmp_path, split, data, config)
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


def lose_a_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: dict[str, Any], **own: Any
) -> tuple[Result, list[str], Clock]:
    """Run one round of two sites. The SuperNode of the second one starts again and loses its request."""
    clock = Clock()
    _use_clock(clock, monkeypatch)
    data = small_data(tmp_path)
    split = federation(str(data), Dirichlet(beta=0.5, clients=2), seed=0)
    values = {"partition.clients": 2, "rounds": 1, "local_epochs": 1, "device": "cpu", **changed}
    here = case(tmp_path, split, data, with_values(Config(), values), **own)
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


@pytest.mark.parametrize("own", [{"grace": 0}, {"minimum": 4}])
def test_without_grace_or_before_the_minimum_a_round_waits_for_its_time_out(
    own: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, _ = run(tmp_path, monkeypatch, {("site-3", 2): 3000.0}, **own)
    assert [row["failed"] for row in rows[1:]] == [{}, {}, {}]


def test_the_limit_is_a_multiple_of_the_usual_time() -> None:
    times = ReplyTimes(grace=3, at_least=20)
    assert times.limit(0) == math.inf
    for seconds in (10, 12, 100):
        times.add(0, seconds)
    assert times.limit(0) == 36
    assert times.limit(1) == math.inf  # perhaps it is always slow
    times.add_missed(1)
    assert times.limit(1) == 36  # no: it is compared with the others
    times.add(1, 5)
    assert times.limit(1) == 20
    for _ in range(5):
        times.add(0, 50)
    assert times.limit(0) == 150  # old replies are forgotten
