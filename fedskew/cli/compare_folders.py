"""`fedskew compare RUN...`: runs that are finished, wherever they ran, side by side; nothing is run."""

from __future__ import annotations

from collections.abc import Sequence

from fedskew.errors import UserError
from fedskew.experiment.compare import MethodResults
from fedskew.experiment.config import differing_keys
from fedskew.experiment.result import Result
from fedskew.export.finished_run import read_run
from fedskew.metrics.summary import CurveSummary
from fedskew.report.recorded import RecordedRun, gather


def recorded_results(folders: Sequence[str]) -> tuple[list[MethodResults], tuple[str, ...], list[str]]:
    """One row a method, the names of the classes, and what a reader must know beside them."""
    gathered = gather(folders)
    runs = gathered.runs
    if unfinished := next((run for run in runs if not run.finished), None):
        raise UserError(f"{unfinished.folder} is not finished; expected finished runs, or `fedskew report` for others")
    classes = runs[0].classes
    if other := next((run for run in runs if run.classes != classes), None):
        raise UserError(f"{other.folder} has other classes than {runs[0].folder}; expected runs on the same data")
    by_method: dict[str, list[RecordedRun]] = {}
    for run in runs:
        by_method.setdefault(run.config.method, []).append(run)
    for method, own in by_method.items():
        _require_same_seeds(method, own, next(iter(by_method.values())))
    results = [MethodResults(method, tuple(map(_result, own))) for method, own in by_method.items()]
    return results, classes, [*gathered.unreadable, *_differences(runs)]


def _require_same_seeds(method: str, runs: Sequence[RecordedRun], others: Sequence[RecordedRun]) -> None:
    seeds, expected = (sorted(run.seed for run in some) for some in (runs, others))
    if len(set(seeds)) < len(seeds):
        raise UserError(f"method {method!r} is there twice with one seed; expected each method once a seed")
    if seeds != expected:
        raise UserError(
            f"method {method!r} has seeds {seeds}, {others[0].config.method!r} {expected}; expected the same"
        )


def _result(run: RecordedRun) -> Result:
    finished = read_run(run.folder)
    curve = [(number, evaluation.accuracy) for number, evaluation in run.evaluations.items()]
    return Result(
        config=run.config,
        history=run.rows,
        evaluation=finished.evaluation,
        curve=CurveSummary.of(curve, run.config.mean_last),
        model=finished.model,
        seconds=run.total("seconds"),
        engine=str(run.summary.get("engine")),
        folder=run.folder,
    )


def _differences(runs: Sequence[RecordedRun]) -> list[str]:
    """Beside the method and the seed."""
    keys = {key for run in runs for key in differing_keys(runs[0].config, run.config)}
    named = sorted(key for key in keys if key != "seed" and key.partition(".")[0] != "method")
    return [f"beside their methods, the runs differ in {', '.join(named)}"] if named else []
