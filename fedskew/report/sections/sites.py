"""Results by site: accuracy and scores on each site's test samples, and how equal the sites are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from fedskew.experiment.round.record import RoundRow
from fedskew.metrics.site_scores import SiteScore, fairness
from fedskew.report.charts.chart import Bars, BarSeries, Figure, Lines
from fedskew.report.charts.table import Cell, Table, number
from fedskew.report.sections.section import Point, Section, lines, percent
from fedskew.results import Comparison, MethodRuns, Result

MAX_BARS = 30
"""With more sites, the bars are left out."""
MAX_ROWS = 400
"""The table of scores lists as many methods as fit in this many rows, and at least one."""
PARAGRAPHS = (
    "Each site has test samples of its own. The final global model is tested on them, or each site's own model if "
    "there is no global one. If a method has both, AUROC and the table of scores show the site's own model in a "
    "simulation, and the global model in a federation across machines. Every site counts once, whatever its size. The "
    "worst decile is the mean of the worst tenth of the sites.",
    "Intervals of AUROC are 95 % intervals by DeLong's method, on the logit scale. They reflect the choice of the "
    "site's test samples, not the randomness of training.",
)


def sites(comparison: Comparison) -> Section | None:
    """Build the section. Return None if no run has results by site."""
    methods = [m for m in comparison.methods if any(site_accuracies(run) for run in m.counted_runs)]
    if not methods:
        return None
    first = [(m, run) for m in methods if (run := m.first) is not None and site_accuracies(run)]
    names = list(dict.fromkeys(name for _, run in first for name in site_accuracies(run)))
    figures = []
    if len(names) <= MAX_BARS:
        figures.append(Figure("site-accuracy", "Accuracy by site, one seed of each method", [_bars(first, names)]))
    if curves := lines(methods, worst_site):
        chart = Lines("worst-site", "worst site", "round", "accuracy %", curves, (0, 100))
        figures.append(Figure("worst-site", "Accuracy of the worst site over the rounds", [chart]))
    tables = [_fairness_table(methods), *_local_tables(methods)]
    if scored := [(m, run) for m, run in first if run.site_scores][: max(1, MAX_ROWS // len(names))]:
        tables.append(_scores_table(scored))
    return Section("sites", "Sites", list(PARAGRAPHS), figures, tables)


def site_accuracies(run: Result) -> dict[str, float]:
    """Accuracy on each site's own test samples, after the last round that recorded it. Empty if no round did."""
    rows = [row for row in run.evaluated if _accuracies(run, row)]
    return _accuracies(run, rows[-1]) if rows else {}


def _accuracies(run: Result, row: RoundRow) -> dict[str, float]:
    if row.sites:  # a federation across machines
        return {name: site["accuracy"] for name, site in row.sites.items()}
    return _by_name(run, (row.client_tests or {}).get("accuracy", ()))


def _personal(run: Result) -> dict[str, float]:
    """Accuracy of each client's own model on its own test samples, for methods with a personal part."""
    return {name: tests["personal"] for name, tests in run.client_tests.items() if "personal" in tests}


def _by_name(run: Result, values: Sequence[float | None]) -> dict[str, float]:
    names = run.client_labels if len(run.client_labels) == len(values) else [str(k) for k in range(len(values))]
    return {name: value for name, value in zip(names, values, strict=True) if value is not None}


def worst_site(run: Result) -> Iterator[Point]:
    for row in run.evaluated:
        if found := _accuracies(run, row):
            yield row.model_round, percent(min(found.values()))


def _bars(first: Sequence[tuple[MethodRuns, Result]], names: Sequence[str]) -> Bars:
    series = []
    for method, run in first:
        found = site_accuracies(run)
        series.append(BarSeries(method.label, [percent(found.get(name)) for name in names], style=method.index))
    return Bars("site-accuracy", "accuracy by site", "site", "accuracy %", names, series, (0, 100))


def _fairness_table(methods: Sequence[MethodRuns]) -> Table:
    rows: list[list[Cell]] = []
    for method in methods:
        for run in method.counted_runs:
            aurocs = {name: score.auroc for name, score in run.site_scores.items()}
            metrics = (("accuracy", site_accuracies(run)), ("personal accuracy", _personal(run)), ("AUROC", aurocs))
            for metric, values in metrics:
                rows += _fairness_rows(method, run, metric, values)
    columns = ["method", "seed", "metric", "sites", "mean %", "standard deviation", "worst %", "worst site"]
    return Table("fairness", "How equal the sites are", [*columns, "worst decile %"], rows)


def _fairness_rows(
    method: MethodRuns, run: Result, metric: str, values: Mapping[str, float | None]
) -> Iterator[list[Cell]]:
    """Yield one row, or none if no site has the metric."""
    if (found := fairness(values)) is not None:
        spread = [percent(found.mean), percent(found.deviation), percent(found.worst)]
        yield [method.label, run.seed, metric, found.sites, *spread, found.worst_site, percent(found.worst_decile)]


def _local_tables(methods: Sequence[MethodRuns]) -> list[Table]:
    """Make a table of the last evaluated round's participants, before and after training. Empty without results."""
    rows: list[list[Cell]] = []
    for method in methods:
        for run in method.counted_runs:
            tests = [row.client_tests for row in run.evaluated if "after" in (row.client_tests or {})]
            if not tests:
                continue
            found = [fairness(_by_name(run, (tests[-1] or {})[when])) for when in ("before", "after")]
            if found[0] is not None and found[1] is not None:
                values = [percent(v) for one in found if one is not None for v in (one.mean, one.worst)]
                rows.append([method.label, run.seed, found[0].sites, *values])
    columns = ["method", "seed", "participants", "mean before %", "worst before %", "mean after %", "worst after %"]
    title = "Participants of the last evaluated round on their own samples, before and after local training"
    return [Table("local-gain", title, columns, rows)] if rows else []


def _scores_table(first: Sequence[tuple[MethodRuns, Result]]) -> Table:
    rows = [_score_row(method, name, score) for method, run in first for name, score in run.site_scores.items()]
    columns = [
        "method",
        "site",
        "samples",
        "accuracy %",
        "AUROC",
        "95 % from",
        "95 % to",
        "Brier score",
        "calibration error",
    ]
    return Table("site-scores", "Scores on each site's own test samples, one seed of each method", columns, rows)


def _score_row(method: MethodRuns, name: str, score: SiteScore) -> list[Cell]:
    values = (score.auroc, score.auroc_low, score.auroc_high, score.brier, score.calibration_error)
    return [method.label, name, score.samples, percent(score.accuracy), *(number(value, 3) for value in values)]
