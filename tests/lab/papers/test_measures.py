"""Numbers of tables, from curves that can be checked by eye."""

from __future__ import annotations

from typing import Any

import pytest

from fedskew.experiment.config import Config
from fedskew.lab.papers.measures import MEASURES, NEVER, MetricInputs, measure
from fedskew.lab.sweep.records import Record


def record(accuracy: list[float], every: int = 1, **more: Any) -> Record:
    rounds = [every * i for i in range(len(accuracy))]
    content = {
        "format": 1, "experiment": "x", "config": Config().to_mapping(), "rounds": rounds, "accuracy": accuracy,
        "macro_f1": [a / 2 for a in accuracy], "worst_class": [a / 4 for a in accuracy],
        "compute": [float(r) for r in rounds], "class_accuracy": [0.2, 0.9, 0.4], "stages": {}, "local": None,
        "seconds": 1.0,
    }  # fmt: skip
    return Record({**content, **more})


def read(metric: str, of: Record, rounds: int = 100, baseline: Record | None = None) -> float | None:
    return measure(metric)(MetricInputs(of, rounds, baseline))


def test_accuracies_are_in_percent_and_keep_to_the_budget() -> None:
    curve = record([0.1, 0.5, 0.7, 0.6, 0.9])
    assert read("best", curve) == pytest.approx(90)
    assert read("best", curve, rounds=3) == pytest.approx(70)
    assert read("last", curve, rounds=3) == pytest.approx(60)


def test_the_last_50_rounds_of_every_tenth_are_five_numbers() -> None:
    curve = record([0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6], every=10)
    assert read("last-50 accuracy", curve) == pytest.approx(100 * (0.2 + 0.3 + 0.4 + 0.5 + 0.6) / 5)
    assert read("last-50 macro-F1", curve) == pytest.approx(50 * (0.2 + 0.3 + 0.4 + 0.5 + 0.6) / 5)


def test_speed_ups_compare_with_fedavg() -> None:
    fedavg = record([0.1, 0.2, 0.4, 0.6, 0.5])
    fast, slow = record([0.1, 0.6, 0.7, 0.7, 0.7]), record([0.1] * 5)
    assert read("speed-up", fast, baseline=fedavg) == 3.0
    assert read("speed-up", slow, baseline=fedavg) == 1.0
    assert read("speed-up", fast) is None
    assert read("rounds to FedAvg", fast, baseline=fedavg) == 1.0
    assert read("rounds to FedAvg", fedavg, baseline=fedavg) == 3.0
    assert read("rounds to FedAvg", slow, baseline=fedavg) == NEVER
    assert read("speed-up over 1000 rounds", slow, baseline=fedavg) == NEVER
    late = record([0.1] * 5 + [0.7])
    assert read("rounds to FedAvg", late, baseline=fedavg) == NEVER, "after FedAvg's end"
    stopped = record([0.1] * 4)
    assert read("rounds to FedAvg", stopped, baseline=fedavg) is None, "it might have got there"
    assert read("speed-up over 1000 rounds", stopped, baseline=fedavg) is None
    assert read("speed-up over 1000 rounds", fast, rounds=4, baseline=fedavg) == 4.0
    assert read("speed-up over 1000 rounds", fast, rounds=1000, baseline=fedavg) == 4.0, "of the rounds that were run"


def test_classes_of_the_last_model() -> None:
    of = record([0.5])
    assert read("best class", of) == pytest.approx(90)
    assert read("mean class", of) == pytest.approx(50)
    assert read("worst class", of) == pytest.approx(20)
    assert read("class gap", of) == pytest.approx(70)


def test_pkds_account() -> None:
    stages = {
        "warm-up": {"rounds": 20, "compute": 20.0, "visits": 0},
        "expert 0": {"rounds": 25, "compute": 5.0, "visits": 0},
        "expert 1": {"rounds": 25, "compute": 7.5, "visits": 0},
        "distil": {"rounds": 80, "compute": 82.192, "visits": 1000, "distilled": 82.0},
    }
    of = record([0.0, 0.4, 2.0, 3.0], stages=stages)
    assert read("warm-up compute", of) == 1.0
    assert read("experts' compute", of) == pytest.approx(0.5)
    assert read("distillation compute", of) == pytest.approx(1.0274)
    assert read("compute before distillation", of) == pytest.approx(32.5)
    assert read("compute to worst class 50", of) == 2.0
    assert read("expert activation", of) == pytest.approx(8.2)
    assert read("experts' compute", record([0.5])) is None
    assert read("expert activation", record([0.5])) is None


def test_updates_of_clients() -> None:
    local = {"round": 1, "drift_diversity": 8.5, "before": [0.5, 0.7], "after": {"0": [1.0, 0.0], "1": [0.5, 0.5]}}
    of = record([0.5], local=local)
    assert read("drift diversity", of) == 8.5
    assert read("after update, class 0", of) == pytest.approx(100)
    assert read("after update, class 1", of) == pytest.approx(0)
    assert read("after update, mean class", of) == pytest.approx(50)
    assert read("before update, class 1", of) == pytest.approx(70)
    assert read("before update", of) == pytest.approx(60)
    assert read("after update", of) == pytest.approx(50)


def test_domains_are_read_apart_and_together() -> None:
    domains = {
        "mnist": [0.1, 0.9, 0.8],
        "usps": [0.1, 0.2, 0.6],
        "svhn": [0.1, 0.1, 0.1],
        "syn-digits": [0.1, 0.2, 0.1],
    }
    of = record([0.1, 0.5, 0.4], domains=domains)
    assert read("best on mnist", of) == pytest.approx(90)
    assert read("best on syn", of) == pytest.approx(20)
    assert read("best, mean of domains", of) == pytest.approx(100 * (0.8 + 0.6 + 0.1 + 0.1) / 4)
    assert read("best on mnist", record([0.5])) is None


def test_a_run_that_did_not_look_has_no_such_number() -> None:
    for metric in MEASURES:
        if "update" in metric or metric == "drift diversity":
            assert read(metric, record([0.5])) is None
