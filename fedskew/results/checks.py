"""Check that runs from any folders can be put into one table."""

from __future__ import annotations

from collections.abc import Sequence

from fedskew.errors import UserError
from fedskew.experiment.config import differing_keys
from fedskew.experiment.result import Result
from fedskew.results.comparison import Comparison, compare_runs
from fedskew.results.ranking import DEFAULT_METRIC


def require_comparable(runs: Sequence[Result], rank_by: str = DEFAULT_METRIC) -> Comparison:
    """Compare these runs. All must be finished, on the same classes, with the same seeds for every method."""
    if unfinished := next((run for run in runs if not run.finished), None):
        raise UserError(
            f"{unfinished.folder} is not finished; expected finished runs, or `fedskew report` for unfinished ones"
        )
    if other := next((run for run in runs if run.classes != runs[0].classes), None):
        raise UserError(f"{other.folder} and {runs[0].folder} have different classes; expected runs on the same data")
    comparison = compare_runs(runs, rank_by=rank_by)
    if len(comparison.runs) < len(runs):
        kept = comparison.runs
        extra = next(run for run in runs if run not in kept)
        raise UserError(f"method {extra.method!r} has two runs with seed {extra.seed}; expected one run per seed")
    first = comparison.methods[0]
    expected = [run.seed for run in first.runs]
    for method in comparison.methods:
        seeds = [run.seed for run in method.runs]
        if seeds != expected:
            raise UserError(
                f"method {method.label!r} has seeds {seeds}, but {first.label!r} has {expected}; expected equal seeds"
            )
    return comparison


def setting_differences(runs: Sequence[Result]) -> list[str]:
    """Return a line that names the keys in which the runs differ, besides method and seed. Empty if there are none."""
    keys = {key for run in runs for key in differing_keys(runs[0].config, run.config)}
    named = sorted(key for key in keys if key != "seed" and key.partition(".")[0] != "method")
    return [f"besides their methods, the runs differ in {', '.join(named)}"] if named else []
