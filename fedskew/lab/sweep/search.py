"""Hyper-parameter search with Optuna (an optional dependency).

A point is one combination of values. Points are scored on a part of the training data, never on the test set.

    method: fedvls
    rounds: 30
    search:
      method.distill_weight: {low: 0.01, high: 1.0, log: true}
      method.teacher_mode: [train, eval]
      local_epochs: {low: 1, high: 10}
    validation: 0.2

A list gives the possible values. `low` and `high` give a range, of whole numbers if both are whole numbers. The
validation part is taken from the training data before they are split. A journal of JSON lines keeps all trials.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from fedskew.errors import UserError
from fedskew.experiment.config import Config, with_values
from fedskew.experiment.config.values import integer, read_yaml, real
from fedskew.experiment.preparation import partition_rule
from fedskew.lab.sweep.grid import refuse_overridden
from fedskew.lab.sweep.job import NON_IDENTIFYING_KEYS, Job
from fedskew.lab.sweep.records import JOURNAL, Outcome, Record
from fedskew.lab.sweep.table import measured_name
from fedskew.methods import make_method
from fedskew.results.ranking import DEFAULT_METRIC, METRICS, RankingMetric

_VALIDATION = 0.2
"""The default of the key `validation`."""
_WITHOUT_EFFECT_ON_SCORE = tuple(
    key for key in NON_IDENTIFYING_KEYS if key not in ("rounds", "eval_every", "mean_last")
)
"""Keys that do not change the score of a point."""

Run = Callable[[Sequence[Job]], Mapping[str, Outcome]]
"""Runs jobs and returns their outcomes by identity. Jobs of the same point and seed share an identity, and so an
outcome."""


@dataclass(frozen=True)
class Search:
    """The search space, the base configuration, and how points are scored."""

    base: Config
    space: Mapping[str, Any]
    """The list or the range of values, by dotted key."""
    seeds: Sequence[int]
    validation: float
    """The fraction of the training data on which points are scored."""
    metric: RankingMetric = METRICS[DEFAULT_METRIC]
    """The metric by which points are scored."""

    @property
    def name(self) -> str:
        """A hash that identifies the search. It changes if new trials could not be compared with old ones."""
        base = {key: value for key, value in self.base.to_mapping().items() if key not in _WITHOUT_EFFECT_ON_SCORE}
        identity = [base, self.space, list(self.seeds), self.validation]
        if self.metric.name != DEFAULT_METRIC:
            identity.append(self.metric.name)
        return hashlib.sha256(json.dumps(identity, sort_keys=True, default=str).encode()).hexdigest()[:12]

    def jobs(self, number: int, values: Mapping[str, Any]) -> list[Job]:
        """Make the runs that score the point of trial `number`, one per seed.

        The tag distinguishes points that differ only in keys that do not identify an experiment, such as `rounds`.
        """
        tag = ",".join(f"{key}={value}" for key, value in values.items() if key in NON_IDENTIFYING_KEYS)
        return [
            Job(
                with_values(self.base, {**values, "seed": seed}),
                f"trial {number} seed {seed}",
                self.validation,
                tag=tag,
            )
            for seed in self.seeds
        ]

    def final_jobs(self, found: BestPoint) -> list[Job]:
        """Make the runs that train the best point on all training data and evaluate it on the test set."""
        jobs = self.jobs(found.number, found.values)
        return [replace(job, label=f"best, {job.label}", validation=None) for job in jobs]


def read_search(
    path: str | Path,
    values: Mapping[str, Any],
    seeds: str | int | None = None,
    metric: RankingMetric = METRICS[DEFAULT_METRIC],
) -> Search:
    content = read_yaml(path)
    if not isinstance(content, Mapping):
        raise UserError(f"{path}: expected a mapping of keys to values, one of them 'search'")
    keys = dict(content)
    space, listed_seeds = keys.pop("search", None), keys.pop("seeds", 1)
    validation = keys.pop("validation", _VALIDATION)
    try:
        if not isinstance(space, Mapping) or not space:
            found = "no search" if space is None else f"search is {space!r}"
            raise UserError(
                f"{found}; expected a mapping such as search: {{method.mu: {{low: 0.001, high: 1, log: true}}}}"
            )
        base = with_values(Config.from_mapping(keys), values)
        number = integer(1)("seeds", listed_seeds if seeds is None else seeds)
        fraction = real(above=0, below=1)("validation", validation)
        space = {str(key): listed for key, listed in space.items()}
        search = Search(base, space, range(base.seed, base.seed + number), fraction, metric)
        _check(search)
        refuse_overridden(values, base, space, "search")
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    return search


def _check(search: Search) -> None:
    """Check every value of each list, and the lower end of each range, before anything runs.

    The other keys of the search then have their first values, because those of the base configuration may not fit. For
    example, `optimizer: nesterov` does not fit a base with momentum 0.
    """
    if "seed" in search.space:
        raise UserError("search.seed is not possible; expected seeds outside the search, such as seeds: 3")
    point = {key: _first_value(key, values) for key, values in search.space.items()}
    for key, values in search.space.items():
        for value in values if isinstance(values, list) else [point[key]]:
            config = with_values(search.base, point | {key: value})
            make_method(config.method, config.method_params)
            partition_rule(config)


def _first_value(key: str, values: Any) -> Any:
    """The first value of a list, or the lower end of a range. Raise `UserError` for anything else."""
    if isinstance(values, list) and values:
        return values[0]
    if isinstance(values, Mapping) and {"low", "high"} <= set(values) <= {"low", "high", "log"}:
        numbers = [values["low"], values["high"]]
        are_numbers = all(isinstance(n, int | float) and not isinstance(n, bool) and math.isfinite(n) for n in numbers)
        if are_numbers and numbers[0] < numbers[1]:
            if not isinstance(values.get("log", False), bool):
                raise UserError(f"search.{key} has log {values['log']!r}; expected true or false")
            if values.get("log") and numbers[0] <= 0:
                raise UserError(f"search.{key} has log and low {numbers[0]}; expected low above 0")
            return numbers[0]
    raise UserError(
        f"search.{key} is {values!r}; expected a list of values, or a range with low below high, such as "
        "{low: 0.01, high: 1, log: true}"
    )


@dataclass(frozen=True)
class BestPoint:
    """The best point of a search."""

    number: int
    """The trial's number, as in the labels of its runs."""
    values: dict[str, Any]
    score: float
    """The score by which trials are selected: see `mean_score`."""
    trials: int
    """The number of completed trials."""
    failed: int
    """The number of failed trials."""


