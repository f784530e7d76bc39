"""Tables for the terminal: one run with its classes, and a comparison of methods."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fedskew.errors import plural
from fedskew.metrics.confusion import LOST, lost_classes
from fedskew.metrics.site_scores import fairness
from fedskew.results import Comparison, MethodRuns, Result
from fedskew.results.early_stops import early_stops
from fedskew.results.ranking import DEFAULT_METRIC, METRICS, RankingMetric

BAR_LENGTH = 30
MAX_CLASSES = 20
"""The maximum number of bars. With more classes, those with the lowest accuracy are shown."""
CLASS_TABLE_NAME_WIDTH = 30
"""Longer method names are wrapped in the table of classes."""
SHOWN = ("accuracy", "macro-f1", "worst-class")
"""The metrics of the comparison table. The ranking metric comes first. If it is not listed, it replaces the last.
If the clients have tests of their own, these take the place of the last one."""
COMPARISON_NAME_WIDTH = 12
"""In a narrow terminal, longer method names are wrapped in the comparison table, to leave room for lost classes."""


def run_summary(result: Result, metric: RankingMetric | None = None) -> RenderableType:
    """Show the run's metrics, the requested one first, a bar per class, and the folder."""
    folder = [Text(f"saved in {result.folder}", overflow="fold")] if result.folder else []
    return Group(_numbers(result, metric), class_bars(result.class_accuracy, result.classes), *folder)


def _numbers(result: Result, metric: RankingMetric | None) -> Table:
    curve, evaluation = result.curve, result.evaluation
    table = Table(title=Text(result.title), title_justify="left", show_header=False, box=None, padding=(0, 2, 0, 0))
    if metric is not None and metric.name != DEFAULT_METRIC:
        value = metric.value(result)
        table.add_row(metric.label, Text(metric.text(value), style="bold"), f"after round {curve.last.round}")
        if known := [point for point in metric.curve(result) if not np.isnan(point[1])]:
            best_round, best = max(known, key=lambda point: metric.sign * point[1])
            table.add_row("  best", metric.text(best), f"after round {best_round}")
    own_models = result.evaluated[-1].client_accuracy is not None
    whose = ", mean of all clients' own models" if own_models else ""
    table.add_row("accuracy", Text(_percent(result.accuracy), style="bold"), f"after round {curve.last.round}{whose}")
    if result.stopped_early:
        table.add_row("  stopped early", "", result.stopped_after)
    table.add_row("  best", _percent(curve.best.accuracy), f"after round {curve.best.round}")
    mean = curve.mean_last
    table.add_row("  mean of last", _percent(mean.accuracy), f"rounds {mean.first_round} to {mean.last_round}")
    worst = evaluation.worst_class
    names = [name for name, a in zip(result.classes, result.class_accuracy, strict=True) if a == worst]
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    table.add_row("worst class", _percent(worst), Text(", ".join(names[:3]) + more))
    for domain, accuracy in result.domain_accuracy.items():
        table.add_row(f"  on {domain}", "–" if accuracy is None else _percent(accuracy), "")
    table.add_row("macro F1", f"{evaluation.macro_f1:.3f}", f"micro {evaluation.micro_f1:.3f}")
    for row in (*_evaluation_rows(result), *_score_rows(result)):
        table.add_row(*row)
    personal = [tests["personal"] for tests in result.client_tests.values() if "personal" in tests]
    if personal:
        mean_accuracy = _percent(sum(personal) / len(personal))
        words = f"each client's own model on that client's held-out samples, mean of {plural(len(personal), 'client')}"
        table.add_row("personal accuracy", Text(mean_accuracy, style="bold"), words)
    accuracies = {name: score.accuracy for name, score in result.site_scores.items()}
    if accuracies and (found := fairness(accuracies)):
        spread = f"mean {_percent(found.mean)}, deviation {_percent(found.deviation)}"
        table.add_row("worst site", _percent(found.worst), Text(f"{found.worst_site} ({spread})"))
    for row in (*_balance_rows(result), *_privacy_rows(result)):
        table.add_row(*row)
    if result.diverged:
        words = "client updates discarded: they, or the server's step with them, were not finite; try a lower --lr"
        table.add_row("diverged", Text(str(result.diverged), style="red"), words)
    seconds_per_round = result.seconds / max(1, result.rounds)
    table.add_row(
        "training time", f"{result.seconds:.1f} s", f"{seconds_per_round:.2f} s per round, {result.engine} engine"
    )
    return table


