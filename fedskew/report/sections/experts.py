"""PKD: the groups of classes, how similar they are, and how often each expert taught."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from fedskew.experiment.round.record import RoundRow
from fedskew.methods.pkd import mutual_probability, stands_out_above
from fedskew.report.charts.chart import Figure, Heat, Line, Lines
from fedskew.report.charts.table import Cell, Table, number
from fedskew.report.sections.section import Point, Section, lines
from fedskew.results import Comparison, MethodRuns, Result

Floats = npt.NDArray[np.float64]
MOST_PANELS = 6
"""At most this many methods with experts get panels of their own."""
MOST_NAMES = 4
"""At most this many class names describe an expert in a legend."""
WORDS = (
    "After the warm-up PKD groups classes that the global model confuses on the clients' training samples. It trains "
    "an expert per group, which teaches the samples whose label and wrong prediction are both in its group."
)


def experts(setting: Comparison) -> Section | None:
    """None if no method has experts."""
    who = [c for c in setting.methods if any("groups" in _notes(run) or _has_experts(run) for run in c.runs)]
    if not who:
        return None
    first = [(c, run) for c in who[:MOST_PANELS] if (run := c.first)]
    figures = [
        *_mapped("similarity", "Mutual probability of classes on training samples, after the warm-up",
                 [similarity(c, run, setting) for c, run in first if survey(run) is not None]),
        *_mapped("warm-confusion", "How often classes were confused on the test set, after the warm-up",
                 [chart for c, run in first if survey(run) is None and (chart := _confused(c, run, setting))]),
        *_taught(who, first, setting),
    ]  # fmt: skip
    words = [WORDS, *(f"{c.label}, seed {run.seed}: {line}" for c, run in first if (line := _threshold(run)))]
    missing = [line for c in who for line in _unknown(c)]
    return Section("experts", "PKD's experts", words, figures, [_table(who, setting)], missing=missing)


def _threshold(run: Result) -> str | None:
    probability = survey(run)
    if probability is None:
        return None
    above = stands_out_above(probability, float(run.config.method_params.get("group_threshold", 2.0)))
    return f"a pair of classes stands out if its mutual probability is above {100 * above:.3g} %."


def _table(who: Sequence[MethodRuns], setting: Comparison) -> Table:
    rows: list[list[Cell]] = []
    for c in who:
        for run in c.runs:
            for i, group in enumerate(groups(run)):
                alike, taught = _within(group, survey(run)), _share(_distilling(run), f"expert {i}")
                rows.append([c.label, run.seed, i, ", ".join(setting.classes[k] for k in group), alike, taught])
    columns = ["method", "seed", "expert", "classes", "mutual probability, %", "taught, % of sample visits"]
    return Table("groups", "Groups of weak classes", columns, rows)


def _mapped(key: str, caption: str, charts: Sequence[Heat]) -> list[Figure]:
    return [Figure(key, caption, charts, 2)] if charts else []


def similarity(contender: MethodRuns, run: Result, setting: Comparison) -> Heat:
    """The mutual probabilities that the groups are based on."""
    probability = survey(run)
    assert probability is not None
    title = f"{contender.label}, seed {run.seed}"
    mutual = 100 * mutual_probability(probability)
    return _pairs(f"similarity-{contender.style}", title, "mutual probability, %", mutual, setting)


def _confused(contender: MethodRuns, run: Result, setting: Comparison) -> Heat | None:
    """The mutual confusion, if no mutual probabilities were recorded."""
    warm = [row for row in run.evaluated if row.stage == "warm-up"]
    if not warm:
        return None
    counts = warm[-1].tested.confusion.astype(np.float64)
    mutual = 100 * mutual_probability(counts / np.maximum(1, counts.sum(axis=1, keepdims=True)))
    title = f"{contender.label}, seed {run.seed}"
    return _pairs(f"warm-confusion-{contender.style}", title, "mutual confusion, %", mutual, setting)


def _pairs(key: str, title: str, what: str, mutual: Floats, setting: Comparison) -> Heat:
    cells = [[None if i == j else number(value, 3) for j, value in enumerate(row)] for i, row in enumerate(mutual)]
    return Heat(key, title, "class", "class", what, setting.classes, setting.classes, cells)


def _taught(who: Sequence[MethodRuns], first: Sequence[tuple[MethodRuns, Result]], setting: Comparison) -> list[Figure]:
    found = lines(who, activations)
    if not found:
        return []
    charts = [Lines("activations", "all experts", "round", "% of sample visits", found)]
    charts += [chart for c, run in first if (chart := activations_by_expert(c, run, setting))]
    return [Figure("activations", "How often a sample was taught by an expert", charts, 2)]


def activations(run: Result) -> Iterator[Point]:
    """The share of sample visits that any expert taught."""
    for row in _distilling(run):
        yield row.model_round, _share([row], "distilled")


def activations_by_expert(contender: MethodRuns, run: Result, setting: Comparison) -> Lines | None:
    """None if the run did not record which expert taught."""
    rows = [row for row in _distilling(run) if "expert 0" in row.tally]
    if not rows:
        return None
    rounds = [row.model_round for row in rows]
    drawn = [
        Line(_named(i, group, setting), rounds, [_share([row], f"expert {i}") for row in rows], style=i)
        for i, group in enumerate(groups(run))
    ]
    key, title = f"activations-{contender.style}", f"each expert of {contender.label}, seed {run.seed}"
    return Lines(key, title, "round", "% of sample visits", drawn)


def _named(expert: int, group: Sequence[int], setting: Comparison) -> str:
    names = [setting.classes[c] for c in group[:MOST_NAMES]]
    return f"{expert}: {', '.join(names)}{' …' if len(group) > MOST_NAMES else ''}"


def _unknown(contender: MethodRuns) -> Iterator[str]:
    """Lines on what older runs did not record."""
    lacking = {
        "the probabilities that the groups are based on": [
            run for run in contender.runs if _notes(run).get("groups") and survey(run) is None
        ],
        "how often each expert taught": [
            run for run in contender.runs if any("expert 0" not in row.tally for row in _distilling(run))
        ],
    }
    for what, runs in lacking.items():
        if runs:
            yield f"{contender.label}, {_seeds(runs)}: {what}: not recorded by that version; run it again"
    silent = [run for run in contender.runs if _has_distilled(run) and not _distilling(run)]
    if silent:
        yield f"{contender.label}, {_seeds(silent)}: how often experts taught: the sites do not share it"


def _seeds(runs: Sequence[Result]) -> str:
    return f"seed{'s' if len(runs) > 1 else ''} {', '.join(str(run.seed) for run in runs)}"


def survey(run: Result) -> Floats | None:
    """[C, C]: mean predictions for training samples of each class after the warm-up; None if no pair is known."""
    found = next((row.survey for row in run.history if row.survey), None)
    if found is None:
        return None
    probability = np.array(found["probability"], np.float64)
    pairs = mutual_probability(probability)[np.triu_indices(len(probability), 1)]
    return probability if np.isfinite(pairs).any() else None


def groups(run: Result) -> list[list[int]]:
    """The groups that PKD found, or those of the configuration."""
    return _notes(run).get("groups") or list(run.config.method_params.get("groups") or [])


def _within(group: Sequence[int], probability: Floats | None) -> float | None:
    """The mean mutual probability of a group's pairs, in percent."""
    if probability is None:
        return None
    inside = mutual_probability(probability)[np.ix_(group, group)]
    return number(100 * float(inside[np.triu_indices(len(group), 1)].mean()), 3)


def _distilling(run: Result) -> list[RoundRow]:
    return [row for row in run.history if "distilled" in row.tally and row.visits]


def _has_distilled(run: Result) -> bool:
    return any(row.stage == "distil" and row.visits for row in run.history)


def _share(rows: Sequence[RoundRow], name: str) -> float | None:
    """Share of all sample visits, in percent."""
    counted = [row for row in rows if name in row.tally]
    if not counted:
        return None
    return number(100 * sum(row.tally[name] for row in counted) / sum(row.visits for row in counted), 3)


def _notes(run: Result) -> dict[str, list[list[int]]]:
    return run.history[-1].notes if run.history else {}


def _has_experts(run: Result) -> bool:
    return any(row.model.startswith("expert") for row in run.history)
