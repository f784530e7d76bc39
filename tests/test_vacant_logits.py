"""The instrument of tools/vacant_logits: its maths on numbers that were computed by hand, and its models on a run."""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

import fedskew as fs
from fedskew.engine import DeviceSamples

COUNTS = np.array([[40, 0, 1], [0, 50, 21]])
"""Classes 0 and 1 never meet, 0 and 2 rarely (1 sample of 22), 1 and 2 often (21 of 22)."""


@pytest.fixture(scope="module")
def tools() -> Iterator[dict[str, ModuleType]]:
    folder = str(Path(__file__).parents[1] / "tools" / "vacant_logits")
    names = ("contact", "measure")
    others = {name: sys.modules.pop(name) for name in names if name in sys.modules}  # benchmarks/peers has a `measure`
    sys.path.insert(0, folder)
    yield {name: importlib.import_module(name) for name in names}
    sys.path.remove(folder)
    for name in names:
        del sys.modules[name]
    sys.modules.update(others)


def test_contact_is_the_share_of_the_smaller_class_that_meets_the_other(tools: dict[str, ModuleType]) -> None:
    shares = tools["contact"].contact(COUNTS)
    assert shares[0, 1] == shares[1, 0] == 0
    assert shares[0, 2] == pytest.approx(1 / 22)
    assert shares[1, 2] == pytest.approx(21 / 22)


def test_pairs_are_grouped_by_contact(tools: dict[str, ModuleType]) -> None:
    never, rarely, often = tools["contact"].contact_groups(COUNTS)
    assert np.argwhere(never).tolist() == [[0, 1], [1, 0]]
    assert np.argwhere(rarely).tolist() == [[0, 2], [2, 0]]
    assert np.argwhere(often).tolist() == [[1, 2], [2, 1]]


def test_log_odds_compare_the_own_class_with_vacant_classes_only(tools: dict[str, ModuleType]) -> None:
    probabilities = np.array([[0.5, 0.25, 0.25], [0.1, 0.8, 0.1]])
    vacant = np.array([False, True, False])  # the first client
    sums, terms = tools["contact"].vacant_log_odds(
        probabilities, np.array([0, 2]), vacant, tools["contact"].contact_groups(COUNTS)
    )
    assert sums.tolist() == pytest.approx([math.log(2), 0, -math.log(8)])
    assert terms.tolist() == [1, 0, 1]


def test_errors_are_percentages_of_all_test_samples(tools: dict[str, ModuleType]) -> None:
    confusion = np.array([[30, 5, 5], [3, 20, 7], [0, 10, 20]])
    errors = tools["contact"].errors_by_group(confusion, tools["contact"].contact_groups(COUNTS))
    assert errors.tolist() == [8, 5, 17]
    assert errors.sum() == 100 - 70  # the accuracy is 70 %


def test_the_aggregated_model_of_a_round_is_received_in_the_next(tools: dict[str, ModuleType]) -> None:
    federation = fs.federation("digits", fs.Shards(clients=5, shards=2), seed=0)
    models = tools["measure"].KeepModels()
    instrument = tools["measure"].Instrument(models, every=1)
    result = fs.run(
        federation, replace(fs.make_method("fedavg"), server=models), "dnn", rounds=2, local_epochs=1,
        callbacks=[instrument], progress=False, device="cpu",
    )  # fmt: skip
    first, last = (one["log_odds"] for one in instrument.measured)
    assert first["aggregated"] == last["received"]
    assert last["trained"][0] > last["received"][0], "cross entropy moves samples away from vacant classes"
    assert last["aggregated"] == pytest.approx(log_odds_of(tools, result, federation), abs=1e-3)
    assert instrument.measured[-1]["accuracy"] == round(100 * result.accuracy, 2)


def log_odds_of(tools: dict[str, ModuleType], result: fs.Result, federation: fs.Federation) -> list[float | None]:
    """The log-odds of the final model, sample by sample."""
    data = federation.dataset
    inputs = DeviceSamples(data, data.train, torch.device("cpu")).inputs(torch.arange(len(data.train)))
    with torch.no_grad():
        logits = result.model(inputs).double().numpy()
    groups = tools["contact"].contact_groups(federation.label_counts)
    found: list[list[float]] = [[], [], []]
    for client, rows in enumerate(federation.indices):
        for row in rows:
            own = data.train.y[row]
            for other in federation.vacant(client):
                found[int(groups[:, own, other].argmax())].append(logits[row, own] - logits[row, other])
    return [float(np.mean(values)) if values else None for values in found]


def test_circles_differ_only_in_which_classes_meet(tools: dict[str, ModuleType]) -> None:
    data = fs.load("digits")
    ring, other = (
        tools["measure"].circular_federation(data, distances, 0) for distances in ((1, 1, 1, 1), (1, 2, 3, 4))
    )
    for federation, meeting in ((ring, 10), (other, 40)):
        counts = federation.label_counts
        assert federation.clients == 40
        assert ((counts > 0).sum(axis=1) == 2).all()
        assert ((counts > 0).sum(axis=0) == 8).all()
        assert counts.sum() == len(data.train)
        assert tools["contact"].contact_groups(counts).sum(axis=(1, 2)).tolist() == [90 - 2 * meeting, 0, 2 * meeting]
