"""The sums that a site has helped to unmask, so that the same request is never unmasked for two sets of sites.

A round that is repeated gives the same updates. The sums of two different sets of sites could then differ by a single
update. A server could also change something that matters little and ask again. So a site helps to unmask only a few
different requests for the same round or test. The file is in the site's state folder, because a worker may be started
again at any time.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedskew.errors import UserError
from fedskew.flower.site_state import StateUnusable
from fedskew.locks import exclusive

NAME = "released-sums.jsonl"
_MOST_REQUESTS = 2
"""Limit of different requests for the same round or test. A round repeated after a restart may have another model."""
_INCOMPLETE = " (incomplete)"
"""Marks a line that a killed process could not complete."""


class ReleasedSums:
    """The record of one site."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / NAME

    def record(self, purpose: str, request: str, contributors: list[str]) -> None:
        """Record a sum before its shares leave. Refuse it if the sums so far and this one could be compared.

        `purpose` names the round or the test, and `request` is the digest of what the server asked for.
        """
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with exclusive(self._path.with_suffix(".lock")):
                entries = self._read()
                earlier = {entry["request"]: entry["contributors"] for entry in entries if entry["purpose"] == purpose}
                _refuse_comparison(purpose, request, contributors, earlier)
                if request not in earlier:
                    self._append({"purpose": purpose, "request": request, "contributors": contributors})
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise StateUnusable(f"cannot use {self._path}: {error}") from error

    def _read(self) -> list[dict[str, Any]]:
        if not self._path.exists():
            return []
        # If the last line is incomplete, the shares of its sum never left the site.
        *lines, _ = self._path.read_text(encoding="utf-8").split("\n")
        return [json.loads(line) for line in lines if not line.endswith(_INCOMPLETE)]

    def _append(self, entry: dict[str, object]) -> None:
        is_torn = self._path.exists() and not self._path.read_bytes().endswith(b"\n")
        with self._path.open("a", encoding="utf-8") as file:
            file.write(f"{_INCOMPLETE}\n" if is_torn and self._path.stat().st_size else "")
            file.write(json.dumps(entry) + "\n")
            file.flush()
            os.fsync(file.fileno())


def _refuse_comparison(purpose: str, request: str, contributors: list[str], earlier: Mapping[str, list[str]]) -> None:
    """Refuse a sum that could be compared with earlier ones of the same purpose.

    `earlier` has the contributors of each request that was unmasked.
    """
    if request not in earlier and len(earlier) >= _MOST_REQUESTS:
        raise UserError(
            f"this site has already unmasked {len(earlier)} different requests for {purpose}; more sums would reveal "
            "individual updates. Expected one of the same requests, or a run with another seed"
        )
    known = earlier.get(request, contributors)
    if known != contributors:
        raise UserError(
            f"this site has already unmasked the same request for {', '.join(known)}, not "
            f"{', '.join(contributors)}; the two sums would reveal individual updates. Expected the same sites, "
            "or a run with another seed"
        )
