"""The conclusion in words: which method is best, by how much, whether that is significant, and which classes change."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from fedskew.metrics.confusion import LOST, lost_classes
from fedskew.results import Comparison, MethodRuns
from fedskew.results.early_stops import early_stops, span, unequal_rounds
from fedskew.results.ranking import DEFAULT_METRIC
from fedskew.results.significance import LEVEL, MAX_SEEDS, MIN_SEEDS, Difference

NOTABLE = 0.01
"""Smaller changes of a class's accuracy are not mentioned."""
MUCH = 0.05
"""A worst class is called much better if its accuracy is higher by at least this much."""
MAX_CLASSES = 5
"""The maximum number of classes that a sentence lists."""


def verdict(comparison: Comparison) -> list[str]:
    """Write the conclusion, the most important sentences first. Warnings about unfinished or stopped runs precede."""
    ranking = comparison.ranking
    if not ranking:
        return ["No run has been evaluated yet."]
    methods = comparison.competing
    compared = [*conclusion(comparison), *_details(methods, comparison)] if len(methods) > 1 else []
    answer = compared or _alone(ranking[0], comparison)
    bounds = ranking[max(1, len(methods)) :]  # if no method competes, `answer` is about the first bound
    return [
        *unfinished(comparison),
        *(f"{line}." for line in early_stops(comparison)),
        *answer,
        *_several_labels(comparison),
        *_bounds(bounds, comparison),
        *_diverged(ranking),
    ]


def conclusion(comparison: Comparison) -> list[str]:
    """Say which method is best, by how much, and whether that is significant. Empty if fewer than two compete."""
    methods, baseline = comparison.competing, comparison.baseline
    if len(methods) < 2:
        return []
    best, second = methods[:2]
    against = {method.label: d for method, d in zip(methods[1:], comparison.differences(), strict=True)}
    lead = against[second.label]
    equal = [method for method in methods[1:] if (d := against[method.label]) is not None and d.is_zero]
    are_equal = second in equal
    sentences = [*_on_fewer_seeds(comparison), _best(best, equal if are_equal else [], comparison)]
    sentences += [] if are_equal else [_lead(best, second, lead, comparison)]
    test_is_explained = not are_equal and lead is not None and lead.seeds < MIN_SEEDS
    named = [baseline, *(equal if are_equal else [])]
    if unproven := [
        method for method in methods[2:] if method not in named and _not_significant(against[method.label])
    ]:
        also = "Also not" if _not_significant(lead) else "Not"
        sentences.append(f"{also} significantly different from {best.label}: {_named(unproven, best)}.")
    has_no_sentence = baseline not in (best, second) and not (are_equal and baseline in equal)
    if baseline is not None and has_no_sentence and baseline.counted_runs:
        sentences.append(_over_baseline(best, baseline, against[baseline.label], comparison, test_is_explained))
    return [*sentences, *_better_on_weak_classes(comparison)]


def unfinished(comparison: Comparison) -> list[str]:
    """Say which methods have unfinished runs, and after which round they are shown. Empty if all are finished.

    At least one run must have been evaluated.
    """
    found = [method for method in comparison.methods if len(method.finished_runs) < len(method.runs)]
    if not found:
        return []
    if not any(method.finished_runs for method in comparison.methods):
        rounds = [run.last_round for method in comparison.methods for run in method.counted_runs]
        return [f"No run is finished; these are the results after round {span(rounds)}."]
    return [f"Unfinished: {', '.join(map(_progress, found))}. If a method has finished runs, only these count."]


def _progress(method: MethodRuns) -> str:
    rounds = [run.last_round for run in method.counted_runs]
    shown = f", shown after round {span(rounds)}" if rounds and not method.finished_runs else ""
    return f"{method.label} ({len(method.finished_runs)} of {len(method.runs)} runs finished{shown})"


def _alone(method: MethodRuns, comparison: Comparison) -> list[str]:
    """Write the conclusion about a method without competitors: its score and its weakest class."""
    verb = "recognises" if _ranks_by_sample_accuracy(comparison) else f"has {comparison.metric.label}"
    score = _score(comparison.score(method).mean, comparison)
    return [
        f"{method.label} {verb} {score} ({_seeds(method)}){_spread(method, comparison)}.",
        *_weakest(method, comparison, "Its"),
    ]


