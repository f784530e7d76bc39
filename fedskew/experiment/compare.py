"""Run several methods. For one seed, all methods have the same split, initial model, clients and batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from fedskew.experiment.callbacks import Callback
from fedskew.experiment.config import Config, run_folder
from fedskew.experiment.preparation import Prepared, build_federation, prepare
from fedskew.experiment.result import Result
from fedskew.experiment.run import run_prepared


def prepare_comparison(config: Config, methods: Sequence[Config], seeds: Sequence[int]) -> list[Prepared]:
    """Prepare all methods, one `Config` each, seed by seed, so that errors show before any run starts."""
    runs = []
    for seed in seeds:
        federation = build_federation(replace(config, seed=seed))
        runs += [prepare(replace(method, seed=seed), federation) for method in methods]
    return runs


def run_comparison(
    runs: Sequence[Prepared], out: str | Path | None = None, callbacks: Sequence[Callback] = ()
) -> list[Result]:
    """Run them all. With `out`, each run has its own folder there, and finished runs are not repeated."""
    folders = [None if out is None else run_folder(out, prepared.config) for prepared in runs]
    return [run_prepared(prepared, folder, callbacks) for prepared, folder in zip(runs, folders, strict=True)]
