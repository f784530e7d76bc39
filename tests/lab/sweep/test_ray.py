"""Jobs on a Ray cluster of this machine, in a process of their own: Ray leaves threads and warnings behind."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fedskew.cli import main
from fedskew.lab.sweep.records import RecordsFile

pytest.importorskip("ray")

GRID = """
data: digits
partition: {rule: dirichlet, clients: 4, beta: 0.5}
rounds: 2
local_epochs: 1
device: cpu
grid:
  model: [dnn, mobilenetv3]
"""


def test_a_sweep_on_ray_ends_like_one_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "grid.yaml").write_text(GRID)
    arguments = ["sweep", "grid.yaml", "--quiet", "--out", "there", "--ray=local"]
    done = subprocess.run(
        [sys.executable, "-m", "fedskew", *arguments], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1, done.stderr
    assert "failed: model mobilenetv3" in done.stderr
    monkeypatch.chdir(tmp_path)
    assert main(["sweep", "grid.yaml", "--quiet", "--out", "here", "--workers=1"]) == 1
    (there,), (here,) = (RecordsFile(tmp_path / out / "runs.jsonl").read() for out in ("there", "here"))
    assert there.curve == here.curve


def test_no_cluster_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "grid.yaml").write_text(GRID)
    arguments = ["sweep", "grid.yaml", "--ray", "127.0.0.1:1"]
    done = subprocess.run(
        [sys.executable, "-m", "fedskew", *arguments], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "no Ray cluster at '127.0.0.1:1'" in done.stderr.splitlines()[-1]
