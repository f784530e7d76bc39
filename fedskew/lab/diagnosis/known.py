"""Settings in which methods were compared: those of the papers and of the reruns in `results/`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from fedskew.data import PARTITIONS, make_partition
from fedskew.data.catalogue import DATASETS
from fedskew.errors import UserError
from fedskew.experiment.config import Config
from fedskew.lab.diagnosis.skew import Floats, Skew, distance
from fedskew.lab.papers.cells import Cell, missing_method, table_cells
from fedskew.lab.papers.protocol import papers, protocol
from fedskew.lab.sweep.records import read_folder
from fedskew.metrics.summary import mean_std
from fedskew.results.naming import flat

ACCURACIES = ("best", "last-50 accuracy")
"""Metrics that measure the overall accuracy of a model."""
NEAR = 0.1
"""Settings up to this distance count as similar: their measures differ by ten points on average."""
SIMILAR_PARTICIPATION = 2.0
"""Shares of clients per round that differ by up to this factor are similar. A method that helps with few clients per
round may harm with all of them (RESULTS.md, the map), so other settings do not count."""
SEEDS = (0, 1)
"""Seeds of the splits over which a setting's measures are averaged."""
SAMPLES = {"mnist": 60_000, "fashion-mnist": 60_000, "cifar10": 50_000, "cifar100": 50_000, "tiny-imagenet": 100_000,
            "cinic10": 90_000, "ag_news": 120_000, "digits": 1_437, "20newsgroups": 11_314}  # fmt: skip
"""Training samples per dataset."""
STRENGTHS = ("beta", "shards", "labels_per_client")
DRAWN = 50_000
"""Number of labels, uniform over classes, on which a known split is drawn to measure it."""


@dataclass(frozen=True)
class Score:
    """A method's accuracy in a setting, in percent."""

    method: str
    """fedskew's name of it."""
    accuracy: float
    baseline: float
    """FedAvg's accuracy in the same source."""
    source: str
    seeds: int | None = None
    """Number of seeds of a rerun; None for papers."""

    @property
    def gain(self) -> float:
        return self.accuracy - self.baseline


@dataclass(frozen=True)
class KnownSetting:
    """A split of a dataset over clients, with the scores of methods."""

    dataset: str
    rule: str
    params: tuple[tuple[str, Any], ...]
    clients: int
    per_round: int | None
    scores: list[Score] = field(default_factory=list, compare=False, hash=False)

    @property
    def label(self) -> str:
        strength = " ".join(f"{value}" if name in STRENGTHS else f"{name}={value}" for name, value in self.params)
        part = f", {self.per_round} per round" if self.per_round and self.per_round < self.clients else ""
        return f"{self.dataset}, {self.rule}{' ' + strength if strength else ''}, {self.clients} clients{part}"

    @property
    def classes(self) -> int:
        return DATASETS[self.dataset].classes

    @property
    def participation(self) -> float:
        """The share of clients per round."""
        return min(self.per_round or self.clients, self.clients) / self.clients

    def place(self) -> Floats:
        return _place(self.rule, self.params, self.clients, self.classes)


