"""Figures with curves over the rounds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from fedskew.errors import UserError
from fedskew.methods.pkd import weak_groups
from fedskew.report.charts.chart import Figure, Line, Lines
from fedskew.report.charts.table import number
from fedskew.report.figures.bars import add_setting
from fedskew.report.sections.curves import accuracy, cost, worst_class
from fedskew.report.sections.experts import taught_shares, taught_shares_by_expert
from fedskew.report.sections.section import Point, lines, percent
from fedskew.results import Comparison, MethodRuns, Result

_DEFAULT_THRESHOLD = 2.0
"""PKD's default `group_threshold`."""


def accuracy_by_setting(comparisons: Sequence[Comparison]) -> Figure:
    """Draw a panel per setting and a curve per method."""
    panels = [
        Lines(f"accuracy-{i}", comparison.label, "round", "accuracy %", lines(comparison.methods, accuracy))
        for i, comparison in enumerate(comparisons)
    ]
    return Figure("accuracy", "Accuracy over the rounds", panels, min(3, len(panels)))


def worst_by_setting(comparisons: Sequence[Comparison]) -> Figure:
    panels = [
        Lines(f"worst-{i}", one.label, "round", "worst class, accuracy %", lines(one.methods, worst_class))
        for i, one in enumerate(comparisons)
    ]
    return Figure("worst", "The worst class over the rounds", panels, min(3, len(panels)))


def best_and_worst(comparisons: Sequence[Comparison]) -> Figure:
    """Draw the best and the worst class of each setting's first federated method.

    If a setting has only reference bounds, the first of them is drawn.
    """
    panels = []
    for i, comparison in enumerate(comparisons):
        method = next((method for method in comparison.methods if not method.is_reference_bound), comparison.methods[0])
        drawn = [
            Line(name, line.x, line.y, line.low, line.high, style)
            for style, (name, curve) in enumerate((("best class", best_class), ("worst class", worst_class)))
            for line in lines([method], curve)
        ]
        title = add_setting(method.label, comparison, comparisons)
        panels.append(Lines(f"best-worst-{i}", title, "round", "accuracy %", drawn, (0, 100)))
    return Figure("best-worst", "Best and worst class over the rounds", panels, min(3, len(panels)))


def best_class(run: Result) -> Iterator[Point]:
    for round_, evaluation in run.evaluations.items():
        yield round_, percent(evaluation.best_class)


def confusable_group(comparisons: Sequence[Comparison]) -> Figure:
    """Draw the accuracy of the classes in one group that a method confuses (`_group`), a panel per method."""
    panels = []
    for comparison in comparisons:
        for method in comparison.methods:
            run = _first_run(method)
            drawn = [
                Line(comparison.classes[c], sorted(run.evaluations), _class_curve(run, c), style=c) for c in _group(run)
            ]
            title = add_setting(method.label, comparison, comparisons)
            panels.append(Lines(f"group-{method.index}", title, "round", "accuracy %", drawn, (0, 100)))
    return Figure("group", "Accuracy of confusable classes over the rounds", panels, min(2, len(panels)))


def _group(run: Result) -> list[int]:
    """The first group that PKD recorded. Without one, PKD's default rule finds a group in the last confusion matrix."""
    noted = run.history[-1].notes.get("groups")
    if noted:
        return list(noted[0])
    require_single_label(run)
    assert run.last is not None
    counts = run.last.confusion.astype(np.float64)
    groups = weak_groups(counts / np.maximum(1, counts.sum(axis=1, keepdims=True)), _DEFAULT_THRESHOLD)
    if not groups:
        raise UserError(f"{run.name}: the data have {len(counts)} class; this figure needs at least two")
    return list(groups[0])


def _class_curve(run: Result, c: int) -> list[float | None]:
    return [percent(run.evaluations[round_].class_accuracy[c]) for round_ in sorted(run.evaluations)]


def prediction_flow(comparisons: Sequence[Comparison]) -> Figure:
    """Draw how often samples of class i are predicted as class j, over the rounds, a curve for every pair i ≠ j."""
    panels = []
    for comparison in comparisons:
        for method in comparison.methods:
            run = _first_run(method)
            rounds = sorted(run.evaluations)
            shares = np.stack([_shares(run, round_) for round_ in rounds])
            drawn = [
                Line(f"{comparison.classes[i]} → {comparison.classes[j]}", rounds,
                     [number(v, 2) for v in shares[:, i, j]], style=i)
                for i in range(shares.shape[1]) for j in range(shares.shape[2]) if i != j
            ]  # fmt: skip
            key, title = f"flow-{method.index}", add_setting(method.label, comparison, comparisons)
            panels.append(Lines(key, title, "round", "predicted as another class, %", drawn, thin=True))
    return Figure("flow", "How often each class is predicted as each other class", panels, min(2, len(panels)))


def require_single_label(run: Result) -> None:
    """Refuse a run whose samples have several labels, because it has no confusion matrix."""
    if run.config.task == "multi-label":
        raise UserError(f"{run.name}: samples have several labels; this figure needs one class per sample")


def _shares(run: Result, round_: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    require_single_label(run)
    counts = run.evaluations[round_].confusion.astype(np.float64)
    shares: np.ndarray[tuple[int, ...], np.dtype[np.float64]] = (
        100 * counts / np.maximum(1, counts.sum(axis=1, keepdims=True))
    )
    return shares


def computation(comparisons: Sequence[Comparison]) -> Figure:
    """Draw accuracy over rounds and over computation, and expert activations.

    Computation is shown twice, once for the global model only and once for all stages.
    """
    found = [(comparison, method) for comparison in comparisons for method in comparison.methods]
    methods = [method for _, method in found]
    if len(comparisons) > 1:  # a panel has the curves of all settings, so labels and styles must differ
        methods = [
            replace(method, label=add_setting(method.label, comparison, comparisons), index=i)
            for i, (comparison, method) in enumerate(found)
        ]
    panels = [
        Lines("over-rounds", "rounds", "round", "accuracy %", lines(methods, accuracy)),
        Lines("over-compute", "computation, global model", "FedAvg rounds", "accuracy %",
              [_over_compute(method, False) for method in methods]),
        Lines("over-total", "computation, all stages", "FedAvg rounds", "accuracy %",
              [_over_compute(method, True) for method in methods]),
    ]  # fmt: skip
    if taught := lines(methods, taught_shares):
        panels.append(Lines("activations", "expert activations", "round", "% of sample visits", taught))
    for i, comparison in enumerate(comparisons):
        by_method = [
            taught_shares_by_expert(method, run, comparison) for method in comparison.methods if (run := method.first)
        ]
        panels += [
            replace(chart, key=f"{chart.key}-{i}", title=add_setting(chart.title, comparison, comparisons))
            for chart in by_method if chart
        ]  # fmt: skip
    return Figure("computation", "Accuracy over rounds and computation", panels, 2)


def _over_compute(method: MethodRuns, all_stages: bool) -> Line:
    run = _first_run(method)
    if all_stages:
        spent = cost(run, "compute")
    else:
        total, spent = 0.0, {0: 0.0}
        for row in run.history:
            if row.is_global:
                total += row.compute
                spent[row.model_round] = total
    rounds = sorted(run.evaluations)
    accuracies = [percent(run.evaluations[round_].accuracy) for round_ in rounds]
    return Line(method.label, [round(spent[round_], 4) for round_ in rounds], accuracies, style=method.index)


def _first_run(method: MethodRuns) -> Result:
    run = method.first
    if run is None:
        raise UserError(f"{method.label}: no round was evaluated in {method.runs[0].folder}")
    return run
