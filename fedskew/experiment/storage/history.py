"""`rounds.jsonl`: one JSON row per round, appended and forced to disk as the round ends.

Every row has a whole number `round`, larger than the row before. A kill can tear the last row only; what is
read is the longest run of good rows from the top.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedskew.experiment.storage.atomic import replace_file, reporting_os_errors

Row = dict[str, Any]


class RoundsFile:
    """The history of a run."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> tuple[list[Row], str | None]:
        """The good rows, and a warning if more than a torn last row had to be left out."""
        lines, problem = self._good_lines()
        return [json.loads(line) for line in lines], problem

    def append(self, row: Mapping[str, Any]) -> None:
        """Add a row. On a full disk the file stays as it was."""
        line = json.dumps(row, allow_nan=False, separators=(",", ":")).encode() + b"\n"
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
        lines, _ = self._good_lines()
        kept = [line for line in lines if through is None or json.loads(line)["round"] <= through]
        content = b"".join(line + b"\n" for line in kept)
        if content != self._bytes():
            replace_file(self.path, lambda draft: _write_bytes(draft, content))

    def _bytes(self) -> bytes:
        with reporting_os_errors("read", self.path):
            return self.path.read_bytes() if self.path.exists() else b""

    def _good_lines(self) -> tuple[list[bytes], str | None]:
        whole = self._bytes().split(b"\n")[:-1]
        good: list[bytes] = []
        before = -1
        for line in whole:
            number = _round_of(line)
            if number is None or number <= before:
                dropped = len(whole) - len(good)
                return good, f"{self.path} is damaged in line {len(good) + 1}; its last {dropped} rows are left out"
            good.append(line)
            before = number
        return good, None


def _round_of(line: bytes) -> int | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    number = row.get("round") if isinstance(row, dict) else None
    return number if isinstance(number, int) and not isinstance(number, bool) else None


def _write_all(descriptor: int, content: bytes) -> None:
    while content:
        content = content[os.write(descriptor, content) :]


def _write_bytes(path: Path, content: bytes) -> None:
    path.write_bytes(content)
