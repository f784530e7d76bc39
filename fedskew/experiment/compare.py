"""Run several methods under equal conditions.

With equal settings and seeds, all methods get the same split. Most also get the same initial model, clients and
batches. The exceptions are methods that need another classifier head, and methods with stages that choose other clients
or samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from fedskew.experiment.callbacks import Callback
from fedskew.experiment.config import Config, run_folder
from fedskew.experiment.preparation import Prepared, build_federation, prepare
from fedskew.experiment.result import Result
from fedskew.experiment.run import run_prepared


def prepare_comparison(base: Config, methods: Sequence[Config], seeds: Sequence[int]) -> list[Prepared]:
    """Prepare every method with every seed, so that errors show before any run starts.

    The data and the split come from `base`. `methods` has one configuration per method, with the same data and split.
    """
    runs = []
    for seed in seeds:
        federation = build_federation(replace(base, seed=seed))
        runs += [prepare(replace(config, seed=seed), federation) for config in methods]
    return runs


def run_comparison(
    runs: Sequence[Prepared], out: str | Path | None = None, callbacks: Sequence[Callback] = ()
) -> list[Result]:
    """Run all prepared runs. With `out`, each run has a folder in it, and finished runs are not repeated."""
    folders = [None if out is None else run_folder(out, prepared.config) for prepared in runs]
    return [run_prepared(prepared, folder, callbacks) for prepared, folder in zip(runs, folders, strict=True)]
