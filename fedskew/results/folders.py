"""Read runs from their folders, finished or not. This does not load their data or models."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from torch import nn

from fedskew.errors import UserError, nearest
from fedskew.experiment.result import Result, recorded_scores, recorded_site_scores
from fedskew.experiment.storage.run_folder import RunFolder
from fedskew.results.model import load_model
from fedskew.results.race import RaceRecord, find_races, load_race

MAX_DEPTH = 3
"""Levels below a given folder that are searched for runs."""


def load_run(folder: str | Path, model: nn.Module | None = None) -> Result:
    """Read the run in a folder, finished or not. Its model is loaded when `result.model` is first used.

    If the run trained a module that you passed as an object, pass the same module as `model`.
    """
    files = RunFolder(folder)
    config, history = files.config, files.rounds()
    summary, about = files.summary() or {}, files.about() or {}
    return Result(
        config=config,
        history=history,
        model_or_loader=partial(load_model, files.path, model),
        engine=str(summary.get("engine") or config.engine),
        folder=files.path,
        about=about,
        finished=files.finished,
        stopped_early=bool(summary.get("stopped_early")),
        scores=recorded_scores(summary),
        site_scores=recorded_site_scores(summary),
        warnings=tuple(files.warnings),
    )


@dataclass(frozen=True)
class LoadedRuns:
    """Runs, and races of methods, that were read from folders."""

    runs: Sequence[Result]
    unreadable: Sequence[str] = ()
    """One line for each folder that could not be read."""
    races: Sequence[RaceRecord] = ()


def load_runs(paths: Iterable[str | Path]) -> LoadedRuns:
    """Read all runs in these folders. Raise a UserError if a folder has no run, or if no run can be read."""
    runs: list[Result] = []
    unreadable: list[str] = []
    for folder in find_runs(paths):
        try:
            runs.append(load_run(folder))
        except UserError as error:
            unreadable.append(str(error))
    if not runs:
        raise UserError("; ".join(unreadable))
    return LoadedRuns(runs, unreadable)


@contextmanager
def _reporting_unreadable_folders() -> Iterator[None]:
    """Turn an error such as a missing permission into one line with the path and the reason."""
    try:
        yield
    except OSError as error:
        raise UserError(f"cannot read {error.filename}: {error.strerror}") from error


@_reporting_unreadable_folders()
def load_runs_and_races(paths: Sequence[str | Path]) -> LoadedRuns:
    """Read all runs in these folders, and the races that `fedskew choose` saved in them or directly below them."""
    folders = find_races(paths)
    races = [race for folder in folders if (race := load_race(folder)) is not None]
    if races:  # beside races, a folder need not have runs
        paths = [path for path in paths if _may_have_runs(Path(path))]
    return replace(load_runs(paths), races=races) if paths else LoadedRuns([], races=races)


@_reporting_unreadable_folders()
def find_runs(paths: Iterable[str | Path]) -> list[Path]:
    """Find the run folders among these paths and up to three levels below them."""
    found: dict[Path, None] = {}
    for path in map(Path, paths):
        if not path.is_dir():
            raise UserError(
                f"no run folder {str(path)!r};{_suggestion(path)} expected one that `fedskew run` or `compare` made"
            )
        runs = [path] if _is_run(path) else _runs_in(path, MAX_DEPTH)
        if not runs:
            raise UserError(
                f"no run in {str(path)!r}: neither it nor a visible folder up to {MAX_DEPTH} levels below it has a "
                "config.yaml"
            )
        found |= dict.fromkeys(runs)
    return list(found)


def _may_have_runs(path: Path) -> bool:
    """Whether the path has runs. Also True if it is not a folder, because `find_runs` then raises the error."""
    return not path.is_dir() or _is_run(path) or bool(_runs_in(path, MAX_DEPTH))


def _suggestion(path: Path) -> str:
    """Suggest the existing folder with the most similar name, if one is similar."""
    parent = path.parent
    existing = [inner.name for inner in parent.iterdir() if inner.is_dir()] if parent.is_dir() else []
    close = nearest(path.name, existing)
    return f" did you mean {str(parent / close)!r}?" if close else ""


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