@lru_cache(maxsize=256)
def _place(rule: str, params: tuple[tuple[str, Any], ...], clients: int, classes: int) -> Floats:
    labels = np.repeat(np.arange(classes), DRAWN // classes)
    split = make_partition(rule, clients=clients, **dict(params))
    places = []
    for seed in SEEDS:
        parts = split.split(labels, classes, seed)
        places.append(Skew(np.array([np.bincount(labels[part], minlength=classes) for part in parts])).place())
    return np.asarray(np.mean(places, axis=0), np.float64)


def known_settings(results: str | Path | None = None) -> list[KnownSetting]:
    """All settings in the papers and in a folder of results."""
    settings: dict[KnownSetting, KnownSetting] = {}
    for setting, score in (*_printed(), *_rerun(results)):
        _add(settings.setdefault(setting, setting).scores, score)
    return list(settings.values())


def _add(scores: list[Score], score: Score) -> None:
    """Add a score; a number printed in several tables counts once."""
    for i, known in enumerate(scores):
        if replace(known, source=score.source) == score:
            sources = dict.fromkeys((*known.source.split(", "), score.source))
            scores[i] = replace(known, source=", ".join(sources)) if score.seeds is None else known
            return
    scores.append(score)


def _printed() -> Iterator[tuple[KnownSetting, Score]]:
    for paper in papers():
        columns: dict[tuple[str, tuple[str, str, str, str]], list[Cell]] = {}
        for table in protocol(paper).tables:
            for cell in table_cells(paper, table):
                comparable = cell.metric in ACCURACIES and not cell.condition
                if comparable and cell.dataset in SAMPLES and protocol(paper).tables[table].partition is None:
                    columns.setdefault((table, cell.column), []).append(cell)
        for (table, _), cells in columns.items():
            yield from _column(paper, table, cells)


def _column(paper: str, table: str, cells: Sequence[Cell]) -> Iterator[tuple[KnownSetting, Score]]:
    means = {cell.method: cell.printed.mean for cell in cells if cell.printed and cell.printed.mean is not None}
    baseline = means.get("FedAvg")
    if baseline is None:
        return
    for cell in cells:
        if cell.method not in means or missing_method(cell):
            continue
        values = protocol(paper).values(table, *cell.place, cell.method)
        setting = _setting(cell.dataset, values)
        if setting is not None:
            name = str(values["method"])
            yield setting, Score(name, means[cell.method], baseline, f"{paper}/{table}")


def _setting(dataset: str, values: Mapping[str, Any]) -> KnownSetting | None:
    rule = values["partition"]
    if not isinstance(rule, str) or "partition.clients" not in values:
        return None
    params = {key.removeprefix("partition."): v for key, v in values.items() if key.startswith("partition.")}
    clients = int(params.pop("clients"))
    params.pop("seed", None)
    per_round = values.get("clients_per_round")
    return KnownSetting(dataset, rule, _distinctive(rule, params), clients, per_round)


def _distinctive(rule: str, params: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    """The strength of a split and its non-default parameters, so that a paper's setting equals its rerun."""
    usual = {spec.name: spec.default for spec in fields(PARTITIONS[rule])} if rule in PARTITIONS else {}
    kept = {name: v for name, v in params.items() if name in STRENGTHS or name not in usual or usual[name] != v}
    return tuple(sorted(kept.items()))


Runs = dict[int, float]
"""Final accuracy in percent, by seed."""


def _rerun(results: str | Path | None) -> Iterator[tuple[KnownSetting, Score]]:
    """Scores from runs that differ only in method and seed, over the seeds that a method shares with FedAvg."""
    groups: dict[tuple[KnownSetting, str], dict[str, dict[str, Runs]]] = {}
    about: dict[tuple[KnownSetting, str], str] = {}
    for record in read_folder(results) if results is not None else ():
        config = record.config
        setting = _config_setting(config)
        if setting is None or not record.finished:
            continue
        values = flat(config)
        alike = setting, json.dumps({k: v for k, v in values.items() if not k.startswith("method.")}, sort_keys=True)
        about[alike] = f"rerun: {config.model} for {config.rounds} rounds"
        variant = json.dumps(config.method_params, sort_keys=True)
        variants = groups.setdefault(alike, {}).setdefault(config.method, {})
        variants.setdefault(variant, {})[config.seed] = 100 * record.curve[-1][1]
    for alike, by_method in groups.items():
        baseline = _usual(by_method.get("fedavg", {}))
        for method, variants in by_method.items():
            runs = _usual(variants)
            seeds = sorted(runs.keys() & baseline.keys())
            if seeds:
                mean, base = (mean_std([of[seed] for seed in seeds]).mean for of in (runs, baseline))
                yield alike[0], Score(method, mean, base, about[alike], len(seeds))


def _config_setting(config: Config) -> KnownSetting | None:
    split = config.partition
    if config.data not in SAMPLES or split.clients is None:
        return None
    params = _distinctive(split.rule, split.params)
    return KnownSetting(config.data, split.rule, params, split.clients, config.clients_per_round)


def _usual(variants: Mapping[str, Runs]) -> Runs:
    """The runs of a method's most frequent variant; ablations have several."""
    return max(variants.values(), key=len, default={})


@dataclass(frozen=True)
class Neighbour:
    """A known setting and its distance."""

    setting: KnownSetting
    distance: float
    """Rounded to two digits; the splits of one setting differ by more."""

    @property
    def near(self) -> bool:
        return self.distance <= NEAR


def nearest(
    skew: Skew, settings: Iterable[KnownSetting], participation: float | None = None, most: int = 5
) -> list[Neighbour]:
    """The most similar settings by skew; ties go to similar numbers of clients and classes.

    With `participation`, only settings with a similar share of clients per round count.
    """
    place = skew.place()
    found = []
    for setting in settings:
        if participation is not None and not _is_similar(setting.participation, participation):
            continue
        try:
            found.append(Neighbour(setting, round(distance(place, setting.place()), 2)))
        except UserError:  # the split cannot be drawn
            continue

    def order(one: Neighbour) -> tuple[float, float]:
        unlike = abs(np.log10(one.setting.clients / skew.clients)) + abs(np.log10(one.setting.classes / skew.classes))
        return one.distance, float(unlike)

    return sorted(found, key=order)[:most]


def _is_similar(one: float, other: float) -> bool:
    return max(one, other) <= SIMILAR_PARTICIPATION * min(one, other)
