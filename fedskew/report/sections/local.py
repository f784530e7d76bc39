"""How local training changes the accuracy of each class, and how much the updates differ."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from fedskew.experiment.round.record import RoundRow
from fedskew.report.charts.chart import Bars, BarSeries, Figure, Lines
from fedskew.report.charts.table import number
from fedskew.report.sections.section import Point, Section, lines, percent
from fedskew.results import Comparison, MethodRuns, Result

KINDS = ("vacant", "minority", "majority")
_NOT_EVALUATED = "local models were not evaluated; run with --eval-local"
_AT_SITES = (
    "local models were not evaluated by class, because they are at the sites; with federation.local_tests, the rows of "
    "rounds.jsonl have their accuracy"
)


def local(comparison: Comparison) -> Section:
    """Build the section: accuracy before and after local training, and drift diversity."""
    methods = [method for method in comparison.methods if any(_rows(run) for run in method.counted_runs)]
    reasons = {method.label: not_evaluated(method) for method in comparison.methods if method not in methods}
    missing = [f"{label}: {reason}" for label, reason in reasons.items()]
    if not methods:
        common = set(reasons.values())
        return Section("local", "Local training", missing=list(common) if len(common) == 1 else missing)
    paragraphs = [
        "Each client's model is evaluated before and after its local training. Under label skew, local training tends "
        "to forget the classes with no samples (vacant) or few samples (minority) on a client. A good method for label "
        "skew retains them.",
        "The first two figures show means over the clients of the last evaluated round and over the seeds.",
    ]
    figures = [
        Figure("kinds", "Accuracy by kind of class, before and after local training", [_kinds(methods)]),
        Figure(
            "local-class",
            "Accuracy by class before and after local training, mean over clients",
            _by_class(comparison, methods),
            2,
        ),
        Figure("forgetting", "Mean accuracy on a client's vacant classes after its training", [_vacant(methods)]),
    ]
    if drifting := lines(methods, drift):
        figures.append(
            Figure(
                "drift",
                "Drift diversity of the updates m: 1/K for K equal ones, 1 for orthogonal ones, larger if they cancel",
                [Lines("drift", "drift diversity", "round", "Σ‖m‖² / ‖Σm‖²", drifting)],
            )
        )
    return Section("local", "Local training", paragraphs, figures, missing=missing)


def not_evaluated(method: MethodRuns) -> str:
    """Say why there are no results of local models, and what to do."""
    runs = method.counted_runs or method.runs
    if any(run.sites for run in runs):
        return _AT_SITES
    if not any(run.config.eval_local for run in runs):
        return _NOT_EVALUATED
    if not any(row.round for run in runs for row in run.evaluated):
        return "no round has been evaluated yet"
    return "--eval-local does not apply to this method"


def _rows(run: Result) -> list[RoundRow]:
    return [row for row in run.evaluated if row.local]


def _kinds(methods: list[MethodRuns]) -> Bars:
    series = []
    for method in methods:
        values = []
        for when in ("before", "after"):
            for kind in KINDS:
                found = [
                    one[when][kind] for run in method.counted_runs for row in _rows(run)[-1:] for one in row.local or ()
                ]
                known = [v for v in found if v is not None]
                values.append(percent(float(np.mean(known))) if known else None)
        series.append(BarSeries(method.label, values, style=method.index))
    categories = [f"{kind}, {when}" for when in ("before", "after") for kind in KINDS]
    return Bars("kinds", "by kind of class", "kind of class", "accuracy %", categories, series, (0, 100))


def _by_class(comparison: Comparison, methods: list[MethodRuns]) -> list[Bars]:
    moments = (
        ("before", "models before their update", _class_means_before),
        ("after", "local models after their update", class_means_after),
    )
    return [
        Bars(f"local-class-{when}", title, "class", "accuracy %", comparison.classes,
             [BarSeries(method.label, accuracies(method), style=method.index) for method in methods], (0, 100))
        for when, title, accuracies in moments
    ]  # fmt: skip


def _class_means_before(method: MethodRuns) -> list[float | None]:
    return _means([row.local_before or [] for run in method.counted_runs for row in _rows(run)[-1:]])


def class_means_after(method: MethodRuns) -> list[float | None]:
    """Class accuracies of the local models after their update, mean over clients and seeds."""
    found = [one["class_accuracy"] for run in method.counted_runs for row in _rows(run)[-1:] for one in row.local or ()]
    return _means(found)


def _means(rows: list[list[float | None]]) -> list[float | None]:
    table = np.array([[np.nan if a is None else 100 * a for a in row] for row in rows], np.float64)
    return [number(float(np.mean(known))) if len(known := c[np.isfinite(c)]) else None for c in table.T]


def _vacant(methods: list[MethodRuns]) -> Lines:
    return Lines("forgetting", "vacant classes", "round", "accuracy %", lines(methods, vacant_after), (0, 100))


def vacant_after(run: Result) -> Iterator[Point]:
    for row in _rows(run):
        known = [v for one in row.local or () if (v := one["after"]["vacant"]) is not None]
        yield row.model_round, percent(float(np.mean(known))) if known else None


def drift(run: Result) -> Iterator[Point]:
    for row in _rows(run):
        if row.drift_diversity is not None:
            yield row.model_round, number(row.drift_diversity, 4)
