"""Runs as their folders tell of them: finished, half-finished or damaged, without loading any data if possible."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedskew.errors import UserError, nearest
from fedskew.experiment.config import Config
from fedskew.experiment.preparation import build_federation
from fedskew.experiment.result import evaluated_rows
from fedskew.experiment.round.row import RoundRow
from fedskew.experiment.storage.about import described
from fedskew.experiment.storage.run_folder import RunFolder
from fedskew.metrics.confusion import Evaluation

Counts = npt.NDArray[np.int64]
DEPTH = 3
"""Levels below a folder of runs on which runs are looked for."""


@dataclass(frozen=True, eq=False)
class RecordedRun:
    """What is known of one run."""

    folder: Path
    config: Config
    rows: list[RoundRow]
    finished: bool
    about: dict[str, Any]
    summary: dict[str, Any] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()

    @property
    def seed(self) -> int:
        return self.config.seed

    @cached_property
    def evaluated(self) -> list[RoundRow]:
        """The rounds after which the global model was tested."""
        return evaluated_rows(self.rows)

    @cached_property
    def evaluations(self) -> dict[int, Evaluation]:
        """By round of the global model; experts' rounds in between do not count, as papers count."""
        return {row.model_round: row.tested for row in self.evaluated}

    @property
    def last_round(self) -> int:
        return max(self.evaluations, default=0)

    @property
    def last(self) -> Evaluation | None:
        """The last evaluation; of a finished run, of the model that came out."""
        return self.evaluations[self.last_round] if self.evaluations else None

    @cached_property
    def federation(self) -> dict[str, Any] | None:
        """Classes, label counts and hash of the split: from the folder, or else from the data if they are there."""
        if "federation" in self.about:
            return dict(self.about["federation"])
        try:
            return described(build_federation(self.config))
        except UserError:
            return None

    @property
    def label_counts(self) -> Counts | None:
        """None where nobody knows: in a federation across machines the sites keep them to themselves."""
        counts = (self.federation or {}).get("label_counts")
        return None if counts is None else np.array(counts, np.int64)

    @property
    def sites(self) -> tuple[str, ...]:
        """Of a federation across machines."""
        return tuple((self.federation or {}).get("sites", ()))

    @property
    def classes(self) -> tuple[str, ...]:
        """Their names; numbers where nothing else is known."""
        if self.federation is not None:
            return tuple(self.federation["classes"])
        return tuple(map(str, range(len(self.last.confusion)))) if self.last else ()

    @property
    def diverged(self) -> int:
        """Updates of clients that were not finite and left out."""
        return sum(len(row.diverged) for row in self.rows)

    @property
    def bytes_moved(self) -> int:
        return sum(row.bytes_moved for row in self.rows)

    def total(self, key: str) -> float:
        """A number that every round has, summed up."""
        return float(sum(getattr(row, key) for row in self.rows))


def read_run(folder: Path) -> RecordedRun:
    """A run, whatever is left of it; without a readable configuration it is none."""
    on_disk = RunFolder(folder)
    config, rows = on_disk.config, on_disk.rounds()
    summary, about = on_disk.summary() or {}, on_disk.about() or {}
    return RecordedRun(folder, config, rows, on_disk.finished, about, summary, tuple(on_disk.warnings))


def find_runs(paths: Iterable[str | Path]) -> list[Path]:
    """Run folders; of another folder, those in it."""
    found: dict[Path, None] = {}
    for path in map(Path, paths):
        if not path.is_dir():
            raise UserError(
                f"no run folder {str(path)!r};{_meant(path)} expected one that `fedskew run` or `compare` made"
            )
        inside = [path] if _is_run(path) else _runs_in(path, DEPTH)
        if not inside:
            raise UserError(f"no run in {str(path)!r}: no folder there has a config.yaml")
        found |= dict.fromkeys(inside)
    return list(found)


def _meant(path: Path) -> str:
    """The folder that is there and has most nearly this name."""
    home = path.parent
    there = [inner.name for inner in home.iterdir() if inner.is_dir()] if home.is_dir() else []
    close = nearest(path.name, there)
    return f" did you mean {str(home / close)!r}?" if close else ""


def _is_run(folder: Path) -> bool:
    return (folder / "config.yaml").is_file()


def _runs_in(folder: Path, depth: int) -> list[Path]:
    runs: list[Path] = []
    for inner in sorted(p for p in folder.iterdir() if p.is_dir() and not p.name.startswith(".")):
        if _is_run(inner):
            runs.append(inner)
        elif depth > 1:
            runs += _runs_in(inner, depth - 1)
    return runs


@dataclass(frozen=True)
class Gathered:
    """The runs of a report, and a line on each that cannot be shown."""

    runs: Sequence[RecordedRun]
    unreadable: Sequence[str]


def gather(paths: Iterable[str | Path]) -> Gathered:
    """Read all; what cannot be read is named, unless nothing is left."""
    runs: list[RecordedRun] = []
    unreadable: list[str] = []
    for folder in find_runs(paths):
        try:
            runs.append(read_run(folder))
        except UserError as error:
            unreadable.append(str(error))
    if not runs:
        raise UserError("; ".join(unreadable))
    return Gathered(runs, unreadable)
