"""What is kept of a run for good: its configuration, its curves and its circumstances, in a few kilobytes of JSON.

A record is made from the rows of a run, finished or not; one of a run that was stopped simply has fewer rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from fedskew.errors import UserError
from fedskew.experiment.config import Config
from fedskew.experiment.round.row import RoundRow
from fedskew.lab.sweep.identity import identity
from fedskew.metrics.confusion import Evaluation
from fedskew.metrics.summary import Curve, CurveSummary

FORMAT = 1
_DIGITS = 5
"""Of an accuracy: test sets have some ten thousand samples."""


@dataclass(frozen=True)
class Record:
    """One run's result."""

    content: Mapping[str, Any]

    @classmethod
    def of(cls, experiment: str, config: Config, rows: Sequence[RoundRow], circumstances: Mapping[str, Any]) -> Record:
        """From a run's rows; `experiment` is its identity, `circumstances` say where, when and how it ran."""
        evaluated = [row for row in rows if row.is_evaluated]
        if not evaluated:
            raise ValueError("a run without any evaluation")
        return cls(
            {
                "format": FORMAT,
                "experiment": experiment,
                "config": config.to_mapping(),
                "rounds": [row.model_round for row in evaluated],
                "accuracy": _series(evaluated, lambda e: e.accuracy),
                "macro_f1": _series(evaluated, lambda e: e.macro_f1),
                "worst_class": _series(evaluated, lambda e: e.worst_class),
                "domains": _domains(evaluated),
                "class_accuracy": [_rounded(a) for a in evaluated[-1].tested.class_accuracy],
                "compute": [round(float(c), 4) for c in _compute(rows)],
                "stages": _stages(rows),
                "local": _local(rows),
                "diverged": sum(len(row.diverged) for row in rows),
                "notes": evaluated[-1].notes,
                "seconds": round(sum(row.seconds for row in rows), 2),
                **circumstances,
            }
        )

    @classmethod
    def from_json(cls, content: Any) -> Record:
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise UserError(f"not the record of a run; expected a JSON object with format {FORMAT}")
        record = cls(content)
        try:
            record.config, record.curve, record.seconds, record.identity  # noqa: B018 - read, to find what is missing
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(f"the record of a run is damaged: {type(error).__name__}: {error}") from error
        return record

    @cached_property
    def config(self) -> Config:
        return Config.from_mapping(self.content["config"])

    @cached_property
    def identity(self) -> str:
        """Of the experiment, as this version of fedskew tells experiments apart.

        Made anew from the configuration: a parameter that a method has got since then has its default in both. What
        follows the first digits (another beginning, circumstances that were compared) is kept.
        """
        asked = replace(self.config, model=self.content.get("asked_model", self.config.model))
        _, dash, apart = str(self.content["experiment"]).partition("-")
        return identity(asked) + dash + apart

    @property
    def rounds(self) -> int:
        """Of the global model, as far as the run came."""
        return int(self.content["rounds"][-1])

    @property
    def curve(self) -> list[tuple[int, float]]:
        return self._points("accuracy")

    @property
    def f1_curve(self) -> list[tuple[int, float]]:
        return self._points("macro_f1")

    @property
    def worst_curve(self) -> list[tuple[int, float]]:
        return self._points("worst_class")

    def domain_curve(self, domain: str) -> list[tuple[int, float]] | None:
        """None where the data have no such domain."""
        series = self.content.get("domains", {}).get(domain)
        if series is None:
            return None
        return [(int(r), a) for r, a in zip(self.content["rounds"], series, strict=True) if a is not None]

    @property
    def compute_curve(self) -> list[tuple[float, float]]:
        """(computation so far, worst class) at every evaluation, the experts' computation included."""
        return list(zip(self.content["compute"], self.content["worst_class"], strict=True))

    @property
    def class_accuracy(self) -> list[float]:
        """Of the last model; classes without test samples are left out."""
        return [a for a in self.content["class_accuracy"] if a is not None]

    @property
    def seconds(self) -> float:
        return float(self.content["seconds"])

    @property
    def start_rounds(self) -> int:
        """How long the model was trained that the run began with; 0 for a new one."""
        return int(self.content.get("start_rounds", 0))

    @property
    def finished(self) -> bool:
        """Whether the run came to the end that its configuration says."""
        return self.rounds >= self.config.rounds

    def summary(self) -> CurveSummary:
        return CurveSummary.of(self.curve, self.config.mean_last)

    def _points(self, series: str) -> list[tuple[int, float]]:
        return [(int(r), float(a)) for r, a in zip(self.content["rounds"], self.content[series], strict=True)]


def until(curve: Curve, rounds: int) -> list[tuple[int, float]]:
    """The part of a curve that a shorter run would have had."""
    return [point for point in curve if point[0] <= rounds]


def _series(evaluated: Sequence[RoundRow], value: Callable[[Evaluation], float]) -> list[float | None]:
    return [_rounded(value(row.tested)) for row in evaluated]


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, _DIGITS)


def _domains(evaluated: Sequence[RoundRow]) -> dict[str, list[float | None]]:
    """The accuracy on each domain's test samples, where the data have domains."""
    names = evaluated[-1].domain_accuracy or {}
    return {name: [_rounded((row.domain_accuracy or {}).get(name)) for row in evaluated] for name in names}


def _compute(rows: Sequence[RoundRow]) -> list[float]:
    """The computation up to each evaluation of the global model."""
    total, at = 0.0, []
    for row in rows:
        total += row.compute
        if row.is_evaluated:
            at.append(total)
    return at


def _stages(rows: Sequence[RoundRow]) -> dict[str, dict[str, float]]:
    """By stage: rounds, computation, sample visits, and whatever the method counts of them."""
    stages: dict[str, dict[str, float]] = {}
    for row in rows:
        if row.round == 0:
            continue
        stage = stages.setdefault(row.stage, {"rounds": 0, "compute": 0.0, "visits": 0})
        stage["rounds"] += 1
        stage["compute"] = round(stage["compute"] + row.compute, 6)
        stage["visits"] += row.visits
        for name, number in row.tally.items():
            stage[name] = stage.get(name, 0.0) + number
    return stages


def _local(rows: Sequence[RoundRow]) -> dict[str, Any] | None:
    """The last round's clients before and after their update, where the run looked at them (`eval_local`)."""
    watched = [row for row in rows if row.local is not None]
    if not watched:
        return None
    last = watched[-1]
    local = last.local or []
    return {
        "round": last.model_round,
        "drift_diversity": last.drift_diversity,
        "before": [_rounded(a) for a in last.local_before or ()],
        "after": {str(c["client"]): [_rounded(a) for a in c["class_accuracy"]] for c in local},
        "groups": {str(c["client"]): {"before": c["before"], "after": c["after"]} for c in local},
    }
