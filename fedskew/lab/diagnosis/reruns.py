"""Reruns: the accuracies that fedskew itself has measured, by setting, protocol and method.

The table `reruns.csv` ships with the package, so a diagnosis does not depend on the current folder. The command
`python tools/build_reruns.py` builds it from the records in the repository's `results/`.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from statistics import fmean
from typing import Any

from fedskew.data.catalogue import DATASETS
from fedskew.errors import UserError, plural
from fedskew.experiment.config import Config
from fedskew.experiment.config.values import parse_yaml
from fedskew.lab.diagnosis.setting import KnownSetting, Score, known_setting
from fedskew.lab.sweep.records import Record
from fedskew.methods import make_method
from fedskew.methods.catalogue import is_reference_bound
from fedskew.results.naming import flat_config

SHIPPED = files("fedskew.lab.diagnosis") / "reruns.csv"
BASELINE = "fedavg"
MAY_DIFFER = ("method", "precision", "eval_every")
"""Keys in which runs of one comparison may differ, besides those that `flat_config` leaves out."""
COLUMNS = ("dataset", "rule", "params", "clients", "per_round", "protocol", "method", "accuracy", "fedavg", "best",
           "fedavg_best")  # fmt: skip


@dataclass(frozen=True)
class Rerun:
    """A method's runs in a setting under one protocol, with FedAvg's runs on the same splits."""

    setting: KnownSetting
    protocol: str
    """Model, rounds, epochs, learning rate and augmentations in words."""
    method: str
    accuracy: tuple[float, ...]
    """Mean accuracy of the last rounds in percent, by seed, as in the maps of RESULTS.md."""
    fedavg: tuple[float, ...]
    """FedAvg's `accuracy`, with the same seeds."""
    best: tuple[float, ...]
    """Accuracy of the best round in percent, by seed."""
    fedavg_best: tuple[float, ...]
    """FedAvg's `best`, with the same seeds."""

    @property
    def gains(self) -> list[float]:
        """Points over FedAvg, by seed."""
        return [accuracy - baseline for accuracy, baseline in zip(self.accuracy, self.fedavg, strict=True)]

    @property
    def score(self) -> Score:
        source = f"rerun: {self.protocol}"
        best_gain = fmean(self.best) - fmean(self.fedavg_best)
        return Score(self.method, fmean(self.accuracy), fmean(self.fedavg), source, len(self.accuracy), best_gain)


# -- from records ----------------------------------------------------------------------------------------

Runs = dict[int, tuple[float, float]]
"""Mean accuracy of the last rounds and accuracy of the best round, in percent, by seed."""


def reruns_from_records(records: Iterable[Record]) -> list[Rerun]:
    """Compare each method with FedAvg, over the seeds that both have.

    Compared runs differ only in the keys of `MAY_DIFFER`, and in keys that `flat_config` leaves out, such as the seed.
    Left out are unfinished runs, runs whose `start_rounds` is not 0, reference bounds, and runs without a
    `config_setting`.
    """
    # By setting, protocol and other configuration values; then by method; then by the method's parameters.
    groups: dict[tuple[KnownSetting, str, str], dict[str, dict[str, Runs]]] = {}
    for record in records:
        config, setting = record.config, config_setting(record.config)
        if setting is None or not record.finished or record.start_rounds or is_reference_bound(config.method):
            continue
        values = {key: v for key, v in flat_config(config).items() if key.partition(".")[0] not in MAY_DIFFER}
        key = setting, _protocol(config), json.dumps(values, sort_keys=True)
        variants = groups.setdefault(key, {}).setdefault(config.method, {})
        runs = variants.setdefault(json.dumps(_complete_params(config), sort_keys=True), {})
        summary = record.summary()
        runs[config.seed] = (100 * summary.mean_last.accuracy, 100 * summary.best.accuracy)
    return [
        rerun
        for (setting, protocol, _), methods in groups.items()
        for rerun in _with_baseline(setting, protocol, methods)
    ]


