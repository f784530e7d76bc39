"""Bar charts by class, by setting and by part of a method."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fedskew.errors import UserError
from fedskew.experiment.round.record import RoundRow
from fedskew.report.charts.chart import Bars, BarSeries, Chart, Figure
from fedskew.report.charts.table import number
from fedskew.report.sections.local import class_means_after, not_evaluated
from fedskew.report.sections.section import percent
from fedskew.results import Comparison, MethodRuns, Result


def local_update(comparisons: Sequence[Comparison]) -> Figure:
    """Compare a client's model before and after its local update, by class. Each method has a panel.

    The client is the first one in the last round that evaluated local models.
    """
    panels: list[Chart] = []
    for comparison in comparisons:
        for method in with_local_models(comparison):
            run, row = last_local_row(method)
            first_client = (row.local or [])[0]
            series = [
                BarSeries("before the update", [percent(a) for a in row.local_before or ()], style=0),
                BarSeries("after the update", [percent(a) for a in first_client["class_accuracy"]], style=1),
            ]
            aggregated = f"{100 * run.evaluations[row.model_round].accuracy:.1f}\N{NO-BREAK SPACE}%"
            client = client_label(comparison, first_client["client"])
            title = add_setting(f"{method.label}, client {client}; aggregated {aggregated}", comparison, comparisons)
            panels.append(
                Bars(f"update-{method.index}", title, "class", "accuracy %", comparison.classes, series, (0, 100))
            )
    return Figure("local-update", "Accuracy by class before and after a local update", panels, min(2, len(panels)))


def local_and_aggregated(comparisons: Sequence[Comparison]) -> Figure:
    """Show accuracy by class after local updates (the mean over clients) and after aggregation."""
    panels = []
    for i, comparison in enumerate(comparisons):
        methods = with_local_models(comparison)
        for method in methods:
            last_local_row(method)  # raises a UserError if the method's local models were not evaluated
        after = [BarSeries(method.label, class_means_after(method), style=method.index) for method in methods]
        aggregated = [
            BarSeries(method.label, _class_percentages(method), style=method.index)
            for method in comparison.methods
            if method.counted_runs
        ]
        for key, title, series in (("local", "after local update", after), ("global", "after aggregation", aggregated)):
            panels.append(
                Bars(
                    f"{key}-{i}",
                    add_setting(title, comparison, comparisons),
                    "class",
                    "accuracy %",
                    comparison.classes,
                    series,
                    (0, 100),
                )
            )
    return Figure("local-and-global", "Accuracy by class after local updates and after aggregation", panels, 2)


def _class_percentages(method: MethodRuns) -> list[float | None]:
    return [number(100 * v) for v in method.class_accuracy]


def add_setting(title: str, comparison: Comparison, comparisons: Sequence[Comparison]) -> str:
    """Add the setting to the title if there are several settings."""
    return f"{comparison.label}: {title}" if len(comparisons) > 1 else title


def client_label(comparison: Comparison, client: int) -> str:
    """The client's name, or else its number."""
    return comparison.client_labels[client] if comparison.client_labels else str(client)


def with_local_models(comparison: Comparison) -> list[MethodRuns]:
    """All methods except reference bounds, for which `eval_local` evaluates no models."""
    found = [method for method in comparison.methods if not method.is_reference_bound]
    if not found:
        raise UserError(f"{comparison.methods[0].label} is a reference bound; expected a federated method")
    return found


def last_local_row(method: MethodRuns) -> tuple[Result, RoundRow]:
    """The last row with results of local models, from the first run that has one."""
    for run in method.runs:
        rows = [row for row in run.evaluated if row.local]
        if rows:
            return run, rows[-1]
    raise UserError(f"{method.label}: {not_evaluated(method)}")


def by_setting(comparisons: Sequence[Comparison]) -> Figure:
    """Compare the methods in every setting."""
    labels = list(dict.fromkeys(method.label for comparison in comparisons for method in comparison.methods))
    series = [
        BarSeries(label, [_accuracy(c, label) for c in comparisons], [_spread(c, label) for c in comparisons], i)
        for i, label in enumerate(labels)
    ]
    names = [comparison.label for comparison in comparisons]
    chart = Bars("by-setting", "accuracy by setting", "setting", "accuracy %", names, series, (0, 100))
    return Figure("by-setting", "Accuracy by setting and method", [chart], wide=True)


def by_part(comparisons: Sequence[Comparison]) -> Figure:
    """Show an ablation, which leaves out parts of a method. Each variant has a bar, and each setting a panel."""
    panels = []
    for i, comparison in enumerate(comparisons):
        labels = [method.label for method in comparison.methods]
        values = [_accuracy(comparison, label) for label in labels]
        series = BarSeries("accuracy", values, [_spread(comparison, label) for label in labels])
        panels.append(Bars(f"part-{i}", comparison.label, "variant", "accuracy %", labels, [series]))
    return Figure("ablation", "What each part contributes", panels, min(2, len(panels)))


def _accuracy(comparison: Comparison, label: str) -> float | None:
    """The mean accuracy of the method with this label, in percent. None if it was not evaluated."""
    found = next((method for method in comparison.methods if method.label == label and method.counted_runs), None)
    return None if found is None else number(100 * found.accuracy.mean)


def _spread(comparison: Comparison, label: str) -> float | None:
    """The standard deviation of the method's accuracy over the seeds, in percent. None for a single seed."""
    found = next(
        (method for method in comparison.methods if method.label == label and len(method.counted_runs) > 1), None
    )
    return None if found is None else number(100 * found.accuracy.std)


def around_mean(comparisons: Sequence[Comparison]) -> Figure:
    """Show accuracy by class minus the mean over classes, and the gap between the best and the worst class."""
    panels = []
    for i, comparison in enumerate(comparisons):
        for method in comparison.methods:
            if not method.counted_runs:
                continue
            by_class = method.class_accuracy
            values = [number(100 * v) for v in by_class - np.nanmean(by_class)]
            gap = 100 * (np.nanmax(by_class) - np.nanmin(by_class))
            title = add_setting(f"{method.label}, Δ {gap:.1f}", comparison, comparisons)
            series = [BarSeries(method.label, values, style=method.index)]
            panels.append(
                Bars(f"around-{i}-{method.index}", title, "class", "accuracy − mean", comparison.classes, series)
            )
    if not panels:
        raise UserError("no round has been evaluated yet; expected runs with an evaluated round")
    return Figure(
        "around-mean",
        "Accuracy by class minus the mean; Δ is the gap between best and worst",
        panels,
        min(3, len(panels)),
    )
