"""The sections of RESULTS.md on our own sweeps: a table of each grid in results/grids that has records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fedskew.errors import plural
from fedskew.lab.sweep.grid import Point, read_grid
from fedskew.lab.sweep.job import planned_rounds
from fedskew.lab.sweep.records import Records, RecordsFile, until
from fedskew.metrics.summary import MeanStd, best, mean_of_last, population_mean_std

GRIDS_FOLDER = "grids"
_MAX_NAMED = 6
"""A table names at most this many combinations that were not run."""


@dataclass(frozen=True)
class Sweep:
    """A grid with the records of its runs."""

    path: Path
    points: Sequence[Point]
    records: Records

    @property
    def keys(self) -> list[str]:
        """The axes of the grid. The seed is not an axis."""
        return [key for key in self.points[0].grid_values if key != "seed"]

    @property
    def methods(self) -> set[str]:
        """The methods of the grid."""
        return {str(point.grid_values["method"]) for point in self.points if "method" in point.grid_values}

    @property
    def last_rounds(self) -> int:
        """The number of last rounds over which accuracies are averaged, because single rounds vary."""
        return self.points[0].config.mean_last

    def combinations(self) -> dict[tuple[str, ...], list[Point]]:
        """The points by their values on the axes. Points that differ only in the seed are together."""
        groups: dict[tuple[str, ...], list[Point]] = {}
        for point in self.points:
            groups.setdefault(tuple(str(point.grid_values[key]) for key in self.keys), []).append(point)
        return groups

    def rows(self) -> dict[tuple[str, ...], SweepRow]:
        """The results of the combinations that were run, by their values on the axes."""
        found = {values: _row(group, self.records) for values, group in self.combinations().items()}
        return {values: row for values, row in found.items() if row is not None}


def read_sweeps(folder: str | Path) -> list[Sweep]:
    """Read the grids that have records."""
    found = []
    for path in sorted((Path(folder) / GRIDS_FOLDER).glob("*.yaml"), key=lambda path: path.stem):
        records = Records(RecordsFile(path.with_suffix(".jsonl")).read())
        if len(records):
            found.append(Sweep(path, _with_recorded_weights(read_grid(path, {}).points(), records), records))
    return found


def _with_recorded_weights(points: Sequence[Point], records: Records) -> list[Point]:
    """Return the points with the digests of their initial weights, taken from the records.

    A point needs its digest to find its record. The digests cannot be computed here, because the files of weights are
    not in the repository.
    """
    digests = {record.config.init: record.config.init_sha256 for record in records}
    return [
        replace(point, config=replace(point.config, init_sha256=digests.get(point.config.init))) for point in points
    ]


def sweep_section(sweep: Sweep, heading: str) -> list[str]:
    """Describe a sweep, and show its table."""
    link = Path("results") / GRIDS_FOLDER / sweep.path.name
    about = f"{_about(sweep.path)} [The grid]({link}).\n"
    return [f"{heading}\n", about, device_line(sweep.records), _table(sweep)]


def _about(path: Path) -> str:
    """Return the comments of the grid file, without the command."""
    lines = path.read_text(encoding="utf-8").splitlines()
    comments = [line.lstrip("# ") for line in lines if line.startswith("#") and "fedskew sweep" not in line]
    return " ".join(comments) or "Every combination of the grid's values."


def device_line(records: Records) -> str:
    """Say how many runs there are, and on which machines they ran."""
    where = sorted(
        {f"{r.content['machine'].get('gpu') or r.content['machine']['cpu']}, {r.config.precision}" for r in records}
    )
    return f"{plural(len(records), 'run')} on {' and '.join(where)}.\n"


def _table(sweep: Sweep) -> str:
    keys, rows = sweep.keys, sweep.rows()
    measure = f"accuracy of the last {sweep.last_rounds} rounds (%)"
    if len(keys) > 2 and "method" in keys:
        caption = [f"Mean {measure}. The best method of a row is bold.\n"]
        cells = _one_row_per_setting(keys, rows)
    else:
        caption, cells = [], _ranking(keys, rows, measure)
    return "\n".join([*caption, *(f"| {' | '.join(line)} |" for line in cells), *_not_run(sweep, rows)]) + "\n"


def _not_run(sweep: Sweep, rows: Mapping[tuple[str, ...], SweepRow]) -> list[str]:
    """Name the combinations that were not run, or count them if they are many."""
    combinations = sweep.combinations()
    missing = [" ".join(values) for values in combinations if values not in rows]
    if len(missing) > _MAX_NAMED:
        return [f"\nNot run: {len(missing)} of {len(combinations)} combinations."]
    return [f"\nNot run: {', '.join(missing)}."] if missing else []


def _ranking(keys: list[str], rows: Mapping[tuple[str, ...], SweepRow], measure: str) -> list[list[str]]:
    """List one combination per row, the best first."""
    ranked = sorted(rows, key=lambda values: -rows[values].mean_last.mean)
    headings = [
        *keys,
        measure,
        "best",
        "worst class",
        "compute (FedAvg: 1)",
        "seeds",
    ]
    return [headings, ["---"] * len(headings), *([*values, *rows[values].cells()] for values in ranked)]


def _one_row_per_setting(keys: list[str], rows: Mapping[tuple[str, ...], SweepRow]) -> list[list[str]]:
    """List the accuracies with one column per method. The best of a row is bold."""
    at = keys.index("method")
    methods = list(dict.fromkeys(values[at] for values in rows))
    by_setting: dict[tuple[str, ...], dict[str, SweepRow]] = {}
    for values, row in rows.items():
        by_setting.setdefault(values[:at] + values[at + 1 :], {})[values[at]] = row
    headings = [*(key for key in keys if key != "method"), *methods, "seeds"]
    cells = [headings, ["---"] * len(headings)]
    for setting, found in by_setting.items():
        best = max(found, key=lambda method: found[method].mean_last.mean)
        shown = {method: row.cells()[0] for method, row in found.items()}
        shown[best] = f"**{shown[best]}**"
        seeds = [row.seeds for row in found.values()]
        fewest_to_most = "–".join(map(str, sorted({min(seeds), max(seeds)})))
        cells.append([*setting, *(shown.get(method, "") for method in methods), fewest_to_most])
    return cells


@dataclass(frozen=True)
class SweepRow:
    """The results of one combination. Accuracies are means over the seeds."""

    mean_last: MeanStd
    """Accuracy as a mean over the last rounds, because single rounds vary."""
    best: MeanStd
    worst: MeanStd
    """Accuracy of the worst class at the last evaluation."""
    compute: float
    """Computation per round, relative to FedAvg, in the first run found."""
    seeds: int
    rounds: int
    """The fewest rounds of any run."""
    planned_rounds: int

    def cells(self) -> list[str]:
        note = "" if self.rounds >= self.planned_rounds else f" ({self.rounds} of {self.planned_rounds} rounds)"
        shown = [
            str(value) if self.seeds > 1 else f"{100 * value.mean:.2f}"
            for value in (self.mean_last, self.best, self.worst)
        ]
        return [shown[0] + note, *shown[1:], f"{self.compute:.2f}", str(self.seeds)]


def _row(points: Sequence[Point], records: Records) -> SweepRow | None:
    found = [record for point in points if (record := records.get(point.job)) is not None]
    if not found:
        return None
    planned = planned_rounds(points[0].config)
    curves = [until(record.curve, planned) for record in found]
    done = min(curve[-1][0] for curve in curves)
    return SweepRow(
        mean_last=population_mean_std([mean_of_last(curve, points[0].config.mean_last).accuracy for curve in curves]),
        best=population_mean_std([best(curve).accuracy for curve in curves]),
        worst=population_mean_std([until(record.worst_curve, planned)[-1][1] for record in found]),
        compute=found[0].content["compute"][len(curves[0]) - 1] / max(1, curves[0][-1][0]),
        seeds=len(found),
        rounds=done,
        planned_rounds=planned,
    )
