"""Who is compared with whom: runs that differ in the seed only are one contender, contenders that differ in the method
only share a setting."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedskew.experiment.config import Config
from fedskew.methods import is_bound
from fedskew.metrics.confusion import Evaluation
from fedskew.metrics.summary import MeanStd, mean_std
from fedskew.report.recorded import Counts, RecordedRun

CIRCUMSTANCES = ("seed", "data_dir", "checkpoint_every", "engine", "device", "compile", "eval_local")
"""Keys that do not make another experiment."""


@dataclass(frozen=True, eq=False)
class Contender:
    """One method with its parameters over the seeds."""

    label: str
    runs: tuple[RecordedRun, ...]
    style: int

    @property
    def method(self) -> str:
        return self.runs[0].config.method

    @property
    def finished(self) -> tuple[RecordedRun, ...]:
        return tuple(run for run in self.runs if run.finished and run.last is not None)

    @property
    def tested(self) -> tuple[RecordedRun, ...]:
        """The runs that speak for it: the finished ones, or while there are none, those under way."""
        return self.finished or tuple(run for run in self.runs if run.last is not None)

    def by_seed(self, value: Callable[[Evaluation], float]) -> dict[int, float]:
        return {run.seed: value(run.last) for run in self.tested if run.last is not None}

    def over_seeds(self, value: Callable[[Evaluation], float]) -> MeanStd | None:
        found = list(self.by_seed(value).values())
        return mean_std(found) if found else None

    @property
    def accuracy(self) -> float:
        """Mean over the seeds; NaN if nothing was tested yet."""
        found = self.over_seeds(lambda e: e.accuracy)
        return float("nan") if found is None else found.mean

    def class_accuracy(self) -> np.ndarray[Any, np.dtype[np.float64]]:
        """[seeds, classes] of the tested runs; NaN for a class without test samples."""
        rows = [run.last.class_accuracy for run in self.tested if run.last is not None]
        return np.array([[np.nan if a is None else a for a in row] for row in rows], np.float64)


@dataclass(frozen=True, eq=False)
class Setting:
    """Contenders on the same federations."""

    label: str
    contenders: tuple[Contender, ...]

    @property
    def runs(self) -> list[RecordedRun]:
        return [run for contender in self.contenders for run in contender.runs]

    @property
    def config(self) -> Config:
        return self.runs[0].config

    @property
    def classes(self) -> tuple[str, ...]:
        return next((run.classes for run in self.runs if run.classes), ())

    @property
    def label_counts(self) -> Counts | None:
        """Of the first seed."""
        return next((run.label_counts for run in self.runs if run.label_counts is not None), None)

    @property
    def baseline(self) -> Contender | None:
        """What others are compared with: plain FedAvg."""
        return next((c for c in self.contenders if c.method == "fedavg"), None)

    @property
    def ranking(self) -> list[Contender]:
        """Those with a result, the best first: on the seeds that all of them have, or else by their own means; bounds,
        which are no methods, last."""
        common = self.common_seeds

        def score(contender: Contender) -> float:
            values = contender.by_seed(lambda e: e.accuracy)
            kept = [a for seed, a in values.items() if seed in common] or list(values.values())
            return sum(kept) / len(kept)

        return sorted((c for c in self.contenders if c.tested), key=lambda c: (is_bound(c.method), -score(c)))

    @property
    def competing(self) -> list[Contender]:
        """The ranking without the bounds."""
        return [c for c in self.ranking if not is_bound(c.method)]

    @property
    def common_seeds(self) -> set[int]:
        """The seeds with which every method that was tested was tested; bounds do not take seeds from them."""
        tested = [c for c in self.contenders if c.tested]
        methods = [c for c in tested if not is_bound(c.method)] or tested
        seeds = [{run.seed for run in c.tested} for c in methods]
        return set.intersection(*seeds) if seeds else set()


def settings(runs: Sequence[RecordedRun]) -> list[Setting]:
    """In the order in which they come."""
    grouped: dict[str, dict[str, list[RecordedRun]]] = {}
    for run in runs:
        rest, method = _apart(run.config)
        grouped.setdefault(_key(rest), {}).setdefault(_key(method), []).append(run)
    varied = varied_keys([run.config for run in runs])
    found = []
    for by_method in grouped.values():
        members = [_distinct(group) for group in by_method.values()]
        labels = _labels([group[0].config for group in members])
        contenders = tuple(
            Contender(label, tuple(sorted(group, key=lambda run: run.seed)), i)
            for i, (label, group) in enumerate(zip(labels, members, strict=True))
        )
        found.append(Setting(_described(members[0][0].config, varied), contenders))
    return found


def _distinct(group: Sequence[RecordedRun]) -> list[RecordedRun]:
    """One run a seed: the same run twice (another engine, say) must not count twice; the one furthest on stays."""
    best: dict[int, RecordedRun] = {}
    for run in group:
        before = best.get(run.seed)
        if before is None or (run.finished, run.last_round) > (before.finished, before.last_round):
            best[run.seed] = run
    return list(best.values())


def flat(config: Config) -> dict[str, Any]:
    """The configuration under dotted keys, less what does not make another experiment."""
    values: dict[str, Any] = {}
    for key, value in config.to_mapping().items():
        if isinstance(value, Mapping):
            values |= {f"{key}.{inner}": v for inner, v in value.items()}
        elif key not in CIRCUMSTANCES:
            values[key] = value
    return values


def varied_keys(configs: Sequence[Config]) -> list[str]:
    """The keys, other than the method's, in which they differ."""
    all_values = [flat(config) for config in configs]
    keys = dict.fromkeys(key for values in all_values for key in values if not key.startswith("method."))
    return [key for key in keys if len({_key(values.get(key)) for values in all_values}) > 1]


def _apart(config: Config) -> tuple[dict[str, Any], dict[str, Any]]:
    values = flat(config)
    method = {key: value for key, value in values.items() if key.startswith("method.")}
    return {key: value for key, value in values.items() if key not in method}, method


def _labels(configs: Sequence[Config]) -> list[str]:
    """The method's name, with the parameters by which contenders of that name differ."""
    labels = []
    for config in configs:
        alike = [other for other in configs if other.method == config.method]
        names = sorted({name for other in alike for name in other.method_params})
        differing = [n for n in names if len({_key(o.method_params.get(n)) for o in alike}) > 1]
        told = ", ".join(f"{name}={config.method_params.get(name)}" for name in differing)
        labels.append(f"{config.method} ({told})" if told else config.method)
    return labels


def _described(config: Config, varied: Sequence[str]) -> str:
    """A setting's name: what distinguishes it, or what it is."""
    if varied:
        values = flat(config)
        return ", ".join(f"{key.removeprefix('partition.')}={values.get(key)}" for key in varied)
    return setting_name(config)


def setting_name(config: Config) -> str:
    params = ", ".join(f"{k} {v}" for k, v in config.partition.params.items() if k in _STRENGTHS)
    clients = f", {config.partition.clients} clients" if config.partition.clients else ""
    return f"{config.data}, {config.partition.rule}{' ' + params if params else ''}{clients}, {config.model}"


_STRENGTHS = ("beta", "shards", "labels_per_client")


def _key(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)