def _best(best: MethodRuns, equal: Sequence[MethodRuns], comparison: Comparison) -> str:
    """Name the best method and its score. `equal` are other methods that are exactly as good."""
    *others, last = [method.label for method in (best, *equal)]
    who = f"{', '.join(others)} and {last} are equally good here" if others else f"{last} is best here"
    by = "" if _ranks_by_sample_accuracy(comparison) else f" by {comparison.metric.label}"
    by += " after different numbers of rounds" if any(unequal_rounds(best, other) for other in equal) else ""
    if len({frozenset(run.seed for run in method.counted_runs) for method in (best, *equal)}) > 1:
        both = "both have" if len(equal) == 1 else f"each shares with {best.label}"
        return f"{who}{by} on the seeds that {both}."  # over its own seeds, each has another mean
    score = _score(comparison.score(best).mean, comparison)
    return f"{who}{by}: {score} ({_seeds(best)}){_spread(best, comparison)}."


def _details(methods: Sequence[MethodRuns], comparison: Comparison) -> list[str]:
    """Say which classes FedAvg loses, which ones the best method improves or harms, and its weakest class and cost."""
    best, baseline, sentences = methods[0], comparison.baseline, []
    if baseline is not None and baseline is not best and baseline.counted_runs:
        if lost := _lost(baseline, comparison.classes):
            sentences.append(f"{baseline.label} has {lost}.")
        sentences += _classes(best, baseline, comparison.classes)
    return [*sentences, *_weakest(best, comparison, f"{best.label}'s"), *_cost(best, baseline)]


def _on_fewer_seeds(comparison: Comparison) -> list[str]:
    """If the methods have different seeds, say on which seeds they are ranked."""
    common = comparison.common_seeds
    if {len(method.counted_runs) for method in comparison.competing} == {len(common)}:
        return []
    if not common:
        return ["The methods have no seed in common, so their order also depends on the seeds."]
    seeds = ", ".join(map(str, sorted(common)))
    return [f"The methods have different seeds; they are ranked on the seeds that all of them have ({seeds})."]


def _not_significant(difference: Difference | None) -> bool:
    return difference is not None and difference.is_tested and not difference.significant


def _named(methods: Sequence[MethodRuns], best: MethodRuns) -> str:
    """List methods that are compared with the best one. Mark those with other numbers of rounds."""
    other = {method: " (after another number of rounds)" if unequal_rounds(best, method) else "" for method in methods}
    return ", ".join(f"{method.label}{mark}" for method, mark in other.items())


def _rounds(first: MethodRuns, second: MethodRuns) -> str:
    """Say if an early stop made the numbers of rounds of two methods different."""
    rounds = unequal_rounds(first, second)
    return f" after different numbers of rounds, {rounds}" if rounds else ""


def _lead(best: MethodRuns, second: MethodRuns, difference: Difference | None, comparison: Comparison) -> str:
    """Say by how much the best method leads the second one, and whether that is significant."""
    if difference is None:
        found = comparison.metric.text(comparison.score(second).mean)
        return f"{second.label} comes next with {found}, but on other seeds, so the two cannot be paired."
    amount = comparison.metric.amount(abs(difference.mean))
    significance = f"{_rounds(best, second)}{_significance(difference, comparison)}"
    if difference.mean < 0:  # the ranking is on the seeds that all methods have, and these two share more
        return f"On the seeds that both have, it is behind {second.label} by {amount}{significance}."
    return f"It leads {second.label} by {amount}{significance}."


def _over_baseline(
    best: MethodRuns,
    baseline: MethodRuns,
    difference: Difference | None,
    comparison: Comparison,
    test_is_explained: bool,
) -> str:
    """Say what the best method gains over FedAvg, the baseline.

    `test_is_explained` says whether the sentence about the lead already states how many seeds a test needs.
    """
    if difference is None:
        return f"{baseline.label} has {comparison.metric.text(comparison.score(baseline).mean)}, on other seeds."
    amount = comparison.metric.amount(abs(difference.mean))
    gain = f"{best.label} gains {amount} over {baseline.label}"
    if difference.mean < 0:  # as in `_lead`
        gain = f"On the seeds that both have, {best.label} is {amount} behind {baseline.label}"
    gain += _rounds(best, baseline)
    if difference.seeds < MIN_SEEDS and test_is_explained:
        return f"{gain}."
    return f"{gain}{_significance(difference, comparison)}."


