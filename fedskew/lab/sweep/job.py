"""One run of a sweep, what makes two runs the same experiment, and the outcome of a run.

A run folder belongs to one machine and one engine, bit for bit; a result does not. Device, engine and number format do
not count here, nor does the number of rounds: a longer run contains the shorter one, because no random choice depends
on the number of rounds. (Methods with stages plan by it; for them it counts.)
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from fedskew.experiment.config import Config
from fedskew.experiment.preparation import partition_rule
from fedskew.methods import Schedule, make_method

CIRCUMSTANCES = (
    "data_dir",
    "rounds",
    "engine",
    "device",
    "precision",
    "compile",
    "eval_every",
    "eval_local",
    "mean_last",
    "checkpoint_every",
)
"""Keys that say where, how long and how closely a run was evaluated, but do not change what it computes."""


def experiment(config: Config) -> dict[str, Any]:
    """The keys that determine a run's numbers, with the defaults of method and partition filled in."""
    mapping = {key: value for key, value in config.to_mapping().items() if key not in CIRCUMSTANCES}
    method = make_method(config.method, config.method_params)
    if plans_by_rounds(config):
        mapping["rounds"] = config.rounds
    return mapping | {"method": {"name": method.name, **method.params}, "partition": _partition(config)}


def plans_by_rounds(config: Config) -> bool:
    """Whether the method has stages, whose lengths may depend on the number of rounds."""
    return isinstance(make_method(config.method, config.method_params).objective, Schedule)


def identity(config: Config) -> str:
    """Twelve hex digits that identify an experiment."""
    text = json.dumps(_canonical(experiment(config)), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _partition(config: Config) -> dict[str, Any]:
    described = partition_rule(config).describe()
    if "path" in described:  # another machine may have the file elsewhere
        described["path"] = Path(str(described["path"])).name
    return {**described, "seed": config.partition_seed}


def _canonical(value: Any) -> Any:
    """Make 1 and 1.0, and tuples and lists, the same value."""
    if isinstance(value, dict):
        return {key: _canonical(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_canonical(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


@dataclass(frozen=True)
class Job:
    """A run to do."""

    config: Config
    label: str
    """The name that users see."""
    validation: float | None = None
    """Test on this fraction of the training data instead of the test set."""
    start: Config | None = None
    """The run whose final model this run starts from; None: a new model."""
    tag: str = ""
    """Distinguishes jobs of the same experiment if a grid compares circumstances, such as devices."""

    @cached_property
    def identity(self) -> str:
        """The same for all jobs of one experiment."""
        begun = "" if self.start is None else f"-after-{identity(self.start)}"
        return identity(self.config) + begun + (f"-{self.tag}" if self.tag else "")

    def to_json(self) -> dict[str, Any]:
        return {
            "config": self.config.to_mapping(),
            "label": self.label,
            "validation": self.validation,
            "start": None if self.start is None else self.start.to_mapping(),
            "tag": self.tag,
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Job:
        start = content["start"]
        return cls(
            Config.from_mapping(content["config"]),
            content["label"],
            content["validation"],
            None if start is None else Config.from_mapping(start),
            content["tag"],
        )


def each_once(jobs: Iterable[Job]) -> list[Job]:
    """Merge jobs of the same experiment into one run that serves all of them, in order of first appearance."""
    found: dict[str, Job] = {}
    for job in jobs:
        before = found.get(job.identity)
        found[job.identity] = job if before is None else _merged(before, job)
    return list(found.values())


def _merged(one: Job, other: Job) -> Job:
    """The longer run from the longer start, with local evaluation if either job needs it."""
    config = replace(_longer(one.config, other.config), eval_local=one.config.eval_local or other.config.eval_local)
    start = None if one.start is None or other.start is None else _longer(one.start, other.start)
    return replace(one, config=config, start=start)


def _longer(one: Config, other: Config) -> Config:
    return max(one, other, key=lambda config: config.rounds)


@dataclass(frozen=True)
class Terms:
    """Conditions for all jobs of a sweep."""

    folder: str | None = None
    """Parent of the run folders; None: keep only records, and start stopped runs over."""
    deadline: float | None = None
    """When to stop, in seconds since the epoch."""
    alone: bool = True
    """Whether a run has the machine to itself; if not, it starts no worker processes."""
    command: str = ""

    def to_json(self) -> dict[str, Any]:
        return dict(vars(self))
