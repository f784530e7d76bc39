"""Results as a table for papers and spreadsheets: LaTeX, Markdown or CSV.

In LaTeX and Markdown a cell is the mean ± the sample standard deviation over the seeds, mostly in percent. If several
federated methods are compared, the best value of each metric is bold. Reference bounds never are. CSV has means and
deviations in separate columns. Of the training time, all formats have only the mean. Below a table, a line names each
method with runs that stopped early. CSV has their number in a column.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from fedskew.errors import UserError, unknown
from fedskew.results.early_stops import early_stops
from fedskew.results.ranking import METRICS, RankingMetric

if TYPE_CHECKING:
    from fedskew.results.comparison import Comparison, MethodRuns

DIGITS = 2
PRINTED = ("accuracy", "macro-f1", "worst-class", "balanced-accuracy", "auroc")
"""The metrics of a table in LaTeX or Markdown, besides the ranking metric. Such a table must fit a page. A CSV file has
all metrics."""


def check_format(format: str) -> None:
    """Refuse an unknown format. Commands call this before anything runs."""
    if format not in FORMATS:
        raise unknown("format", format, FORMATS)


def table_text(comparisons: Sequence[Comparison], format: str) -> str:
    """Write the comparisons of one or several settings as a table in this format."""
    check_format(format)
    if (empty := next((comparison for comparison in comparisons if not comparison.ranking), None)) is not None:
        raise UserError(f"no run of {empty.label!r} has been evaluated yet; expected finished runs for a table")
    return FORMATS[format](comparisons)


def _metrics(comparisons: Sequence[Comparison], names: Iterable[str]) -> list[RankingMetric]:
    """Return the ranking metric, then the named metrics. Leave out metrics that no run has."""
    ordered = [METRICS[name] for name in dict.fromkeys((comparisons[0].rank_by, *names))]
    runs = [run for comparison in comparisons for method in comparison.methods for run in method.counted_runs]
    return [metric for metric in ordered if any(not math.isnan(metric.value(run)) for run in runs)]


def _markdown(comparisons: Sequence[Comparison]) -> str:
    blocks = []
    for comparison in comparisons:
        headings, rows = _cells(comparison, lambda text: f"**{text}**")
        lines = [headings, ["---", *["---:"] * (len(headings) - 1)], *rows]
        escaped = [[cell.replace("|", "\\|") for cell in line] for line in lines]
        table = "\n".join(f"| {' | '.join(line)} |" for line in escaped)
        notes = "".join(f"\n{line}\n" for line in early_stops(comparison))
        blocks.append(f"{_caption(comparison)}\n\n{table}\n{notes}")
    return "\n".join(blocks)


def _latex(comparisons: Sequence[Comparison]) -> str:
    blocks = []
    for comparison in comparisons:
        headings, rows = _cells(comparison, lambda text: f"\\textbf{{{text}}}", _latex_text)
        lines = [
            f"% {_caption(comparison)}",
            "% needs \\usepackage{booktabs}",
            f"\\begin{{tabular}}{{l{'r' * (len(headings) - 1)}}}",
            "\\toprule",
            f"{' & '.join(headings)} \\\\",
            "\\midrule",
            *(f"{' & '.join(row)} \\\\" for row in rows),
            "\\bottomrule",
            *(f"\\multicolumn{{{len(headings)}}}{{l}}{{{_latex_text(line)}}} \\\\" for line in early_stops(comparison)),
            "\\end{tabular}",
        ]
        blocks.append("\n".join(lines) + "\n")
    return "\n".join(blocks)


def _csv(comparisons: Sequence[Comparison]) -> str:
    metrics = _metrics(comparisons, METRICS)
    named = [heading for m in metrics for heading in (m.heading, f"{m.label} sample deviation")]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["setting", "method", "seeds", "best", *named, "training time per run, s", "runs stopped early"])
    for comparison in comparisons:
        for method in comparison.ranking:
            numbers = [_plain(value, metric) for metric in metrics for value in method.over_seeds(metric.value)]
            best = "yes" if method is comparison.best else "no"
            stopped = sum(run.stopped_early for run in method.counted_runs)
            seeds = len(method.counted_runs)
            writer.writerow([comparison.label, method.label, seeds, best, *numbers, _time(method), stopped])
    return text.getvalue()


FORMATS: dict[str, Callable[[Sequence[Comparison]], str]] = {"latex": _latex, "markdown": _markdown, "csv": _csv}


def _cells(
    comparison: Comparison, bold: Callable[[str], str], escape: Callable[[str], str] = str
) -> tuple[list[str], list[list[str]]]:
    """Return headings and rows, the best method first."""
    metrics = _metrics([comparison], PRINTED)
    named = (f"{metric.label} (%)" if metric.percent else metric.label for metric in metrics)
    headings = ["method", *named, "training time (s)"]
    columns = [_column(comparison, metric, bold, escape) for metric in metrics]
    rows = [
        [escape(method.label), *(column[i] for column in columns), _time(method)]
        for i, method in enumerate(comparison.ranking)
    ]
    return [escape(heading) for heading in headings], rows


def _column(
    comparison: Comparison, metric: RankingMetric, bold: Callable[[str], str], escape: Callable[[str], str]
) -> list[str]:
    """Return the cells of one metric, with the best value in bold. All cells that print the best value are bold."""
    found = [method.over_seeds(metric.value) for method in comparison.ranking]
    merits = [round(metric.sign * metric.scale * value.mean, _digits(metric)) for value in found]
    competing = [m for method, m in zip(comparison.ranking, merits, strict=True) if not method.is_reference_bound]
    top = max((merit for merit in competing if not math.isnan(merit)), default=math.inf)
    cells = []
    for method, value, merit in zip(comparison.ranking, found, merits, strict=True):
        cell = escape(metric.cell(value, DIGITS))
        cells.append(bold(cell) if len(competing) > 1 and not method.is_reference_bound and merit == top else cell)
    return cells


def _digits(metric: RankingMetric) -> int:
    return DIGITS if metric.percent else DIGITS + 2


def _time(method: MethodRuns) -> str:
    return f"{sum(run.seconds for run in method.counted_runs) / len(method.counted_runs):.1f}"


def _caption(comparison: Comparison) -> str:
    seeds = sorted({len(method.counted_runs) for method in comparison.ranking})
    several = f"mean ± sample standard deviation over {' or '.join(map(str, seeds))} seeds"
    return (
        f"{comparison.label}; {several if seeds[-1:] > [1] else 'one seed'}; best by {comparison.metric.label} first."
    )


def _plain(number: float, metric: RankingMetric) -> str:
    return "" if math.isnan(number) else f"{metric.scale * number:.{_digits(metric)}f}"


_ESCAPES = {"±": "$\\pm$", "–": "--", "−": "$-$", "κ": "$\\kappa$"}
_ESCAPES |= {"\\": "\\textbackslash{}", "~": "\\textasciitilde{}", "^": "\\textasciicircum{}"}
_ESCAPES |= {character: f"\\{character}" for character in "&%$#_{}"}


def _latex_text(text: str) -> str:
    return "".join(_ESCAPES.get(character, character) for character in text)
