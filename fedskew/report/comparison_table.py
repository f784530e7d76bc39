"""Methods side by side for the terminal: what each attains, and which classes it loses."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from fedskew.experiment.compare import MethodResults
from fedskew.methods import is_bound
from fedskew.metrics.summary import MeanStd
from fedskew.report.run_summary import colour

LOST = 0.05
"""The accuracy below which a class counts as lost."""
NAME_WIDTH = 12
"""Longer names of methods are broken where the terminal is narrow, so that the lost classes keep their room."""


def comparison_table(results: Sequence[MethodResults], classes: Sequence[str]) -> Table:
    """One row a method, in the order given; the best accuracy of a method that is no bound is marked."""
    seeds = len(results[0].results)
    table = Table(title=_title(results), title_justify="left")
    table.add_column("method", overflow="fold", no_wrap=all(len(r.method) <= NAME_WIDTH for r in results))
    for heading in ("accuracy %", "best %", "worst class %"):
        table.add_column(heading, justify="right", no_wrap=seeds < 3)
    table.add_column(f"classes lost (< {100 * LOST:.0f} %)")
    table.add_column("time", justify="right", no_wrap=True)
    methods = [result for result in results if not is_bound(result.method)]
    top = max((result.accuracy.mean for result in methods), default=None)
    for result in results:
        marked = len(results) > 1 and result in methods and result.accuracy.mean == top
        table.add_row(
            Text(result.method + (" *" if marked else ""), style="bold" if marked else ""),
            _spread(result.accuracy, seeds),
            _spread(result.over_seeds(lambda r: r.curve.best.accuracy), seeds),
            _spread(result.worst_class, seeds),
            _lost_in_words(result, classes),
            f"{sum(r.seconds for r in result.results):.1f} s",
        )
    if len(results) > 1:
        bounds = "" if len(methods) == len(results) else "; bounds do not compete"
        table.caption = f"* the highest accuracy after the last round{bounds}"
        table.caption_justify = "left"
    if diverged := sum(r.diverged for result in results for r in result.results):
        note = f"{diverged} client updates were not finite and left out"
        table.caption = f"{table.caption}; {note}" if table.caption else note
    return table


def lost_classes(class_accuracy: Sequence[float | None]) -> list[int]:
    """The classes that a model does not recognise any more."""
    return [c for c, a in enumerate(class_accuracy) if a is not None and a < LOST]


def class_accuracy_table(results: Sequence[MethodResults], classes: Sequence[str], width: int) -> Table:
    """Methods × classes in percent, mean over the seeds; of more classes than fit, those that fare worst."""
    margin = max(len(result.method) for result in results) + 4
    cell = min(9, max(3, *(len(name) for name in classes)))
    room = max(1, (width - margin) // (cell + 2))
    shown, title = list(range(len(classes))), "accuracy by class, %"
    if len(classes) > room:
        mean = [_mean([result.class_accuracy[c] for result in results]) for c in shown]
        shown = sorted(sorted(shown, key=mean.__getitem__)[:room])
        title = f"accuracy by class, %: the {len(shown)} of {len(classes)} classes that fare worst"
    if len(results[0].results) > 1:
        title += f", mean of {len(results[0].results)} seeds"
    table = Table(title=title, title_justify="left", box=None, padding=(0, 1))
    table.add_column("method", no_wrap=True)
    for c in shown:
        table.add_column(Text(classes[c][:cell]), justify="right", no_wrap=True)
    for result in results:
        cells = [result.class_accuracy[c] for c in shown]
        table.add_row(Text(result.method), *(_cell(a) for a in cells))
    return table


def _title(results: Sequence[MethodResults]) -> Text:
    config, seeds = results[0].results[0].config, len(results[0].results)
    spread = f", mean ± population standard deviation of {seeds} seeds" if seeds > 1 else f", seed {config.seed}"
    return Text(f"{config.data}, {config.partition.rule} split{spread}")


def _spread(value: MeanStd, seeds: int) -> str:
    return f"{100 * value.mean:.1f} ± {100 * value.std:.1f}" if seeds > 1 else f"{100 * value.mean:.1f}"


def _lost_in_words(result: MethodResults, classes: Sequence[str]) -> Text:
    lost = [lost_classes(r.class_accuracy) for r in result.results]
    names = [classes[c] for c in sorted({c for seed in lost for c in seed})]
    if not names:
        return Text("none", style="green")
    more = f" and {len(names) - 10} more" if len(names) > 10 else ""
    often = f"{sum(map(len, lost)) / len(lost):.1f} a seed: " if len(lost) > 1 else ""
    return Text(often + ", ".join(names[:10]) + more, style="red")


def _mean(values: Sequence[float | None]) -> float:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else 1.0


def _cell(accuracy: float | None) -> Text:
    return Text("-") if accuracy is None else Text(f"{100 * accuracy:.0f}", style=colour(accuracy))
