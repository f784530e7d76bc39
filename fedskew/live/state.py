"""The current content of the live page, rebuilt only when a run or a race has written something."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedskew.errors import UserError, plural
from fedskew.report.document import Document, document
from fedskew.report.page.render import body, charts, page
from fedskew.results import LoadedRuns, Result, find_runs, load_runs_and_races
from fedskew.results.race import RACE, find_races
from fedskew.results.ranking import DEFAULT_METRIC

FILES = ("about.json", "rounds.jsonl", "summary.json")
"""Files of a run. When one of them changes, the page is rebuilt."""
_MAX_LISTED = 3
"""The maximum number of unfinished runs and races that the status line names."""
NOTHING = LoadedRuns([])
"""What is shown before any run or race exists."""


class LiveState:
    """Follows the folders of runs and races, which need not exist yet."""

    def __init__(self, paths: Sequence[str | Path], rank_by: str = DEFAULT_METRIC) -> None:
        self._paths, self._rank_by = list(map(Path, paths)), rank_by
        self._lock = threading.Lock()
        self._seen: tuple[object, ...] | None = None
        """The result of `_file_versions` when the content was built. None before it is built for the first time."""
        self._loaded = NOTHING
        self._content: dict[str, Any] = {}
        self._version = 0

    def page(self) -> str:
        """Render the whole page."""
        return page(self._document(self._load()), live=True)

    def current(self, after: int, ended: bool = False) -> dict[str, Any]:
        """Return the content if it changed since version `after`, otherwise only the version and the status line.

        `ended` says that the process that wrote the runs has ended, so unfinished runs were interrupted.
        """
        with self._lock:
            written = self._file_versions()
            if written != self._seen:
                self._loaded = self._load()
                shown = self._document(self._loaded)
                self._seen = written
                self._version += 1
                self._content = {"body": str(body(shown)), **charts(shown)}
            content = {} if after == self._version else self._content
            return {"version": self._version, "status": _status(self._loaded, ended), **content}

    def _file_versions(self) -> tuple[object, ...]:
        """Return the size and time of each followed file. They change when a run writes to the file."""
        found = []
        files = [folder / name for folder in self._run_folders() for name in FILES]
        for path in (*files, *(folder / RACE for folder in find_races(self._paths))):
            stat = path.stat() if path.exists() else None
            found.append((str(path), stat and (stat.st_size, stat.st_mtime_ns)))
        return tuple(found)

    def _run_folders(self) -> list[Path]:
        folders: list[Path] = []
        for path in self._paths:
            try:
                folders += find_runs([path])
            except UserError:  # not started yet, or a race
                continue
        return folders

    def _load(self) -> LoadedRuns:
        """Load all runs and races that exist. If none can be read, the reason is in `unreadable`."""
        folders: list[str | Path] = [*self._run_folders(), *find_races(self._paths)]
        if not folders:
            return NOTHING
        try:
            return load_runs_and_races(folders)
        except UserError as error:
            return LoadedRuns([], [str(error)])

    def _document(self, loaded: LoadedRuns) -> Document:
        if not loaded.runs and not loaded.races:
            problems = loaded.unreadable or ["no results yet: the first round has not started"]
            return Document("fedskew", [], None, problems)
        try:
            return document(loaded, with_features=False, rank_by=self._rank_by)
        except UserError as error:  # for instance AUROC, which no run has before its end
            by_accuracy = document(loaded, with_features=False)
            return replace(by_accuracy, problems=[*by_accuracy.problems, f"ranked by accuracy: {error}"])


def _status(loaded: LoadedRuns, ended: bool) -> str:
    """Say in one line what is finished, and in which round the other runs are, or were interrupted."""
    runs, races = loaded.runs, loaded.races
    if not runs and not races:
        if loaded.unreadable:
            return "no run can be read"
        return "ended before the first round" if ended else "waiting"
    unfinished = [_position(run) for run in runs if not run.finished]
    unfinished += [f"race: {plural(len(race.rungs), 'rung')} done" for race in races if not race.finished]
    if not unfinished:
        return "finished"
    finished = sum(run.finished for run in runs)
    parts = [f"{finished} of {len(runs)} runs finished"] if len(runs) > 1 else []
    return ", ".join([*(["interrupted"] if ended else []), *parts, *unfinished[:_MAX_LISTED]])


def _position(run: Result) -> str:
    where = f"round {run.history[-1].round}" if run.history else "before the first round"
    return f"{run.config.method} seed {run.seed}: {where}"
