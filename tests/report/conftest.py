"""Small real runs on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import fedskew as fs

SETTINGS: dict[str, Any] = {"rounds": 3, "clients_per_round": 3, "local_epochs": 1, "eval_local": True}


@pytest.fixture(scope="session")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """FedAvg and FedVLS with two seeds, and PKD with one."""
    folder = tmp_path_factory.mktemp("runs")
    for seed in (0, 1):
        fed = fs.federation("digits", fs.Dirichlet(clients=6, beta=0.3), seed)
        for method in ("fedavg", "fedvls"):
            fs.run(fed, method, out=folder / f"{method}-{seed}", **SETTINGS)
    fed = fs.federation("digits", fs.Dirichlet(clients=6, beta=0.3), 0)
    params = {"warmup_rounds": 1, "expert_rounds": 1}
    fs.run(fed, "pkd", out=folder / "pkd-0", method_params=params, **SETTINGS)
    return folder
