"""Bar charts by class, by setting and by part of a method."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fedskew.errors import UserError
from fedskew.experiment.round.record import RoundRow
from fedskew.report.charts.chart import Bars, BarSeries, Chart, Figure
from fedskew.report.charts.table import number
from fedskew.report.sections.local import NEEDED, class_means
from fedskew.report.sections.section import percent
from fedskew.results import Comparison, MethodRuns, Result


def local_update(settings: Sequence[Comparison]) -> Figure:
    """Compare the global model with the first client's update in the last evaluated round, a panel for each method."""
    panels: list[Chart] = []
    for setting in settings:
        for c in with_local_models(setting):
            run, row = last_local_row(c)
            one = (row.local or [])[0]
            series = [
                BarSeries("initial global model", [percent(a) for a in row.local_before or ()], style=0),
                BarSeries("updated local model", [percent(a) for a in one["class_accuracy"]], style=1),
            ]
            aggregated = run.evaluations[row.model_round].accuracy
            title = add_setting(
                f"{c.label}, client {one['client']}; aggregated {100 * aggregated:.1f}\N{NO-BREAK SPACE}%",
                setting,
                settings,
            )
            panels.append(Bars(f"update-{c.style}", title, "class", "accuracy %", setting.classes, series, (0, 100)))
    return Figure("local-update", "Accuracy by class before and after a local update", panels, min(2, len(panels)))


def local_and_aggregated(settings: Sequence[Comparison]) -> Figure:
    """Show accuracy by class after local updates, as the mean over clients, and after aggregation."""
    panels = []
    for i, setting in enumerate(settings):
        methods = with_local_models(setting)
        for c in methods:
            last_local_row(c)  # raises a UserError if the method's local models were not evaluated
        after = [BarSeries(c.label, class_means(c), style=c.style) for c in methods]
        whole = [BarSeries(c.label, _mean(c), style=c.style) for c in setting.methods if c.tested]
        for key, title, series in (("local", "after local update", after), ("global", "after aggregation", whole)):
            panels.append(
                Bars(
                    f"{key}-{i}",
                    add_setting(title, setting, settings),
                    "class",
                    "accuracy %",
                    setting.classes,
                    series,
                    (0, 100),
                )
            )
    return Figure("local-and-global", "Accuracy by class after local updates and after aggregation", panels, 2)


def _mean(contender: MethodRuns) -> list[float | None]:
    return [number(100 * v) for v in contender.class_accuracy]


def add_setting(title: str, setting: Comparison, settings: Sequence[Comparison]) -> str:
    """Add the setting to the title if there are several settings."""
    return f"{setting.label}: {title}" if len(settings) > 1 else title


def with_local_models(setting: Comparison) -> list[MethodRuns]:
    """All methods except reference bounds, which have no local models."""
    found = [c for c in setting.methods if not c.is_reference_bound]
    if not found:
        raise UserError(f"{setting.methods[0].label} is a reference bound; expected a method with local models")
    return found


def last_local_row(contender: MethodRuns) -> tuple[Result, RoundRow]:
    """The last row with results of local models, from the first run that has one."""
    for run in contender.runs:
        rows = [row for row in run.evaluated if row.local]
        if rows:
            return run, rows[-1]
    raise UserError(f"{contender.label}: {NEEDED}")


def by_setting(settings: Sequence[Comparison]) -> Figure:
    """Compare the methods in every setting."""
    labels = list(dict.fromkeys(c.label for s in settings for c in s.methods))
    series = [
        BarSeries(label, [_accuracy(s, label) for s in settings], [_spread(s, label) for s in settings], i)
        for i, label in enumerate(labels)
    ]
    names = [s.label for s in settings]
    chart = Bars("by-setting", "accuracy by setting", "setting", "accuracy %", names, series, (0, 100))
    return Figure("by-setting", "Methods under several splits", [chart], wide=True)


def by_part(settings: Sequence[Comparison]) -> Figure:
    """Show an ablation, with a bar per variant of a method and a panel per setting."""
    panels = []
    for i, setting in enumerate(settings):
        labels = [c.label for c in setting.methods]
        values = [_accuracy(setting, label) for label in labels]
        one = BarSeries("accuracy", values, [_spread(setting, label) for label in labels])
        panels.append(Bars(f"part-{i}", setting.label, "variant", "accuracy %", labels, [one]))
    return Figure("ablation", "What each part contributes", panels, min(2, len(panels)))


def _accuracy(setting: Comparison, label: str) -> float | None:
    found = next((c for c in setting.methods if c.label == label and c.tested), None)
    return None if found is None else number(100 * found.accuracy.mean)


def _spread(setting: Comparison, label: str) -> float | None:
    found = next((c for c in setting.methods if c.label == label and len(c.tested) > 1), None)
    return None if found is None else number(100 * found.accuracy.std)


def around_mean(settings: Sequence[Comparison]) -> Figure:
    """Show accuracy by class minus the mean, and the gap between the best and the worst class."""
    panels = []
    for i, setting in enumerate(settings):
        for c in setting.methods:
            if not c.tested:
                continue
            mean = c.class_accuracy
            values = [number(100 * v) for v in mean - np.nanmean(mean)]
            gap = 100 * (np.nanmax(mean) - np.nanmin(mean))
            title = add_setting(f"{c.label}, Δ {gap:.1f}", setting, settings)
            series = [BarSeries(c.label, values, style=c.style)]
            panels.append(Bars(f"around-{i}-{c.style}", title, "class", "accuracy − mean", setting.classes, series))
    return Figure(
        "around-mean",
        "Accuracy by class minus the mean; Δ is the gap between best and worst",
        panels,
        min(3, len(panels)),
    )
