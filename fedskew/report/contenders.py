"""Who is compared with whom: runs that differ in the seed only are one contender, contenders that differ in the method
only share a setting."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedskew.experiment.config import Config
from fedskew.methods import is_bound
from fedskew.metrics.confusion import Evaluation
from fedskew.metrics.summary import MeanStd, mean_std
from fedskew.report.naming import flat, key_of, labels, setting_label, told_apart, varied_keys
from fedskew.report.recorded import Counts, RecordedRun


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
    """By what was varied, from small to large."""
    grouped: dict[str, dict[str, list[RecordedRun]]] = {}
    for run in runs:
        rest, method = _apart(run.config)
        grouped.setdefault(key_of(rest), {}).setdefault(key_of(method), []).append(run)
    configs = [run.config for run in runs]
    varied = varied_keys(configs)
    told = told_apart(configs, varied)
    found = []
    for by_method in sorted(grouped.values(), key=lambda members: _place(members, varied)):
        members = [_distinct(group) for group in by_method.values()]
        named = labels([group[0].config for group in members])
        contenders = tuple(
            Contender(label, tuple(sorted(group, key=lambda run: run.seed)), i)
            for i, (label, group) in enumerate(zip(named, members, strict=True))
        )
        found.append(Setting(setting_label(members[0][0].config, told), contenders))
    return found


def _place(by_method: Mapping[str, Sequence[RecordedRun]], varied: Sequence[str]) -> list[tuple[bool, float, str]]:
    """Numbers by size and before words."""
    values = flat(next(iter(by_method.values()))[0].config)
    told = [values.get(key) for key in varied]
    return [(False, float(v), "") if isinstance(v, int | float) else (True, 0.0, key_of(v)) for v in told]


def _distinct(group: Sequence[RecordedRun]) -> list[RecordedRun]:
    """One run a seed: the same run twice (another engine, say) must not count twice; the one furthest on stays."""
    best: dict[int, RecordedRun] = {}
    for run in group:
        before = best.get(run.seed)
        if before is None or (run.finished, run.last_round) > (before.finished, before.last_round):
            best[run.seed] = run
    return list(best.values())


def _apart(config: Config) -> tuple[dict[str, Any], dict[str, Any]]:
    values = flat(config)
    method = {key: value for key, value in values.items() if key.startswith("method.")}
    return {key: value for key, value in values.items() if key not in method}, method
