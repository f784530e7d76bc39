"""The final table, and whether its differences are more than chance."""

from __future__ import annotations

from collections.abc import Callable

from fedskew.metrics.confusion import Evaluation
from fedskew.metrics.summary import CurveSummary, MeanStd, mean_std
from fedskew.report.charts.table import Cell, Table, number
from fedskew.report.contenders import Contender, Setting
from fedskew.report.sections.section import Section
from fedskew.report.verdict import differences

_MEASURES: dict[str, Callable[[Evaluation], float]] = {
    "accuracy %": lambda e: 100 * e.accuracy,
    "worst class %": lambda e: 100 * e.worst_class,
    "best − worst class": lambda e: 100 * e.class_gap,
    "macro F1 %": lambda e: 100 * e.macro_f1,
}


def results(setting: Setting) -> Section:
    ranking = setting.ranking
    tables = [Table("final", "After the last round", _columns(), [_row(c) for c in ranking])] if ranking else []
    words = ["Mean ± population standard deviation over the seeds. Best is chosen on the test set, as papers do."]
    if len(methods := setting.competing) > 1:
        tables.append(_significance(methods))
        words.append(
            "The second table pairs the best with each other method, seed by seed; p is two-sided, from Student's t, "
            "corrected by Holm's method for all pairs of methods, since any of them could have come out best; the "
            "interval is that of the one pair."
        )
        words += _how_many(len(setting.common_seeds))
    missing = [f"{c.label}: no evaluated round in {c.runs[0].folder}" for c in setting.contenders if not c.tested]
    return Section("results", "Final results", words, tables=tables, missing=missing)


def _how_many(seeds: int) -> list[str]:
    """What so few seeds can show."""
    if not 2 <= seeds <= 4:
        return []
    freedom = f"{seeds - 1} degree{'s' if seeds > 2 else ''} of freedom"
    return [f"With {seeds} seeds t has {freedom}: only large and steady differences come out."]


def _columns() -> list[str]:
    return ["method", "seeds", *_MEASURES, "best %", "mean of last %", "compute", "MB moved", "seconds"]


def _row(contender: Contender) -> list[Cell]:
    summaries = [
        CurveSummary.of([(t, e.accuracy) for t, e in sorted(run.evaluations.items())], run.config.mean_last)
        for run in contender.tested
    ]
    n = len(contender.tested)
    measured = [contender.over_seeds(measure) for measure in _MEASURES.values()]
    totals = [[run.total("compute"), run.bytes_moved / 1e6, run.total("seconds")] for run in contender.tested]
    means = [number(sum(column) / n, 1) for column in zip(*totals, strict=True)]
    return [
        contender.label,
        n,
        *(_spread(value, n) for value in measured),
        _spread(mean_std([100 * s.best.accuracy for s in summaries]), n),
        _spread(mean_std([100 * s.mean_last.accuracy for s in summaries]), n),
        *(value or None for value in means),
    ]


def _spread(value: MeanStd | None, seeds: int) -> str:
    if value is None:
        return ""
    return f"{value.mean:.2f} ± {value.std:.2f}" if seeds > 1 else f"{value.mean:.2f}"


def _significance(methods: list[Contender]) -> Table:
    best, others = methods[0], methods[1:]
    rows: list[list[Cell]] = []
    for other, d in zip(others, differences(methods), strict=True):
        if d is None:
            rows.append([other.label, 0, None, None, None, None, "no seed in common"])
            continue
        bounds = [None if b is None else number(100 * b) for b in (d.low, d.high)]
        says = "one seed: cannot be told" if d.seeds < 2 else "sure" if d.sure else "not sure"
        rows.append([other.label, d.seeds, number(100 * d.mean), *bounds, number(d.p, 4), says])
    columns = ["against", "seeds in common", "difference, points", "95 % from", "to", "p", "says"]
    return Table("significance", f"{best.label}, the best, minus each other method", columns, rows)
