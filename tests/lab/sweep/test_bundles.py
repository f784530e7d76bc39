"""Which runs share a stack."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fedskew.experiment.config import Config
from fedskew.lab.sweep.bundles import USUAL, bundled, usual_together


def labels(jobs, workers: int, most: int) -> list[str]:
    return ["".join(job.label for job in bundle) for bundle in bundled(jobs, workers, most)]


def test_seeds_of_the_same_run_go_together_in_the_place_of_the_first(tiny_job) -> None:
    grid = [tiny_job(f"{m[-1]}{s}", method=m, seed=s) for s in range(3) for m in ("fedavg", "fedprox", "fedlmd")]
    assert labels(grid, 1, 8) == ["g0g1g2", "x0x1x2", "d0d1d2"]
    assert labels(grid, 1, 2) == ["g0g1", "x0x1", "d0d1", "g2", "x2", "d2"]
    assert labels(grid, 1, 1) == [job.label for job in grid]


def test_numbers_of_a_method_may_differ(tiny_job) -> None:
    methods = ("fedprox", {"name": "fedprox", "mu": 0.3}, {"name": "fedprox", "mu": 1}, {"name": "fedprox", "mu": "x"})
    named = list(zip("abcd", methods, strict=True))
    jobs = [tiny_job(f"{seed}{name}", seed=seed, method=method) for seed in (0, 1) for name, method in named]
    assert labels(jobs, 1, 8) == ["0a0b0c1a1b1c", "0d", "1d"]


def test_every_worker_has_something_to_do(tiny_job) -> None:
    jobs = [tiny_job(str(seed), seed=seed) for seed in range(8)]
    assert labels(jobs, 8, 8) == list("01234567")
    assert labels(jobs, 5, 8) == list("01234567")
    assert labels(jobs, 3, 8) == ["01", "23", "45", "67"]
    assert labels(jobs, 2, 8) == ["0123", "4567"]
    assert labels([], 2, 8) == []


def test_so_may_splits_and_numbers_of_clients(tiny_job) -> None:
    jobs = [
        tiny_job("a"),
        tiny_job("b", partition__beta=0.4),
        tiny_job("c", partition="iid", seed=1),
        tiny_job("d", partition__clients=9, clients_per_round=3),
        tiny_job("e", clients_per_round=2),
    ]
    assert labels(jobs, 1, 8) == ["abcde"]


def test_bundles_of_a_kind_are_of_like_sizes(tiny_job) -> None:
    jobs = [tiny_job(str(seed), seed=seed) for seed in range(9)]
    assert labels(jobs, 1, 8) == ["01234", "5678"]
    assert labels(jobs, 1, 4) == ["012", "345", "678"]


def test_what_differs_in_more_than_that_stays_apart(tiny_job) -> None:
    usual = tiny_job("a")
    others = [
        tiny_job("b", seed=1, lr=0.02),
        tiny_job("c", seed=2, method={"name": "fedgr", "reduction": "mean"}),
        tiny_job("d", seed=3, method={"name": "fedgr", "reduction": "sum"}),
        tiny_job("e", seed=4, momentum=0.5),
        replace(tiny_job("f", seed=5), validation=0.2),
        replace(tiny_job("g", seed=6), start=usual.config),
        replace(tiny_job("h", seed=7), start=usual.config),
        replace(tiny_job("i", seed=8), tag="bf16"),
        tiny_job("j", seed=9, rounds=4),
    ]
    assert labels([usual, *others], 1, 8) == list("abcdefghij")


@pytest.mark.parametrize(("engine", "stacks"), [("auto", True), ("stacked", True), ("plain", False)])
def test_runs_share_a_stack_where_a_gpu_stacks_them(engine: str, stacks: bool, monkeypatch) -> None:
    assert usual_together(Config(device="cpu", engine=engine)) == 1
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert usual_together(Config(device="auto", engine=engine)) == 1
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert usual_together(Config(device="cpu", engine=engine)) == 1
    assert usual_together(Config(device="auto", engine=engine)) == (USUAL if stacks else 1)
