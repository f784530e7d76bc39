"""PKD: which classes it grouped, how alike they were, how often each expert taught."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from fedskew.experiment.round.row import RoundRow
from fedskew.methods.pkd import mutual_probability, stands_out_above
from fedskew.report.charts.chart import Figure, Heat, Line, Lines
from fedskew.report.charts.table import Cell, Table, number
from fedskew.report.sections.section import Point, Section, lines
from fedskew.results import Comparison, MethodRuns, Result

Floats = npt.NDArray[np.float64]
MOST_PANELS = 6
"""Methods with experts that are shown one by one."""
MOST_NAMES = 4
"""Classes that name an expert in a legend."""
WORDS = (
    "After the warm-up PKD groups classes to which the global model gives one another's probability on the clients' "
    "training samples, trains an expert for each group and lets it teach samples whose label and wrong prediction fall "
    "into its group."
)


def experts(setting: Comparison) -> Section | None:
    """None where no method has experts."""
    who = [c for c in setting.methods if any("groups" in _notes(run) or _has_experts(run) for run in c.runs)]
    if not who:
        return None
    first = [(c, run) for c in who[:MOST_PANELS] if (run := c.first)]
    figures = [
        *_mapped("similarity", "Probability that classes give one another on training samples, after the warm-up",
                 [similarity(c, run, setting) for c, run in first if survey(run) is not None]),
        *_mapped("warm-confusion", "How often classes were taken for one another on the test set, after the warm-up",
                 [chart for c, run in first if survey(run) is None and (chart := _confused(c, run, setting))]),
        *_taught(who, first, setting),
    ]  # fmt: skip
    words = [WORDS, *(f"{c.label}, seed {run.seed}: {bar}" for c, run in first if (bar := _bar(run)))]
    missing = [line for c in who for line in _unknown(c)]
    return Section("experts", "PKD's experts", words, figures, [_table(who, setting)], missing=missing)


def _bar(run: Result) -> str | None:
    probability = survey(run)
    if probability is None:
        return None
    above = stands_out_above(probability, float(run.config.method_params.get("group_threshold", 2.0)))
    return f"a pair of classes stands out if they give one another more than {100 * above:.3g} %."


def _table(who: Sequence[MethodRuns], setting: Comparison) -> Table:
    rows: list[list[Cell]] = []
    for c in who:
        for run in c.runs:
            for i, group in enumerate(groups(run)):
                alike, taught = _within(group, survey(run)), _share(_distilling(run), f"expert {i}")
                rows.append([c.label, run.seed, i, ", ".join(setting.classes[k] for k in group), alike, taught])
    columns = ["method", "seed", "expert", "classes", "probability of one another, %", "taught, % of sample visits"]
    return Table("groups", "Groups of weak classes", columns, rows)


def _mapped(key: str, caption: str, charts: Sequence[Heat]) -> list[Figure]:
    return [Figure(key, caption, charts, 2)] if charts else []


def similarity(contender: MethodRuns, run: Result, setting: Comparison) -> Heat:
    """What the groups came from."""
    probability = survey(run)
    assert probability is not None
    title = f"{contender.label}, seed {run.seed}"
    mutual = 100 * mutual_probability(probability)
    return _pairs(f"similarity-{contender.style}", title, "mutual probability, %", mutual, setting)


def _confused(contender: MethodRuns, run: Result, setting: Comparison) -> Heat | None:
    """In place of it, where no survey was made or recorded."""
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
    """By all experts together."""
    for row in _distilling(run):
        yield row.model_round, _share([row], "distilled")


def activations_by_expert(contender: MethodRuns, run: Result, setting: Comparison) -> Lines | None:
    """None where it was not recorded which expert taught."""
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
    """What runs from before do not tell."""
    lacking = {
        "the probabilities that the groups come from": [
            run for run in contender.runs if _notes(run).get("groups") and survey(run) is None
        ],
        "how often each expert taught": [
            run for run in contender.runs if any("expert 0" not in row.tally for row in _distilling(run))
        ],
    }
    for what, runs in lacking.items():
        if runs:
            yield f"{contender.label}, {_seeds(runs)}: {what}, which that version did not record; run it anew"
    silent = [run for run in contender.runs if _has_distilled(run) and not _distilling(run)]
    if silent:
        yield f"{contender.label}, {_seeds(silent)}: how often experts taught, which the sites keep to themselves"


def _seeds(runs: Sequence[Result]) -> str:
    return f"seed{'s' if len(runs) > 1 else ''} {', '.join(str(run.seed) for run in runs)}"


def survey(run: Result) -> Floats | None:
    """[C, C]: how training samples of each true class were predicted after the warm-up; None where no pair is known."""
    told = next((row.survey for row in run.history if row.survey), None)
    if told is None:
        return None
    probability = np.array(told["probability"], np.float64)
    pairs = mutual_probability(probability)[np.triu_indices(len(probability), 1)]
    return probability if np.isfinite(pairs).any() else None


def groups(run: Result) -> list[list[int]]:
    """Found, or given by the configuration."""
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
    """Of all sample visits, in percent."""
    counted = [row for row in rows if name in row.tally]
    if not counted:
        return None
    return number(100 * sum(row.tally[name] for row in counted) / sum(row.visits for row in counted), 3)


def _notes(run: Result) -> dict[str, list[list[int]]]:
    return run.history[-1].notes if run.history else {}


def _has_experts(run: Result) -> bool:
    return any(row.model.startswith("expert") for row in run.history)
