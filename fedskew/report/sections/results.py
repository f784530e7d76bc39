"""The final table, and the significance of its differences."""

from __future__ import annotations

from collections.abc import Callable

from fedskew.report.charts.table import Cell, Table, number
from fedskew.report.sections.section import Section
from fedskew.results import Comparison, MethodRuns, Result

_MEASURES: dict[str, Callable[[Result], float]] = {
    "accuracy %": lambda run: run.accuracy,
    "worst class %": lambda run: run.evaluation.worst_class,
    "best − worst class": lambda run: run.evaluation.class_gap,
    "macro F1 %": lambda run: run.evaluation.macro_f1,
    "best %": lambda run: run.curve.best.accuracy,
    "mean of last %": lambda run: run.curve.mean_last.accuracy,
}


def results(setting: Comparison) -> Section:
    ranking = setting.ranking
    tables = [Table("final", "After the last round", _columns(), [_row(c) for c in ranking])] if ranking else []
    words = ["Mean ± sample standard deviation over the seeds. The best round is chosen on the test set, as in papers."]
    if len(setting.competing) > 1:
        tables.append(_significance(setting))
        words.append(
            "The second table compares the best method with each of the others, paired by seed. p is two-sided, from "
            "Student's t test, and corrected by Holm's method for all pairs of methods, because any of them could have "
            "come out best. The intervals are not corrected."
        )
        words += _few_seeds_note(len(setting.common_seeds))
    missing = [f"{c.label}: no evaluated round in {c.runs[0].folder}" for c in setting.methods if not c.tested]
    return Section("results", "Final results", words, tables=tables, missing=missing)


def _few_seeds_note(seeds: int) -> list[str]:
    """Warn that only large differences are detectable with few seeds."""
    if not 2 <= seeds <= 4:
        return []
    freedom = f"{seeds - 1} degree{'s' if seeds > 2 else ''} of freedom"
    return [f"With {seeds} seeds the test has {freedom}: only large and consistent differences are significant."]


def _columns() -> list[str]:
    return ["method", "seeds", *_MEASURES, "compute", "MB moved", "seconds"]


def _row(contender: MethodRuns) -> list[Cell]:
    n = len(contender.tested)
    measured = [contender.over_seeds(measure) for measure in _MEASURES.values()]
    totals = [[run.compute, run.bytes_moved / 1e6, run.seconds] for run in contender.tested]
    means = [number(sum(column) / n, 1) for column in zip(*totals, strict=True)]
    return [
        contender.label,
        n,
        *(value.in_percent(2) for value in measured),
        *(value or None for value in means),
    ]


def _significance(setting: Comparison) -> Table:
    best, *others = setting.competing
    rows: list[list[Cell]] = []
    for other, d in zip(others, setting.differences(), strict=True):
        if d is None:
            rows.append([other.label, 0, None, None, None, None, "no seed in common"])
            continue
        bounds = [None if b is None else number(100 * b) for b in (d.low, d.high)]
        result = "one seed: unknown" if d.seeds < 2 else "significant" if d.significant else "not significant"
        rows.append([other.label, d.seeds, number(100 * d.mean), *bounds, number(d.p, 4), result])
    columns = ["against", "seeds in common", "difference, points", "95 % from", "to", "p", "result"]
    return Table("significance", f"{best.label} (the best) minus each of the others", columns, rows)