def search_with_optuna(search: Search, trials: int, at_once: int, folder: Path, run: Run) -> BestPoint:
    """Try points, `at_once` at a time, and return the best point.

    The search ends when the folder's journal has `trials` completed or failed trials of this search, or when a run is
    stopped.
    """
    optuna = _optuna()
    folder.mkdir(parents=True, exist_ok=True)
    backend = optuna.storages.journal.JournalFileBackend(str(folder / JOURNAL))
    storage = optuna.storages.JournalStorage(backend)
    direction = "minimize" if search.metric.lower_is_better else "maximize"
    study = optuna.create_study(storage=storage, study_name=search.name, direction=direction, load_if_exists=True)
    finished = (optuna.trial.TrialState.COMPLETE, optuna.trial.TrialState.FAIL)
    while (done := len(study.get_trials(states=finished))) < trials:
        # With `constant_liar`, points that are tried at the same time are less alike.
        study.sampler = optuna.samplers.TPESampler(seed=search.base.seed + done, constant_liar=True)
        new = [study.ask() for _ in range(min(at_once, trials - done))]
        points = [_point(trial, search.space) for trial in new]
        outcomes = run([job for t, p in zip(new, points, strict=True) for job in search.jobs(t.number, p)])
        for trial, point in zip(new, points, strict=True):
            by_seed = [outcomes[job.identity] for job in search.jobs(trial.number, point)]
            if not any(outcome.status == "stopped" for outcome in by_seed):
                trial.set_user_attr("values", point)
                score = _score(by_seed, search.metric)
                if score is None:
                    trial.set_user_attr("reason", _why_failed(by_seed, search.metric))
                study.tell(trial, score, optuna.trial.TrialState.FAIL if score is None else None)
        if any(outcome.status == "stopped" for outcome in outcomes.values()):
            break
    return _best(study, optuna, search.metric, was_stopped=done < trials)


def _best(study: Any, optuna: Any, metric: RankingMetric, was_stopped: bool) -> BestPoint:
    complete = study.get_trials(states=(optuna.trial.TrialState.COMPLETE,))
    failed = study.get_trials(states=(optuna.trial.TrialState.FAIL,))
    if not complete and was_stopped:
        raise UserError("no trial finished; increase --time-limit")
    if not complete:
        reason = failed[-1].user_attrs.get("reason", "unknown")
        raise UserError(
            f"no trial finished; {len(failed)} failed, the last because: {reason}; failed trials are not repeated; "
            "expected another search, or a larger --trials"
        )
    best = max(complete, key=lambda trial: metric.sign * trial.value)
    return BestPoint(best.number, dict(best.user_attrs["values"]), float(best.value), len(complete), len(failed))


def _point(trial: Any, space: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _suggest(trial, key, values) for key, values in space.items()}


def _suggest(trial: Any, key: str, values: Any) -> Any:
    if isinstance(values, list):
        return values[trial.suggest_categorical(key, list(range(len(values))))]
    low, high, log = values["low"], values["high"], bool(values.get("log"))
    if isinstance(low, int) and isinstance(high, int):
        return trial.suggest_int(key, low, high, log=log)
    return trial.suggest_float(key, float(low), float(high), log=log)


def _score(outcomes: Sequence[Outcome], metric: RankingMetric) -> float | None:
    """Return the score of a trial. None if a run failed or lacks the metric."""
    finished = [o.record for o in outcomes if o.status == "finished" and o.record is not None]
    return mean_score(finished, metric) if len(finished) == len(outcomes) else None


def _why_failed(outcomes: Sequence[Outcome], metric: RankingMetric) -> str:
    """Return why a trial without a score failed."""
    reasons = (outcome.reason for outcome in outcomes if outcome.status == "failed")
    return next(reasons, f"a run has no {metric.label}")


def mean_score(records: Sequence[Record], metric: RankingMetric) -> float | None:
    """Return the mean over the seeds and over the last `mean_last` rounds, because single rounds vary.

    Metrics that are known only at the end, such as AUROC, are averaged over the seeds only. None if a record lacks the
    metric.
    """
    scores = [record.mean_of_last(measured_name(metric), record.config) for record in records]
    known = [score for score in scores if score is not None]
    return fmean(known) if len(known) == len(scores) else None


def _optuna() -> Any:
    try:
        import optuna
    except ImportError as error:
        raise UserError("--search optuna needs Optuna: pip install 'fedskew[search]'") from error
    optuna.logging.set_verbosity(logging.WARNING)
    return optuna
