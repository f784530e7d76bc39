"""The decision after the final, its reasons, and the answer in words.

The finalists are ordered by their means over all splits on which they were trained to the end. This includes the splits
of the last rung, because there are few splits in all.

The choice is the best finalist that ranks above tuned FedAvg in this order and also beats it on the fresh splits by
more than noise: its mean lead there exceeds one standard error of the paired differences. If there is none, the choice
is FedAvg.

A significance test at 5 % would be the wrong rule, because one method must be chosen in any case. With few splits, the
test would choose FedAvg where other methods are several points better. The answer reports the test beside the choice.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, stdev
from typing import Any, NamedTuple

from fedskew.choose.field import BASELINE
from fedskew.choose.trial import TrialResult
from fedskew.errors import plural
from fedskew.methods import combined_entry
from fedskew.methods.class_weights import entries_with_weights, revealed_labels
from fedskew.results.race import SPLITS, Finalist, Repeats, Rung, Standing
from fedskew.results.ranking import find_metric
from fedskew.results.significance import Difference, holm, paired


class FinalResult(NamedTuple):
    """The results of one finalist."""

    standing: Standing
    """The finalist, with its scores on the fresh splits of the final."""
    earlier_scores: Sequence[float]
    """Its scores on the splits of the last rung."""
    trials: Sequence[TrialResult]
    """Its trials on the fresh splits, for its costs and its discarded updates."""


_SAME_COST = 0.02
"""Costs are multiples of FedAvg's. Two costs that differ by no more than this count as equal."""

_ENOUGH_SPLITS = 8
"""With fewer splits, an answer that chooses another method than FedAvg has a warning, because a weakness may not have
shown yet. If a method fails on one split in six, a race with seven splits misses this in more than a quarter of the
cases."""


def decide(
    results: Sequence[FinalResult],
    rank_by: str,
    class_weights: object = None,
    repeats: Repeats = SPLITS,
    rungs: Sequence[Rung] = (),
) -> dict[str, Any]:
    """Return the last fields of the race's record: the finalists, the choice and the answer.

    `class_weights` is the configuration key of that name. Some of its values make clients reveal label counts.
    `repeats` has the words for what differs between trials: splits, or seeds if the split is fixed. `rungs` have the
    learning rates that were tried.
    """
    baseline, _, baseline_trials = next(result for result in results if result.standing.method == BASELINE)
    others = [result.standing for result in results if result.standing is not baseline]
    compared = [paired(standing.scores, baseline.scores) for standing in others]
    corrected = dict(zip((s.label for s in others), holm([d for d in compared if d is not None]), strict=True))
    found = [
        _finalist(
            standing,
            fmean([*standing.scores.values(), *earlier]),
            corrected.get(standing.label),
            trials,
            baseline_trials,
            revealed_labels(entries_with_weights(standing.method, class_weights)),
        )
        for standing, earlier, trials in results
    ]
    final = tuple(sorted(found, key=lambda finalist: -finalist.overall))
    baseline_rank = next(i for i, finalist in enumerate(final) if finalist.standing is baseline)
    better = enumerate(final[:baseline_rank])
    chosen = next((i for i, finalist in better if _beats(finalist.standing, baseline)), baseline_rank)
    tried = len(results[0].standing.scores) + len(results[0].earlier_scores)
    winner = next(result for result in results if result.standing is final[chosen].standing)
    answer = _answer(final, final[chosen], rank_by, tried, repeats)
    answer += _at_the_end_of_the_rates(winner, rungs)
    answer += _alternatives(final, final[chosen])
    answer += _diverged(winner)
    return {"final": final, "chosen": chosen, "answer": tuple(answer)}


