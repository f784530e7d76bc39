"""A configuration to start from: the user's own split where there are data, else a stand-in of the same shape."""

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
    """All clients of a small federation take part, ten of a large one."""
    return None if clients <= 2 * MOST_PER_ROUND else MOST_PER_ROUND


def starting_config(method: str, per_round: int | None, given: Config | None, counts_path: Path | None) -> Config:
    """With so many clients a round, or all; everything else is a default."""
    config = with_values(given or Config(), {"method": method, "clients_per_round": per_round})
    if counts_path is None:
        return config
    partition = PartitionConfig("counts", None, None, {"path": str(counts_path)})
    return with_values(config, {"partition": partition.to_mapping()})


def stand_in(classes: int) -> str | None:
    """A dataset with so many classes, on which to rehearse."""
    return next((name for name in PREFERRED if DATASETS[name].classes == classes), None)


def scaled(counts: IntArray, dataset: str) -> IntArray:
    """The counts as far as the dataset has samples, all in one proportion; who has a class keeps at least one."""
    have = SAMPLES[dataset] // DATASETS[dataset].classes * 0.9  # classes are not quite equal
    factor = min(1.0, have / counts.sum(axis=0).max())
    return np.where(counts > 0, np.maximum(1, np.floor(counts * factor)), 0).astype(np.int64)


def save_start(
    target: Path, method: str, per_round: int | None, counts: LabelCounts, given: Config | None, split: bool
) -> Config:
    """Write the configuration; beside it the counts, unless they are those of a `split` that `given` describes."""
    if target.suffix.lower() not in (".yaml", ".yml"):
        raise UserError(f"cannot write a configuration to {str(target)!r}; expected a file that ends in .yaml")
    path = None if split else target.with_suffix(".csv")
    header, table, config = ["client", *counts.classes], counts.counts, given
    if given is None:
        dataset = stand_in(len(counts.classes))
        if dataset is None:
            raise UserError(
                f"no dataset at hand has {len(counts.classes)} classes to rehearse on; give your own with --data PATH"
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
