"""Methods on the same federations: means over seeds, ranking and significance."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from fedskew.display import data_frame, html_table
from fedskew.experiment.config import Config
from fedskew.experiment.result import Result
from fedskew.methods import is_reference_bound
from fedskew.metrics.drift import finite_or_none
from fedskew.metrics.summary import MeanStd, mean_std
from fedskew.notebook import curves, label_map
from fedskew.results.early_stops import early_stops, unequal_rounds
from fedskew.results.naming import flat_config, labels, naming_keys, setting_label, to_key, varied_keys
from fedskew.results.ranking import DEFAULT_METRIC, RankingMetric, find_metric, require_metric
from fedskew.results.significance import Difference, leads

if TYPE_CHECKING:
    import pandas


SCORE_KEYS = (
    "auroc", "auprc", "kappa", "log_loss", "brier", "ece", "sensitivity", "specificity", "sensitivity_at_specificity",
)  # fmt: skip
"""Ranking metrics that the JSON, `to_frame` and the tables of sweeps also show, in Python's spelling."""


@dataclass(frozen=True, eq=False)
class MethodRuns:
    """The runs of one method with one set of parameters, one run per seed."""

    label: str
    runs: tuple[Result, ...]
    index: int = 0
    """Position among the methods of all settings. It determines colours, line styles and ids in charts."""

    @property
    def method(self) -> str:
        return self.runs[0].method

    @property
    def is_reference_bound(self) -> bool:
        """Whether the method is a reference bound, not a federated method."""
        return is_reference_bound(self.method)

    @property
    def finished_runs(self) -> tuple[Result, ...]:
        """The finished runs that have an evaluation."""
        return tuple(run for run in self.runs if run.finished and run.last is not None)

    @property
    def counted_runs(self) -> tuple[Result, ...]:
        """The runs that count in means and tables: the finished runs, or all evaluated runs if none is finished."""
        return self.finished_runs or tuple(run for run in self.runs if run.last is not None)

    @property
    def counted(self) -> tuple[Result, ...]:
        """The name of `counted_runs` in version 0.2."""
        return self.counted_runs

    @property
    def first(self) -> Result | None:
        """The run with the lowest seed in `counted_runs`, for figures that show one run."""
        return self.counted_runs[0] if self.counted_runs else None

    def by_seed(self, value: Callable[[Result], float]) -> dict[int, float]:
        """Return a value of each run in `counted_runs`, by seed."""
        return {run.seed: value(run) for run in self.counted_runs}

    def over_seeds(self, value: Callable[[Result], float]) -> MeanStd:
        """Mean and standard deviation over the seeds. NaN if nothing was evaluated yet."""
        found = list(self.by_seed(value).values())
        return mean_std(found) if found else MeanStd(np.nan, np.nan)

    @property
    def accuracy(self) -> MeanStd:
        return self.over_seeds(lambda run: run.accuracy)

    @property
    def macro_f1(self) -> MeanStd:
        return self.over_seeds(lambda run: run.evaluation.macro_f1)

    @property
    def worst_class(self) -> MeanStd:
        return self.over_seeds(lambda run: run.evaluation.worst_class)

    def class_accuracies(self, seeds: set[int] | None = None) -> npt.NDArray[np.float64]:
        """Accuracies as [seeds, classes]. NaN for a class without test samples."""
        rows = [run.class_accuracy for run in self.counted_runs if seeds is None or run.seed in seeds]
        return np.array([[np.nan if a is None else a for a in row] for row in rows], np.float64)

    @property
    def class_accuracy(self) -> npt.NDArray[np.float64]:
        """Accuracy by class, the mean over the seeds. NaN for a class without test samples. Empty if nothing was
        evaluated yet."""
        rows = self.class_accuracies()
        return np.asarray(rows.mean(axis=0), np.float64) if len(rows) else np.empty(0)

    def class_changes(self, other: MethodRuns) -> npt.NDArray[np.float64]:
        """This method's accuracies minus the other's, [seeds, classes], for the seeds that both have."""
        common = {run.seed for run in self.counted_runs} & {run.seed for run in other.counted_runs}
        return self.class_accuracies(common) - other.class_accuracies(common)

    def to_json(self) -> dict[str, Any]:
        def pair(value: Callable[[Result], float]) -> dict[str, float | None]:
            return {name: finite_or_none(number) for name, number in self.over_seeds(value)._asdict().items()}

        return {
            "method": self.label,
            "seeds": [run.seed for run in self.counted_runs],
            "rounds": [run.rounds for run in self.counted_runs],
            "stopped_early": [run.stopped_early for run in self.counted_runs],
            "accuracy": pair(lambda r: r.accuracy),
            "best": pair(lambda r: r.curve.best.accuracy),
            "mean_last": pair(lambda r: r.curve.mean_last.accuracy),
            "macro_f1": pair(lambda r: r.evaluation.macro_f1),
            "worst_class": pair(lambda r: r.evaluation.worst_class),
            "balanced_accuracy": pair(lambda r: r.evaluation.mean_class),
            **{name: pair(find_metric(name).value) for name in SCORE_KEYS},
            "client_accuracy": pair(lambda r: r.client_accuracy),
            "class_gap": pair(lambda r: r.evaluation.class_gap),
            "class_accuracy": [None if np.isnan(a) else float(a) for a in self.class_accuracy],
            "seconds": pair(lambda r: r.seconds),
            "compute": pair(lambda r: r.compute),
            "diverged": sum(run.diverged for run in self.counted_runs),
            "folders": [str(run.folder) for run in self.counted_runs if run.folder],
            "params": self.runs[0].config.method_params,
        }