def _finalist(
    standing: Standing,
    overall: float,
    difference: Difference | None,
    trials: Sequence[TrialResult],
    baseline_trials: Sequence[TrialResult],
    reveals: str,
) -> Finalist:
    entry = combined_entry(standing.method)

    def ratio(name: str) -> float:
        cost, baseline_cost = (fmean(getattr(trial, name) for trial in each) for each in (trials, baseline_trials))
        return round(cost / baseline_cost, 3) if baseline_cost else 1.0

    return Finalist(
        standing, overall, difference, ratio("compute"), ratio("bytes"), ratio("round_seconds"), reveals,
        entry.extra_compute,
    )  # fmt: skip


def _beats(standing: Standing, baseline: Standing) -> bool:
    """Whether the mean lead over FedAvg on the fresh splits exceeds one standard error."""
    leads = [standing.scores[seed] - score for seed, score in baseline.scores.items()]
    return standing is not baseline and fmean(leads) > stdev(leads) / math.sqrt(len(leads))


def _answer(final: Sequence[Finalist], chosen: Finalist, rank_by: str, tried: int, repeats: Repeats) -> list[str]:
    """Write which method to use and why. `tried` is the number of splits on which finalists trained to the end."""
    metric, fresh = find_metric(rank_by).label, len(chosen.standing.scores)
    advice = f"Use {_named(chosen.standing)}: {_percent(chosen.overall)} {metric} on validation data"
    lines = [f"{advice}, mean of {tried} {repeats.many}."]
    baseline = next(finalist for finalist in final if finalist.standing.method == BASELINE)
    if chosen is baseline:
        lines += [_no_better(final, baseline, metric, tried, repeats)]
    elif chosen.difference is not None:
        tuned = f"FedAvg with its best learning rate, {baseline.standing.lr:g}"
        where = f"{repeats.on.capitalize()} {fresh} fresh {repeats.many}"
        lines += [f"{where} it beats {tuned}, by {_lead(chosen.difference, repeats)}.", f"It {_cost(chosen)}."]
        lines += _warning(tried, repeats)
    return lines


def _warning(tried: int, repeats: Repeats) -> list[str]:
    if tried >= _ENOUGH_SPLITS:
        return []
    risk = f"The method was tried {repeats.on} only {tried} {repeats.many}. It may fail {repeats.on} others."
    return [f"{risk} A larger budget tries more."]


def _at_the_end_of_the_rates(chosen: FinalResult, rungs: Sequence[Rung]) -> list[str]:
    """Say that a better learning rate may lie beyond those that were tried for the chosen method.

    If updates were discarded because they were not finite, a larger learning rate is not suggested.
    """
    method, lr = chosen.standing.method, chosen.standing.lr
    tried = {lr, *(standing.lr for rung in rungs for standing in rung.standings if standing.method == method)}
    if min(tried) < lr < max(tried) or len(tried) == 1:
        return []
    if lr == min(tried):
        end, other = "smallest", "smaller"
    elif _discarded(chosen):
        return []
    else:
        end, other = "largest", "larger"
    return [f"The learning rate {lr:g} is the {end} that was tried; a {other} one may be better: --lr {lr:g}."]


def _discarded(chosen: FinalResult) -> int:
    return sum(trial.diverged for trial in chosen.trials)


def _diverged(chosen: FinalResult) -> list[str]:
    discarded = _discarded(chosen)
    updates = f"{plural(discarded, 'client update')} of {chosen.standing.method} {'was' if discarded == 1 else 'were'}"
    why = "discarded because of values that were not finite"  # in the updates, or in the server's step with them
    return [f"In the final, {updates} {why}; try a lower --lr."] if discarded else []


def _no_better(final: Sequence[Finalist], baseline: Finalist, metric: str, tried: int, repeats: Repeats) -> str:
    best = next(finalist for finalist in final if finalist is not baseline)
    if best.overall <= baseline.overall:
        return f"No other method in the final has a higher mean {metric}; {best.standing.label} comes next."
    lead = f"{100 * (best.overall - baseline.overall):.1f} points"
    better = f"{_named(best.standing)} is {lead} better on average over all {tried} {repeats.many}"
    fresh = f"{repeats.on} the {len(best.standing.scores)} fresh ones"
    return f"{better}, but {fresh} it does not lead by more than the noise (one standard error)."


