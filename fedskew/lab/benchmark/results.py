"""The measurements of a benchmark, with everything needed to repeat it, as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from statistics import median
from typing import Any, Literal

from fedskew.errors import UserError
from fedskew.lab.benchmark.commands import CommandTime
from fedskew.lab.benchmark.peers import PeerTime
from fedskew.lab.benchmark.scale import ScaleMeasurement

Level = Literal["steps", "rounds", "federation", "participants", "start-up", "whole-runs"]
"""What is measured. `federation` is whole rounds by federation size, `participants` is whole rounds by clients per
round, and `start-up` and `whole-runs` are commands."""

LEVELS: tuple[Level, ...] = ("steps", "rounds", "federation", "participants", "start-up", "whole-runs")
SCALE = "scale"
"""A run on a federation of very many clients. It is measured on request only, because it writes gigabytes to disk."""
PEERS = "peers"
"""A comparison with a JAX script. It is made on request only, because it needs a clone of the repository, and JAX."""

LOOP, TUNED_LOOP, LIMIT, BARE = "loop", "tuned loop", "limit", "bare steps"
"""Names of contenders other than engines. `loop` is an ordinary PyTorch loop, and `tuned loop` has a faster SGD.
`limit` is one step on one large batch. `bare steps` are an engine's local steps; its whole rounds are compared with
them."""
REFERENCES = (LOOP, TUNED_LOOP, LIMIT)
"""Contenders that do not use fedskew's engines."""


@dataclass(frozen=True)
class Measurement:
    """The measured speed of one contender on one case."""

    level: Level
    contender: str
    """One of the names above, or an engine's name."""
    model: str
    clients: int
    """Clients per round."""
    federation: int
    """Clients in the federation."""
    batch_size: int
    method: str
    precision: str
    sizes: str
    """Whether the clients have `equal` or `unequal` numbers of samples."""
    samples: int
    """Samples trained on per call."""
    seconds: tuple[float, ...]
    """Mean seconds per call, one value per repetition."""
    memory: int | None
    """Peak memory in bytes, minus the memory in use before. None if the system does not report it."""
    asked: str = ""
    """The requested engine, such as `auto`."""

    @property
    def time(self) -> float:
        return median(self.seconds)

    @property
    def rate(self) -> float:
        """Samples per second."""
        return self.samples / self.time

    @property
    def spread(self) -> float:
        """Half of the range over the repetitions, relative to the median."""
        return (max(self.seconds) - min(self.seconds)) / 2 / self.time

    def to_json(self) -> dict[str, Any]:
        derived = {"samples_per_second": self.rate, "median_seconds": self.time, "spread": self.spread}
        return asdict(self) | {"seconds": list(self.seconds)} | derived

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Measurement:
        try:
            known = {spec.name: value[spec.name] for spec in fields(cls)}
            measurement = cls(**known | {"seconds": tuple(float(s) for s in known["seconds"])})
            valid = measurement.seconds and min(measurement.seconds) > 0 and measurement.level in LEVELS
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(f"a measurement is damaged: {type(error).__name__}: {error}") from error
        if not valid:
            raise UserError(
                f"a measurement is damaged: level {measurement.level!r}, seconds {list(measurement.seconds)}"
            )
        return measurement


def fastest(measurements: list[Measurement]) -> Measurement | None:
    """The measurement with the most samples per second."""
    return max(measurements, key=lambda m: m.rate, default=None)


FORMAT = 1


@dataclass(frozen=True)
class Failure:
    """Something that could not be measured: a contender, a group of contenders or commands, `PEERS` or `SCALE`."""

    label: str
    reason: str

    @classmethod
    def from_error(cls, label: str, error: Exception) -> Failure:
        return cls(label, next(iter(str(error).strip().splitlines()), type(error).__name__))


@dataclass
class Results:
    """The measurements of a benchmark, which may still be running."""

    machine: Mapping[str, str | int]
    versions: Mapping[str, str]
    command: str
    date: str
    measurements: list[Measurement] = field(default_factory=list)
    commands: list[CommandTime] = field(default_factory=list)
    scale: list[ScaleMeasurement] = field(default_factory=list)
    peers: list[PeerTime] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    """Notices of engines that could not do all that was requested, for instance train all clients at once."""
    left_out: list[str] = field(default_factory=list)
    """Titles of groups that were skipped for lack of time."""
    seconds: float = 0.0
    """Duration of the whole benchmark."""

    @property
    def kind(self) -> str:
        """The kind of device, such as cuda or cpu. Empty if the file does not name it."""
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
            "commands": [command.to_json() for command in self.commands],
            "scale": [m.to_json() for m in self.scale],
            "peers": [peer.to_json() for peer in self.peers],
            "failures": [{"what": f.label, "why": f.reason} for f in self.failures],
            "notices": list(self.notices),
            "left_out": list(self.left_out),
        }

    @classmethod
    def from_json(cls, value: Any) -> Results:
        if not isinstance(value, dict) or value.get("format") != FORMAT:
            raise UserError("not a benchmark; expected the output of `fedskew bench --json`")
        try:
            return cls(
                machine={"device": "", **value["machine"]},
                versions=dict(value["versions"]),
                command=str(value["command"]),
                date=str(value["date"]),
                measurements=[Measurement.from_json(m) for m in value["measurements"]],
                commands=[CommandTime.from_json(command) for command in value.get("commands", [])],
                scale=[ScaleMeasurement.from_json(m) for m in value.get("scale", [])],
                peers=[PeerTime.from_json(peer) for peer in value.get("peers", [])],
                failures=[Failure(f["what"], f["why"]) for f in value["failures"]],
                notices=[str(line) for line in value["notices"]],
                left_out=[str(line) for line in value["left_out"]],
                seconds=float(value["seconds"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(f"damaged benchmark file: {type(error).__name__}: {error}") from error


def read_results(path: str) -> Results:
    """Read a benchmark from a file."""
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
