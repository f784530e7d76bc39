"""Sweeps of our own among the results: every `grids/NAME.yaml` with the records of its runs, `NAME.jsonl`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fedskew.lab.sweep.grid import Point, read_grid
from fedskew.lab.sweep.record import until
from fedskew.lab.sweep.records_file import Records, RecordsFile
from fedskew.metrics.summary import MeanStd, best, mean_of_last, mean_std

FOLDER = "grids"
_LATE = 10
"""Rounds."""


def grid_sections(folder: str | Path) -> list[str]:
    """A table for each sweep, the best first."""
    sections = []
    for path in sorted((Path(folder) / FOLDER).glob("*.yaml")):
        records = Records(RecordsFile(path.with_suffix(".jsonl")).read())
        if len(records):
            link = Path("results") / FOLDER / path.name
            sections += [f"## Sweep {path.stem}\n", f"{_about(path)} [The grid]({link}).\n", device_line(records)]
            sections.append(_table(read_grid(path, {}).points(), records))
    return sections


def _about(path: Path) -> str:
    """The comment on its first lines, without the command."""
    lines = path.read_text(encoding="utf-8").splitlines()
    said = [line.lstrip("# ") for line in lines if line.startswith("#") and "fedskew sweep" not in line]
    return " ".join(said) or "every combination of its values."


def device_line(records: Records) -> str:
    """Where it ran."""
    where = sorted(
        {f"{r.content['machine'].get('gpu') or r.content['machine']['cpu']}, {r.config.precision}" for r in records}
    )
    return f"{len(records)} runs on {' and '.join(where)}.\n"


def _table(points: Sequence[Point], records: Records) -> str:
    keys = [key for key in points[0].place if key != "seed"]
    places: dict[tuple[str, ...], list[Point]] = {}
    for point in points:
        places.setdefault(tuple(str(point.place[key]) for key in keys), []).append(point)
    rows = {place: row for place, of in places.items() if (row := _row(of, records))}
    ranked = sorted(rows, key=lambda place: -rows[place].late.mean)
    headings = [*keys, "accuracy of the last 10 rounds (%)", "best", "worst class", "computation (FedAvg: 1)", "seeds"]
    cells = [headings, ["---"] * len(headings), *([*place, *rows[place].cells()] for place in ranked)]
    missing = [" ".join(place) for place in places if place not in rows]
    left_out = [f"\nNot run: {', '.join(missing)}."] if missing else []
    return "\n".join([*(f"| {' | '.join(line)} |" for line in cells), *left_out]) + "\n"


@dataclass(frozen=True)
class _Row:
    """Means over the seeds of one combination."""

    late: MeanStd
    """Of the last rounds: single ones swing."""
    best: MeanStd
    worst: MeanStd
    compute: float
    seeds: int
    rounds: int
    wanted: int

    def cells(self) -> list[str]:
        note = "" if self.rounds >= self.wanted else f" ({self.rounds} of {self.wanted} rounds)"
        shown = [
            str(value) if self.seeds > 1 else f"{100 * value.mean:.2f}" for value in (self.late, self.best, self.worst)
        ]
        return [shown[0] + note, *shown[1:], f"{self.compute:.2f}", str(self.seeds)]


def _row(points: Sequence[Point], records: Records) -> _Row | None:
    found = [record for point in points if (record := records.get(point.job)) is not None]
    if not found:
        return None
    wanted = points[0].config.rounds
    curves = [until(record.curve, wanted) for record in found]
    done = min(curve[-1][0] for curve in curves)
    return _Row(
        late=mean_std([mean_of_last(curve, _LATE).accuracy for curve in curves]),
        best=mean_std([best(curve).accuracy for curve in curves]),
        worst=mean_std([until(record.worst_curve, wanted)[-1][1] for record in found]),
        compute=found[0].content["compute"][len(curves[0]) - 1] / max(1, curves[0][-1][0]),
        seeds=len(found),
        rounds=done,
        wanted=wanted,
    )
