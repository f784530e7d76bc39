"""A configuration to start from: the user's data and split, or a stand-in dataset with the same label counts."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from fedskew.data.catalogue import DATASETS
from fedskew.data.partitions.rule import IntArray
from fedskew.errors import UserError
from fedskew.experiment.config import Config, PartitionConfig, with_values
from fedskew.experiment.storage.atomic import replace_file, reporting_os_errors
from fedskew.lab.diagnosis.known import SAMPLES
from fedskew.lab.diagnosis.label_counts import LabelCounts

MOST_PER_ROUND = 10
PREFERRED = ("digits", "fashion-mnist", "cifar10", "ag_news", "20newsgroups", "cifar100", "tiny-imagenet")


def usual_per_round(clients: int) -> int | None:
    """Clients per round: all (None) in a small federation, ten in a large one."""
    return None if clients <= 2 * MOST_PER_ROUND else MOST_PER_ROUND


def starting_config(method: str, per_round: int | None, given: Config | None, counts_path: Path | None) -> Config:
    """The configuration with this method, clients per round (None: all), and the label counts in a file."""
    config = with_values(given or Config(), {"method": method, "clients_per_round": per_round})
    if counts_path is None:
        return config
    partition = PartitionConfig("counts", None, None, {"path": str(counts_path)})
    return with_values(config, {"partition": partition.to_mapping()})


def stand_in(classes: int) -> str | None:
    """A dataset with that many classes, to rehearse on."""
    return next((name for name in PREFERRED if DATASETS[name].classes == classes), None)


def scaled(counts: IntArray, dataset: str) -> IntArray:
    """Scale the counts down to the dataset's size; every nonzero count stays at least 1."""
    have = SAMPLES[dataset] // DATASETS[dataset].classes * 0.9  # classes differ a little in size
    factor = min(1.0, have / counts.sum(axis=0).max())
    return np.where(counts > 0, np.maximum(1, np.floor(counts * factor)), 0).astype(np.int64)


def save_start(
    target: Path, method: str, per_round: int | None, counts: LabelCounts, given: Config | None, split: bool
) -> Config:
    """Write the configuration and, unless `given` describes the `split`, the counts beside it."""
    if target.suffix.lower() not in (".yaml", ".yml"):
        raise UserError(f"cannot write a configuration to {str(target)!r}; expected a file that ends in .yaml")
    path = None if split else target.with_suffix(".csv")
    header, table, config = ["client", *counts.classes], counts.counts, given
    if given is None:
        dataset = stand_in(len(counts.classes))
        if dataset is None:
            raise UserError(
                f"no built-in dataset has {len(counts.classes)} classes to rehearse on; add your own with --data PATH"
            )
        header, table = [], scaled(counts.counts, dataset)
        config = with_values(Config(), {"data": dataset})
    start = starting_config(method, per_round, config, path)
    text = to_yaml(start)
    with reporting_os_errors("write", target):
        target.parent.mkdir(parents=True, exist_ok=True)
    if path is not None:
        rows = [[name, *row] for name, row in zip(counts.clients, table.tolist(), strict=True)]
        replace_file(path, lambda draft: _write_counts(draft, [header, *rows] if header else table.tolist()))
    replace_file(target, lambda draft: _write(draft, f"# fedskew run -c {target.name}\n{text}"))
    return start


def to_yaml(config: Config) -> str:
    return str(yaml.safe_dump(config.to_mapping(), sort_keys=False, allow_unicode=True))


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def _write_counts(path: Path, rows: list[list[Any]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, lineterminator="\n").writerows(rows)
