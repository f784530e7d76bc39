"""PKD's groups of classes, how similar the classes are, and how often each expert taught."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from fedskew.experiment.round.record import RoundRow
from fedskew.methods.pkd import confusion_threshold, mutual_probability
from fedskew.report.charts.chart import Figure, Heat, Line, Lines
from fedskew.report.charts.table import Cell, Table, number
from fedskew.report.sections.section import Point, Section, lines
from fedskew.results import Comparison, MethodRuns, Result

Floats = npt.NDArray[np.float64]
MAX_PANELS = 6
"""The maximum number of methods with panels."""
MAX_NAMES = 4
"""The maximum number of class names that describe an expert in a legend."""
EXPLANATION = (
    "PKD groups the classes that the global model confuses on training samples after the warm-up, unless the groups "
    "are configured. It trains an expert per group. By default, an expert teaches the samples that are mistaken for "
    "another class of its group."
)


def experts(comparison: Comparison) -> Section | None:
    """Build the section. Return None if no method has experts."""
    methods = [
        method
        for method in comparison.methods
        if any("groups" in _notes(run) or _has_experts(run) for run in method.runs)
    ]
    if not methods:
        return None
    first = [(method, run) for method in methods[:MAX_PANELS] if (run := method.first)]
    figures = [
        *_as_figure("similarity", "Mutual probability of classes on training samples, after the warm-up",
                 [similarity_chart(method, run, comparison) for method, run in first if survey(run) is not None]),
        *_as_figure("warm-confusion", "How often classes were confused on the test set, after the warm-up",
                 [chart for method, run in first
                  if survey(run) is None and (chart := _confusion_chart(method, run, comparison))]),
        *_teaching_figures(methods, first, comparison),
    ]  # fmt: skip
    thresholds = [(method, run, line) for method, run in first if (line := _threshold(run))]
    paragraphs = [EXPLANATION, *(f"{method.label}, seed {run.seed}: {line}" for method, run, line in thresholds)]
    missing = [line for method in methods for line in _missing(method)]
    return Section("experts", "PKD's experts", paragraphs, figures, [_table(methods, comparison)], missing=missing)


def _threshold(run: Result) -> str | None:
    """Say above which mutual probability two classes count as confused. None if it is unknown."""
    probability = survey(run)
    if probability is None:
        return None
    above = confusion_threshold(probability, float(run.config.method_params.get("group_threshold", 2.0)))
    return f"two classes count as confused if their mutual probability is above {100 * above:.3g} %."


def _table(methods: Sequence[MethodRuns], comparison: Comparison) -> Table:
    rows: list[list[Cell]] = []
    for method in methods:
        for run in method.runs:
            for i, group in enumerate(groups(run)):
                similarity, taught = _mean_similarity(group, survey(run)), _share(_tallied_rows(run), f"expert {i}")
                names = ", ".join(comparison.classes[k] for k in group)
                rows.append([method.label, run.seed, i, names, similarity, taught])
    columns = ["method", "seed", "expert", "classes", "mutual probability, %", "taught, % of sample visits"]
    return Table("groups", "PKD's groups of classes", columns, rows)


def _as_figure(key: str, caption: str, charts: Sequence[Heat]) -> list[Figure]:
    return [Figure(key, caption, charts, 2)] if charts else []


def similarity_chart(method: MethodRuns, run: Result, comparison: Comparison) -> Heat:
    """Draw the mutual probabilities that determine the groups."""
    probability = survey(run)
    assert probability is not None
    title = f"{method.label}, seed {run.seed}"
    mutual = 100 * mutual_probability(probability)
    return _pairs(f"similarity-{method.index}", title, "mutual probability, %", mutual, comparison)


def _confusion_chart(method: MethodRuns, run: Result, comparison: Comparison) -> Heat | None:
    """Draw the mutual confusion on the test set, for runs without recorded mutual probabilities."""
    warm = [row for row in run.evaluated if row.stage == "warm-up"]
    if not warm:
        return None
    counts = warm[-1].required_evaluation.confusion.astype(np.float64)
    mutual = 100 * mutual_probability(counts / np.maximum(1, counts.sum(axis=1, keepdims=True)))
    title = f"{method.label}, seed {run.seed}"
    return _pairs(f"warm-confusion-{method.index}", title, "mutual confusion, %", mutual, comparison)


def _pairs(key: str, title: str, what: str, mutual: Floats, comparison: Comparison) -> Heat:
    cells = [[None if i == j else number(value, 3) for j, value in enumerate(row)] for i, row in enumerate(mutual)]
    return Heat(key, title, "class", "class", what, comparison.classes, comparison.classes, cells)


def _teaching_figures(
    methods: Sequence[MethodRuns], first: Sequence[tuple[MethodRuns, Result]], comparison: Comparison
) -> list[Figure]:
    found = lines(methods, taught_shares)
    if not found:
        return []
    charts = [Lines("activations", "all experts", "round", "% of sample visits", found)]
    charts += [chart for method, run in first if (chart := taught_shares_by_expert(method, run, comparison))]
    return [Figure("activations", "How often a sample was taught by an expert", charts, 2)]


def taught_shares(run: Result) -> Iterator[Point]:
    """The share of sample visits that any expert taught."""
    for row in _tallied_rows(run):
        yield row.model_round, _share([row], "distilled")


def taught_shares_by_expert(method: MethodRuns, run: Result, comparison: Comparison) -> Lines | None:
    """Draw a curve per expert. Return None if the run did not record which expert taught."""
    rows = [row for row in _tallied_rows(run) if "expert 0" in row.tally]
    if not rows:
        return None
    rounds = [row.model_round for row in rows]
    drawn = [
        Line(_expert_name(i, group, comparison), rounds, [_share([row], f"expert {i}") for row in rows], style=i)
        for i, group in enumerate(groups(run))
    ]
    key, title = f"activations-{method.index}", f"each expert of {method.label}, seed {run.seed}"
    return Lines(key, title, "round", "% of sample visits", drawn)


def _expert_name(expert: int, group: Sequence[int], comparison: Comparison) -> str:
    names = [comparison.classes[c] for c in group[:MAX_NAMES]]
    return f"{expert}: {', '.join(names)}{' …' if len(group) > MAX_NAMES else ''}"


def _missing(method: MethodRuns) -> Iterator[str]:
    """Name the results that the runs did not record."""
    unrecorded = {
        "the mutual probabilities": [run for run in method.runs if _notes(run).get("groups") and survey(run) is None],
        "how often each expert taught": [
            run for run in method.runs if any("expert 0" not in row.tally for row in _tallied_rows(run))
        ],
    }
    for what, runs in unrecorded.items():
        if runs:
            yield f"{method.label}, {_seeds(runs)}: {what}: not recorded by the version that made the run; repeat it"
    unshared = [run for run in method.runs if _ran_distillation(run) and not _tallied_rows(run)]
    if unshared:
        yield f"{method.label}, {_seeds(unshared)}: how often experts taught: the sites do not share it"


def _seeds(runs: Sequence[Result]) -> str:
    return f"seed{'s' if len(runs) > 1 else ''} {', '.join(str(run.seed) for run in runs)}"


def survey(run: Result) -> Floats | None:
    """The mean predicted probabilities [C, C] on training samples of each class, after the warm-up.

    None if they were not recorded, or if no pair of classes has a finite value.
    """
    found = next((row.survey for row in run.history if row.survey), None)
    if found is None:
        return None
    probability = np.array(found["probability"], np.float64)
    pairs = mutual_probability(probability)[np.triu_indices(len(probability), 1)]
    return probability if np.isfinite(pairs).any() else None


def groups(run: Result) -> list[list[int]]:
    """The groups that PKD found. If it found none, the groups in the configuration."""
    return _notes(run).get("groups") or list(run.config.method_params.get("groups") or [])


def _mean_similarity(group: Sequence[int], probability: Floats | None) -> float | None:
    """The mean mutual probability of a group's pairs, in percent."""
    if probability is None:
        return None
    inside = mutual_probability(probability)[np.ix_(group, group)]
    return number(100 * float(inside[np.triu_indices(len(group), 1)].mean()), 3)


def _tallied_rows(run: Result) -> list[RoundRow]:
    """The rows that recorded how often experts taught."""
    return [row for row in run.history if "distilled" in row.tally and row.visits]


def _ran_distillation(run: Result) -> bool:
    return any(row.stage == "distil" and row.visits for row in run.history)


def _share(rows: Sequence[RoundRow], name: str) -> float | None:
    """The percentage of sample visits in these rows that were tallied as `name`."""
    counted = [row for row in rows if name in row.tally]
    if not counted:
        return None
    return number(100 * sum(row.tally[name] for row in counted) / sum(row.visits for row in counted), 3)


def _notes(run: Result) -> dict[str, list[list[int]]]:
    return run.history[-1].notes if run.history else {}


def _has_experts(run: Result) -> bool:
    return any(row.model.startswith("expert") for row in run.history)
