"""AG News and 20 Newsgroups, where FEDSKEW_DATA has them: every kind of method runs, the same on both engines."""

from __future__ import annotations

import os
from functools import cache

import pytest

from fedskew.data import DATASETS, Dirichlet, Federation, federation, load
from fedskew.data.published.file_search import find_files
from fedskew.experiment.run import run

METHODS = {
    "ag_news": ("fedavg", "fedlmd+scaffold", "fedgc", "centralised"),
    "20newsgroups": ("fedvls", "fedconcat", "local-only", "centralised"),
}
"""One of each kind, and those with another way of training."""


def _here(name: str) -> bool:
    published = DATASETS[name].published
    return bool(os.environ.get("FEDSKEW_DATA")) and published is not None and bool(find_files(published, None))


@cache
def _split(name: str) -> Federation:
    return federation(load(name, length=40, vocabulary=3000), Dirichlet(50, 0.5), 0)


@pytest.mark.parametrize(
    ("name", "method"),
    [
        pytest.param(
            name,
            method,
            marks=[
                pytest.mark.skipif(not _here(name), reason=f"{name} is not in FEDSKEW_DATA"),
                *([] if method == "fedvls" else [pytest.mark.slow]),
            ],
        )
        for name, methods in METHODS.items()
        for method in methods
    ],
)
def test_it_runs_the_same_on_both_engines(name: str, method: str) -> None:
    fed = _split(name)
    settings = {"rounds": 3, "eval_every": 3, "clients_per_round": 5, "lr": 0.1, "local_epochs": 1, "device": "cpu"}
    plain, stacked = (run(fed, method, engine=engine, **settings) for engine in ("plain", "stacked"))
    assert plain.config.model == "fasttext"
    assert plain.diverged == stacked.diverged == 0
    losses = [[row.loss for row in result.history[1:]] for result in (plain, stacked)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-2)
    assert plain.accuracy == pytest.approx(stacked.accuracy, abs=0.01)
    if method == "centralised":
        assert plain.accuracy > 1.1 / fed.classes
