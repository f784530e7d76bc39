"""One run of a sweep, and what came of it, as JSON between processes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

from fedskew.experiment.config import Config
from fedskew.lab.sweep.identity import identity
from fedskew.lab.sweep.record import Record

Status = Literal["finished", "stopped", "failed"]


@dataclass(frozen=True)
class Job:
    """A run to be made."""

    config: Config
    label: str
    """What a user calls it."""
    validation: float | None = None
    """The part of the training data to test on, instead of the test set."""
    start: Config | None = None
    """The run whose final model this one begins with; none: a new model."""
    tag: str = ""
    """What tells it from the same experiment under other circumstances, where those are compared."""

    @cached_property
    def identity(self) -> str:
        """The same for jobs that are the same experiment."""
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
    """Each experiment once, in the place of its first job: a run that serves all who want it."""
    found: dict[str, Job] = {}
    for job in jobs:
        before = found.get(job.identity)
        found[job.identity] = job if before is None else _serving_both(before, job)
    return list(found.values())


def _serving_both(one: Job, other: Job) -> Job:
    """With the more rounds of the two, at its beginning too, its clients looked at if either wants that."""
    config = replace(_longer(one.config, other.config), eval_local=one.config.eval_local or other.config.eval_local)
    start = None if one.start is None or other.start is None else _longer(one.start, other.start)
    return replace(one, config=config, start=start)


def _longer(one: Config, other: Config) -> Config:
    return max(one, other, key=lambda config: config.rounds)


@dataclass(frozen=True)
class Outcome:
    """What came of a job; one that was stopped or failed may have a record of the rounds it did."""

    status: Status
    record: Record | None = None
    reason: str = ""

    def to_json(self) -> dict[str, Any]:
        content = None if self.record is None else dict(self.record.content)
        return {"status": self.status, "record": content, "reason": self.reason}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Outcome:
        record = content["record"]
        return cls(content["status"], None if record is None else Record(record), content["reason"])


@dataclass(frozen=True)
class Terms:
    """What holds for all jobs of a sweep."""

    folder: str | None = None
    """Where the runs' folders lie; none: nothing but records is kept, and a stopped run begins again."""
    deadline: float | None = None
    """When to stop, in seconds of the epoch."""
    alone: bool = True
    """Whether a run has the machine for itself; if not, it takes no second process."""
    command: str = ""

    def to_json(self) -> dict[str, Any]:
        return dict(vars(self))
