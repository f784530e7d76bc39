"""The final table, and the significance of its differences."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fedskew.report.charts.table import Cell, Table, number
from fedskew.report.sections.section import Section
from fedskew.results import Comparison, MethodRuns, Result
from fedskew.results.early_stops import early_stops, unequal_rounds
from fedskew.results.ranking import METRICS
from fedskew.results.significance import MIN_SEEDS, POWER, Difference

_IN_PERCENT: dict[str, Callable[[Result], float]] = {
    "best − worst class": lambda run: run.evaluation.class_gap,
    "best accuracy %": lambda run: run.curve.best.accuracy,
    "mean of last accuracies %": lambda run: run.curve.mean_last.accuracy,
}
_FEW_SEEDS = 4
"""With up to this many seeds, the section warns that only large differences are detectable."""


def results(comparison: Comparison) -> Section:
    """Build the section: the final table, and the significance of differences."""
    ranking = comparison.ranking
    tables = [_final(ranking)] if ranking else []
    paragraphs = [
        "Metrics are means ± sample standard deviations over the seeds, after the last round. Two columns use other "
        "rounds. The best accuracy is that of the best round, which is chosen on the test set, as in papers. The mean "
        "of last accuracies is a mean over the last evaluated rounds."
    ]
    if stops := early_stops(comparison):
        paragraphs.append(f"A callback stopped these runs before their last round. {'; '.join(stops)}.")
    if len(comparison.competing) > 1:
        tables.append(_significance(comparison))
        paragraphs.append(
            f"The second table compares the best method by {comparison.metric.label} with each of the others, paired "
            "by seed. p is two-sided, from Student's t test, and corrected by Holm's method for all pairs of methods, "
            "because the best one is chosen on the same runs. "
            "Each interval has the level at which Holm's method tests that comparison, so it excludes 0 if and only if "
            'the difference is significant. "Seeds to settle it" is the number of seeds with which the difference '
            f"would be significant with a probability of {100 * POWER:.0f} %, if its mean and spread stay as they are."
        )
        paragraphs += _few_seeds_note(min(0 if d is None else d.seeds for d in comparison.differences()))
    missing = [
        f"{method.label}: no evaluated round in {method.runs[0].folder}"
        for method in comparison.methods
        if not method.counted_runs
    ]
    return Section("results", "Final results", paragraphs, tables=tables, missing=missing)


def _few_seeds_note(fewest: int) -> list[str]:
    """Warn that only large differences are detectable with few seeds.

    `fewest` is the smallest number of seeds that the best method shares with any of the others.
    """
    if fewest < MIN_SEEDS:
        return [f"A test needs at least {MIN_SEEDS} seeds that both methods have: --seeds {MIN_SEEDS}."]
    if fewest > _FEW_SEEDS:
        return []
    freedom = f"{fewest - 1} degrees of freedom"
    return [f"With {fewest} seeds, a test has {freedom}, so only large and consistent differences are significant."]


def _final(ranking: Sequence[MethodRuns]) -> Table:
    """List the methods, one per row, with the metrics that at least one of them has."""
    found = {m.heading: [m.cell(method.over_seeds(m.value), 2) for method in ranking] for m in METRICS.values()}
    found |= {
        name: [method.over_seeds(value).in_percent(2) for method in ranking] for name, value in _IN_PERCENT.items()
    }
    shown = {name: cells for name, cells in found.items() if set(cells) != {"–"}}
    columns = ["method", "seeds", *shown, "compute", "MB moved", "training time, s"]
    rows = [_row(method, [cells[i] for cells in shown.values()]) for i, method in enumerate(ranking)]
    return Table("final", "Results by method", columns, rows)


def _row(method: MethodRuns, measured: Sequence[str]) -> list[Cell]:
    n = len(method.counted_runs)
    totals = [[run.compute, run.bytes_moved / 1e6, run.seconds] for run in method.counted_runs]
    return [method.label, n, *measured, *(_cost(sum(column) / n) for column in zip(*totals, strict=True))]


def _cost(mean: float) -> float | None:
    """Round a cost. A small cost keeps more digits. A cost of 0 becomes None, because it may not have been recorded."""
    return number(mean, 1 if mean >= 1 else 3) if mean else None


def _significance(comparison: Comparison) -> Table:
    best, *others = comparison.competing
    rows: list[list[Cell]] = []
    scale, digits = comparison.metric.scale, 2 if comparison.metric.percent else 4
    for other, d in zip(others, comparison.differences(), strict=True):
        if d is None:
            rows.append([other.label, None, None, None, None, None, "no seed in common", None])
            continue
        bounds = [None if b is None else number(scale * b, digits) for b in (d.low, d.high)]
        won = f"{d.wins} of {d.seeds}"
        lead = number(scale * d.mean, digits)
        result = _result(d) + (", but after different numbers of rounds" if unequal_rounds(best, other) else "")
        rows.append([other.label, won, lead, *bounds, number(d.p, 4), result, d.seeds_to_settle])
    difference = "difference, points" if comparison.metric.percent else "difference"
    columns = ["against", "seeds won", difference, "interval from", "to", "p", "result", "seeds to settle it"]
    title = f"{best.label}, the best by {comparison.metric.label}, compared with each of the others"
    return Table("significance", title, columns, rows)


def _result(difference: Difference) -> str:
    if difference.seeds < MIN_SEEDS:
        return f"not tested: fewer than {MIN_SEEDS} seeds"
    if difference.p is None:
        return "not tested: identical difference for every seed"
    return "significant" if difference.significant else "not significant"