@dataclass(frozen=True, eq=False, repr=False)
class Comparison:
    """Methods on the same federations, with one run per method and seed."""

    label: str
    methods: tuple[MethodRuns, ...]
    rank_by: str = DEFAULT_METRIC
    """The name of the metric that decides which method is best."""

    @property
    def metric(self) -> RankingMetric:
        """The metric that decides which method is best."""
        return find_metric(self.rank_by)

    def score(self, method: MethodRuns) -> MeanStd:
        """Mean and standard deviation of `metric` over the method's seeds."""
        return method.over_seeds(self.metric.value)

    @property
    def runs(self) -> list[Result]:
        return [run for method in self.methods for run in method.runs]

    @property
    def config(self) -> Config:
        return self.runs[0].config

    @property
    def classes(self) -> tuple[str, ...]:
        return next((run.classes for run in self.runs if run.classes), ())

    @property
    def is_multi_label(self) -> bool:
        """Whether samples have any number of labels, instead of one class."""
        return self.config.task == "multi-label"

    @property
    def label_counts(self) -> npt.NDArray[np.int64] | None:
        """Number of samples, [clients, classes], from the first run that has them. None if no run has them."""
        return next((run.label_counts for run in self.runs if run.label_counts is not None), None)

    @property
    def client_labels(self) -> tuple[str, ...]:
        """The clients' names, or their numbers, from the first run with label counts. Empty without such a run."""
        return next((run.client_labels for run in self.runs if run.label_counts is not None), ())

    @property
    def baseline(self) -> MethodRuns | None:
        """Plain FedAvg, with which the other methods are compared. None if it is not among the methods."""
        return next((m for m in self.methods if m.method == "fedavg"), None)

    @property
    def ranking(self) -> list[MethodRuns]:
        """The evaluated methods, the best first, then the reference bounds. `ranked_mean` decides the order."""
        merit = self.metric.merit
        evaluated = [m for m in self.methods if m.counted_runs]
        return sorted(evaluated, key=lambda m: (m.is_reference_bound, -self.ranked_mean(m, merit)))

    def ranked_mean(self, method: MethodRuns, value: Callable[[Result], float]) -> float:
        """Mean of a value over `common_seeds`. If the method has none of them, the mean is over all its seeds."""
        values, common = method.by_seed(value), self.common_seeds
        kept = [a for seed, a in values.items() if seed in common] or list(values.values())
        return sum(kept) / len(kept)

    @property
    def competing(self) -> list[MethodRuns]:
        """The ranking without the reference bounds."""
        return [m for m in self.ranking if not m.is_reference_bound]

    @property
    def best(self) -> MethodRuns | None:
        """The first of `competing`. None if there is no competing method, or if only one method was evaluated."""
        return self.competing[0] if self.competing and len(self.ranking) > 1 else None

    @property
    def common_seeds(self) -> set[int]:
        """The seeds that all evaluated methods share. Reference bounds count only if there are no other methods."""
        evaluated = [m for m in self.methods if m.counted_runs]
        methods = [m for m in evaluated if not m.is_reference_bound] or evaluated
        seeds = [{run.seed for run in m.counted_runs} for m in methods]
        return set.intersection(*seeds) if seeds else set()

    def differences(self) -> list[Difference | None]:
        """The lead of the best method over each other method in `competing`, corrected for all pairs of these methods.

        The correction counts all pairs because the best method is chosen by the same values (see `significance`). A
        lead is positive if the best method is better, also for metrics in which lower values are better. It is None for
        a method that shares no seed with the best method.
        """
        return leads([method.by_seed(self.metric.merit) for method in self.competing], self.metric.limit)

    def to_json(self) -> dict[str, Any]:
        shared = {key: value for key, value in self.config.to_mapping().items() if key not in ("method", "seed")}
        return {
            "classes": list(self.classes),
            "config": shared,
            "methods": [m.to_json() for m in self.methods],
            "rank_by": self.rank_by,
            "best": None if self.best is None else self.best.label,
            "differences": self._differences_json(),
        }

    def _differences_json(self) -> list[dict[str, Any]]:
        """The differences as JSON. `significant` is null if nothing was tested."""
        competing = self.competing
        return [
            {
                "against": method.label,
                "seeds": difference.seeds,
                "wins": difference.wins,
                "mean": difference.mean,
                "low": difference.low,
                "high": difference.high,
                "p": difference.p,
                "significant": difference.significant if difference.is_tested else None,
                "seeds_to_settle": difference.seeds_to_settle,
                "unequal_rounds": bool(unequal_rounds(competing[0], method)),
            }
            for method, difference in zip(competing[1:], self.differences(), strict=True)
            if difference is not None
        ]

    def to_frame(self) -> pandas.DataFrame:
        """One row per run in `MethodRuns.counted_runs`, as a pandas DataFrame."""
        rows = [
            {
                "method": method.label,
                "seed": run.seed,
                "finished": run.finished,
                "rounds": run.rounds,
                "stopped_early": run.stopped_early,
                "accuracy": run.accuracy,
                "best": run.curve.best.accuracy,
                "mean_last": run.curve.mean_last.accuracy,
                "macro_f1": run.evaluation.macro_f1,
                "worst_class": run.evaluation.worst_class,
                "balanced_accuracy": run.evaluation.mean_class,
                **{name: find_metric(name).value(run) for name in SCORE_KEYS},
                "client_accuracy": run.client_accuracy,
                "class_gap": run.evaluation.class_gap,
                "compute": run.compute,
                "bytes": run.bytes_moved,
                "seconds": run.seconds,
            }
            for method in self.methods
            for run in method.counted_runs
        ]
        frame: pandas.DataFrame = data_frame(rows)
        return frame

    def table(self, format: str = "markdown") -> str:
        """The metrics of each method, as means and sample standard deviations, in `markdown`, `latex` or `csv`."""
        from fedskew.results.table import table_text

        return table_text([self], format)

    def __repr__(self) -> str:
        found = ", ".join(f"{m.label} {self.metric.text(self.score(m).mean)}" for m in self.ranking)
        by = "" if self.rank_by == DEFAULT_METRIC else f", {self.metric.label}"
        return f"<Comparison: {self.label}{by}: {found or 'nothing evaluated yet'}>"

    def _repr_html_(self) -> str:
        """Show the comparison in a notebook: a table, the accuracy over the rounds, and the label counts."""
        records = [
            {
                "method": m.label,
                "seeds": len(m.counted_runs),
                "accuracy %": str(m.accuracy),
                "macro F1 %": str(m.macro_f1),
                "worst class %": str(m.worst_class),
                "seconds per run": f"{m.over_seeds(lambda run: run.seconds).mean:.1f}",
            }
            for m in self.ranking
        ]
        table = html_table(records, self.label) if records else f"<p>{escape(repr(self))}</p>"
        accuracy = {
            m.label: [[(round_, 100 * value) for round_, value in run.accuracy_curve] for run in m.counted_runs]
            for m in self.ranking
        }
        counts = self.label_counts
        shown = "" if counts is None else label_map(counts, self.client_labels, self.classes)
        stops = "".join(f"<p>{escape(line)}</p>" for line in early_stops(self))
        return f"{table}{stops}{curves(accuracy)}{shown}"


