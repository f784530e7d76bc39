"""A benchmark's figures with all that is needed to repeat it, as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedskew.errors import UserError
from fedskew.lab.benchmark.measurement import Measurement
from fedskew.lab.benchmark.timing import Failure

FORMAT = 1


@dataclass
class Results:
    """What was measured so far."""

    machine: Mapping[str, str | int]
    versions: Mapping[str, str]
    command: str
    date: str
    measurements: list[Measurement] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    """What the engines had to do differently from what was asked."""
    left_out: list[str] = field(default_factory=list)
    """What there was no time for."""
    seconds: float = 0.0
    """That the whole benchmark took."""

    @property
    def kind(self) -> str:
        """Of the device: cuda or cpu."""
        return str(self.machine["device"])

    def to_json(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "machine": dict(self.machine),
            "versions": dict(self.versions),
            "command": self.command,
            "date": self.date,
            "seconds": self.seconds,
            "measurements": [m.to_json() for m in self.measurements],
            "failures": [{"what": f.label, "why": f.reason} for f in self.failures],
            "notices": list(self.notices),
            "left_out": list(self.left_out),
        }

    @classmethod
    def from_json(cls, value: Any) -> Results:
        if not isinstance(value, dict) or value.get("format") != FORMAT:
            raise UserError("not the JSON of a benchmark; expected what 'fedskew bench --json' prints")
        try:
            return cls(
                machine={"device": "", **value["machine"]},
                versions=dict(value["versions"]),
                command=str(value["command"]),
                date=str(value["date"]),
                measurements=[Measurement.from_json(m) for m in value["measurements"]],
                failures=[Failure(f["what"], f["why"]) for f in value["failures"]],
                notices=[str(line) for line in value["notices"]],
                left_out=[str(line) for line in value["left_out"]],
                seconds=float(value["seconds"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(f"the JSON of a benchmark is damaged: {type(error).__name__}: {error}") from error


def read_results(path: str) -> Results:
    """The benchmark kept in a file."""
    try:
        value = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise UserError(f"{path} is not JSON: {error}") from error
    try:
        return Results.from_json(value)
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
