"""`fedskew bench --only peers`: fedskew and the JAX script of `benchmarks/peers` on the same work."""

from __future__ import annotations

import json
import os
import select
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from fedskew.errors import UserError
from fedskew.lab.benchmark import peers
from fedskew.lab.benchmark.peers import JAX, OURS, PeerTime, measure_peers, peer_case
from fedskew.lab.benchmark.plan import quick_plan
from fedskew.lab.benchmark.results import Results, read_results
from fedskew.lab.benchmark.run import Benchmark
from fedskew.lab.benchmark.tables import markdown
from fedskew.lab.benchmark.targets import targets


def _results(kind: str, *times: tuple[str, str, float, float, float]) -> Results:
    found = [PeerTime(peer, precision, "some work", 100, *seconds) for peer, precision, *seconds in times]
    return Results({"device": kind, "cpu": "a CPU"}, {}, "fedskew bench", "2026-11-18", peers=found)


def test_the_scripts_run_and_a_missing_one_is_named() -> None:
    shown: list[str] = []
    times, skipped = measure_peers(peer_case("cpu", ("float32",), is_quick=True), shown.append)
    by_peer = {time.peer: time for time in times}
    ours = by_peer[OURS]
    assert (ours.precision, ours.rounds) == ("float32", 3)
    assert 0 < ours.seconds_per_round < ours.start_up < ours.whole_run
    assert shown[0] == "1/1 fedskew, float32"
    assert (JAX in by_peer) != ("JAX vmap: jax is not installed" in skipped)


def test_targets_on_a_gpu_compare_equal_formats() -> None:
    results = _results(
        "cuda",
        (OURS, "float32", 0.063, 4, 11), (OURS, "tf32", 0.04, 4, 9), (OURS, "bf16", 0.02, 4, 7),
        (JAX, "float32", 0.110, 9, 39), (JAX, "tf32", 0.08, 8, 27), (JAX, "bf16", 0.09, 8, 20),
    )  # fmt: skip
    found = {target.what: (round(target.value, 3), target.bound, target.met) for target in targets(results)}
    assert found == {
        "fedskew on the JAX script's work, float32: ms per round": (63.0, 70.0, True),
        "float32: fedskew / JAX, 100 rounds": (0.282, 0.4, True),
        "tf32: JAX / fedskew, per round": (2.0, 2.5, False),
        "tf32: fedskew / JAX, 100 rounds": (0.333, 0.4, True),
        "bf16: JAX / fedskew, per round": (4.5, 4.0, True),
        "bf16: fedskew / JAX, 100 rounds": (0.35, 0.4, True),
    }


def test_targets_on_a_cpu_are_the_round_and_the_start_up() -> None:
    results = _results("cpu", (OURS, "float32", 0.4, 4.0, 20), (JAX, "float32", 0.6, 3.0, 30))
    assert {target.what: target.met for target in targets(results)} == {
        "float32: JAX / fedskew, per round": True,
        "float32: JAX / fedskew, to the end of the first round": False,
    }
    assert targets(_results("cpu", (OURS, "float32", 0.4, 4.0, 20))) == []


def test_a_file_keeps_the_times_and_the_page_has_them(tmp_path: Path) -> None:
    made = _results("cpu", (OURS, "float32", 0.4, 4.0, 20.0), (JAX, "float32", 0.6, 3.0, 30.0))
    path = tmp_path / "made.json"
    path.write_text(json.dumps(made.to_json()))
    assert read_results(str(path)) == made
    page = markdown(made)
    assert "## fedskew and a JAX script: some work, 100 rounds" in page
    assert "| JAX vmap | float32 | 0.600 | 1.50 | 3.000 | 0.75 | 30.000 | 1.50 |" in page


@pytest.mark.parametrize("damage", [{"rounds": None}, {"whole_run": "long"}, {"start_up": []}])
def test_times_that_are_no_numbers_are_refused(damage: dict[str, Any]) -> None:
    (time,) = _results("cpu", (OURS, "float32", 0.4, 4.0, 20.0)).peers
    with pytest.raises(UserError, match=r"the times of a peer are damaged: (TypeError|ValueError)"):
        PeerTime.from_json({**asdict(time), **damage})


def test_without_a_clone_the_error_says_what_is_needed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(peers, "_COMPARE", tmp_path / "compare.py")
    with pytest.raises(UserError, match=r"compare\.py does not exist; expected a clone of fedskew's repository"):
        measure_peers(peer_case("cpu", ("float32",), is_quick=True), print)


def test_a_script_that_fails_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = tmp_path / "compare.py"
    script.write_text("import sys; sys.exit('the disk is full')")
    monkeypatch.setattr(peers, "_COMPARE", script)
    with pytest.raises(UserError, match=r"compare\.py: exit status 1: the disk is full"):
        measure_peers(peer_case("cpu", ("float32",), is_quick=True), print)


@pytest.mark.parametrize(
    ("device", "visible", "seen"), [("cuda:1", None, "1"), ("cuda:1", "4,6", "6"), ("cuda", "4,6", "4,6")]
)
def test_the_scripts_see_the_gpu_that_was_named(
    monkeypatch: pytest.MonkeyPatch, device: str, visible: str | None, seen: str
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    case = peer_case(device, ("bf16",), is_quick=False)
    assert case.environment["CUDA_VISIBLE_DEVICES"] == seen
    assert case.flags[:2] == ("--device", "cuda")


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs Linux")
def test_an_interrupt_ends_the_scripts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = tmp_path / "compare.py"
    script.write_text(
        "import subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print(child.pid, file=sys.stderr, flush=True)\n"
        "child.wait()\n"
    )
    monkeypatch.setattr(peers, "_COMPARE", script)
    started: list[int] = []

    def interrupt(line: str) -> None:
        started.append(os.pidfd_open(int(line)))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure_peers(peer_case("cpu", ("float32",), is_quick=True), interrupt)
    ended, _, _ = select.select(started, [], [], 60)  # readable when the process has ended
    os.close(started[0])
    assert ended


def test_the_benchmark_keeps_the_times_and_the_reasons(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run = {"seconds_per_round": 0.1, "start_up": 2.0, "whole_run": 3.0}
    found = {
        "work": "some work",
        "rounds": 3,
        "rows": [{"peer": OURS, "precision": "float32", "repeats": [run]}],
        "skipped": ["JAX vmap: jax is not installed"],
    }
    script = tmp_path / "compare.py"
    script.write_text(
        "import pathlib, sys\n"
        f"pathlib.Path(sys.argv[sys.argv.index('--out') + 1] + '.json').write_text({json.dumps(found)!r})\n"
    )
    monkeypatch.setattr(peers, "_COMPARE", script)
    shown: list[tuple[int, int, str]] = []
    saved: list[int] = []
    benchmark = Benchmark(replace(quick_plan("cpu"), levels=("peers", "scale"), scale_clients=2000), "fedskew bench")
    results = benchmark.run(
        lambda done, total, title, _: shown.append((done, total, title)), lambda now: saved.append(len(now.scale))
    )
    assert (shown[-1], saved) == ((1, 2, "a run on 2,000 clients"), [0, 1])
    assert results.peers == [PeerTime(OURS, "float32", "some work", 3, **run)]
    assert [failure.reason for failure in results.failures] == ["JAX vmap: jax is not installed"]
