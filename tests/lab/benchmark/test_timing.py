"""Contenders take turns, and one that fails does not stop the others."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from fedskew.errors import UserError
from fedskew.lab.benchmark.cases import Case, Workload
from fedskew.lab.benchmark.plan import Plan, default_plan, groups, quick_plan
from fedskew.lab.benchmark.run import Benchmark
from fedskew.lab.benchmark.timing import Contender, ContenderTimer, Ready, TimingLength

CASE = Case("dnn", 2, Workload(1, 1, 10), "cpu")
CPU = torch.device("cpu")


def contender(name: str, call: Callable[[], None], closed: list[str] | None = None) -> Contender:
    def close() -> None:
        if closed is not None:
            closed.append(name)

    return Contender(CASE, "steps", name, lambda: Ready(call, lambda: 7, lambda: name, close))


def silent(line: str) -> None:
    pass


def test_contenders_take_turns() -> None:
    calls: list[str] = []
    contenders = [contender(name, lambda name=name: calls.append(name)) for name in "ab"]  # type: ignore[misc]
    measured = ContenderTimer(CPU, TimingLength(repetitions=3, seconds=0, warm_up=1)).measure(contenders, silent)
    assert "".join(calls) == "aa" + "bb" + 3 * "ab"
    assert [(m.contender, len(m.seconds), m.samples) for m in measured] == [("a", 3, 7), ("b", 3, 7)]


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate"), UserError("CUDA out of memory.")]
)
def test_one_that_fails_is_noted_and_all_are_closed(error: Exception) -> None:
    def fail() -> None:
        raise error

    closed: list[str] = []
    stopwatch = ContenderTimer(CPU, TimingLength(1, 0))
    contenders = [contender("a", fail, closed), contender("b", lambda: None, closed)]
    assert [m.contender for m in stopwatch.measure(contenders, silent)] == ["b"]
    assert [(f.label, f.reason) for f in stopwatch.failures] == [("a", "CUDA out of memory.")]
    assert sorted(closed) == ["a", "b"]


def test_what_an_engine_says_is_kept() -> None:
    stopwatch = ContenderTimer(CPU, TimingLength(1, 0))
    ready = Ready(lambda: None, lambda: 1, lambda: "stacked", notices=["in chunks of 40"])
    stopwatch.measure([Contender(CASE, "steps", "a label", lambda: ready)], silent)
    assert stopwatch.notices == ["a label: in chunks of 40"]


def test_threads_are_the_contenders_own() -> None:
    before = torch.get_num_threads()
    seen: list[int] = []
    ready = Ready(lambda: seen.append(torch.get_num_threads()), lambda: 1, lambda: "a", threads=before + 1)
    ContenderTimer(CPU, TimingLength(1, 0)).measure([Contender(CASE, "steps", "a", lambda: ready)], silent)
    assert set(seen) == {before + 1}
    assert torch.get_num_threads() == before


def test_what_there_is_no_time_for_is_said() -> None:
    plan = Plan(
        "cpu", ("dnn",), (10,), ("fedavg",), ("float32",), ("plain",), Workload(1, 1, 10), TimingLength(1, 0), budget=0
    )
    results = Benchmark(plan, "fedskew bench").run(lambda *_: None)
    assert results.measurements == []
    assert results.left_out[0] == "steps of fedavg on dnn, 10 clients"
    assert len(results.left_out) == len(groups(plan)) == 5


def test_results_are_kept_after_each_group() -> None:
    plan = Plan(
        "cpu", ("dnn",), (2,), ("fedavg",), ("float32",), ("plain",), Workload(1, 1, 10), TimingLength(1, 0), 100,
        federations=(10, 20), participants=(1, 2), levels=("federation", "participants"),
    )  # fmt: skip
    kept: list[int] = []
    Benchmark(plan, "fedskew bench").run(lambda *_: None, lambda results: kept.append(len(results.measurements)))
    assert kept == [2, 4]


def test_the_rows_with_a_target_come_first() -> None:
    titles = [group.title for group in groups(default_plan("cuda"))]
    assert titles[:4] == [
        "steps of fedavg on cnn, 10 clients",
        "steps of fedavg on dnn, 10 clients",
        "steps of fedavg on mobilenetv2, 10 clients",
        "steps of fedavg on cnn, 100 clients",
    ]
    assert titles.index("rounds of cnn, 10 clients, bf16") < titles.index("rounds by federation size")
    assert titles.index("rounds by number of participants") < titles.index("rounds of cnn, 10 clients, float32")
    assert len(titles) == len(set(titles))


def test_large_contenders_are_not_kept_beside_one_another() -> None:
    apart = {group.title for group in groups(default_plan("cuda")) if not group.interleaved}
    assert "steps of fedavg on resnet18, 100 clients" in apart
    assert not any("cnn" in title or ", 10 clients" in title for title in apart)


def test_enough_repetitions_are_made_even_when_it_is_late() -> None:
    late = iter([False, *100 * [True]])
    stopwatch = ContenderTimer(CPU, TimingLength(7, 0), lambda: next(late))
    [measurement] = stopwatch.measure([contender("a", lambda: None)], silent)
    assert len(measurement.seconds) == 3


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_group_compares_with_the_loop(device: str) -> None:
    for plan in (default_plan(device), quick_plan(device)):
        for group in groups(plan):
            labels = [c.label for c in group.contenders]
            compared = any(label.startswith("loop") for label in labels)
            assert compared or group.commands or group.title.startswith("rounds by")
            if group.title.startswith("steps of fedavg"):
                assert any(label.startswith("limit") for label in labels)


def test_a_contender_goes_by_what_it_came_to() -> None:
    name = ["auto"]
    ready = Ready(lambda: name.__setitem__(0, "pool"), lambda: 1, lambda: name[0])
    contender = Contender(CASE, "steps", "a", lambda: ready, "auto")
    (measured,) = ContenderTimer(torch.device("cpu"), TimingLength(1, 0.0)).measure([contender], lambda _: None)
    assert (measured.contender, measured.asked) == ("pool", "auto")
