"""What grows with the number of clients: a few numbers per client in arrays, and no Python object."""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedskew as fs
from fedskew.experiment.callbacks import Callback
from fedskew.experiment.storage import about
from fedskew.results.folders import load_run

FEW, MANY = 2_000, 8_000
"""Both are too many for about.json, where it may list fewer clients than usual."""

RULES = [fs.IID, fs.Balanced, lambda clients: fs.Shards(clients, 1), lambda clients: fs.LabelsPerClient(clients, 1)]


def dataset(samples: int) -> fs.Dataset:
    rng = np.random.default_rng(0)
    parts = [
        fs.Samples(rng.standard_normal((n, 3), np.float32), (np.arange(n) % 4).astype(np.int64)) for n in (samples, 40)
    ]
    return fs.Dataset("points", "table", ("a", "b", "c", "d"), *parts)


def blocks() -> int:
    gc.collect()
    return sys.getallocatedblocks()


class Peak(Callback):
    """Counts the memory blocks of Python objects when the run starts and after each round."""

    def __init__(self) -> None:
        self.blocks = 0

    def on_start(self, prepared: Any, state: Any, rounds_ahead: int) -> None:
        self.blocks = max(self.blocks, blocks())

    def on_round(self, row: Any, rounds_ahead: int) -> None:
        self.blocks = max(self.blocks, blocks())


@pytest.mark.parametrize("rule", RULES)
def test_a_split_has_no_object_per_client(rule: Any) -> None:
    data = dataset(8 * FEW)
    fs.federation(data, rule(8), seed=0)
    before = blocks()
    federation = fs.federation(data, rule(FEW), seed=0)
    assert len(federation.hash) == 64
    for known in (federation.sizes, federation.label_counts, federation.indices):
        assert len(known) == FEW
    assert blocks() - before < 500


def test_a_run_has_no_object_per_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(about, "MAX_LISTED_CLIENTS", FEW - 1)
    peaks = {}
    for clients in (8, FEW, MANY):  # the first run imports and allocates what all runs need
        before, peak = blocks(), Peak()
        federation = fs.federation(dataset(4 * clients), fs.LabelsPerClient(clients, 1), seed=0)
        out = tmp_path / str(clients)
        result = fs.run(federation, "scaffold", "dnn", out=out, callbacks=[peak], rounds=2, clients_per_round=5,
                        local_epochs=1, device="cpu", engine="stacked")  # fmt: skip
        peaks[clients] = peak.blocks - before
        assert (result.label_counts == federation.label_counts).all()
        del result, federation
    assert abs(peaks[MANY] - peaks[FEW]) < 500
    written = {clients: (tmp_path / str(clients) / "about.json").stat().st_size for clients in (FEW, MANY)}
    assert abs(written[MANY] - written[FEW]) < 100


def test_label_counts_of_many_clients_are_read_from_their_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(about, "MAX_LISTED_CLIENTS", 3)
    federation = fs.federation(dataset(80), fs.LabelsPerClient(4, 1), seed=0)
    fs.run(federation, "fedavg", "dnn", out=tmp_path, rounds=1, local_epochs=1, device="cpu")
    assert "label_counts" not in json.loads((tmp_path / "about.json").read_text())["federation"]
    read = load_run(tmp_path)
    assert read.label_counts is not None
    assert (read.label_counts == federation.label_counts).all()
    assert read.client_labels == ("0", "1", "2", "3")
    (tmp_path / "label_counts.npy").write_bytes(b"damaged")
    assert load_run(tmp_path).label_counts is None
