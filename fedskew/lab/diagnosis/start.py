"""A configuration to start from: the user's data and split, or a stand-in: synthetic data with the same classes."""

from __future__ import annotations

import csv
from pathlib import Path
from shlex import quote
from typing import Any

import yaml

from fedskew.data.label_counts import LabelCounts
from fedskew.errors import UserError
from fedskew.experiment.config import Config, PartitionConfig, with_values
from fedskew.experiment.storage.files import replace_file, reporting_os_errors

PER_ROUND_IF_LARGE = 10
"""Clients per round in a large federation."""
STAND_IN_SAMPLES = (500, 20_000)
"""The minimum and the maximum number of training samples of a stand-in."""
STAND_IN_ROUNDS = 20
"""The rounds of a run on a stand-in. They are fewer than the default, because synthetic classes are easy to learn."""


def usual_per_round(clients: int) -> int | None:
    """The usual number of clients per round: all (None) in a small federation, and ten in a large one."""
    return None if clients <= 2 * PER_ROUND_IF_LARGE else PER_ROUND_IF_LARGE


def starting_config(method: str, per_round: int | None, given: Config | None, counts_path: Path | None) -> Config:
    """Make a configuration with this method and this number of clients per round. `None` means all clients.

    With `counts_path`, that file of counts replaces the split of `given`.
    """
    config = with_values(given or Config(), {"method": method, "clients_per_round": per_round})
    if counts_path is None:
        return config
    partition = PartitionConfig("counts", None, None, {"path": str(counts_path)})
    return with_values(config, {"partition": partition.to_mapping()})


def stand_in(counts: LabelCounts) -> Config:
    """Make a configuration with synthetic data that have the classes of these counts.

    There are enough samples for the counts, up to a limit that keeps runs fast.
    """
    needed = int(counts.counts.sum(axis=0).max()) * len(counts.classes)
    samples = min(max(needed, STAND_IN_SAMPLES[0]), STAND_IN_SAMPLES[1])
    data = {"data": "synthetic", "data.classes": list(counts.classes), "data.samples": samples}
    return with_values(Config(), {**data, "rounds": STAND_IN_ROUNDS})


def start_path(text: str) -> Path:
    """Return the file to which a configuration is written. Refuse a name that does not end in .yaml or .yml."""
    path = Path(text)
    if path.suffix.lower() not in (".yaml", ".yml"):
        raise UserError(f"cannot write a configuration to {text!r}; expected a file that ends in .yaml")
    return path


def save_start(
    target: Path,
    method: str,
    per_round: int | None,
    counts: LabelCounts,
    given: Config | None,
    counts_path: Path | None,
) -> Config:
    """Write the configuration to start from. Its relative paths begin in the current folder.

    `counts_path` is the user's file of counts. It is None if `given` describes the split. Otherwise, the counts are
    written to a file next to the configuration, unless that is the user's file.
    """
    path = None if counts_path is None else target.with_suffix(".csv")
    start = starting_config(method, per_round, stand_in(counts) if given is None else given, path)
    text = to_yaml(start)
    with reporting_os_errors("write", target):
        target.parent.mkdir(parents=True, exist_ok=True)
    if path is not None and counts_path is not None and path.resolve() != counts_path.resolve():
        rows = [[name, *row] for name, row in zip(counts.clients, counts.counts.tolist(), strict=True)]
        replace_file(path, lambda draft: _write_counts(draft, [["client", *counts.classes], *rows]))
    replace_file(target, lambda draft: _write(draft, f"# fedskew run -c {quote(str(target))}\n{text}"))
    return start


def to_yaml(config: Config) -> str:
    return str(yaml.safe_dump(config.to_mapping(), sort_keys=False, allow_unicode=True))


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8", errors="replace")  # a file name need not be valid UTF-8


def _write_counts(path: Path, rows: list[list[Any]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, lineterminator="\n").writerows(rows)