def compare_runs(runs: Sequence[Result], label: str | None = None, rank_by: str = DEFAULT_METRIC) -> Comparison:
    """Compare runs. Runs with the same method and parameters belong together, even if other settings differ.

    `rank_by` names the metric that decides which method is best, such as accuracy, macro-f1 or auroc.
    """
    return _compare(runs, _method_labels(runs), label, rank_by)


def _compare(runs: Sequence[Result], names: Mapping[str, str], label: str | None, rank_by: str) -> Comparison:
    """Compare the runs of one setting. `names` has the labels of all settings' methods."""
    grouped: dict[str, list[Result]] = {}
    for run in runs:
        grouped.setdefault(_method_key(run), []).append(run)
    indices = {key: i for i, key in enumerate(names)}
    methods = tuple(MethodRuns(names[key], _one_per_seed(group), indices[key]) for key, group in grouped.items())
    metric = require_metric((run for method in methods for run in method.counted_runs), rank_by)
    return Comparison(label or setting_label(methods[0].runs[0].config, []), methods, metric.name)


def _method_labels(runs: Sequence[Result]) -> dict[str, str]:
    """The label of each method, by `_method_key`, in the order of the runs."""
    configs = {_method_key(run): run.config for run in runs}
    return dict(zip(configs, labels(list(configs.values())), strict=True))