def _lead(difference: Difference, repeats: Repeats) -> str:
    points = f"{100 * difference.mean:.1f} points"
    if difference.low is None or difference.high is None:
        return f"{points} {repeats.on} every {repeats.one}"
    better = f"better {repeats.on} {difference.wins} of {difference.seeds} {repeats.many}"
    interval = f"interval {100 * difference.low:+.1f} to {100 * difference.high:+.1f}".replace("-", "−")
    verdict = "significant at 5 %" if difference.significant else "not significant at 5 %"
    corrected = f", corrected for {difference.comparisons} comparisons" if difference.comparisons > 1 else ""
    return f"{points} ({interval}, {better}; {verdict}{corrected})"


def _cost(finalist: Finalist) -> str:
    costs = [
        f"{ratio:.2f} times the {what}"
        for ratio, what in (
            (finalist.compute, "computation"),
            (finalist.traffic, "traffic"),
            (finalist.time_ratio, "time per round"),
        )
        if abs(ratio - 1) > _SAME_COST
    ]
    listed = " and ".join(filter(None, (", ".join(costs[:-1]), *costs[-1:])))
    cost = f"costs {listed} of FedAvg{_extra_compute(finalist)}" if costs else "costs no more than FedAvg"
    reveals = "nothing about its labels" if finalist.reveals == "nothing" else finalist.reveals
    return f"{cost}. Besides its updates, a site reveals {reveals}"


def _extra_compute(finalist: Finalist) -> str:
    """Name what clients compute in addition to FedAvg. If an item does not say how often, it is once per local step."""
    if finalist.extra_compute == "none":
        return ""
    items = finalist.extra_compute.split(", ")
    named = [item if " per " in item or "last round" in item else f"{item} per step" for item in items]
    return f" (in addition: {', '.join(named)})"


def _alternatives(final: Sequence[Finalist], chosen: Finalist) -> list[str]:
    """Name the finalists that are cheaper than the chosen one, or reveal nothing if the chosen one reveals labels.

    Finalists that are significantly worse are left out.
    """
    lines = []
    worse = _significantly_worse(final, chosen)
    for finalist in final:
        if finalist is chosen or finalist.standing.label in worse:
            continue
        reasons = []
        if _is_cheaper(finalist, chosen):
            reasons.append("is cheaper")
        if finalist.reveals == "nothing" != chosen.reveals:
            reasons.append("reveals nothing about labels")
        if reasons:
            lines.append(f"{_named(finalist.standing)} {' and '.join(reasons)}, and is not significantly worse.")
    return lines


def _is_cheaper(finalist: Finalist, chosen: Finalist) -> bool:
    """Whether the finalist costs less computation or traffic than the chosen one, and not more of the other."""
    extra = finalist.compute - chosen.compute, finalist.traffic - chosen.traffic
    return min(extra) < -_SAME_COST and max(extra) <= _SAME_COST


def _significantly_worse(final: Sequence[Finalist], chosen: Finalist) -> set[str]:
    """Return the labels of the finalists that are significantly worse than the chosen one, after Holm's correction.

    FedAvg is judged by the test that the answer reports. A finalist that is worse by the same amount on every split
    cannot be tested, and counts as worse.
    """
    others = [finalist for finalist in final if finalist is not chosen]
    leads = [paired(chosen.standing.scores, finalist.standing.scores) for finalist in others]
    tested = holm([lead for lead in leads if lead is not None])
    found = dict(zip((finalist.standing.label for finalist in others), tested, strict=True))
    if chosen.difference is not None:
        found |= {one.standing.label: chosen.difference for one in others if one.standing.method == BASELINE}
    return {label for label, lead in found.items() if lead.mean > 0 and (lead.significant or not lead.is_tested)}


def _named(standing: Standing) -> str:
    return f"{standing.label} with learning rate {standing.lr:g}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
