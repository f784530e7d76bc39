"""The conclusion in words: which method is best, by how much, whether that is significant, which classes change."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fedskew.metrics.confusion import LOST, lost_classes
from fedskew.results import Comparison, MethodRuns
from fedskew.results.significance import Difference

NOTABLE = 0.01
"""Smaller differences are not mentioned."""
MOST_CLASSES = 5


def verdict(setting: Comparison) -> list[str]:
    """Sentences, the most important ones first."""
    ranking = setting.ranking
    if not ranking:
        return ["No run has been evaluated yet."]
    methods = setting.competing
    answer = _compared(methods, setting) if len(methods) > 1 else _alone(ranking[0], setting)
    return [*_unfinished(setting), *answer, *_bounds(ranking[max(1, len(methods)) :]), *_diverged(ranking)]


def _unfinished(setting: Comparison) -> list[str]:
    going = [c for c in setting.methods if len(c.finished) < len(c.runs)]
    if not going:
        return []
    if not any(c.finished for c in setting.methods):
        rounds = [run.last_round for c in setting.methods for run in c.tested]
        return [f"No run is finished; these are the results after round {_span(rounds)}."]
    return [f"Unfinished: {', '.join(map(_standing, going))}; only finished runs count if a method has any."]


def _standing(contender: MethodRuns) -> str:
    rounds = [run.last_round for run in contender.tested]
    far = f", shown after round {_span(rounds)}" if rounds and not contender.finished else ""
    return f"{contender.label} ({len(contender.finished)} of {len(contender.runs)} runs finished{far})"


def _span(rounds: Sequence[int]) -> str:
    return str(rounds[0]) if len(set(rounds)) == 1 else f"{min(rounds)} to {max(rounds)}"


def _alone(contender: MethodRuns, setting: Comparison) -> list[str]:
    return [
        f"{contender.label} recognises {_percent(contender.accuracy.mean)} of the test set "
        f"({_seeds(contender)}){_spread(contender)}.",
        *_weakest(contender, setting, "Its"),
    ]


def _compared(methods: Sequence[MethodRuns], setting: Comparison) -> list[str]:
    best, second, baseline = methods[0], methods[1], setting.baseline
    against = {c.label: d for c, d in zip(methods[1:], setting.differences(), strict=True)}
    sentences = _on_fewer_seeds(setting)
    lead = against[second.label]
    equal = lead is not None and lead.is_zero
    who = f"{best.label} and {second.label} are equally good here" if equal else f"{best.label} is best here"
    sentences += [f"{who}: {_percent(best.accuracy.mean)} of the test set ({_seeds(best)}){_spread(best)}."]
    sentences += [] if equal else [_lead(second, lead)]
    if unsure := [c for c in methods[2:] if c is not baseline and _open(against[c.label])]:
        names = ", ".join(c.label for c in unsure)
        sentences.append(f"{'Also not' if _open(lead) else 'Not'} significantly different from {best.label}: {names}.")
    if baseline is not None and baseline not in (best, second) and baseline.tested:
        sentences.append(_over_baseline(baseline, against[baseline.label]))
    if baseline is not None and baseline is not best and baseline.tested:
        sentences += _classes(best, baseline, setting.classes)
    it, its = (best.label, f"{best.label}'s") if equal else ("It", "Its")
    return [*sentences, *_weakest(best, setting, its), *_cost(best, baseline, it)]


def _on_fewer_seeds(setting: Comparison) -> list[str]:
    common = setting.common_seeds
    have = {len(c.tested) for c in setting.competing}
    if len(have) == 1 and have == {len(common)}:
        return []
    if not common:
        return ["The methods have no seed in common, so their order also depends on the seeds."]
    seeds = ", ".join(map(str, sorted(common)))
    return [f"The methods have different seeds; they are ranked on the seeds that all of them have ({seeds})."]


def _open(difference: Difference | None) -> bool:
    return difference is not None and difference.seeds > 1 and not difference.significant


def _lead(second: MethodRuns, difference: Difference | None) -> str:
    if difference is None:
        found = _percent(second.accuracy.mean)
        return f"{second.label} comes next with {found}, but on other seeds, so the two cannot be paired."
    points = f"It leads {second.label} by {_points(difference.mean)}"
    if difference.seeds == 1:
        return f"{points}, but one seed cannot rule out chance; run more (--seeds 5)."
    return f"{points} ({_interval(difference)}): {_significance(difference)}."


def _over_baseline(baseline: MethodRuns, difference: Difference | None) -> str:
    if difference is None:
        return f"{baseline.label} has {_percent(baseline.accuracy.mean)}, on other seeds."
    gain = f"It gains {_points(difference.mean)} over {baseline.label}"
    if difference.seeds == 1:
        return f"{gain} (one seed)."
    return f"{gain} ({_interval(difference)}): {_significance(difference)}."


def _interval(difference: Difference) -> str:
    if difference.low is None or difference.high is None:
        return f"{difference.seeds} seeds"
    low, high = 100 * difference.low, 100 * difference.high
    return f"95 % interval {signed(low, 1)} to {signed(high, 1)}, paired over {difference.seeds} seeds"


def _significance(difference: Difference) -> str:
    if difference.p is None:
        return "the same with every seed, so chance cannot be estimated"
    how = f"p = {difference.p:.3f}" if difference.p >= 0.001 else "p < 0.001"
    if difference.comparisons > 1:
        how += f", corrected for {difference.comparisons} comparisons"
    if not difference.significant:
        few = f"; with {difference.seeds} seeds only large differences are detectable" if difference.seeds < 5 else ""
        return f"not significant ({how}){few}"
    return f"significant ({how})"


def _classes(best: MethodRuns, baseline: MethodRuns, names: Sequence[str]) -> list[str]:
    """Class by class, over the seeds that both methods have."""
    common = {run.seed for run in best.tested} & {run.seed for run in baseline.tested}
    if not common:
        return []
    changes = best.class_accuracies(common) - baseline.class_accuracies(common)
    mean = changes.mean(axis=0)
    order = np.argsort(mean)
    gains = [c for c in order[::-1] if mean[c] >= NOTABLE][:MOST_CLASSES]
    losses = [c for c in order if mean[c] <= -NOTABLE][:MOST_CLASSES]

    def described(c: int) -> str:
        agreed = (np.sign(changes[:, c]) == np.sign(mean[c])).all()
        return f"{names[c]} ({signed(100 * mean[c])}{'' if agreed or len(changes) == 1 else ', not with every seed'})"

    sentences = []
    if gains:
        sentences.append(f"Compared with {baseline.label}, these gain most: {', '.join(map(described, gains))}.")
    lose = ", ".join(map(described, losses)) if losses else "none by a point or more"
    sentences.append(f"Classes that lose accuracy: {lose}.")
    return sentences


def _weakest(contender: MethodRuns, setting: Comparison, its: str) -> list[str]:
    mean = contender.class_accuracy
    if not np.isfinite(mean).any():
        return []
    worst = int(np.nanargmin(mean))
    lost = [setting.classes[c] for c in lost_classes(mean)]
    weakest = f"{its} weakest class is {setting.classes[worst]} with {_percent(float(mean[worst]))}"
    if not lost:
        return [f"{weakest}; no class is lost."]
    more = f" and {len(lost) - MOST_CLASSES} more" if len(lost) > MOST_CLASSES else ""
    return [f"{weakest}; lost classes (below {100 * LOST:.0f} %): {', '.join(lost[:MOST_CLASSES])}{more}."]


def _cost(best: MethodRuns, baseline: MethodRuns | None, it: str) -> list[str]:
    """The cost of whole runs: an unfinished run costs less."""
    if baseline is None or baseline is best or not (best.finished and baseline.finished):
        return []
    ratios, known = [], False
    for key, what in (("compute", "computation"), ("bytes", "communication")):
        own, its = _mean_cost(best, key), _mean_cost(baseline, key)
        known |= bool(own and its)
        if own and its and abs(own / its - 1) >= 0.005:
            ratios.append(f"{own / its:.2f} times the {what} of {baseline.label}")
    if ratios:
        return [f"{it} costs {' and '.join(ratios)}."]
    return [f"{it} costs no more than {baseline.label}."] if known else []


def _bounds(bounds: Sequence[MethodRuns]) -> list[str]:
    listed = ", ".join(f"{c.label} {_percent(c.accuracy.mean)}" for c in bounds)
    return [f"Reference bounds, not federated methods: {listed}."] if listed else []


def _diverged(ranking: Sequence[MethodRuns]) -> list[str]:
    found = {c.label: sum(run.diverged for run in c.tested) for c in ranking}
    listed = ", ".join(f"{n} of {label}" for label, n in found.items() if n)
    return [f"Client updates that were not finite and were left out: {listed}."] if listed else []


def _mean_cost(contender: MethodRuns, key: str) -> float:
    return contender.over_seeds(lambda run: run.bytes_moved if key == "bytes" else run.compute).mean


def signed(points: float, digits: int = 0) -> str:
    """With a minus sign that is as wide as the plus sign."""
    return f"{points:+.{digits}f}".replace("-", "−")


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _points(difference: float) -> str:
    return f"{100 * difference:.1f} points"


def _seeds(contender: MethodRuns) -> str:
    n = len(contender.tested)
    return f"mean of {n} seeds" if n > 1 else f"one seed, {contender.tested[0].seed}"


def _spread(contender: MethodRuns) -> str:
    values = list(contender.by_seed(lambda run: run.accuracy).values())
    return f", from {100 * min(values):.1f} to {100 * max(values):.1f}" if len(values) > 1 else ""
