"""A class that only one part of the data has gets a line in the notes, because metrics or models lack it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedskew as fs
from fedskew.experiment import shared_federations
from fedskew.experiment.config import Config, with_values

UNTESTED = "no test samples, so no metric says how well"


def arrays(*counts: int) -> tuple[np.ndarray, np.ndarray]:
    """A table with this number of samples of each class."""
    y = np.repeat(np.arange(len(counts)), counts)
    return np.random.default_rng(0).normal(size=(len(y), 3)), y


def notes(data: Any, **options: Any) -> tuple[str, ...]:
    return fs.federation(data, fs.IID(clients=2), seed=0, name="mine", **options).notes


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ((20, 1), f"mine: class '1' has {UNTESTED} it is predicted"),
        ((20, 20, 1), f"mine: class '2' has {UNTESTED} it is predicted"),
        ((20, 1, 2), f"mine: classes '1', '2' have {UNTESTED} they are predicted"),
        ((20, *[1] * 7), f"mine: classes '1', '2', '3', '4', '5' and 2 more have {UNTESTED} they are predicted"),
    ],
)
def test_a_class_that_the_hold_out_leaves_without_test_samples_is_named(counts: Any, expected: str) -> None:
    assert notes(arrays(*counts)) == (expected,)


def test_a_class_of_only_one_part_is_named() -> None:
    both, first = arrays(20, 20, 20), arrays(20, 20)
    assert notes(both, test=first) == (f"mine: class '2' has {UNTESTED} it is predicted",)
    assert notes(first, test=both) == ("mine: class '2' has test samples, but no training samples to learn it from",)
    x, y = arrays(20, 20, 20, 20)
    (note,) = notes((x[y < 2], y[y < 2]), test=(x, y))
    assert note == "mine: classes '2', '3' have test samples, but no training samples to learn them from"


def test_a_label_of_several_is_named() -> None:
    x, _ = arrays(20, 20)
    rare = np.zeros(40, int)
    rare[0] = 1
    y = np.stack([np.arange(40) % 2, np.arange(40) % 3 == 0, rare], axis=1)
    assert notes((x[:20], y[:20]), test=(x[20:], y[20:])) == (f"mine: label '2' has {UNTESTED} it is predicted",)


def test_classes_that_lack_samples_as_expected_have_no_line() -> None:
    assert notes(arrays(20, 20), classes=["ill", "well", "unknown"]) == (), "the user listed a class without samples"
    skewed = fs.federation("digits", fs.LabelsPerClient(clients=5, labels_per_client=2), seed=0)
    assert skewed.notes == ()
    assert fs.federation("synthetic", fs.Dirichlet(clients=5, beta=0.05), seed=0).notes == ()


def test_counts_may_leave_out_the_class(tmp_path: Path) -> None:
    (tmp_path / "counts.csv").write_text("0,1\n5,5\n6,4\n")
    fed = fs.federation(arrays(20, 20, 1), fs.Counts(tmp_path / "counts.csv"), seed=0, name="mine")
    assert fed.dataset.classes == ("0", "1")
    assert not [note for note in fed.notes if "test samples" in note]


def test_federations_that_runs_share_have_the_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDSKEW_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(shared_federations, "_MIN_CACHED_SECONDS", -1)
    x, y = arrays(20, 20, 1)
    np.savez(tmp_path / "mine.npz", x=x, y=y)
    values = {"data": str(tmp_path / "mine.npz"), "partition.rule": "iid", "partition.clients": 2}
    for _ in ("drawn", "from the cache"):
        monkeypatch.setattr(shared_federations, "_recent", {})
        shared = shared_federations.shared_federation(with_values(Config(), values))
        assert shared.notes == (f"mine.npz: class '2' has {UNTESTED} it is predicted",)
    assert list((tmp_path / "cache").rglob("*.json")), "the second split was read from the cache"
