"""A site's record of the sums that it has helped to unmask.

A repeated round gives the same updates. If the sums over two different sets of sites were unmasked, they could differ
by a single update. So for one request, a site helps to unmask the sum over only one set of sites.

A server could also make a tiny change to a request, or name another saved state of a site, and ask again. So a site
helps to unmask only a few different sums for the same round or test. The record is in the site's state folder, so it
survives a restart of the worker.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedskew.errors import UserError
from fedskew.flower.site_state import StateUnusable
from fedskew.locks import exclusive

NAME = "released-sums.jsonl"
_MOST_SUMS = 2
"""The maximum number of different sums for the same round or test. There may be two, because a restarted server may
repeat a round with another model."""
_INCOMPLETE = " (incomplete)"
"""Added to a line that a killed process did not complete."""


class ReleasedSums:
    """The record of one site."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / NAME

    def record(self, purpose: str, request: str, contributors: list[str], contribution: str = "") -> None:
        """Record a sum before the site sends the secret shares that unmask it.

        Refuse a sum that could be compared with an earlier one.

        `purpose` names the round or the test. `request` is the digest of the server's request. `contribution` is the
        digest of the site's own part of the sum. It is empty if this part has noise, which is new each time.
        """
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with exclusive(self._path.with_suffix(".lock")):
                earlier = [entry for entry in self._read() if entry["purpose"] == purpose]
                entry: dict[str, object] = {"purpose": purpose, "request": request, "contributors": contributors}
                entry |= {"contribution": contribution} if contribution else {}
                if entry not in earlier:
                    _refuse_comparison(entry, earlier)
                    self._append(entry)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise StateUnusable(f"cannot use {self._path}: {error}") from error

    def _read(self) -> list[dict[str, Any]]:
        if not self._path.exists():
            return []
        # If the last line is incomplete, the shares of its sum never left the site.
        *lines, _ = self._path.read_text(encoding="utf-8").split("\n")
        return [json.loads(line) for line in lines if not line.endswith(_INCOMPLETE)]

    def _append(self, entry: dict[str, object]) -> None:
        before = self._path.read_bytes() if self._path.exists() else b""
        is_last_incomplete = bool(before) and not before.endswith(b"\n")
        with self._path.open("a", encoding="utf-8") as file:
            file.write(f"{_INCOMPLETE}\n" if is_last_incomplete else "")
            file.write(json.dumps(entry) + "\n")
            file.flush()
            os.fsync(file.fileno())


def _refuse_comparison(entry: Mapping[str, Any], earlier: Sequence[Mapping[str, Any]]) -> None:
    """Refuse a new sum that could be compared with the earlier sums of the same purpose."""
    purpose, contributors = entry["purpose"], entry["contributors"]
    for known in earlier:
        if known["request"] == entry["request"] and known["contributors"] != contributors:
            raise UserError(
                f"this site has already helped to unmask the sum over {', '.join(known['contributors'])} for the same "
                f"request, not over {', '.join(contributors)}; the two sums could reveal one site's part. Expected "
                "the same sites, or a run with another seed"
            )
    if len(earlier) >= _MOST_SUMS:
        raise UserError(
            f"this site has already helped to unmask {len(earlier)} different sums for {purpose}; more sums could "
            "reveal one site's part. Expected one of the requests of these sums, or a run with another seed"
        )
