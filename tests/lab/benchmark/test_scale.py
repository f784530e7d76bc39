"""A run on many clients whose data stay on disk, measured in a process of its own."""

from __future__ import annotations

import json
import shutil
from collections import namedtuple
from dataclasses import replace
from pathlib import Path

import pytest

from fedskew.errors import UserError
from fedskew.lab.benchmark.results import Results, read_results
from fedskew.lab.benchmark.scale import PHASES, ScaleMeasurement, measure_scale, own_peak_memory, scale_case
from fedskew.lab.benchmark.tables import markdown
from fedskew.lab.benchmark.targets import targets
from fedskew.platforms import peak_memory

BYTES_PER_SAMPLE = 160
"""The most that a split may need: its indices, labels and owners, and what sorting them takes, are 8 bytes each."""


def test_a_run_on_many_clients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    case = replace(scale_case("cpu", 20_000), rounds=2)
    assert (case.participants, case.bytes) == (20, (20_000 * 50 + 10_000) * (32 * 4 + 1))
    measured = measure_scale(case)
    assert list(tmp_path.iterdir()) == []  # the data are deleted
    assert tuple(measured.phases) == PHASES
    assert len(measured.round_seconds) == 2
    assert measured.memory_after["partition"] - measured.memory_after["load"] < BYTES_PER_SAMPLE * 20_000 * 50
    assert measured.folder_bytes < 3e6
    assert ScaleMeasurement.from_json(json.loads(json.dumps(measured.to_json()))) == measured

    made = Results({"device": "cpu", "cpu": "a CPU"}, {}, "fedskew bench", "2026-11-16", scale=[measured])
    (tmp_path / "made.json").write_text(json.dumps(made.to_json()))
    assert read_results(str(tmp_path / "made.json")) == made
    assert "| 20,000 × 50, 0.1 GB on disk; dnn, float32 | 2 rounds of 20 participants |" in markdown(made)
    (target,) = targets(made)
    assert (target.what, target.met) == ("20,000 clients: peak host memory, GB", True)


def test_a_full_disk_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**9, 0, 10**9))
    with pytest.raises(
        UserError, match=r"has 1\.0 GB of free disk; expected 7\.1 GB for the data of 1,000,000 clients"
    ):
        measure_scale(scale_case("cpu", 1_000_000))


def test_a_kernel_without_a_high_water_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: "Name:\tpython\nVmRSS:\t2192 kB\n")
    assert own_peak_memory() == peak_memory() > 0
