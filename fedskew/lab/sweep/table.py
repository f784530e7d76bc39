"""The results of a sweep as a tidy table, with one row per run and one column per value."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedskew.errors import UserError
from fedskew.experiment.config import Config
from fedskew.experiment.storage.files import replace_file
from fedskew.lab.sweep.job import planned_rounds
from fedskew.lab.sweep.records import Record, until
from fedskew.methods import is_reference_bound
from fedskew.metrics.summary import CurveSummary
from fedskew.results.comparison import SCORE_KEYS
from fedskew.results.naming import to_key
from fedskew.results.ranking import RankingMetric

Row = dict[str, Any]
"""A row of the table, by column."""


FINISHED = "finished"
"""The `status` of a run with all the requested rounds. Means over the seeds count only finished runs."""


def make_row(grid_values: Mapping[str, Any], config: Config, record: Record | None, status: str) -> Row:
    """Make the row of a run with this configuration.

    The record may have more rounds than the configuration. The additional rounds count only in `diverged` and
    `seconds`. If an axis has the name of a measured column, such as `rounds` or `split`, the column has the axis's
    values.
    """
    measured = dict.fromkeys(_MEASURED) if record is None else _measured(record, config)
    return {**grid_values, "status": status, **{name: v for name, v in measured.items() if name not in grid_values}}


_MEASURED = (
    "rounds", "accuracy", "best", "best_round", "mean_last", "macro_f1", "worst_class", "diverged", "compute",
    "seconds", "experiment", "split", "device", "balanced_accuracy", *SCORE_KEYS,
)  # fmt: skip
"""The columns that are computed from a run's record."""


def _measured(record: Record, config: Config) -> Row:
    rounds = planned_rounds(config)
    curve = until(record.curve, rounds)
    summary = CurveSummary.from_curve(curve, config.mean_last)
    values = (
        curve[-1][0], summary.last.accuracy, summary.best.accuracy, summary.best.round, summary.mean_last.accuracy,
        until(record.f1_curve, rounds)[-1][1], until(record.worst_curve, rounds)[-1][1], record.content["diverged"],
        record.content["compute"][len(curve) - 1], record.seconds, record.identity, record.content["split"],
        record.content["machine"].get("gpu", record.content["machine"]["cpu"]),
        record.value_after("balanced_accuracy", rounds), *(record.value_after(name, rounds) for name in SCORE_KEYS),
    )  # fmt: skip
    return dict(zip(_MEASURED, values, strict=True))


PointKey = tuple[str, ...]
"""The values of the grid's keys without the seed, as the table shows them. In this module, they identify a point."""


_FEDERATION = ("data", "partition", "clients_per_round")
"""Configuration keys of the data, the split and the participation. Runs that differ in them are not compared."""


def grid_keys(rows: Sequence[Row]) -> list[str]:
    """The keys that were varied, besides the seed. They are a row's first columns, and the seed comes next."""
    names = list(rows[0])
    return names[: names.index("seed")]


def by_point(rows: Sequence[Row]) -> dict[PointKey, list[Row]]:
    """Group the runs by point of the grid. Each group has one run per seed."""
    keys = grid_keys(rows)
    points: dict[PointKey, list[Row]] = {}
    for row in rows:
        points.setdefault(_point(row, keys), []).append(row)
    return points


def _point(row: Row, keys: Sequence[str]) -> PointKey:
    return tuple(str(row[key]) for key in keys)


def measured_name(metric: RankingMetric) -> str:
    """The table's column for a ranking metric."""
    return metric.name.replace("-", "_")


def best_points(rows: Sequence[Row], configs: Sequence[Config], metric: RankingMetric) -> set[PointKey]:
    """Return the best point for each federation and participation, by the mean over the seeds.

    `configs` has the configuration of each row. Reference bounds and points with unfinished runs do not compete. If
    fewer than two points compete, none is best.
    """
    keys = grid_keys(rows)
    config_of = {_point(row, keys): config for row, config in zip(rows, configs, strict=True)}
    means: dict[str, dict[PointKey, float]] = {}
    for point, runs in by_point(rows).items():
        config = config_of[point]
        if not is_reference_bound(config.method) and all(run["status"] == FINISHED for run in runs):
            merit = metric.sign * _mean(point, runs, metric)
            means.setdefault(_federation(config), {})[point] = merit
    return {max(found, key=lambda point: found[point]) for found in means.values() if len(found) > 1}


def _federation(config: Config) -> str:
    values = config.to_mapping()
    return to_key([values[key] for key in _FEDERATION])


def _mean(point: PointKey, rows: Sequence[Row], metric: RankingMetric) -> float:
    values = [row[measured_name(metric)] for row in rows]
    if None in values:
        raise UserError(
            f"{', '.join(point)} has no {metric.label}: {_why_missing(metric)}; rank by {_always_recorded(metric)}, "
            "or repeat the sweep with another --out"
        )
    return math.fsum(values) / len(values)


def _why_missing(metric: RankingMetric) -> str:
    if _is_recorded_each_round(metric):
        return (
            "the outputs of a run's model are not finite, the test samples do not define this metric, or a run is from "
            "an earlier version of fedskew"
        )
    return (
        "this metric is computed only for the global model after the last round; a run was trained for more rounds "
        "than requested, has no global model or no finite probabilities, had too little memory, or is from an earlier "
        "version of fedskew"
    )


def _always_recorded(metric: RankingMetric) -> str:
    """The metric to rank by instead."""
    return "accuracy" if _is_recorded_each_round(metric) else "macro-f1"


def _is_recorded_each_round(metric: RankingMetric) -> bool:
    return metric.measure is not None


def write_csv(rows: Sequence[Row], path: Path) -> None:
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, _columns(rows), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    replace_file(path, lambda draft: _write(draft, text.getvalue()))


def write_parquet(rows: Sequence[Row], path: Path) -> bool:
    """Write a Parquet file. Return False if pyarrow is not installed."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        return False
    columns = {name: _one_type([row.get(name) for row in rows]) for name in _columns(rows)}
    replace_file(path, lambda draft: pyarrow.parquet.write_table(pyarrow.table(columns), draft))
    return True


def _columns(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name in row))


def _one_type(values: list[Any]) -> list[Any]:
    """Turn mixed values into text, because a Parquet column has one type."""
    kinds = {float if isinstance(v, float | int) and not isinstance(v, bool) else type(v) for v in values}
    return values if len(kinds - {type(None)}) <= 1 else [None if v is None else str(v) for v in values]


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
