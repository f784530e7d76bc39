"""Learning curves over rounds, communication and computation."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

from fedskew.report.charts.chart import Figure, Line, Lines
from fedskew.report.sections.section import Point, Section, lines, mean_line, percent
from fedskew.results import Comparison, MethodRuns, Result

PERCENT_RANGE = (0.0, 100.0)


def curves(comparison: Comparison) -> Section:
    """Build the section: accuracy over rounds and over cost, the worst class, and the local loss."""
    methods = comparison.methods
    over_rounds = Lines(
        "accuracy", "accuracy over rounds", "round", "accuracy %", lines(methods, accuracy), PERCENT_RANGE
    )
    worst = Lines(
        "worst", "worst class over rounds", "round", "accuracy of the worst class %", lines(methods, worst_class)
    )
    figures = [Figure("rounds", "Accuracy and worst class over the rounds", [over_rounds, worst], 2)]
    missing = []
    costs = [
        Lines(f"by-{key}", f"accuracy over {what}", f"{what}, {unit}", "accuracy %", found, PERCENT_RANGE)
        for key, what, unit in (("bytes", "communication", "MB"), ("compute", "computation", "FedAvg rounds"))
        if (found := [line for method in methods if (line := _by_cost(method, key))])
    ]
    if costs:
        figures.append(Figure("costs", "Accuracy over cost", costs, 2))
    rows = [row for run in comparison.runs for row in run.history if row.round]
    if rows and not any(row.bytes for row in rows):
        missing.append(
            "communication: an earlier version of fedskew made these runs and did not count bytes; repeat them"
        )
    if losses := lines(methods, loss):
        figures.append(Figure("loss", "Mean local loss", [Lines("loss", "local loss", "round", "loss", losses)]))
    band = (
        "Where a curve is a mean over seeds, a band spans their lowest to their highest value."
        if any(len(method.counted_runs) > 1 for method in methods)
        else ""
    )
    return Section("curves", "Learning curves", [band] if band else [], figures, missing=missing)


def accuracy(run: Result) -> Iterator[Point]:
    for round_, evaluation in run.evaluations.items():
        yield round_, percent(evaluation.accuracy)


def worst_class(run: Result) -> Iterator[Point]:
    for round_, evaluation in run.evaluations.items():
        yield round_, percent(evaluation.worst_class)


def loss(run: Result) -> Iterator[Point]:
    for row in run.history:
        if row.is_global and row.round:
            yield row.model_round, row.loss


def cost(run: Result, key: str) -> dict[int, float]:
    """The total cost up to each evaluated round, including stages that train other models.

    `key` is `bytes`, for megabytes, or `compute`, for computation in units of a FedAvg round.
    """
    spent = [row.bytes_moved / 1e6 if key == "bytes" else row.compute for row in run.history]
    sums = {row.round: total for row, total in zip(run.history, accumulate(spent), strict=True)}
    return {row.model_round: sums[row.round] for row in run.evaluated}


def _by_cost(method: MethodRuns, key: str) -> Line | None:
    """Mean accuracy over mean cost, with a point per round. Both are means over the seeds."""
    line = mean_line(method, accuracy)
    if line is None:
        return None
    costs = [cost(run, key) for run in method.counted_runs]
    means = [sum(c[int(round_)] for c in costs) / len(costs) for round_ in line.x]
    if not any(means):
        return None
    return Line(line.name, [round(x, 4) for x in means], line.y, line.low, line.high, line.style)