def config_setting(config: Config) -> KnownSetting | None:
    """The setting of a configuration. None for a user's own data, and for a split without a number of clients."""
    split = config.partition
    if config.data not in DATASETS or split.clients is None:
        return None
    return known_setting(config.data, split.rule, split.params, split.clients, config.clients_per_round)


def _protocol(config: Config) -> str:
    augmented = f", {' and '.join(config.augment)}" if config.augment else ""
    length = f"{plural(config.rounds, 'round')} of {plural(config.local_epochs, 'epoch')}"
    return f"{config.model}, {length}, lr {config.lr:g}{augmented}"


def _complete_params(config: Config) -> dict[str, Any]:
    """All parameters of the method, including those that were added to it after the run."""
    try:
        return dict(make_method(config.method, config.method_params).params)
    except UserError:  # a method that this version lacks
        return dict(config.method_params)


def _with_baseline(setting: KnownSetting, protocol: str, methods: Mapping[str, dict[str, Runs]]) -> list[Rerun]:
    """Pair each method's runs with FedAvg's, over the seeds that both have. Methods without such seeds are left out."""
    baseline = _most_frequent(BASELINE, methods.get(BASELINE, {}))
    found = []
    for method, variants in methods.items():
        runs = _most_frequent(method, variants)
        seeds = sorted(runs.keys() & baseline.keys())
        if seeds and method != BASELINE:
            both = (runs, baseline)
            numbers = [tuple(round(by_seed[seed][i], 2) for seed in seeds) for i in (0, 1) for by_seed in both]
            found.append(Rerun(setting, protocol, method, *numbers))
    return found


def _most_frequent(method: str, variants: Mapping[str, Runs]) -> Runs:
    """The runs with the parameters that have the most seeds.

    Among equals, those that change the fewest defaults.
    """
    try:
        defaults: Mapping[str, Any] = make_method(method).params
    except UserError:
        defaults = {}

    def order(variant: str) -> tuple[int, int]:
        params = json.loads(variant)
        changed = sum(json.loads(json.dumps(defaults.get(name))) != value for name, value in params.items())
        return len(variants[variant]), -changed

    return variants[max(variants, key=order)] if variants else {}


# -- the table that ships ----------------------------------------------------------------------------------


@cache
def shipped_reruns() -> tuple[Rerun, ...]:
    """Read the reruns that ship with this version of fedskew."""
    return tuple(_rerun(row) for row in csv.DictReader(SHIPPED.read_text(encoding="utf-8").splitlines()))


def to_csv(reruns: Sequence[Rerun]) -> str:
    """Return the text of `reruns.csv` for these reruns, sorted."""
    lines = io.StringIO()
    writer = csv.writer(lines, lineterminator="\n")
    writer.writerow(COLUMNS)
    writer.writerows(sorted(_row(rerun) for rerun in reruns))
    return lines.getvalue()


def _row(rerun: Rerun) -> list[str]:
    setting = rerun.setting
    params = " ".join(f"{name}={value}" for name, value in setting.params)
    values = (rerun.accuracy, rerun.fedavg, rerun.best, rerun.fedavg_best)
    numbers = [" ".join(f"{value:.2f}" for value in by_seed) for by_seed in values]
    columns = [setting.dataset, setting.rule, params, str(setting.clients), str(setting.per_round or "")]
    return [*columns, rerun.protocol, rerun.method, *numbers]


def _rerun(row: Mapping[str, str]) -> Rerun:
    pairs = (pair.partition("=") for pair in row["params"].split())
    params = tuple((name, parse_yaml(value, "reruns.csv")) for name, _, value in pairs)
    per_round = int(row["per_round"]) if row["per_round"] else None
    setting = KnownSetting(row["dataset"], row["rule"], params, int(row["clients"]), per_round)
    numbers = [tuple(map(float, row[column].split())) for column in COLUMNS[-4:]]
    return Rerun(setting, row["protocol"], row["method"], *numbers)