def _significance(difference: Difference, comparison: Comparison) -> str:
    """Say whether a difference is significant. If not, say how many seeds would settle it."""
    if difference.seeds < MIN_SEEDS:
        seen = "one seed" if difference.seeds == 1 else f"better with {difference.wins} of {difference.seeds} seeds"
        return f" ({seen}); a test needs at least {MIN_SEEDS} seeds: --seeds {MIN_SEEDS}"
    wins = f"better with {difference.wins} of {difference.seeds} seeds"
    if difference.p is None:
        return f", {wins}. The difference is identical for every seed, so it cannot be tested"
    how = _p_value(difference.p)
    if difference.comparisons > 1:
        how += f", corrected for {_pairs(difference.comparisons, comparison)} of methods"
    result = "significant" if difference.significant else "not significant"
    return f", {wins}: {result} ({how}{_interval(difference, comparison)}){_seeds_needed(difference)}"


def _pairs(tested: int, comparison: Comparison) -> str:
    """Count the pairs for which p is corrected. Pairs that cannot be tested do not count."""
    return f"all {tested} pairs" if tested == math.comb(len(comparison.competing), 2) else f"{tested} pairs"


def _p_value(p: float) -> str:
    """Format p with enough digits that a significant p does not read 0.050."""
    if p < 0.001:
        return "p < 0.001"
    digits = next((n for n in (3, 4, 5) if (round(p, n) < LEVEL) == (p < LEVEL)), 6)
    return f"p = {p:.{digits}f}"


def _interval(difference: Difference, comparison: Comparison) -> str:
    if difference.low is None or difference.high is None:
        return ""
    if not comparison.metric.percent:
        return f", interval {signed(difference.low, 3)} to {signed(difference.high, 3)}"
    return f", interval {signed(100 * difference.low, 1)} to {signed(100 * difference.high, 1)} points"


def _seeds_needed(difference: Difference) -> str:
    """Say how many seeds would settle a difference that is not significant. Empty for any other difference."""
    if difference.significant or difference.is_zero:
        return ""
    if (needed := difference.seeds_to_settle) is None:
        return f". Even {MAX_SEEDS} seeds would hardly settle it" if difference.seeds < MAX_SEEDS else ""
    return f". If the difference stays as it is, --seeds {needed} would probably settle it"


def _better_on_weak_classes(comparison: Comparison) -> list[str]:
    """Name a method with a better macro F1 and a much better worst class than the best method.

    As in the ranking, the means are over the seeds that all methods have, if there are any.
    """
    best, *others = comparison.competing
    f1 = {m.label: comparison.ranked_mean(m, lambda run: run.evaluation.macro_f1) for m in comparison.competing}
    worst = {m.label: comparison.ranked_mean(m, lambda run: run.evaluation.worst_class) for m in comparison.competing}
    better = [m.label for m in others if f1[m.label] > f1[best.label] and worst[m.label] >= worst[best.label] + MUCH]
    if not better:
        return []
    other = max(better, key=f1.__getitem__)
    better_f1 = f"{_percent(f1[other])} against {_percent(f1[best.label])}"
    better_class = f"{_percent(worst[other])} against {_percent(worst[best.label])}"
    return [
        f"{other} has a better macro F1 ({better_f1}) and a much better worst class ({better_class}); "
        "to rank by macro F1: --rank-by macro-f1."
    ]


def _classes(best: MethodRuns, baseline: MethodRuns, names: Sequence[str]) -> list[str]:
    """Name the classes that gain most and the classes that lose, on average over the seeds that both methods have."""
    changes = best.class_changes(baseline)
    if not len(changes):
        return []
    mean = changes.mean(axis=0)
    order = np.argsort(mean)
    gains = [c for c in order[::-1] if mean[c] >= NOTABLE][:MAX_CLASSES]
    losses = [c for c in order if mean[c] <= -NOTABLE]

    def described(c: int) -> str:
        agreed = (np.sign(changes[:, c]) == np.sign(mean[c])).all()
        return f"{names[c]} ({signed(100 * mean[c])}{'' if agreed or len(changes) == 1 else ', not with every seed'})"

    gain = f"these classes gain most: {', '.join(map(described, gains))}" if gains else "no class gains a point or more"
    lose = _listed([described(c) for c in losses]) if losses else "none by a point or more"
    return [f"Compared with {baseline.label}, {gain}.", f"Classes that lose accuracy: {lose}."]


def _weakest(method: MethodRuns, comparison: Comparison, owner: str) -> list[str]:
    """Name the weakest class, or all equally weak ones, and the lost classes. `owner` is a word such as `Its`."""
    mean = method.class_accuracy
    if not np.isfinite(mean).any():
        return []
    lowest = float(np.nanmin(mean))
    names = [comparison.classes[c] for c in np.flatnonzero(mean == lowest)]
    which = f"class is {names[0]}" if len(names) == 1 else f"classes are {_listed(names)}"
    weakest = f"{owner} weakest {which} with {_percent(lowest)}"
    return [f"{weakest}; {_lost(method, comparison.classes) or 'no class is lost'}."]


