"""`fedskew.compare`: run several methods on the same federations."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from fedskew.data import Federation, Partition, federation
from fedskew.errors import UserError
from fedskew.experiment.callbacks import Callback, check_callbacks
from fedskew.experiment.compare import run_comparison
from fedskew.experiment.config import Config, PartitionConfig, parse_method, with_values
from fedskew.experiment.config.documentation import documents_settings
from fedskew.experiment.preparation import (
    Prepared,
    partition_rule,
    prepare,
    refuse_data_settings,
    refuse_other_split,
)
from fedskew.experiment.progress import showing_progress
from fedskew.methods import Method, Part
from fedskew.results.comparison import Comparison, compare_runs
from fedskew.results.ranking import DEFAULT_METRIC, find_metric

AnyMethod = str | Mapping[str, Any] | Method | Part
"""A name, a name with settings such as "fedvls:distill_weight=0.5", a mapping such as {"name": "fedvls",
"distill_weight": 0.5}, or an object."""


@documents_settings("seed")
def compare(
    data: object,
    methods: Sequence[AnyMethod],
    seeds: int | Sequence[int] = 3,
    *,
    partition: Partition | None = None,
    same_split: bool = False,
    rank_by: str = DEFAULT_METRIC,
    model: str | nn.Module | None = None,
    config: Config | None = None,
    out: str | Path | None = None,
    callbacks: Sequence[Callback] = (),
    progress: bool | None = None,
    **settings: Any,
) -> Comparison:
    """Run every method with every seed. `settings` are configuration keys such as `rounds` and `lr`, listed below.

    data: a federation, or anything that `load` takes, which `partition` then splits.
    methods: a list of names such as `fedvls`, names with settings such as `fedvls:distill_weight=0.5`, or objects.
    seeds: a list of seeds, or their number. With a number, the first is the federation's seed, or 0 if `data` is not a
        federation.
    partition: the rule that splits `data`. The default is the partition of `config`.
    same_split: whether all seeds use one split: the federation's, or that of seed 0 if `data` is not a federation. By
        default, each seed has another split by the same rule. A rule that is not random always gives the same split.
        `partition.seed` also gives all seeds one split: that of this seed.
    rank_by: the metric that decides which method is best: accuracy, macro-f1, worst-class, balanced-accuracy, auroc,
        auprc, sensitivity, specificity, sensitivity-at-specificity, kappa, log-loss, brier or ece.
    model: a model's name or a `torch.nn.Module`, as in `fedskew.run`.
    config: a `Config`, whose values the settings override. Its data, method and seed are ignored, and its partition too
        if `data` is a federation.
    out: a folder for the runs. A repeated call continues an interrupted comparison there.
    callbacks: objects that watch all runs, such as `EarlyStopping(patience=10)`.
    progress: whether to show a bar, and in a notebook a live curve. None shows them in a notebook and in a terminal,
        False never. True also prints lines in a log.

    With the same seed, all methods get the same split. Most also get the same initial model, clients and batches. The
    exceptions are methods with another head, and methods that train in stages with other clients or samples.
    """
    check_callbacks(callbacks)
    if config is not None and not isinstance(config, Config):
        raise UserError(f"config is {config!r}; expected a fedskew.Config")
    metric = find_metric(rank_by)
    parsed = _parse_methods(methods)
    base, given = _base_federation(data, partition, config or Config(), settings)
    model_object = None if isinstance(model, str) else model
    prepared: list[Prepared] = []
    is_fixed = same_split or base.partition.seed is not None
    for seed in _list_seeds(seeds, data.seed if isinstance(data, Federation) else 0):
        split = given if is_fixed else given.resplit(seed)
        for method in parsed:
            values = {"seed": seed, **({"model": model} if isinstance(model, str) else {})}
            method_object = None if isinstance(method, str | Mapping) else method
            run_config = with_values(base, values if method_object is not None else {**values, "method": method})
            prepared.append(prepare(run_config, split, method_object, model_object))
    _refuse_repeated(prepared)
    with showing_progress(progress, len(prepared)) as shown:
        results = run_comparison(prepared, out, [*shown, *callbacks])
    return compare_runs(results, rank_by=metric.name)


def _base_federation(
    data: object, partition: Partition | None, config: Config, settings: Mapping[str, Any]
) -> tuple[Config, Federation]:
    """Return the shared configuration and the federation.

    Data that are not a federation are split with `partition.seed`, by default 0.
    """
    for key, value in settings.items():
        section = key.partition(".")[0]
        if section in ("seed", "method"):
            raise UserError(f"{key} is {value!r}; expected {section}s= in a comparison")
    refuse_data_settings(settings, data, partition)
    if isinstance(data, Federation):
        if partition is not None:
            raise UserError("partition is given, but the federation is already split; pass its dataset instead")
        base = with_values(replace(config, partition=PartitionConfig()), {**settings, "data": data.dataset.described})
        refuse_other_split(base, data)
        return base, data
    if partition is not None:
        config = replace(config, partition=PartitionConfig(seed=config.partition.seed))
    base = with_values(config, settings)
    split = federation(data, partition or partition_rule(base), base.partition.seed or 0, base.data_dir)
    described = {"name": str(data)} if isinstance(data, str | PathLike) else split.dataset.described
    return with_values(base, {"data": described}), split


def _parse_methods(methods: Sequence[AnyMethod]) -> list[AnyMethod]:
    listed = list(methods) if isinstance(methods, Iterable) and not isinstance(methods, str | Mapping) else []
    if not listed:
        raise UserError(f"methods is {methods!r}; expected a list, for example ['fedavg', 'fedvls']")
    return [parse_method(method) if isinstance(method, str) else method for method in listed]


def _list_seeds(seeds: int | Sequence[int], first: int) -> list[int]:
    """Return the seeds as a list. If `seeds` is a number, `first` is the first seed."""
    listed = list(range(first, first + int(seeds))) if isinstance(seeds, int | np.integer) else []
    if isinstance(seeds, Iterable):
        listed = list(seeds)
    if isinstance(seeds, bool | str) or not listed or len(set(listed)) < len(listed):
        raise UserError(f"seeds is {seeds!r}; expected a number of seeds, at least 1, or a list of different seeds")
    return listed


def _refuse_repeated(prepared: Sequence[Prepared]) -> None:
    """Refuse a method that is given twice with the same parameters. A table would show both under one name."""
    configs = [run.config for run in prepared if run.config.seed == prepared[0].config.seed]
    identities = [(config.method, sorted(config.method_params.items(), key=str)) for config in configs]
    for identity in identities:
        if identities.count(identity) > 1:
            raise UserError(
                f"method {identity[0]!r} is given twice with the same settings; expected it once, or with different "
                f"settings, such as '{identity[0]}:NAME=VALUE'"
            )
