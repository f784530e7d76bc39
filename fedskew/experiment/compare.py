"""Several methods on the same federations: every method meets the same split, clients and batches, seed by seed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedskew.data import Federation
from fedskew.experiment.callbacks import Callback
from fedskew.experiment.config import Config, run_name
from fedskew.experiment.preparation import Prepared, build_federation, prepare
from fedskew.experiment.result import Result
from fedskew.experiment.run import run_prepared
from fedskew.metrics.summary import MeanStd, mean_std


@dataclass(frozen=True)
class MethodResults:
    """One method's results over the seeds."""

    method: str
    results: tuple[Result, ...]

    def over_seeds(self, value: Callable[[Result], float]) -> MeanStd:
        return mean_std([value(result) for result in self.results])

    @property
    def accuracy(self) -> MeanStd:
        return self.over_seeds(lambda r: r.accuracy)

    @property
    def worst_class(self) -> MeanStd:
        return self.over_seeds(lambda r: r.evaluation.worst_class)

    @property
    def class_accuracy(self) -> list[float | None]:
        """Mean over the seeds, class by class."""
        columns = zip(*(result.class_accuracy for result in self.results), strict=True)
        kept = [[a for a in column if a is not None] for column in columns]
        return [sum(column) / len(column) if column else None for column in kept]

    def to_json(self) -> dict[str, Any]:
        def pair(value: MeanStd) -> dict[str, float]:
            return value._asdict()

        return {
            "method": self.method,
            "seeds": [result.config.seed for result in self.results],
            "accuracy": pair(self.accuracy),
            "best": pair(self.over_seeds(lambda r: r.curve.best.accuracy)),
            "mean_last": pair(self.over_seeds(lambda r: r.curve.mean_last.accuracy)),
            "macro_f1": pair(self.over_seeds(lambda r: r.evaluation.macro_f1)),
            "worst_class": pair(self.worst_class),
            "class_gap": pair(self.over_seeds(lambda r: r.evaluation.class_gap)),
            "class_accuracy": self.class_accuracy,
            "seconds": pair(self.over_seeds(lambda r: r.seconds)),
            "compute": pair(self.over_seeds(lambda r: r.compute)),
            "diverged": sum(result.diverged for result in self.results),
            "folders": [str(result.folder) for result in self.results if result.folder],
        }


def prepare_comparison(config: Config, methods: Sequence[Config], seeds: Sequence[int]) -> list[Prepared]:
    """All runs, seed by seed, each checked before any starts; `methods` are `config` with one method each."""
    runs = []
    for seed in seeds:
        fed: Federation = build_federation(replace(config, seed=seed))
        runs += [prepare(replace(method, seed=seed), fed) for method in methods]
    return runs


def compare(
    runs: Sequence[Prepared], out: str | Path | None = None, callbacks: Sequence[Callback] = ()
) -> list[MethodResults]:
    """Run them all; with `out`, each in a folder of its own there, where finished runs are not run again."""
    results: dict[str, list[Result]] = {}
    for prepared in runs:
        folder = None if out is None else Path(out) / run_name(prepared.config)
        results.setdefault(label(prepared), []).append(run_prepared(prepared, folder, callbacks))
    return [MethodResults(name, tuple(found)) for name, found in results.items()]


def label(prepared: Prepared) -> str:
    return prepared.config.method