def _method_key(run: Result) -> str:
    return to_key(_setting_and_method(run.config)[1])


def comparisons(runs: Sequence[Result], rank_by: str = DEFAULT_METRIC) -> list[Comparison]:
    """Make one comparison per setting. A method has the same label and the same index in all of them.

    A setting is the configuration without the method, the seed, and the keys that change results at most by rounding.
    """
    grouped: dict[str, list[Result]] = {}
    for run in runs:
        grouped.setdefault(to_key(_setting_and_method(run.config)[0]), []).append(run)
    configs = [run.config for run in runs]
    varied = varied_keys(configs)
    shown = naming_keys(configs, varied)
    ordered = sorted(grouped.values(), key=lambda members: _sort_key(members[0], varied))
    names = _method_labels([run for members in ordered for run in members])
    return [_compare(members, names, setting_label(members[0].config, shown), rank_by) for members in ordered]


def _sort_key(run: Result, varied: Sequence[str]) -> list[tuple[bool, float, str]]:
    """Return a sort key for a setting: the values that vary. Numbers come before words."""
    values = flat_config(run.config)
    found = [values.get(key) for key in varied]
    return [(False, float(v), "") if isinstance(v, int | float) else (True, 0.0, to_key(v)) for v in found]


def _one_per_seed(group: Sequence[Result]) -> tuple[Result, ...]:
    """Keep the most advanced run of each seed. A repeated run, perhaps with another engine, counts once."""
    best: dict[int, Result] = {}
    for run in group:
        before = best.get(run.seed)
        if before is None or (run.finished, run.last_round) > (before.finished, before.last_round):
            best[run.seed] = run
    return tuple(sorted(best.values(), key=lambda run: run.seed))


def _setting_and_method(config: Config) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Return the configuration without the method, and the method with its parameters."""
    values = flat_config(config)
    method = {key: value for key, value in values.items() if key.startswith("method.")}
    return {key: value for key, value in values.items() if key not in method}, method