def _lost(method: MethodRuns, names: Sequence[str]) -> str:
    """Name the classes that are lost with any seed, and their mean number per seed. Empty if no class is lost."""
    by_seed = [lost_classes(run.class_accuracy) for run in method.counted_runs]
    lost = [names[c] for c in sorted({c for seed in by_seed for c in seed})]
    if not lost:
        return ""
    per_seed = f", {sum(map(len, by_seed)) / len(by_seed):.1f} per seed" if len(by_seed) > 1 else ""
    return f"lost classes (below {100 * LOST:.0f} %){per_seed}: {_listed(lost)}"


def _listed(classes: Sequence[str]) -> str:
    """List the first `MAX_CLASSES` classes, and count the others."""
    more = f" and {len(classes) - MAX_CLASSES} more" if len(classes) > MAX_CLASSES else ""
    return ", ".join(classes[:MAX_CLASSES]) + more


def _cost(best: MethodRuns, baseline: MethodRuns | None) -> list[str]:
    """Say what the best method costs, relative to FedAvg. Unfinished runs do not count, because they cost less."""
    if baseline is None or baseline is best or not (best.finished_runs and baseline.finished_runs):
        return []
    ratios, is_known = [], False
    for key, what in (("compute", "computation"), ("bytes", "communication")):
        cost, baseline_cost = _mean_cost(best, key), _mean_cost(baseline, key)
        if not cost or not baseline_cost:
            continue
        is_known = True
        if abs(cost / baseline_cost - 1) >= 0.005:  # a smaller difference is printed as 1.00
            ratios.append(f"{cost / baseline_cost:.2f} times the {what} of {baseline.label}")
    if ratios:
        return [f"{best.label} costs {' and '.join(ratios)}."]
    return [f"{best.label} costs about as much as {baseline.label}."] if is_known else []


def _bounds(bounds: Sequence[MethodRuns], comparison: Comparison) -> list[str]:
    listed = ", ".join(f"{bound.label} {comparison.metric.text(comparison.score(bound).mean)}" for bound in bounds)
    return [f"Reference bounds, not federated methods: {listed}."] if listed else []


def _diverged(ranking: Sequence[MethodRuns]) -> list[str]:
    found = {method.label: sum(run.diverged for run in method.counted_runs) for method in ranking}
    listed = ", ".join(f"{n} of {label}" for label, n in found.items() if n)
    left_out = "Client updates left out because they, or the server's step with them, were not finite"
    return [f"{left_out}: {listed}."] if listed else []


def _mean_cost(method: MethodRuns, key: str) -> float:
    return method.over_seeds(lambda run: run.bytes_moved if key == "bytes" else run.compute).mean


def signed(value: float, digits: int = 0) -> str:
    """Format a number with its sign. The minus sign is as wide as the plus sign."""
    return f"{value:+.{digits}f}".replace("-", "−")


def _ranks_by_sample_accuracy(comparison: Comparison) -> bool:
    """Whether the score is the share of test samples that are predicted correctly."""
    return comparison.rank_by == DEFAULT_METRIC and not comparison.is_multi_label


def _several_labels(comparison: Comparison) -> list[str]:
    """Warn that rare labels make the accuracy of any model high."""
    if not comparison.is_multi_label or comparison.rank_by != DEFAULT_METRIC:
        return []
    return [
        "Samples have several labels, so accuracy is the share of correct yes/no decisions, one per sample and label. "
        "It is high if labels are rare: --rank-by macro-f1 or auroc is a better measure."
    ]


def _score(share: float, comparison: Comparison) -> str:
    text = comparison.metric.text(share)
    return f"{text} of the test set" if _ranks_by_sample_accuracy(comparison) else text


def _percent(share: float) -> str:
    return "–" if math.isnan(share) else f"{100 * share:.1f} %"


def _seeds(method: MethodRuns) -> str:
    n = len(method.counted_runs)
    return f"mean of {n} seeds" if n > 1 else f"one seed, {method.counted_runs[0].seed}"


def _spread(method: MethodRuns, comparison: Comparison) -> str:
    """Give the lowest and the highest value over the seeds. Empty for a single seed."""
    values, metric = list(method.by_seed(comparison.metric.value).values()), comparison.metric
    if len(values) < 2:
        return ""
    low, high = metric.scale * min(values), metric.scale * max(values)
    return f", from {low:.1f} to {high:.1f}" if metric.percent else f", from {low:.3f} to {high:.3f}"
