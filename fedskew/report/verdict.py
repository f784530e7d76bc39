"""The conclusion in words: which method is best, by how much, whether that is significant, which classes change."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from fedskew.metrics.confusion import LOST, lost_classes
from fedskew.results import Comparison, MethodRuns
from fedskew.results.ranking import DEFAULT_METRIC
from fedskew.results.significance import MAX_SEEDS, MIN_SEEDS, Difference

NOTABLE = 0.01
"""Smaller differences are not mentioned."""
MUCH = 0.05
"""A worst class that is better by this is much better."""
MAX_CLASSES = 5


def verdict(setting: Comparison) -> list[str]:
    """Sentences, the most important ones first."""
    ranking = setting.ranking
    if not ranking:
        return ["No run has been evaluated yet."]
    methods = setting.competing
    compared = [*conclusion(setting), *_details(methods, setting)] if len(methods) > 1 else []
    answer = compared or _alone(ranking[0], setting)
    return [*_unfinished(setting), *answer, *_bounds(ranking[max(1, len(methods)) :], setting), *_diverged(ranking)]


def conclusion(setting: Comparison) -> list[str]:
    """Which method is best, by how much and whether that is significant; nothing if fewer than two compete."""
    methods, baseline = setting.competing, setting.baseline
    if len(methods) < 2:
        return []
    best, second = methods[:2]
    against = {c.label: d for c, d in zip(methods[1:], setting.differences(), strict=True)}
    lead = against[second.label]
    equal = lead is not None and lead.is_zero
    sentences = [*_on_fewer_seeds(setting), _best(best, second if equal else None, setting)]
    sentences += [] if equal else [_lead(second, lead, setting)]
    if unproven := [c for c in methods[2:] if c is not baseline and _not_significant(against[c.label])]:
        also = "Also not" if _not_significant(lead) else "Not"
        sentences.append(f"{also} significantly different from {best.label}: {', '.join(c.label for c in unproven)}.")
    if baseline is not None and baseline not in (best, second) and baseline.tested:
        sentences.append(_over_baseline(best, baseline, against[baseline.label], setting))
    return [*sentences, *_fairer(methods)]


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
    verb = "recognises" if setting.rank_by == DEFAULT_METRIC else f"has {setting.metric.label}"
    score = _score(setting.score(contender).mean, setting)
    return [
        f"{contender.label} {verb} {score} ({_seeds(contender)}){_spread(contender, setting)}.",
        *_weakest(contender, setting, "Its"),
    ]


def _best(best: MethodRuns, equal: MethodRuns | None, setting: Comparison) -> str:
    who = f"{best.label} and {equal.label} are equally good here" if equal else f"{best.label} is best here"
    by = "" if setting.rank_by == DEFAULT_METRIC else f" by {setting.metric.label}"
    score = _score(setting.score(best).mean, setting)
    return f"{who}{by}: {score} ({_seeds(best)}){_spread(best, setting)}."


def _details(methods: Sequence[MethodRuns], setting: Comparison) -> list[str]:
    """How the best method changes classes, its weakest class, and its cost."""
    best, baseline, sentences = methods[0], setting.baseline, []
    if baseline is not None and baseline is not best and baseline.tested:
        sentences += _classes(best, baseline, setting.classes)
    return [*sentences, *_weakest(best, setting, f"{best.label}'s"), *_cost(best, baseline, best.label)]


def _on_fewer_seeds(setting: Comparison) -> list[str]:
    common = setting.common_seeds
    have = {len(c.tested) for c in setting.competing}
    if len(have) == 1 and have == {len(common)}:
        return []
    if not common:
        return ["The methods have no seed in common, so their order also depends on the seeds."]
    seeds = ", ".join(map(str, sorted(common)))
    return [f"The methods have different seeds; they are ranked on the seeds that all of them have ({seeds})."]


def _not_significant(difference: Difference | None) -> bool:
    return difference is not None and difference.is_tested and not difference.significant


def _lead(second: MethodRuns, difference: Difference | None, setting: Comparison) -> str:
    if difference is None:
        found = _percent(setting.score(second).mean)
        return f"{second.label} comes next with {found}, but on other seeds, so the two cannot be paired."
    return f"It leads {second.label} by {_points(difference.mean)}{_significance(difference)}."


def _over_baseline(best: MethodRuns, baseline: MethodRuns, difference: Difference | None, setting: Comparison) -> str:
    if difference is None:
        return f"{baseline.label} has {_percent(setting.score(baseline).mean)}, on other seeds."
    gain = f"{best.label} gains {_points(difference.mean)} over {baseline.label}"
    if difference.seeds < MIN_SEEDS:  # the sentence about the lead already says what a test needs
        return f"{gain}."
    return f"{gain}{_significance(difference)}."


def _significance(difference: Difference) -> str:
    """Whether a difference is significant, and how many seeds would settle it if not."""
    if difference.seeds < MIN_SEEDS:
        seen = "one seed" if difference.seeds == 1 else f"better with {difference.wins} of {difference.seeds} seeds"
        return f" ({seen}); a test needs at least {MIN_SEEDS} seeds: --seeds {MIN_SEEDS}"
    wins = f"better with {difference.wins} of {difference.seeds} seeds"
    if difference.p is None:
        return f", {wins} and by the same amount each time, so chance cannot be estimated"
    how = f"p = {difference.p:.3f}" if difference.p >= 0.001 else "p < 0.001"
    if difference.comparisons > 1:
        how += f", corrected for {difference.comparisons} comparisons"
    result = "significant" if difference.significant else "not significant"
    return f", {wins}: {result} ({how}{_interval(difference)}){_seeds_needed(difference)}"


def _interval(difference: Difference) -> str:
    if difference.low is None or difference.high is None:
        return ""
    return f", interval {signed(100 * difference.low, 1)} to {signed(100 * difference.high, 1)} points"


def _seeds_needed(difference: Difference) -> str:
    if difference.significant or difference.is_zero:
        return ""
    if (needed := difference.seeds_to_settle) is None:
        return f". Even {MAX_SEEDS} seeds would hardly settle it" if difference.seeds < MAX_SEEDS else ""
    return f". If the difference stays as it is, --seeds {needed} would probably settle it"


def _fairer(methods: Sequence[MethodRuns]) -> list[str]:
    """A method that serves the rare classes much better than the best one."""
    best = methods[0]
    f1, worst = best.macro_f1.mean, best.worst_class.mean
    fairer = [m for m in methods[1:] if m.macro_f1.mean > f1 and m.worst_class.mean >= worst + MUCH]
    if not fairer:
        return []
    other = max(fairer, key=lambda m: m.macro_f1.mean)
    better_f1 = f"{_percent(other.macro_f1.mean)} against {_percent(f1)}"
    better_class = f"{_percent(other.worst_class.mean)} against {_percent(worst)}"
    return [
        f"{other.label} has a better macro F1 ({better_f1}) and a much better worst class ({better_class}); "
        "to rank by macro F1: --rank-by macro-f1."
    ]


def _classes(best: MethodRuns, baseline: MethodRuns, names: Sequence[str]) -> list[str]:
    """Class by class, over the seeds that both methods have."""
    common = {run.seed for run in best.tested} & {run.seed for run in baseline.tested}
    if not common:
        return []
    changes = best.class_accuracies(common) - baseline.class_accuracies(common)
    mean = changes.mean(axis=0)
    order = np.argsort(mean)
    gains = [c for c in order[::-1] if mean[c] >= NOTABLE][:MAX_CLASSES]
    losses = [c for c in order if mean[c] <= -NOTABLE][:MAX_CLASSES]

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
    more = f" and {len(lost) - MAX_CLASSES} more" if len(lost) > MAX_CLASSES else ""
    return [f"{weakest}; lost classes (below {100 * LOST:.0f} %): {', '.join(lost[:MAX_CLASSES])}{more}."]


def _cost(best: MethodRuns, baseline: MethodRuns | None, it: str) -> list[str]:
    """The cost relative to FedAvg. Only finished runs count, because an unfinished one costs less."""
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


def _bounds(bounds: Sequence[MethodRuns], setting: Comparison) -> list[str]:
    listed = ", ".join(f"{c.label} {_percent(setting.score(c).mean)}" for c in bounds)
    return [f"Reference bounds, not federated methods: {listed}."] if listed else []


def _diverged(ranking: Sequence[MethodRuns]) -> list[str]:
    found = {c.label: sum(run.diverged for run in c.tested) for c in ranking}
    listed = ", ".join(f"{n} of {label}" for label, n in found.items() if n)
    return [f"Client updates that were not finite and were left out: {listed}."] if listed else []


def _mean_cost(contender: MethodRuns, key: str) -> float:
    return contender.over_seeds(lambda run: run.bytes_moved if key == "bytes" else run.compute).mean


def signed(points: float, digits: int = 0) -> str:
    """Format a number with its sign. The minus sign is as wide as the plus sign."""
    return f"{points:+.{digits}f}".replace("-", "−")


def _score(share: float, setting: Comparison) -> str:
    return f"{_percent(share)} of the test set" if setting.rank_by == DEFAULT_METRIC else _percent(share)


def _percent(share: float) -> str:
    return "–" if math.isnan(share) else f"{100 * share:.1f} %"


def _points(difference: float) -> str:
    return f"{100 * difference:.1f} points"


def _seeds(contender: MethodRuns) -> str:
    n = len(contender.tested)
    return f"mean of {n} seeds" if n > 1 else f"one seed, {contender.tested[0].seed}"


def _spread(contender: MethodRuns, setting: Comparison) -> str:
    values = list(contender.by_seed(setting.metric.value).values())
    return f", from {100 * min(values):.1f} to {100 * max(values):.1f}" if len(values) > 1 else ""
