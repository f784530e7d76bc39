"""`fedskew bench` from the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fedskew.lab.benchmark.timing import ContenderTimer

TINY = ("bench", "--device", "cpu", "--models", "dnn", "--clients", "2", "--methods", "fedavg", "--quick")


def test_a_quick_bench_prints_tables(cli):
    outcome = cli(*TINY, "--only", "steps")
    assert outcome.status == 0, outcome.err
    assert "Local steps" in outcome.out
    assert "dnn 2 × 64" in outcome.out
    assert "Whole rounds" not in outcome.out
    assert "…" not in outcome.out
    assert "1/1 steps of fedavg on dnn, 2 clients" in outcome.err


def test_json_says_what_was_measured_on_what(cli):
    outcome = cli(*TINY, "--json", "--out", "kept.json")
    assert outcome.status == 0, outcome.err
    assert outcome.err == ""
    kept = outcome.json
    assert kept == json.loads(Path("kept.json").read_text(encoding="utf-8"))
    assert kept["command"] == " ".join(("fedskew", *TINY, "--out", "kept.json", "--json"))
    assert kept["machine"]["device"] == "cpu"
    assert {"fedskew", "torch", "python", "numpy"} <= kept["versions"].keys()
    assert kept["failures"] == kept["left_out"] == []
    assert {m["level"] for m in kept["measurements"]} == {"steps", "rounds", "federation", "participants"}
    assert {"loop", "tuned loop", "limit", "bare steps"} <= {m["contender"] for m in kept["measurements"]}
    for measurement in kept["measurements"]:
        assert measurement["samples_per_second"] > 0
        assert len(measurement["seconds"]) == 3
    assert {"what", "value", "sign", "bound", "met"} == kept["targets"][0].keys()

    rendered = cli("bench", "--render", "kept.json")
    assert rendered.status == 0
    assert rendered.out.startswith("# Benchmark on ")
    assert "| dnn 2 × 64 |" in rendered.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--models", "cn"), "unknown model 'cn'; did you mean 'cnn'?"),
        (("--methods", "fedavg,fedvl"), "unknown method 'fedvl'; did you mean 'fedvls'?"),
        (("--precisions", "fp32"), "unknown precision 'fp32'"),
        (("--only", "step"), "unknown measurement 'step'; did you mean 'steps'?"),
        (("--only", "whole-runs", "--device", "cpu"), "whole-runs measures commands on a CUDA GPU"),
        (("--clients", "0"), "clients is '0'; expected a whole number of at least 1"),
        (("--budget", "no"), "budget is 'no'; expected a finite number above 0"),
        (("--device", "tpu"), "device is 'tpu'"),
        (("--out", "nowhere/kept.json"), "cannot write nowhere/kept.json"),
        (("--render", "nothing.json"), "cannot read nothing.json"),
    ],
)
def test_a_mistake_is_one_line(arguments, message, cli):
    outcome = cli("bench", *arguments)
    assert outcome.status == 2
    assert outcome.out == ""
    assert outcome.err.startswith(f"error: {message}")
    assert outcome.err.count("\n") == 1


def test_an_interrupted_bench_prints_what_it_has(cli, monkeypatch):
    measure = ContenderTimer.measure
    groups: list[Any] = []

    def until_the_second(self, contenders, tell):
        groups.append(contenders)
        if len(groups) > 1:
            raise KeyboardInterrupt
        return measure(self, contenders, tell)

    monkeypatch.setattr(ContenderTimer, "measure", until_the_second)
    outcome = cli(*TINY, "--only", "steps,rounds", "--quiet")
    assert outcome.status == 130
    assert "dnn 2 × 64" in outcome.out
    assert outcome.err.endswith("stopped; the remaining measurements were skipped\n")
