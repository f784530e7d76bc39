"""The section with the features says what it does not draw."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from made_up_runs import made_up
from torch import Tensor

import fedskew
from fedskew.data import make_partition
from fedskew.engine.data.device import DeviceSamples
from fedskew.errors import UserError
from fedskew.experiment.config import PartitionConfig
from fedskew.report.figures.heat_maps import model_internals
from fedskew.report.model_outputs import ModelOutputs, model_outputs
from fedskew.report.sections import features as section
from fedskew.results import Comparison, comparisons, load_runs


def test_methods_and_classes_that_are_not_drawn_are_counted(comparison: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(section, "MAX_PANELS", 1)
    monkeypatch.setattr(section, "MAX_CLASSES", 3)
    (loaded,) = comparisons(load_runs([comparison]).runs)
    found = section.features(loaded)
    assert f"only the first 1 of {len(loaded.methods)} methods are drawn" in found.missing
    assert "only the first 3 of 10 classes are drawn" in found.missing


def trained_run(folder: Path, test_samples: np.ndarray) -> Comparison:
    """Train on 20 samples, and test on these."""
    x = np.random.default_rng(0).normal(size=(20, 4)).astype(np.float32)
    y = np.arange(20) % 2
    data = folder / "data.npz"
    np.savez(data, x_train=x, y_train=y, x_test=x[test_samples], y_test=y[: len(test_samples)])
    federation = fedskew.federation(fedskew.load(str(data)), make_partition("iid", clients=2), seed=0)
    fedskew.run(federation, "fedavg", "dnn", rounds=1, out=folder / "run", progress=False)
    (loaded,) = comparisons(load_runs([folder / "run"]).runs)
    return loaded


def test_a_single_test_sample_has_no_features_to_draw(tmp_path: Path) -> None:
    loaded = trained_run(tmp_path, np.array([0]))
    reason = "features are drawn in a plane; expected at least two test samples and two features"
    assert section.features(loaded).missing == [f"fedavg: {reason}"]
    assert len(model_internals([loaded]).charts) == 3, "distances and probabilities need no plane"


def test_equal_features_are_not_drawn(tmp_path: Path) -> None:
    loaded = trained_run(tmp_path, np.zeros(6, np.int64))
    reason = "all test samples have the same features, so they cannot be drawn"
    assert section.features(loaded).missing == [f"fedavg: {reason}"]


def test_features_of_a_federation_across_machines_are_not_drawn() -> None:
    run = made_up("fedavg", 0, [0.5, 0.5])
    at_sites = replace(run, config=replace(run.config, partition=PartitionConfig("sites", params={"names": ["north"]})))
    with pytest.raises(UserError, match="the data are at the sites, so features cannot be computed here"):
        model_outputs(at_sites)


@pytest.mark.parametrize("model", ["tfcnn", "fasttext"])
def test_data_that_no_longer_fit_the_model_are_named(model: str, tmp_path: Path) -> None:
    """TFCNN fails in its head, and fastText on a word that it does not know."""

    def write(size: int) -> Path:
        rng = np.random.default_rng(size)
        y = np.arange(40) % 2
        if model == "tfcnn":
            x = rng.integers(0, 256, (40, 1, size, size), dtype=np.uint8)
            np.savez(tmp_path / "data.npz", x_train=x[:20], y_train=y[:20], x_test=x[20:], y_test=y[20:])
            return tmp_path / "data.npz"
        texts = [" ".join(f"w{word}" for word in rng.integers(0, size, 20)) for _ in y]
        lines = [f"{text},{'ab'[label]}" for text, label in zip(texts, y, strict=True)]
        (tmp_path / "data.csv").write_text("\n".join(["text,label", *lines]) + "\n")
        return tmp_path / "data.csv"

    data = write(12)
    federation = fedskew.federation(fedskew.load(str(data)), make_partition("iid", clients=2), seed=0)
    run = fedskew.run(federation, "fedavg", model, rounds=1, local_epochs=1, out=tmp_path / "run", progress=False)
    write(24)
    with pytest.raises(UserError, match="has changed since the run: its inputs do not fit the model"):
        model_outputs(run)


def test_no_batch_is_much_smaller_than_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """resnet10, which normalises by the batch's statistics, cannot compute the logits of one small image alone."""
    run = trained_run(tmp_path, np.arange(6)).methods[0].first
    assert run is not None
    sizes: list[int] = []
    inputs = DeviceSamples.inputs

    def recorded(self: DeviceSamples, indices: Tensor) -> Tensor:
        sizes.append(len(indices))
        return inputs(self, indices)

    monkeypatch.setattr(DeviceSamples, "inputs", recorded)
    monkeypatch.setattr("fedskew.report.model_outputs.BATCH_SIZE", 5)
    model_outputs(run)
    assert sizes == [3, 3]


@pytest.mark.parametrize("scale", [1e-30, 1e39])
def test_features_that_t_sne_cannot_scale_are_refused(scale: float) -> None:
    features = scale * np.random.default_rng(0).normal(size=(50, 10))
    outputs = ModelOutputs(np.arange(50) % 2, features, np.full((50, 2), 0.5))
    with pytest.raises(UserError, match="differ too little or too much for t-SNE"):
        _ = outputs.tsne


def test_features_that_differ_by_rounding_errors_count_as_equal() -> None:
    features = np.full((6, 10), 3.0) * (1 + 1e-7 * np.random.default_rng(0).uniform(-1, 1, size=(6, 10)))
    outputs = ModelOutputs(np.arange(6) % 2, features, np.full((6, 2), 0.5))
    with pytest.raises(UserError, match="all test samples have the same features"):
        _ = outputs.pca
