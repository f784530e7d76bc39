"""The current content of the live page, rebuilt only when a run has written something."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedskew.errors import UserError
from fedskew.report.document import Document, document
from fedskew.report.page.render import body, charts, page
from fedskew.results import find_runs, load_runs
from fedskew.results.ranking import DEFAULT_METRIC

FILES = ("rounds.jsonl", "summary.json")
"""The files that change during a run."""


class LiveState:
    """Follows run folders, which need not exist yet."""

    def __init__(self, paths: Sequence[str | Path], rank_by: str = DEFAULT_METRIC) -> None:
        self._paths, self._rank_by = list(paths), rank_by
        self._lock = threading.Lock()
        self._seen: tuple[object, ...] = ("nothing",)
        self._content: dict[str, Any] = {}
        self._version = 0

    def page(self) -> str:
        """Render the whole page."""
        return page(self._document()[0], live=True)

    def current(self, after: int) -> dict[str, Any]:
        """Return the content if it changed since version `after`, otherwise only the version and the status line."""
        with self._lock:
            written = self._written()
            if written != self._seen:
                shown, status = self._document()
                self._seen = written
                self._version += 1
                self._content = {"body": str(body(shown)), "status": status, **charts(shown)}
            if after == self._version:
                return {"version": self._version, "status": self._content["status"]}
            return {"version": self._version, **self._content}

    def _written(self) -> tuple[object, ...]:
        """The size and time of each followed file, which change when a run writes something."""
        found = []
        for folder in self._folders():
            for path in (folder / name for name in FILES):
                stat = path.stat() if path.exists() else None
                found.append((str(path), stat and (stat.st_size, stat.st_mtime_ns)))
        return tuple(found)

    def _folders(self) -> list[Path]:
        folders: list[Path] = []
        for path in self._paths:
            try:
                folders += find_runs([path])
            except UserError:  # not started yet
                continue
        return folders

    def _document(self) -> tuple[Document, str]:
        folders = self._folders()
        if not folders:
            return Document("fedskew", [], None, ["no results yet: the first round has not started"]), "waiting"
        try:
            loaded = load_runs(folders)
        except UserError as error:
            return Document("fedskew", [], None, [str(error)]), "waiting"
        try:
            shown = document(loaded, with_features=False, rank_by=self._rank_by)
        except UserError as error:  # for instance AUROC, which no run has before its end
            ranked = document(loaded, with_features=False)
            shown = replace(ranked, problems=[*ranked.problems, f"ranked by accuracy: {error}"])
        done = sum(run.finished for run in loaded.runs)
        running = [f"{run.config.method} seed {run.seed}: round {run.history[-1].round}"
                   for run in loaded.runs if not run.finished and run.history]  # fmt: skip
        status = f"{done} of {len(loaded.runs)} runs finished" if len(loaded.runs) > 1 else ""
        return shown, ", ".join(filter(None, [status, *running[:3]])) or "finished"
