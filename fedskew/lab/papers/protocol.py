"""A paper's protocol (settings, methods with hyper-parameters, tables, variants) and its printed numbers."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from functools import cache
from importlib.resources import files
from typing import Any

from fedskew.errors import UserError, unknown
from fedskew.experiment.config.values import parse_yaml

PUBLISHED = files("fedskew.lab.papers") / "published"
"""The folder of printed numbers, one CSV file per paper, and of printed label counts."""


@dataclass(frozen=True)
class PrintedNumber:
    """A number as printed in the paper. `mean` is None if the paper prints no legible number."""

    table: str
    dataset: str
    split: str
    condition: str
    method: str
    metric: str
    mean: float | None
    std: float | None
    note: str

    @property
    def hyperparameter(self) -> str | None:
        """The hyper-parameter's name, if this is a setting and not a result."""
        kind, _, name = self.metric.partition(":")
        return name if kind == "hyperparameter" else None


@cache
def numbers(paper: str) -> tuple[PrintedNumber, ...]:
    """Read all printed numbers of a paper, in the order of its tables. The protocol `fedskew` has none."""
    path = PUBLISHED / f"{paper}.csv"
    if not path.is_file():
        return ()
    return tuple(_number(row) for row in csv.DictReader(path.read_text(encoding="utf-8").splitlines()))


def _number(row: dict[str, Any]) -> PrintedNumber:
    mean, std = row.pop("mean"), row.pop("std")
    return PrintedNumber(**row, mean=float(mean) if mean else None, std=float(std) if std else None)


PROTOCOLS = files("fedskew.lab.papers") / "protocols"
"""The folder of protocols, one YAML file each."""

Values = dict[str, Any]
"""Configuration values by dotted key."""

_STRENGTH_KEYS = {
    "dirichlet": "beta",
    "domain-dirichlet": "beta",
    "shards": "shards",
    "quantity": "labels_per_client",
    "labels": "labels_per_client",
    "fedgr-label": "labels_per_client",
    "fedgr-double": "labels_per_client",
}
"""By partition rule, the parameter that `0.1` sets in a split such as `dirichlet:0.1`."""


@dataclass(frozen=True)
class TableSpec:
    """A table or figure of a paper."""

    name: str
    title: str
    settings: Mapping[str, Any]
    also: tuple[str, ...]
    """Methods to run that the paper's table does not have."""
    rounds: int | None
    """The largest number of rounds, if the table compares several. One run with the most rounds serves all of them."""
    partition: str | None
    """A file of label counts that replaces the split."""
    update: Mapping[str, Any] | None
    """For a table that shows one client's update of a trained model: the client (`client`), and the method that trained
    the model before that update (`of`). None for other tables."""
    cells: tuple[Mapping[str, Any], ...]
    """Blocks of cells without published numbers. Each block is crossed with `methods` and `metrics`."""
    methods: tuple[str, ...]
    metrics: tuple[str, ...]


@dataclass(frozen=True)
class Protocol:
    """The protocol of one paper, or of fedskew's own experiments."""

    name: str
    citation: str
    extends: str | None
    """The protocol that this one extends."""
    reports: str
    """A phrase that says which accuracy the paper reports."""
    settings: Mapping[str, Any]
    datasets: Mapping[str, Mapping[str, Any]]
    """Settings of each dataset. They override `settings`."""
    splits: Mapping[str, Mapping[str, Any]]
    """Additional settings of splits, by `dataset/split` pattern."""
    methods: Mapping[str, Mapping[str, Any]]
    """Settings by the paper's name of a method. `at` has those for some datasets and splits only."""
    conditions: Mapping[str, Any]
    """By a condition's name: the configuration key that it sets, or the settings for each of its values."""
    variants: Mapping[str, Mapping[str, Any]]
    """Named deviations from the protocol: the settings that change, and the reason (`why`)."""
    tables: Mapping[str, TableSpec]
    misprints: tuple[str, ...]
    """Known flaws of the paper and its program, and illegible numbers."""

    def values(
        self, table: str, dataset: str, split: str, condition: str, method: str, variant: str | None = None
    ) -> Values:
        """The configuration of one cell, by dotted key. Later sources override earlier ones."""
        spec = self.tables[table]
        changes = {} if variant is None else self.variant(variant)
        values: Values = {
            "data": dataset,
            **self.settings,
            **self.datasets[dataset],
            **_split_values(split),
            **_matching(self.splits, f"{dataset}/{split}"),
            **changes.get("settings", {}),
            **changes.get("datasets", {}).get(dataset, {}),
            **self._method_values(method, f"{dataset}/{split}"),
            **changes.get("methods", {}).get(method, {}),
            **spec.settings,
            **self._condition_values(condition, changes),
        }
        if spec.partition is not None:
            values = {key: value for key, value in values.items() if not key.startswith("partition")}
            values["partition"] = {"rule": "counts", "path": str(PUBLISHED / spec.partition)}
        if spec.rounds is not None:
            values["rounds"] = spec.rounds
        return values

    def variant(self, name: str) -> Mapping[str, Any]:
        if name not in self.variants:
            raise unknown(f"variant of {self.name}", name, self.variants)
        return self.variants[name]

    def _method_values(self, method: str, dataset_and_split: str) -> Values:
        entry = dict(self.methods[method])
        special = entry.pop("at", {})
        return entry | _matching(special, dataset_and_split)

    def _condition_values(self, condition: str, variant_changes: Mapping[str, Any]) -> Values:
        values: Values = {}
        for name, value in conditions(condition).items():
            meaning = self.conditions.get(name)
            if isinstance(meaning, str):
                values[meaning] = _condition_value(value, condition)
            elif meaning is not None:
                values |= meaning[value]
            values |= variant_changes.get("conditions", {}).get(f"{name}={value}", {})
        return values


