"""Records, the permanent results of runs, in a few kilobytes of JSON each.

A record has the configuration, the curves and the circumstances of a run. The record of a stopped run has fewer
rounds. A file has one record per line and only grows, so files from several machines can be concatenated.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from fedskew.errors import UserError, other_format
from fedskew.experiment.config import Config
from fedskew.experiment.round.record import RoundRow
from fedskew.experiment.storage.files import reporting_os_errors
from fedskew.lab.sweep.job import Job, has_stages, identity, planned_rounds
from fedskew.metrics.confusion import Evaluation
from fedskew.metrics.scores import Scores
from fedskew.metrics.summary import Curve, CurveSummary, mean_of_last
from fedskew.results.ranking import METRICS

FORMAT = 1
JOURNAL = "search.jsonl"
"""The file with the trials of a search, in the same folder as the records."""
_DIGITS = 5
"""Decimal digits of accuracies and other scores. Test sets rarely have enough samples to need more."""


FINAL_SCORES = {name.replace("-", "_"): metric.score for name, metric in METRICS.items() if metric.score is not None}
"""Metrics of the final model's probabilities, with their attributes in `Scores`."""


@dataclass(frozen=True)
class Record:
    """One run's result."""

    content: Mapping[str, Any]

    @classmethod
    def from_rows(
        cls,
        experiment: str,
        config: Config,
        rows: Sequence[RoundRow],
        circumstances: Mapping[str, Any],
        scores: Scores | None = None,
    ) -> Record:
        """Summarise a run.

        `experiment` is the identity of the run's experiment. `circumstances` say where, when and how it ran. `scores`
        are the scores of the final model, if the run is finished.
        """
        evaluated = [row for row in rows if row.is_evaluated]
        if not evaluated:
            raise ValueError("the run has no evaluation")
        return cls(
            {
                "format": FORMAT,
                "experiment": experiment,
                "config": config.to_mapping(),
                "rounds": [row.model_round for row in evaluated],
                "accuracy": _series(evaluated, lambda e: e.accuracy),
                "macro_f1": _series(evaluated, lambda e: e.macro_f1),
                "worst_class": _series(evaluated, lambda e: e.worst_class),
                "balanced_accuracy": _series(evaluated, lambda e: e.mean_class),
                "kappa": _series(evaluated, lambda e: e.kappa),
                "log_loss": _series(evaluated, lambda e: e.log_loss),
                **_final_scores(scores),
                "domains": _domains(evaluated),
                "class_accuracy": [_rounded(a) for a in evaluated[-1].required_evaluation.class_accuracy],
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
        if not isinstance(content, dict) or "format" not in content:
            raise UserError(f"not a record of a run; expected a JSON object with format {FORMAT}")
        if content["format"] != FORMAT:
            raise other_format("the record of a run", content["format"], FORMAT)
        record = cls(content)
        try:
            # Each of these raises an error if something is missing.
            record.config, record.rounds, record.curve, record.seconds, record.identity  # noqa: B018
        except (LookupError, TypeError, ValueError) as error:
            raise UserError(f"damaged record of a run: {type(error).__name__}: {error}") from error
        return record

    @cached_property
    def config(self) -> Config:
        return Config.from_mapping(self.content["config"])

    @cached_property
    def identity(self) -> str:
        """The identity of the experiment, as this version of fedskew computes it.

        The identity is a hash of the configuration. The saved hash does not include parameters that the method got
        after the record was written. So the hash is computed again, and such parameters have their defaults. The
        suffix for a start model or a tag is kept.
        """
        requested = replace(self.config, model=self.content.get("asked_model", self.config.model))
        _, dash, suffix = str(self.content["experiment"]).partition("-")
        return identity(requested) + dash + suffix

    @property
    def rounds(self) -> int:
        """Rounds of the global model up to its last evaluation."""
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

    def value_after(self, measure: str, rounds: int) -> float | None:
        """Return a measure such as `macro_f1` at the last evaluation up to `rounds`. None if the record lacks it.

        Scores such as AUROC are known only after the last round, and older records lack some measures.
        """
        if measure in FINAL_SCORES:
            found = self.content.get(measure) if self.rounds <= rounds else None
            return None if found is None else float(found)
        if measure not in self.content:
            return None
        value = until(self._points(measure), rounds)[-1][1]
        return None if math.isnan(value) else value

    def mean_of_last(self, measure: str, config: Config) -> float | None:
        """Return the mean of a measure such as `macro_f1` over the last `mean_last` rounds of a configuration.

        The record may be longer than the configured run. Its later rounds do not count. A measure in `FINAL_SCORES`,
        such as AUROC, has only the value after the record's last round. It is returned instead of a mean, or None if
        the record is longer. Also None if a value is missing.
        """
        rounds = planned_rounds(config)
        if measure in FINAL_SCORES or measure not in self.content:
            return self.value_after(measure, rounds)
        mean = mean_of_last(until(self._points(measure), rounds), config.mean_last).accuracy
        return None if math.isnan(mean) else mean

    def domain_curve(self, domain: str) -> list[tuple[int, float]] | None:
        """Accuracy on one domain. None if the data do not have it."""
        series = self.content.get("domains", {}).get(domain)
        if series is None:
            return None
        return [(int(r), a) for r, a in zip(self.content["rounds"], series, strict=True) if a is not None]

    @property
    def compute_curve(self) -> list[tuple[float, float]]:
        """Pairs (computation so far, worst class's accuracy). The computation includes that of earlier stages."""
        return list(zip(self.content["compute"], self.content["worst_class"], strict=True))

    @property
    def class_accuracy(self) -> list[float]:
        """Class accuracies of the last model, without classes that have no test samples."""
        return [a for a in self.content["class_accuracy"] if a is not None]

    @property
    def seconds(self) -> float:
        return float(self.content["seconds"])

    @property
    def start_rounds(self) -> int:
        """Rounds for which the start model was trained. 0 for a new model."""
        return int(self.content.get("start_rounds", 0))

    @property
    def finished(self) -> bool:
        """Whether the run has all rounds of its configuration."""
        return self.rounds >= planned_rounds(self.config)

    def summary(self) -> CurveSummary:
        return CurveSummary.from_curve(self.curve, self.config.mean_last)

    def _points(self, series: str) -> list[tuple[int, float]]:
        """Pairs (round, value) of a series such as `accuracy`. A value that is missing is NaN."""
        points = zip(self.content["rounds"], self.content[series], strict=True)
        return [(int(r), math.nan if a is None else float(a)) for r, a in points]


def until(curve: Curve, rounds: int) -> list[tuple[int, float]]:
    """The part of a curve up to this number of rounds."""
    return [point for point in curve if point[0] <= rounds]


def _series(evaluated: Sequence[RoundRow], value: Callable[[Evaluation], float | None]) -> list[float | None]:
    return [_rounded(value(row.required_evaluation)) for row in evaluated]


def _final_scores(scores: Scores | None) -> dict[str, float]:
    found = {name: getattr(scores, score, None) for name, score in FINAL_SCORES.items()}
    return {name: round(value, _DIGITS) for name, value in found.items() if value is not None}


def _rounded(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else round(value, _DIGITS)


def _domains(evaluated: Sequence[RoundRow]) -> dict[str, list[float | None]]:
    """Accuracy per domain, if the data have domains."""
    names = evaluated[-1].domain_accuracy or {}
    return {name: [_rounded((row.domain_accuracy or {}).get(name)) for row in evaluated] for name in names}


def _compute(rows: Sequence[RoundRow]) -> list[float]:
    """Computation up to each evaluation of the global model."""
    total, totals = 0.0, []
    for row in rows:
        total += row.compute
        if row.is_evaluated:
            totals.append(total)
    return totals


def _stages(rows: Sequence[RoundRow]) -> dict[str, dict[str, float]]:
    """Sum rounds, computation, sample visits and the method's counts per stage."""
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
    """What `eval_local` recorded in the last round with it: accuracies before and after local training, and drift."""
    with_local = [row for row in rows if row.local is not None]
    if not with_local:
        return None
    last = with_local[-1]
    local = last.local or []
    return {
        "round": last.model_round,
        "drift_diversity": last.drift_diversity,
        "before": [_rounded(a) for a in last.local_before or ()],
        "after": {str(c["client"]): [_rounded(a) for a in c["class_accuracy"]] for c in local},
        "groups": {str(c["client"]): {"before": c["before"], "after": c["after"]} for c in local},
    }


Status = Literal["finished", "stopped", "failed"]


@dataclass(frozen=True)
class Outcome:
    """How a job ended. A stopped job may have a record of its rounds."""

    status: Status
    record: Record | None = None
    reason: str = ""
    """Why the job failed."""

    def to_json(self) -> dict[str, Any]:
        content = None if self.record is None else dict(self.record.content)
        return {"status": self.status, "record": content, "reason": self.reason}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Outcome:
        record = content["record"]
        return cls(content["status"], None if record is None else Record(record), content["reason"])


class RecordsFile:
    """A file of records. An incomplete line is ignored, because a killed process may leave one."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def read(self) -> list[Record]:
        return list(self._records())

    def append(self, record: Record) -> None:
        line = json.dumps(record.content, separators=(",", ":"), allow_nan=False)
        with reporting_os_errors("write", self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            content = self.path.read_bytes() if self.path.exists() else b""
            has_incomplete_line = content != b"" and not content.endswith(b"\n")
            with self.path.open("a", encoding="utf-8") as file:
                file.write(("\n" if has_incomplete_line else "") + line + "\n")

    def _records(self) -> Iterator[Record]:
        with reporting_os_errors("read", self.path):
            try:
                lines = self.path.read_text(encoding="utf-8").split("\n") if self.path.exists() else []
            except UnicodeDecodeError as error:
                raise UserError(f"{self.path}: not UTF-8; expected a JSON record of a run per line") from error
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                content = json.loads(line)
            except ValueError as error:
                # Skip the last line, or a line that breaks off, because a killed process may have left it.
                breaks_off = not line.endswith("}") or getattr(error, "pos", None) == len(line)
                if number >= len(lines) - 1 or breaks_off:
                    continue
                raise UserError(f"{self.path} line {number}: not JSON; expected a record of a run") from None
            try:
                yield Record.from_json(content)
            except UserError as error:
                raise UserError(f"{self.path} line {number}: {error}") from error


def is_enough(record: Record, job: Job) -> bool:
    """Whether the run, and the run it started from, have as many rounds as the job needs.

    If the run was planned with another number of rounds, it must also have been evaluated after exactly the job's
    rounds.
    """
    rounds = planned_rounds(job.config)
    was_evaluated = record.config.rounds == job.config.rounds or rounds in record.content["rounds"]
    return record.rounds >= rounds and was_evaluated and (job.start is None or record.start_rounds >= job.start.rounds)


class Records:
    """Records by experiment. If an experiment has several records, the one with the most rounds is used.

    The longest record may not be enough for a job (`is_enough`), because it was not evaluated after the job's last
    round. Then a shorter record is used if it is enough. Among records with equally many rounds, the one added last is
    used. If the runs start from a trained model, the rounds of the start model are compared first, and the rounds of
    the run decide only between equals. A job with local evaluation (`eval_local`) only gets records with local
    evaluation.
    """

    def __init__(self, records: Iterable[Record] = ()) -> None:
        self._by_identity: dict[str, list[Record]] = {}
        for record in records:
            self.add(record)

    def add(self, record: Record) -> None:
        self._by_identity.setdefault(record.identity, []).append(record)

    def get(self, job: Job) -> Record | None:
        """The record of the job's experiment. It may have fewer or more rounds than the job."""
        known = self._by_identity.get(job.identity, [])
        found = [record for record in known if record.config.eval_local or not job.config.eval_local]
        return _longest([record for record in found if is_enough(record, job)] or found) if found else None

    def longest(self, job: Job) -> Record | None:
        """Return the record of the job's experiment.

        For a method with stages, another number of rounds is another experiment. If the job has no record, look at the
        experiments that differ from it only in having fewer rounds. Return the record of the longest of them.
        """
        if (found := self.get(job)) or not has_stages(job.config):
            return found
        rounds_needed = job.config.rounds
        fewer = sorted({r.config.rounds for r in self if r.config.rounds < rounds_needed}, reverse=True)
        shorter = (replace(job, config=replace(job.config, rounds=rounds)) for rounds in fewer)
        return next((found for one in shorter if (found := self.get(one))), None)

    def __len__(self) -> int:
        return len(self._by_identity)

    def __iter__(self) -> Iterator[Record]:
        return map(_longest, self._by_identity.values())


def _longest(records: Sequence[Record]) -> Record:
    """The record whose start model has the most rounds. Among equals, the one with the most rounds, then the last."""
    return max(reversed(records), key=lambda record: (record.start_rounds, record.rounds))


def read_folder(folder: str | Path) -> Records:
    """Read all records in the *.jsonl files of a folder, except the journal of a search, which has no records."""
    paths = [path for path in sorted(Path(folder).glob("*.jsonl")) if path.name != JOURNAL]
    return Records(record for path in paths for record in RecordsFile(path).read())