def _balance_rows(result: Result) -> list[tuple[str, str, str]]:
    """Class weights and balanced batches, if the run has them."""
    weights, batches = result.config.class_weights, result.config.batches
    rows = [] if weights is None else [("class weights", weights if isinstance(weights, str) else "given", "")]
    return rows if batches == "shuffled" else [*rows, ("batches", batches, "")]


def _privacy_rows(result: Result) -> list[tuple[str, str, str]]:
    """The ε of a run with noise."""
    if result.privacy is None:
        return []
    whose = "one training sample" if result.privacy["kind"] == "example" else "a whole site"
    return [("privacy", f"ε = {result.privacy['epsilon']:.3g}", f"at δ = {result.privacy['delta']:g}, for {whose}")]


def _evaluation_rows(result: Result) -> list[tuple[str, str, str]]:
    """Balanced accuracy, Cohen's κ and log loss. Unknown or infinite values are left out."""
    found = result.evaluation
    log_loss = np.nan if found.log_loss is None else found.log_loss
    rows = [
        ("balanced accuracy", found.mean_class, _percent(found.mean_class), "mean over the classes"),
        ("Cohen's κ", found.kappa, f"{found.kappa:.3f}", ""),
        ("log loss", log_loss, f"{log_loss:.3f}", ""),
    ]
    return [(name, text, note) for name, value, text, note in rows if np.isfinite(value)]


def _score_rows(result: Result) -> list[tuple[str, str, str]]:
    """List AUROC, calibration and other scores of the final model. Unknown scores are left out."""
    scores = result.scores
    if scores is None:
        return []
    several = "mean over the labels" if result.config.task == "multi-label" else "mean of each class against the rest"
    auroc_note = several if scores.positive is None else f"of {result.classes[scores.positive]}"
    at = f"at specificity {scores.target_specificity:g}"
    rows = [
        ("AUROC", scores.auroc, auroc_note),
        ("AUPRC", scores.auprc, ""),
        ("sensitivity", scores.sensitivity, "at threshold 0.5"),
        ("specificity", scores.specificity, "at threshold 0.5"),
        ("sensitivity", scores.sensitivity_at_specificity, at),
        ("Brier score", scores.brier, ""),
        ("ECE", scores.calibration_error, "expected calibration error"),
    ]
    return [(name, f"{value:.3f}", note) for name, value, note in rows if value is not None]


def class_bars(class_accuracy: Sequence[float | None], classes: Sequence[str]) -> Table:
    """Show one bar per class. If there are many classes, show those with the lowest accuracy."""
    shown = [(name, a) for name, a in zip(classes, class_accuracy, strict=True) if a is not None]
    title = "accuracy by class"
    if len(shown) > MAX_CLASSES:
        shown = sorted(shown, key=lambda item: item[1])[:MAX_CLASSES]
        title = f"the {MAX_CLASSES} of {len(classes)} classes with the lowest accuracy"
    table = Table(title=title, title_justify="left", show_header=False, box=None, padding=(0, 2, 0, 0))
    for name, a in shown:
        table.add_row(Text(name[:20]), Text("█" * round(BAR_LENGTH * a), style=colour(a)), _percent(a))
    return table