def _matching(patterns: Mapping[str, Mapping[str, Any]], dataset_and_split: str) -> Values:
    """Combine the values of all patterns, such as `cifar10/*`, that match a text such as `cifar10/shards:2`."""
    values: Values = {}
    for pattern, additional in patterns.items():
        if fnmatchcase(dataset_and_split, pattern):
            values |= additional
    return values


@cache
def _condition_value(value: str, condition: str) -> Any:
    return parse_yaml(value, f"condition {condition}")


def conditions(text: str) -> dict[str, str]:
    """Parse conditions such as `lambda=0.1;rounds=40`."""
    pairs = (part.partition("=") for part in text.split(";") if part)
    return {name: value for name, _, value in pairs}


@cache
def _split_values(split: str) -> Mapping[str, Any]:
    rule, _, strength = split.partition(":")
    if not strength:
        return {"partition": rule}
    if rule not in _STRENGTH_KEYS:
        raise UserError(f"unknown split {split!r}; expected one such as dirichlet:0.1 or shards:2")
    return {"partition": rule, f"partition.{_STRENGTH_KEYS[rule]}": parse_yaml(strength, f"split {split}")}


@cache
def read_protocol(name: str) -> Protocol:
    """Read a protocol by its name."""
    if name not in papers():
        raise unknown("paper", name, papers())
    content = _content(name)
    _refuse_unknown(content, _KEYS, name)
    for table, spec in content["tables"].items():
        _refuse_unknown(spec, _TABLE_KEYS, f"{name}/{table}")
    listed = content["datasets"]
    return Protocol(
        name=name,
        citation=content["citation"],
        extends=content.get("extends"),
        reports=content["reports"],
        settings=content["settings"],
        datasets={dataset: {} for dataset in listed} if isinstance(listed, list) else listed,
        splits=content.get("splits", {}),
        methods=content["methods"],
        conditions=content["conditions"],
        variants=content["variants"],
        tables={table: _table(table, spec) for table, spec in content["tables"].items()},
        misprints=tuple(content["misprints"]),
    )


def papers() -> tuple[str, ...]:
    """The names of all protocols: one per paper, and `fedskew`."""
    names = (path.name for path in PROTOCOLS.iterdir())
    return tuple(sorted(name.removesuffix(".yaml") for name in names if name.endswith(".yaml")))


def _content(name: str) -> dict[str, Any]:
    """Read a protocol. A protocol that extends another one inherits all methods, and the keys that it does not set."""
    content: dict[str, Any] = parse_yaml((PROTOCOLS / f"{name}.yaml").read_text(encoding="utf-8"), f"{name}.yaml")
    if "extends" not in content:
        return content
    base = _content(content["extends"])
    return base | content | {"methods": base["methods"] | content.get("methods", {})}


_KEYS = tuple(f.name for f in fields(Protocol))
_TABLE_KEYS = tuple(f.name for f in fields(TableSpec))


def _refuse_unknown(content: Mapping[str, Any], known: Iterable[str], where: str) -> None:
    for key in content:
        if key not in known:
            raise unknown(f"key of the protocol {where}", str(key), known)


def _table(name: str, spec: Mapping[str, Any]) -> TableSpec:
    return TableSpec(
        name=name,
        title=spec["title"],
        settings=spec.get("settings", {}),
        also=tuple(spec.get("also", ())),
        rounds=spec.get("rounds"),
        partition=spec.get("partition"),
        update=spec.get("update"),
        cells=tuple(spec.get("cells", ())),
        methods=tuple(spec.get("methods", ())),
        metrics=tuple(spec.get("metrics", ())),
    )
