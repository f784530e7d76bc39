"""Jobs (the runs of a sweep), and when two jobs are the same experiment.

Device, engine and number format do not distinguish experiments, because results differ only by rounding. Usually, the
number of rounds does not distinguish them, because a longer run contains the shorter one. With a method that
trains in stages (`Schedule`), it does, because the lengths of the stages may depend on it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from fedskew.experiment.config import Config
from fedskew.experiment.preparation import partition_rule
from fedskew.methods import Schedule, make_method

NON_IDENTIFYING_KEYS = (
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
"""Keys that do not distinguish experiments: where a run is executed, how long it is, and how it is evaluated."""

_LORA = {"lora_rank": 8, "lora_alpha": 16.0, "lora_targets": []}
_LATER_KEYS = {"init": None, "init_sha256": None, "train": "all", "head": "auto", "server_data": 0.0, **_LORA}
"""Keys that were added after the first records, with the value that earlier sweeps used. That value is left out of the
hash, so that old records keep their identity."""


def identifying_values(config: Config) -> dict[str, Any]:
    """Return the values that define an experiment, with the defaults of method and partition filled in."""
    mapping = {key: value for key, value in config.to_mapping().items() if key not in NON_IDENTIFYING_KEYS}
    for key, earlier_value in _LATER_KEYS.items():
        if mapping[key] == earlier_value:
            del mapping[key]
    mapping.pop("init_sha256", None)  # without `init`, a run ignores it
    if (digest := _init_digest(config)) is not None:  # the content of the initial weights counts, wherever the file is
        mapping["init_sha256"] = digest
        del mapping["init"]
    method = make_method(config.method, config.method_params)
    if has_stages(config):
        mapping["rounds"] = config.rounds
    return mapping | {"method": {"name": method.name, **method.params}, "partition": _partition(config)}


def _init_digest(config: Config) -> str | None:
    """Return the digest of the file `init`. None if `init` is not set, or if neither digest nor file is available."""
    if config.init is None:
        return None
    if config.init_sha256 is not None:
        return config.init_sha256
    path = Path(os.path.expanduser(config.init))
    return _file_digest(path, path.stat().st_mtime_ns) if path.is_file() else None


@lru_cache(maxsize=16)
def _file_digest(path: Path, modified_ns: int) -> str:  # noqa: ARG001 - a part of the cache's key
    return hashlib.sha256(path.read_bytes()).hexdigest()


def planned_rounds(config: Config) -> int:
    """Return how many rounds a run has. A method that trains no clients sets this number itself."""
    schedule = make_method(config.method, config.method_params).objective
    if isinstance(schedule, Schedule) and not schedule.trains_clients:
        return sum(stage.rounds for stage in schedule.stages(config.rounds, config.local_epochs, {}))
    return config.rounds


def has_stages(config: Config) -> bool:
    """Whether the method has a `Schedule`. The lengths of its stages may depend on the number of rounds."""
    return isinstance(make_method(config.method, config.method_params).objective, Schedule)


def identity(config: Config) -> str:
    """Hash a configuration into twelve hex digits that identify its experiment."""
    text = json.dumps(_canonical(identifying_values(config)), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _partition(config: Config) -> dict[str, Any]:
    described = partition_rule(config).describe()
    if "path" in described:  # another machine may have the file elsewhere
        described["path"] = Path(str(described["path"])).name
    return {**described, "seed": config.partition_seed}


def _canonical(value: Any) -> Any:
    """Turn 1.0 into 1, and tuples into lists, so that equal configurations have the same hash."""
    if isinstance(value, dict):
        return {key: _canonical(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_canonical(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


@dataclass(frozen=True)
class Job:
    """A run of a sweep."""

    config: Config
    label: str
    """The name that users see."""
    validation: float | None = None
    """The fraction of the training data on which the run is evaluated. None means the test set."""
    start: Config | None = None
    """The configuration of the run that trains the start model. None for a new model."""
    tag: str = ""
    """Distinguishes jobs of the same experiment, for example if a grid compares devices."""

    @cached_property
    def identity(self) -> str:
        """The hash of the experiment, with suffixes for the start model and the tag."""
        start = "" if self.start is None else f"-after-{identity(self.start)}"
        return identity(self.config) + start + (f"-{self.tag}" if self.tag else "")

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


def merge_jobs(jobs: Iterable[Job]) -> list[Job]:
    """Merge jobs with the same identity into one run that serves all of them. The order is kept.

    A job that ends between two evaluations of the longer run remains a run of its own.
    """
    found: dict[str, list[tuple[Job, set[int]]]] = {}
    for job in jobs:
        merged = found.setdefault(job.identity, [])
        for i, (before, ends) in enumerate(merged):
            both, all_ends = _merge(before, job), ends | {job.config.rounds}
            if all(_evaluates_after(both.config, end) for end in all_ends):
                merged[i] = both, all_ends
                break
        else:
            merged.append((job, {job.config.rounds}))
    return [job for merged in found.values() for job, _ in merged]


def _evaluates_after(config: Config, round: int) -> bool:
    """Whether a run is evaluated after this round."""
    return round == config.rounds or round % config.eval_every == 0


def _merge(one: Job, other: Job) -> Job:
    """Keep the longer run and the longer start, with local evaluation if either job needs it."""
    config = replace(_longer(one.config, other.config), eval_local=one.config.eval_local or other.config.eval_local)
    start = None if one.start is None or other.start is None else _longer(one.start, other.start)
    return replace(one, config=config, start=start)


def _longer(one: Config, other: Config) -> Config:
    return max(one, other, key=lambda config: config.rounds)


@dataclass(frozen=True)
class SweepSettings:
    """Settings for all jobs of a sweep."""

    folder: str | None = None
    """Parent of the run folders. If None, only records are saved, and stopped runs start over."""
    deadline: float | None = None
    """When to stop, as a Unix time in seconds."""
    is_alone_on_machine: bool = True
    """Whether a run is the only one on the machine. If not, it starts no worker processes."""
    command: str = ""
    """The command that started the sweep, for the records."""
    lock_timeout: float = 0.0
    """Seconds to wait until no other process writes to the run folder. Only a job that moved from a dead node of a Ray
    cluster waits."""

    def to_json(self) -> dict[str, Any]:
        return dict(vars(self))