def comparison_table(comparison: Comparison) -> Table:
    """Show one row per method, in the given order. Mark the best method, or all that are equally good.

    Reference bounds are not marked.
    """
    methods = comparison.methods
    seeds = len(methods[0].runs)
    table = Table(title=_title(comparison, seeds), title_justify="left")
    table.add_column("method", overflow="fold", no_wrap=all(len(m.label) <= COMPARISON_NAME_WIDTH for m in methods))
    has_client_tests = any(run.client_tests for run in comparison.runs)
    most = len(SHOWN) - has_client_tests
    shown = [METRICS[name] for name in dict.fromkeys((comparison.rank_by, *SHOWN))][:most]
    accuracy = METRICS["accuracy"]
    for metric in shown:
        table.add_column(metric.heading.replace(" ", "\n", 1), justify="right", no_wrap=True)
    if has_client_tests:
        table.add_column("on own\nsamples %", justify="right", no_wrap=True)
    table.add_column(f"classes lost\n(< {100 * LOST:.0f} %)")
    table.add_column("training\ntime", justify="right", no_wrap=True)
    best = comparison.best
    top = None if best is None else comparison.score(best).mean
    for method in methods:
        is_best = best is not None and not method.is_reference_bound and comparison.score(method).mean == top
        table.add_row(
            Text(method.label + (" *" if is_best else ""), style="bold" if is_best else ""),
            *(metric.cell(method.over_seeds(metric.value), 1) for metric in shown),
            *([accuracy.cell(method.over_seeds(lambda run: run.client_accuracy), 1)] if has_client_tests else []),
            _list_lost_classes(method, comparison.classes),
            f"{sum(run.seconds for run in method.runs):.1f} s",
        )
    notes = []
    if has_client_tests:
        notes.append("on own samples: mean accuracy on each client's held-out samples, of its own model if it has one")
    if best is not None:
        bounds = ", reference bounds aside" if any(m.is_reference_bound for m in methods) else ""
        notes.append(f"* {comparison.metric.best_word} {comparison.metric.label} after the last round{bounds}")
    if diverged := sum(run.diverged for run in comparison.runs):
        discarded = f"{plural(diverged, 'client update')} {'was' if diverged == 1 else 'were'} discarded"
        notes.append(f"{discarded}: an update, or the server's step with it, was not finite; try a lower --lr")
    lines = [*early_stops(comparison), *(["; ".join(notes)] if notes else [])]
    table.caption, table.caption_justify = Text("\n".join(lines), "table.caption") if lines else None, "left"
    return table


def class_accuracy_table(comparison: Comparison, width: int) -> Table:
    """Show accuracy by method and class in percent, the mean over the seeds. If not all classes fit, show the worst."""
    methods, classes = comparison.methods, comparison.classes
    margin = min(CLASS_TABLE_NAME_WIDTH, max(len(method.label) for method in methods)) + 4
    cell = min(9, max(3, *(len(name) for name in classes)))
    room = max(1, (width - margin) // (cell + 2))
    shown, title = list(range(len(classes))), "accuracy by class, %"
    if len(classes) > room:
        means = np.nan_to_num(np.array([method.class_accuracy for method in methods]).mean(axis=0), nan=1.0)
        shown = sorted(sorted(shown, key=means.__getitem__)[:room])
        title = f"accuracy by class, %: the {len(shown)} of {len(classes)} classes with the lowest accuracy"
    if len(methods[0].runs) > 1:
        title += f", mean of {len(methods[0].runs)} seeds"
    table = Table(title=title, title_justify="left", box=None, padding=(0, 1))
    table.add_column("method", max_width=CLASS_TABLE_NAME_WIDTH, overflow="fold")
    for c in shown:
        table.add_column(Text(classes[c][:cell]), justify="right", no_wrap=True)
    for method in methods:
        table.add_row(Text(method.label), *(_cell(a) for a in method.class_accuracy[shown]))
    return table


def _title(comparison: Comparison, seeds: int) -> Text:
    config = comparison.config
    spread = f", mean ± sample standard deviation of {seeds} seeds" if seeds > 1 else f", seed {config.seed}"
    return Text(f"{config.data}, {config.partition.rule} split{spread}")


def _list_lost_classes(method: MethodRuns, classes: Sequence[str]) -> Text:
    lost = [lost_classes(run.class_accuracy) for run in method.counted_runs]
    names = [classes[c] for c in sorted({c for seed in lost for c in seed})]
    if not names:
        return Text("none", style="green")
    more = f" and {len(names) - 10} more" if len(names) > 10 else ""
    per_seed = f"{sum(map(len, lost)) / len(lost):.1f} per seed: " if len(lost) > 1 else ""
    return Text(per_seed + ", ".join(names[:10]) + more, style="red")


def colour(accuracy: float) -> str:
    """The colour of an accuracy, from red for 0 to green for 1."""
    scale = ("red", "dark_orange", "yellow", "green_yellow", "green")
    return scale[min(len(scale) - 1, int(len(scale) * accuracy))]


def _percent(value: float) -> str:
    return "-" if np.isnan(value) else f"{100 * value:.1f} %"


def _cell(accuracy: float) -> Text:
    return Text("-") if np.isnan(accuracy) else Text(f"{100 * accuracy:.0f}", style=colour(accuracy))
