"""Settings in which methods were compared, and the accuracy of each method there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import lru_cache
from typing import Any

import numpy as np

from fedskew.data import PARTITIONS, make_partition
from fedskew.data.catalogue import DATASETS
from fedskew.experiment.config.keys import SKEW_KEYS
from fedskew.lab.diagnosis.skew import Floats, Skew

SEEDS = (0, 1)
"""Seeds of the splits over which a setting's measures are averaged."""

LABELS_TO_SPLIT = 50_000
"""To measure the skew of a known setting, about this many labels are split, equally many of each class."""


@dataclass(frozen=True)
class Score:
    """A method's accuracy in a setting, in percent."""

    method: str
    """The method's name in fedskew."""
    accuracy: float
    baseline: float
    """FedAvg's accuracy from the same source."""
    source: str
    """The tables of papers, separated by commas, or the protocol of a rerun."""
    seeds: int | None = None
    """Number of seeds of a rerun. None for papers."""
    best_gain: float | None = None
    """A rerun's gain in the accuracy of the best round, because many papers print that accuracy. The rerun's `accuracy`
    is the mean of the last rounds."""
    prints_best: bool = False
    """Whether the paper prints the accuracy of the best round."""

    @property
    def gain(self) -> float:
        return self.accuracy - self.baseline

    @property
    def is_rerun(self) -> bool:
        return self.seeds is not None

    @property
    def sources(self) -> list[str]:
        return [self.source] if self.is_rerun else self.source.split(", ")


@dataclass(frozen=True)
class KnownSetting:
    """A split of a dataset over clients, with the scores of methods."""

    dataset: str
    rule: str
    """The name of the partition rule."""
    params: tuple[tuple[str, Any], ...]
    """The names and values of the rule's parameters."""
    clients: int
    per_round: int | None
    """Clients per round. None means all."""
    scores: list[Score] = field(default_factory=list, compare=False, hash=False)

    @property
    def label(self) -> str:
        """The setting in words. Parameters that set how strong the skew is are shown without their name."""
        strength = " ".join(f"{value}" if name in SKEW_KEYS else f"{name}={value}" for name, value in self.params)
        per_round = f", {self.per_round} per round" if self.per_round and self.per_round < self.clients else ""
        return f"{self.dataset}, {self.rule}{' ' + strength if strength else ''}, {self.clients} clients{per_round}"

    @property
    def classes(self) -> int:
        return DATASETS[self.dataset].classes

    @property
    def participation(self) -> float:
        """The share of clients per round."""
        return min(self.per_round or self.clients, self.clients) / self.clients

    @property
    def was_rerun(self) -> bool:
        return any(score.is_rerun for score in self.scores)

    def rerun_gain(self, printed: Score) -> float | None:
        """The mean gain of a printed score's method in its reruns in this setting, by the metric that the paper prints.
        None without reruns."""
        reruns = [score for score in self.scores if score.is_rerun and score.method == printed.method]
        gains = [score.best_gain if printed.prints_best else score.gain for score in reruns]
        known = [gain for gain in gains if gain is not None]
        return sum(known) / len(known) if known else None

    def coordinates(self) -> Floats:
        """The numbers by which settings are compared (see `Skew.coordinates`), as means over `SEEDS`."""
        return _mean_coordinates(self.rule, self.params, self.clients, self.classes)


@lru_cache(maxsize=256)
def _mean_coordinates(rule: str, params: tuple[tuple[str, Any], ...], clients: int, classes: int) -> Floats:
    labels = np.repeat(np.arange(classes), LABELS_TO_SPLIT // classes)
    partition = make_partition(rule, clients=clients, **dict(params))
    by_seed = []
    for seed in SEEDS:
        parts = partition.split(labels, classes, seed)
        by_seed.append(Skew(np.array([np.bincount(labels[part], minlength=classes) for part in parts])).coordinates())
    return np.asarray(np.mean(by_seed, axis=0), np.float64)


def known_setting(
    dataset: str, rule: str, params: Mapping[str, Any], clients: int, per_round: int | None
) -> KnownSetting:
    """Make a setting without scores.

    Parameters that have their default value are left out, except `SKEW_KEYS`. A paper and its rerun then give equal
    settings, even if only one of them states a default.
    """
    defaults = {spec.name: spec.default for spec in fields(PARTITIONS[rule])} if rule in PARTITIONS else {}
    kept = {name: v for name, v in params.items() if name in SKEW_KEYS or name not in defaults or defaults[name] != v}
    if per_round is not None and per_round >= clients:
        per_round = None
    return KnownSetting(dataset, rule, tuple(sorted(kept.items())), clients, per_round)
