"""Shared test settings: one thread per test process, and the real datasets where they are to be found."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings

import fedskew as fs
from fedskew.methods import METHODS, catalogue

torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")  # for the processes that tests start: idle threads spin
# No test depends on how fast the machine is, hence no deadline and no complaint about slow examples.
settings.register_profile(
    "fedskew", max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("fedskew")


collect_ignore = ["flower"] if os.name == "nt" else []
"""Federations do not run on Windows."""

LONGEST_FIRST = (
    "flower/test_real_processes.py",
    "choose/test_race.py",
    "test_docs.py",
    "lab/sweep/test_ray_pool.py",
    "engine/test_engine_agreement.py",
    "engine/stacked/test_slots.py",
    "flower/test_refused_connections.py",
    "test_examples.py",
    "export/test_exported_models.py",
    "test_peers.py",
    "engine/parallel/test_pool_engine.py",
    "experiment/round/test_run_state.py",
    "lab/sweep/test_pool.py",
    "losses/test_loss_properties.py",
    "cli/test_help_examples.py",
    "flower/test_worker.py",
    "report/test_every_moment.py",
    "experiment/test_overlapping_rounds.py",
    "live/test_live_page.py",
    "export/test_export_run.py",
    "test_architecture.py",
    "lab/papers/test_results_page.py",
    "methods/test_hook_results.py",
    "report/page/test_report_browser.py",
    "test_notebook.py",
    "experiment/test_real_text.py",
    "cli/test_sweep_command.py",
    "test_workers.py",
)
"""The files that take longest, so that none runs alone at the end. Those that wait run beside those that compute."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start with the longest files. The others keep their order."""
    here = Path(__file__).parent
    places = {here / name: place for place, name in enumerate(LONGEST_FIRST)}
    missing = [str(path) for path in places if not path.exists()]
    assert not missing, f"LONGEST_FIRST names files that do not exist: {missing}"
    items.sort(key=lambda item: places.get(item.path, len(places)))


def pytest_collection_finish() -> None:
    """All tests and modules stay to the end: no garbage collection, and every run has one, need look at them."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _no_traces_in_the_user_s_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    os.environ["FEDSKEW_CACHE"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(autouse=True)
def _forgotten_methods() -> Iterator[None]:
    """Take the methods that a test adds to the catalogue out again. Other tests run over the whole catalogue."""
    registries: list[dict[str, Any]] = [METHODS, catalogue._ALIASES]
    before = [dict(registry) for registry in registries]
    yield
    for registry, content in zip(registries, before, strict=True):
        if registry.keys() != content.keys():
            registry.clear()
            registry.update(content)


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The folder of publishers' files that FEDSKEW_DATA names; without it the test is skipped."""
    folder = os.environ.get("FEDSKEW_DATA", "")
    if not folder or not Path(folder).is_dir():
        pytest.skip("FEDSKEW_DATA names no folder with the real datasets")
    return Path(folder)


SMALL_RUN: dict[str, Any] = {"rounds": 3, "clients_per_round": 3, "local_epochs": 1, "eval_local": True}


@pytest.fixture(scope="session")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """FedAvg and FedVLS with two seeds, and PKD with one."""
    folder = tmp_path_factory.mktemp("runs")
    for seed in (0, 1):
        fed = fs.federation("digits", fs.Dirichlet(clients=6, beta=0.3), seed)
        for method in ("fedavg", "fedvls"):
            fs.run(fed, method, out=folder / f"{method}-{seed}", **SMALL_RUN)
    fed = fs.federation("digits", fs.Dirichlet(clients=6, beta=0.3), 0)
    params = {"warmup_rounds": 1, "expert_rounds": 1}
    fs.run(fed, "pkd", out=folder / "pkd-0", method_params=params, **SMALL_RUN)
    return folder
