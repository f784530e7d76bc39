"""Secure aggregation between real processes, with TLS, node keys and audit logs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from in_process import small_data
from safetensors.torch import load_file

from fedskew.flower.secure.fixed_point import FixedPoint

TOLERANCE = 1e-6
FLAGS = ["--method", "fedavg", "--rounds", "2", "--local-epochs", "1", "--batch-size", "20", "--beta", "0.5"]


def fedskew(*arguments: object) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "fedskew", *map(str, arguments)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_trial_comes_to_the_simulated_model_and_its_logs_have_no_single_update(tmp_path: Path) -> None:
    data, trial = small_data(tmp_path), tmp_path / "trial"
    fedskew("federate", "up", trial, "--secure-aggregation", "--sites", 3, "--data", data, *FLAGS)
    fedskew("run", "--data", data, "--clients", 3, "--engine", "plain", *FLAGS, "--out", tmp_path / "simulated")
    found, expected = (load_file(f / "model.safetensors") for f in (trial / "run", tmp_path / "simulated"))
    torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE)
    assert FixedPoint(3, 1_000_000, 16.0).error_bound < TOLERANCE / 1000
    entries = [json.loads(line) for line in (trial / "run" / "audit.jsonl").read_text().splitlines()]
    replies = [entry for entry in entries if entry["event"] == "reply"]
    assert {kind: sum(e["kind"] == kind for e in replies) for kind in ("train", "secure_unmask")} == {
        "train": 6,
        "secure_unmask": 6,
    }
    for entry in replies:
        assert list(entry.get("tensors", {"shapes": {"masked": ""}})["shapes"]) == ["masked"]
