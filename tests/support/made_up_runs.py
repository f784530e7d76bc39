"""Runs made up of confusion matrices, where exact numbers are wanted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from fedskew.experiment.config import Config, with_values
from fedskew.experiment.result import Result
from fedskew.experiment.round.record import RoundRow
from fedskew.metrics.confusion import Evaluation


def made_up(method: str, seed: int, right: list[float], finished: bool = True, **values: Any) -> Result:
    """A run of two rounds whose classes, 100 test samples each, are recognised in these shares at the end."""
    matrices = [_matrix([0.1] * len(right)), _matrix(right)]
    rows = [
        RoundRow(
            round=t, model_round=t, clients=[0, 1], loss=1.0, compute=float(t > 0), seconds=1.0,
            bytes={"down": 500_000 * t, "up": 500_000 * t}, evaluation=Evaluation(m),
            time={"train": 0.5, "server": 0.1, "evaluate": 0.2},
        )
        for t, m in enumerate(matrices)
    ]  # fmt: skip
    config = with_values(Config(), {"method": method, "seed": seed, "rounds": 1, **values})
    classes = [f"class {c}" for c in range(len(right))]
    counts = [[10] * len(right), [0] * (len(right) - 1) + [7]]
    federation = {"classes": classes, "label_counts": counts, "split": "0" * 64, "unused": 0}
    folder = Path(f"runs/{method}-{seed}")
    return Result(config, rows, nn.Identity(), "plain", folder, {"federation": federation}, finished)


def _matrix(right: list[float]) -> np.ndarray:
    """What is not right is taken for the next class."""
    hits = np.rint(100 * np.array(right)).astype(int)
    return np.diag(hits) + np.roll(np.diag(100 - hits), 1, axis=1)
