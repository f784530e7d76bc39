"""The section with the features says what it does not draw."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import fedskew
from fedskew.data import make_partition
from fedskew.report.sections import features as section
from fedskew.results import comparisons, load_runs


def test_methods_and_classes_that_are_not_drawn_are_counted(comparison: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(section, "MAX_PANELS", 1)
    monkeypatch.setattr(section, "MAX_CLASSES", 3)
    (loaded,) = comparisons(load_runs([comparison]).runs)
    found = section.features(loaded)
    assert f"only the first 1 of {len(loaded.methods)} methods are drawn" in found.missing
    assert "only the first 3 of 10 classes are drawn" in found.missing


def test_a_single_test_sample_has_no_features_to_draw(tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=(20, 4)).astype(np.float32)
    y = np.arange(20) % 2
    data = tmp_path / "data.npz"
    np.savez(data, x_train=x, y_train=y, x_test=x[:1], y_test=y[:1])
    federation = fedskew.federation(fedskew.load(str(data)), make_partition("iid", clients=2), seed=0)
    fedskew.run(federation, "fedavg", "dnn", rounds=1, out=tmp_path / "run", progress=False)
    (loaded,) = comparisons(load_runs([tmp_path / "run"]).runs)
    reason = "features are drawn in a plane; expected at least two test samples and two features"
    assert section.features(loaded).missing == [f"fedavg: {reason}"]
