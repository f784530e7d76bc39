"""The answer in words: which method is best here, by how much, is it sure, which classes gain or lose."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fedskew.report.contenders import Contender, Setting
from fedskew.report.significance import Difference, holm, paired

LOST = 0.05
"""The accuracy below which a class counts as lost."""
NOTABLE = 0.01
"""Differences below it are not told."""
MOST_CLASSES = 5


def verdict(setting: Setting) -> list[str]:
    """Sentences, the most important first."""
    ranking = setting.ranking
    if not ranking:
        return ["Nothing was tested yet: the runs have no evaluation."]
    said = _unfinished(setting)
    if len(ranking) == 1:
        return [*said, *_alone(ranking[0], setting)]
    return [*said, *_compared(ranking, setting)]


def _unfinished(setting: Setting) -> list[str]:
    going = [c for c in setting.contenders if len(c.finished) < len(c.runs)]
    if not going:
        return []
    if not any(c.finished for c in setting.contenders):
        rounds = [run.last_round for c in setting.contenders for run in c.tested]
        return [f"No run is finished: this is how they stand after round {_span(rounds)}."]
    told = [f"{c.label} ({len(c.finished)} of {len(c.runs)} runs finished)" for c in going]
    return [f"Unfinished: {', '.join(told)}; only finished runs count where a method has any."]


def _span(rounds: Sequence[int]) -> str:
    return str(rounds[0]) if len(set(rounds)) == 1 else f"{min(rounds)} to {max(rounds)}"


def _alone(contender: Contender, setting: Setting) -> list[str]:
    return [
        f"{contender.label} recognises {_percent(contender.accuracy)} of the test set "
        f"({_seeds(contender)}){_spread(contender)}.",
        *_weakest(contender, setting),
    ]


def _compared(ranking: Sequence[Contender], setting: Setting) -> list[str]:
    best, baseline = ranking[0], setting.baseline
    against = {c.label: d for c, d in zip(ranking[1:], differences(best, ranking[1:]), strict=True)}
    said = _on_fewer_seeds(setting)
    said += [f"{best.label} is best here: {_percent(best.accuracy)} of the test set ({_seeds(best)}){_spread(best)}."]
    second = ranking[1]
    said.append(_lead(second, against[second.label], len(against)))
    if unsure := [c for c in ranking[2:] if c is not baseline and _open(against[c.label])]:
        names = ", ".join(c.label for c in unsure)
        said.append(f"Not told apart from {best.label} either: {names}.")
    if baseline is not None and baseline not in (best, second) and baseline.tested:
        said.append(_over_baseline(baseline, against[baseline.label], len(against)))
    if baseline is not None and baseline is not best and baseline.tested:
        said += _classes(best, baseline, setting.classes)
    return [*said, *_weakest(best, setting), *_cost(best, baseline)]


def _on_fewer_seeds(setting: Setting) -> list[str]:
    common = setting.common_seeds
    have = {len(c.tested) for c in setting.ranking}
    if len(have) == 1 and have == {len(common)}:
        return []
    if not common:
        return ["The methods have no seed in common: the order below mixes methods with seeds."]
    seeds = ", ".join(map(str, sorted(common)))
    return [f"Not all methods have the same seeds: they are ranked on those that all have ({seeds})."]


def differences(best: Contender, others: Sequence[Contender]) -> list[Difference | None]:
    """The best minus each of the others, corrected for their number."""
    first = best.by_seed(lambda e: e.accuracy)
    raw = [paired(first, other.by_seed(lambda e: e.accuracy)) for other in others]
    corrected = iter(holm([d for d in raw if d is not None]))
    return [None if d is None else next(corrected) for d in raw]


def _open(difference: Difference | None) -> bool:
    return difference is not None and difference.seeds > 1 and not difference.sure


def _lead(second: Contender, difference: Difference | None, comparisons: int) -> str:
    if difference is None:
        return (
            f"{second.label} comes next with {_percent(second.accuracy)}, on other seeds, so the two cannot be paired."
        )
    points = f"It leads {second.label} by {_points(difference.mean)}"
    if difference.seeds == 1:
        return f"{points}, with one seed only: nobody can say whether that is chance; run more (--seeds 5)."
    return f"{points} ({_interval(difference)}): {_certainty(difference, comparisons)}."


def _over_baseline(baseline: Contender, difference: Difference | None, comparisons: int) -> str:
    if difference is None:
        return f"{baseline.label} has {_percent(baseline.accuracy)}, on other seeds."
    told = f"Over {baseline.label} it gains {_points(difference.mean)}"
    if difference.seeds == 1:
        return f"{told} (one seed)."
    return f"{told} ({_interval(difference)}): {_certainty(difference, comparisons)}."


def _interval(difference: Difference) -> str:
    if difference.low is None or difference.high is None:
        return f"{difference.seeds} seeds"
    low, high = 100 * difference.low, 100 * difference.high
    return f"95 % interval {signed(low, 1)} to {signed(high, 1)}, paired over {difference.seeds} seeds"


def _certainty(difference: Difference, comparisons: int) -> str:
    if difference.p is None:
        return "the same difference in every seed"
    how = f"p = {difference.p:.3f}" if difference.p >= 0.001 else "p < 0.001"
    if comparisons > 1:
        how += f", corrected for {comparisons} comparisons"
    if not difference.sure:
        few = " so few seeds show large differences only;" if difference.seeds < 5 else ""
        return f"not sure,{few} {how}"
    return f"{'as sure as ' + str(difference.seeds) + ' seeds can be' if difference.seeds < 5 else 'sure'}, {how}"


def _classes(best: Contender, baseline: Contender, names: Sequence[str]) -> list[str]:
    """Over the seeds that both have."""
    common = {run.seed for run in best.tested} & {run.seed for run in baseline.tested}
    if not common:
        return []
    changes = _of_seeds(best, common) - _of_seeds(baseline, common)
    mean = changes.mean(axis=0)
    order = np.argsort(mean)
    gains = [c for c in order[::-1] if mean[c] >= NOTABLE][:MOST_CLASSES]
    losses = [c for c in order if mean[c] <= -NOTABLE][:MOST_CLASSES]

    def told(c: int) -> str:
        agreed = (np.sign(changes[:, c]) == np.sign(mean[c])).all()
        return f"{names[c]} ({signed(100 * mean[c])}{'' if agreed or len(changes) == 1 else ', not in every seed'})"

    said = []
    if gains:
        said.append(f"Against {baseline.label}, the classes that gain most: {', '.join(map(told, gains))}.")
    lose = ", ".join(map(told, losses)) if losses else "none by a point or more"
    said.append(f"Classes that lose: {lose}.")
    return said


def _of_seeds(contender: Contender, seeds: set[int]) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    rows = [run.seed in seeds for run in contender.tested]
    return contender.class_accuracy()[rows]


def _weakest(contender: Contender, setting: Setting) -> list[str]:
    mean = contender.class_accuracy().mean(axis=0)
    if not np.isfinite(mean).any():
        return []
    worst = int(np.nanargmin(mean))
    lost = [setting.classes[c] for c in np.flatnonzero(mean < LOST)]
    said = f"Its weakest class is {setting.classes[worst]} with {_percent(float(mean[worst]))}"
    if not lost:
        return [f"{said}; no class is lost."]
    more = f" and {len(lost) - MOST_CLASSES} more" if len(lost) > MOST_CLASSES else ""
    return [f"{said}; lost (below {100 * LOST:.0f} %): {', '.join(lost[:MOST_CLASSES])}{more}."]


def _cost(best: Contender, baseline: Contender | None) -> list[str]:
    if baseline is None or baseline is best:
        return []
    told = []
    for key, what in (("compute", "computation"), ("bytes", "communication")):
        own, its = _mean_cost(best, key), _mean_cost(baseline, key)
        if own and its and abs(own / its - 1) >= 0.005:
            told.append(f"{own / its:.2f} times the {what} of {baseline.label}")
    return [f"It costs {' and '.join(told)}." if told else f"It costs no more than {baseline.label}."]


def _mean_cost(contender: Contender, key: str) -> float:
    totals = [moved(row) if key == "bytes" else row.get(key) or 0.0 for run in contender.tested for row in run.rows]
    return float(sum(totals)) / max(1, len(contender.tested))


def moved(row: dict[str, dict[str, int]]) -> int:
    """Bytes of a round, both ways."""
    return sum(row.get("bytes", {}).values())


def signed(points: float, digits: int = 0) -> str:
    """With a sign that is as wide as the plus."""
    return f"{points:+.{digits}f}".replace("-", "−")


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _points(difference: float) -> str:
    return f"{100 * difference:.1f} points"


def _seeds(contender: Contender) -> str:
    n = len(contender.tested)
    return f"mean of {n} seeds" if n > 1 else f"one seed, {contender.tested[0].seed}"


def _spread(contender: Contender) -> str:
    values = list(contender.by_seed(lambda e: e.accuracy).values())
    return f", from {100 * min(values):.1f} to {100 * max(values):.1f}" if len(values) > 1 else ""
