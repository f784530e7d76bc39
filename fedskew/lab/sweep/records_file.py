"""Records on disk: one line of JSON each, append-only, so that files of several machines can be put together."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from fedskew.errors import UserError
from fedskew.experiment.storage.atomic import reporting_os_errors
from fedskew.lab.sweep.identity import plans_by_rounds
from fedskew.lab.sweep.job import Job
from fedskew.lab.sweep.record import Record


class RecordsFile:
    """A file of records; a torn last line, which a kill may leave, is passed over."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def read(self) -> list[Record]:
        return list(self._records())

    def append(self, record: Record) -> None:
        line = json.dumps(record.content, separators=(",", ":"), allow_nan=False)
        with reporting_os_errors("write", self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            torn = self.path.exists() and not self.path.read_bytes().endswith(b"\n") and self.path.stat().st_size
            with self.path.open("a", encoding="utf-8") as file:
                file.write(("\n" if torn else "") + line + "\n")

    def _records(self) -> Iterator[Record]:
        with reporting_os_errors("read", self.path):
            lines = self.path.read_text(encoding="utf-8").split("\n") if self.path.exists() else []
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                content = json.loads(line)
            except ValueError:
                if number >= len(lines) - 1 or not line.endswith("}"):
                    continue
                raise UserError(f"{self.path} line {number}: not JSON; expected the record of a run") from None
            try:
                yield Record.from_json(content)
            except UserError as error:
                raise UserError(f"{self.path} line {number}: {error}") from error


class Records:
    """Records by experiment; of several of one experiment, the one that ran longest, then the latest.

    A job that wants clients looked at (`eval_local`) is served by records of runs that did, and by no others.
    """

    def __init__(self, records: Iterable[Record] = ()) -> None:
        self._by_identity: dict[str, Record] = {}
        self._watched: dict[str, Record] = {}
        for record in records:
            self.add(record)

    def add(self, record: Record) -> None:
        for records in (self._by_identity, self._watched) if record.config.eval_local else (self._by_identity,):
            known = records.get(record.identity)
            if known is None or (record.start_rounds, record.rounds) >= (known.start_rounds, known.rounds):
                records[record.identity] = record

    def get(self, job: Job) -> Record | None:
        """Of that experiment, however far it ran."""
        return (self._watched if job.config.eval_local else self._by_identity).get(job.identity)

    def longest(self, job: Job) -> Record | None:
        """The same, or else one with fewer rounds, of a method that plans by them."""
        if (found := self.get(job)) or not plans_by_rounds(job.config):
            return found
        wanted = job.config.rounds
        fewer = sorted({r.config.rounds for r in self if r.config.rounds < wanted}, reverse=True)
        shorter = (replace(job, config=replace(job.config, rounds=rounds)) for rounds in fewer)
        return next((found for one in shorter if (found := self.get(one))), None)

    def __len__(self) -> int:
        return len(self._by_identity)

    def __iter__(self) -> Iterator[Record]:
        return iter(self._by_identity.values())


def read_folder(folder: str | Path) -> Records:
    """All records in the *.jsonl files of a folder."""
    return Records(record for path in sorted(Path(folder).glob("*.jsonl")) for record in RecordsFile(path).read())
