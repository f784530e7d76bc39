"""What tables and the conclusion say about runs that a callback stopped before their last round."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from fedskew.errors import plural

if TYPE_CHECKING:
    from fedskew.results.comparison import Comparison, MethodRuns


def early_stops(comparison: Comparison) -> list[str]:
    """Return a line per method with stopped runs, such as `fedavg: stopped early, after 5 to 12 of 30 rounds`."""
    return [
        f"{method.label}: {_describe(method)}"
        for method in comparison.methods
        if any(run.stopped_early for run in method.counted_runs)
    ]


def _describe(method: MethodRuns) -> str:
    stopped = [run for run in method.counted_runs if run.stopped_early]
    rounds, planned = span([run.rounds for run in stopped]), {run.planned_rounds for run in stopped}
    after = plural(1, "round") if rounds == "1" else f"{rounds} rounds"
    if len(planned) == 1 and (number := planned.pop()) is not None:
        after = f"{rounds} of {plural(number, 'round')}"
    few = "" if len(stopped) == len(method.counted_runs) else f"{len(stopped)} of {len(method.counted_runs)} runs "
    return f"{few}stopped early, after {after}"


def unequal_rounds(first: MethodRuns, second: MethodRuns) -> str:
    """Return the rounds of two methods, such as `30 against 5 to 12`, if an early stop made them different.

    Empty if the two trained for the same number of rounds with each seed that both have.
    """
    ours, theirs = ({run.seed: run for run in method.counted_runs} for method in (first, second))
    pairs = [(run, theirs[seed]) for seed, run in ours.items() if seed in theirs]
    if all(a.rounds == b.rounds or not (a.stopped_early or b.stopped_early) for a, b in pairs):
        return ""
    return " against ".join(span([run.rounds for run in runs]) for runs in zip(*pairs, strict=True))


def span(rounds: Collection[int]) -> str:
    """Return the number, or the lowest and the highest one, such as `5 to 12`."""
    return str(min(rounds)) if len(set(rounds)) == 1 else f"{min(rounds)} to {max(rounds)}"
