"""`predictions.parquet` has one row per test sample, in the order of the test set, and the run's own predictions."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import fedskew as fs


@pytest.mark.parametrize("domains", [(), ("paper", "screen")], ids=["one domain", "two domains"])
def test_the_predictions_are_those_of_the_test_set_in_its_order(domains: tuple[str, ...], tmp_path: Path) -> None:
    """With domains, the model is evaluated domain by domain."""
    dataset = fs.load("digits")
    if domains:
        train, test = (replace(part, domain=np.arange(len(part)) % 2) for part in (dataset.train, dataset.test))
        dataset = replace(dataset, domains=domains, train=train, test=test)
    federation = fs.federation(dataset, fs.IID(clients=3))
    settings = {"rounds": 1, "local_epochs": 1, "device": "cpu", "save_predictions": True}
    result = fs.run(federation, "fedavg", out=tmp_path / "run", **settings)
    table = pd.read_parquet(tmp_path / "run" / "predictions.parquet")
    assert table["row"].tolist() == list(range(len(dataset.test)))
    assert table["true"].tolist() == [dataset.classes[y] for y in dataset.test.y]
    found = pd.crosstab(table["true"], table["predicted"]).reindex(index=dataset.classes, columns=dataset.classes)
    np.testing.assert_array_equal(found.fillna(0), result.evaluation.confusion)
    probabilities = table[[f"p_{name}" for name in dataset.classes]].to_numpy()
    assert table["predicted"].tolist() == [dataset.classes[c] for c in probabilities.argmax(axis=1)]
    np.testing.assert_allclose(probabilities.sum(axis=1), 1)


def test_a_finished_run_says_that_it_saves_no_predictions(tmp_path: Path) -> None:
    class Notices(fs.Callback):
        def __init__(self) -> None:
            self.lines: list[str] = []

        def on_notice(self, line: str) -> None:
            self.lines.append(line)

    federation = fs.federation("digits", fs.IID(clients=2))
    settings = {"rounds": 1, "local_epochs": 1, "device": "cpu", "out": tmp_path / "run"}
    fs.run(federation, "fedavg", **settings)
    notices = Notices()
    for save in (False, True):
        fs.run(federation, "fedavg", callbacks=[notices], save_predictions=save, **settings)
    before, after = notices.lines
    assert before.endswith("nothing was run")
    assert after.endswith("nothing was run, so no predictions were saved; to save them, choose another --out")
