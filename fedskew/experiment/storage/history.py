"""`rounds.jsonl`: one JSON row per round, appended and forced to disk as the round ends.

Every row has a whole number `round`, larger than that of the row before. A kill can damage only the last row; all good
rows from the top are read.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from fedskew.experiment.round.record import RoundRow
from fedskew.experiment.storage.atomic import reporting_os_errors, write_file


class RoundsFile:
    """The history of a run."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> tuple[list[RoundRow], str | None]:
        """The good rows, and a warning if more than an incomplete last row is left out."""
        good, problem = self._good()
        return [row for row, _ in good], problem

    def append(self, row: RoundRow) -> None:
        """Add a row. If the disk is full, the file stays as it was."""
        line = json.dumps(row.to_json(), allow_nan=False, separators=(",", ":")).encode() + b"\n"
        with reporting_os_errors("write", self.path), self.path.open("ab", buffering=0) as file:
            end = file.seek(0, os.SEEK_END)
            try:
                _write_all(file.fileno(), line)
                os.fsync(file.fileno())
            except OSError:
                os.ftruncate(file.fileno(), end)
                raise

    def keep(self, through: int | None = None) -> None:
        """Drop damaged rows and those of rounds after `through`, atomically."""
        good, _ = self._good()
        content = b"".join(line + b"\n" for row, line in good if through is None or row.round <= through)
        if content != self._bytes():
            write_file(self.path, content)

    def _bytes(self) -> bytes:
        with reporting_os_errors("read", self.path):
            return self.path.read_bytes() if self.path.exists() else b""

    def _good(self) -> tuple[list[tuple[RoundRow, bytes]], str | None]:
        """Rows with their lines, up to the first that is damaged or out of order."""
        whole = self._bytes().split(b"\n")[:-1]
        good: list[tuple[RoundRow, bytes]] = []
        for line in whole:
            row = _parsed(line)
            if row is None or (good and row.round <= good[-1][0].round):
                dropped = len(whole) - len(good)
                return good, f"{self.path} is damaged in line {len(good) + 1}; its last {dropped} rows are left out"
            good.append((row, line))
        return good, None


def _parsed(line: bytes) -> RoundRow | None:
    try:
        return RoundRow.from_json(json.loads(line))
    except (ValueError, TypeError, KeyError, AttributeError):
        return None


def _write_all(descriptor: int, content: bytes) -> None:
    while content:
        content = content[os.write(descriptor, content) :]
