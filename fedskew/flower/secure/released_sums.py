"""The sums that a site has helped to unmask, so that the same request is never unmasked for two sets of sites.

A round that is repeated gives the same updates. The sums of two different sets of sites would then differ by single
updates. The file is in the site's state folder, because a worker may be started again at any time.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from fedskew.errors import UserError
from fedskew.flower.site_state import StateUnusable

NAME = "released-sums.jsonl"
_INCOMPLETE = " (incomplete)"
"""Marks a line that a killed process could not complete."""


class ReleasedSums:
    """The record of one site."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / NAME

    def record(self, request: str, contributors: list[str]) -> None:
        """Record a sum before its shares leave. Refuse a request that was unmasked for other contributors."""
        try:
            earlier = self._read().get(request)
            if earlier is None:
                self._append({"request": request, "contributors": contributors})
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise StateUnusable(f"cannot use {self._path}: {error}") from error
        if earlier is not None and earlier != contributors:
            raise UserError(
                f"this site has already unmasked the same request for {', '.join(earlier)}, not "
                f"{', '.join(contributors)}; the two sums would reveal individual updates. Expected the same sites, "
                "or a run with another seed"
            )

    def _read(self) -> dict[str, list[str]]:
        if not self._path.exists():
            return {}
        *lines, _ = self._path.read_text(encoding="utf-8").split("\n")  # shares of an incomplete last line never left
        entries = [json.loads(line) for line in lines if not line.endswith(_INCOMPLETE)]
        return {entry["request"]: entry["contributors"] for entry in entries}

    def _append(self, entry: dict[str, object]) -> None:
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        is_torn = self._path.exists() and not self._path.read_bytes().endswith(b"\n")
        with self._path.open("a", encoding="utf-8") as file:
            file.write(f"{_INCOMPLETE}\n" if is_torn and self._path.stat().st_size else "")
            file.write(json.dumps(entry) + "\n")
            file.flush()
            os.fsync(file.fileno())
