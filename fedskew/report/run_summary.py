"""One run's result for the terminal: the accuracies that papers report, and every class by name."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fedskew.experiment.result import Result

BAR = 30
MOST_CLASSES = 20
"""That are shown, the worst ones."""


def run_summary(result: Result, classes: Sequence[str]) -> RenderableType:
    """A small table, and a bar for each class."""
    return Group(_numbers(result, classes), class_bars(result.class_accuracy, classes), *_folder(result))


def percent(value: float, digits: int = 1) -> str:
    return f"{100 * value:.{digits}f} %"


def _numbers(result: Result, classes: Sequence[str]) -> Table:
    curve = result.curve
    table = Table(title=_title(result), title_justify="left", show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_row("accuracy", Text(percent(result.accuracy), style="bold"), f"after round {curve.last.round}")
    table.add_row("  best", percent(curve.best.accuracy), f"after round {curve.best.round}")
    tail = curve.mean_last
    table.add_row("  mean of last", percent(tail.accuracy), f"rounds {tail.first_round} to {tail.last_round}")
    worst = result.evaluation.worst_class
    names = [name for name, a in zip(classes, result.class_accuracy, strict=True) if a == worst]
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    table.add_row("worst class", percent(worst), Text(", ".join(names[:3]) + more))
    for domain, accuracy in result.domain_accuracy.items():
        table.add_row(f"  on {domain}", "–" if accuracy is None else percent(accuracy), "")
    table.add_row("macro F1", f"{result.evaluation.macro_f1:.3f}", f"micro {result.evaluation.micro_f1:.3f}")
    if result.diverged:
        table.add_row("diverged", Text(str(result.diverged), style="red"), "updates were not finite and left out")
    rounds = max(1, len(result.history) - 1)
    table.add_row("time", f"{result.seconds:.1f} s", f"{result.seconds / rounds:.2f} s a round, {result.engine} engine")
    return table


def _title(result: Result) -> Text:
    config = result.config
    return Text(f"{config.method} on {config.data}, {config.partition.rule} split, seed {config.seed}")


def class_bars(class_accuracy: Sequence[float | None], classes: Sequence[str]) -> Table:
    """Class by class; of many classes, those with the lowest accuracy."""
    tested = [(name, a) for name, a in zip(classes, class_accuracy, strict=True) if a is not None]
    title = "accuracy by class"
    if len(tested) > MOST_CLASSES:
        tested = sorted(tested, key=lambda item: item[1])[:MOST_CLASSES]
        title = f"the {MOST_CLASSES} of {len(classes)} classes with the lowest accuracy"
    table = Table(title=title, title_justify="left", show_header=False, box=None, padding=(0, 2, 0, 0))
    for name, a in tested:
        table.add_row(Text(name[:20]), Text("█" * round(BAR * a), style=colour(a)), percent(a))
    return table


def colour(accuracy: float) -> str:
    """Red for a lost class, green for one that is served well."""
    scale = ("red", "dark_orange", "yellow", "green_yellow", "green")
    return scale[min(len(scale) - 1, int(len(scale) * accuracy))]


def _folder(result: Result) -> list[Text]:
    return [Text(f"kept in {result.folder}", overflow="fold")] if result.folder else []
