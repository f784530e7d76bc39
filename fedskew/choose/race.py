"""The race: successive halving over rounds, then a final on fresh splits.

A race has up to three rungs. In the first rung, all candidates train for about a ninth of the rounds, on the same
splits. Two candidates of each method (see `keep_best`) go on to the second rung, which ends after about a third of the
rounds. The best of these go on to the third rung, which ends after the last round. The best methods and tuned FedAvg
then meet in a final, on splits that no rung has used. In the second and third rung, runs continue from their
checkpoints.

Each split belongs to a seed. If the federation's split is fixed, all seeds have the same split. Their trials then
differ in validation samples, initial model, the clients sampled in each round, and batches. In that case, read "split"
as "seed" in this package.

Optuna's pruner is not used, because it stops single trials. Here, all candidates of a rung are compared on the same
splits, FedAvg is never dropped, one method cannot fill a rung with its settings, and the plan follows from a budget.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median

from fedskew.choose.budget import (
    MAX_PER_METHOD,
    PLANNED_SHARE,
    Budget,
    Costs,
    Plan,
    choose_plan,
    rung_ends,
    shrink_final,
)
from fedskew.choose.decision import FinalResult, decide
from fedskew.choose.field import BASELINE, Candidate, make_field
from fedskew.choose.trial import Trial
from fedskew.choose.trials import RaceWatcher, Trials
from fedskew.errors import UserError
from fedskew.experiment.config import Config
from fedskew.results.race import RaceRecord, Rung, Standing, save_race

MAX_SPLITS = 3
"""The maximum number of splits in a rung. The final uses the seeds after these, so its splits are fresh."""


@dataclass
class Race:
    """One race in its folder."""

    base: Config
    record: RaceRecord
    budget: Budget
    folder: Path
    trials: Trials
    workers: int
    watcher: RaceWatcher

    def run(self) -> RaceRecord:
        """Run the race from the start, or from where an earlier session stopped."""
        self._began = time.monotonic()
        self.trials.failures |= self.record.failures or {}
        ends, methods = rung_ends(self.base.rounds), self.record.methods
        if self.budget.unit == "rounds":
            costs = Costs.counted(methods)
            plan = self._plan(costs)
        else:
            self._train(f"measuring {len(methods)} methods", make_field(methods, self.base.lr, 0), [0], ends[0])
            costs = self._measured_costs(ends[0])
            plan = self._plan(costs)
        field = make_field(self.record.methods, self.base.lr, plan.settings)
        sizes = plan.sizes(len(self.record.methods))[-len(ends[1:]) :] if ends[1:] else ()
        for number, end in enumerate(ends):
            field = self._without_failed(field)
            heading = f"rung {number + 1} of {len(ends)}: {len(field)} candidates, to round {end}"
            self._train(heading, field, range(plan.splits), end)
            ranking = self._rank(self._without_failed(field), range(plan.splits), end)
            size = sizes[number] if number < len(sizes) else 0
            kept = keep_best(ranking, size) if size else finalists(ranking, self._fit_final(plan, costs))
            self.trials.drop([c for c in field if c not in kept], self._seeds(range(plan.splits)))
            self._record_rung(number, end, ranking, kept)
            field = kept
        return self._final(field, self._fit_final(plan, costs).final_splits, ends[-1])

    def _plan(self, costs: Costs) -> Plan:
        """Return the plan of an earlier session, or the most thorough plan that the budget allows."""
        if self.record.plan is not None:
            return Plan.from_json(self.record.plan)
        plan = choose_plan(self.budget, costs, self.record.methods, self.base.lr, self.base.rounds, self.workers)
        self._save(plan=plan.to_json())
        return plan

    def _measured_costs(self, rounds: int) -> Costs:
        """Return the costs in seconds, from trials on the first split. Methods that failed are removed from the race.

        Each method has its own cost per round. The cost of starting a trial is the same for all.
        """
        per_round, starts = {}, []
        for method in self.record.methods:
            found = [self.trials.get(c, self._seeds([0])[0], rounds)
                     for c in self._without_failed(make_field([method], self.base.lr, 0))]  # fmt: skip
            if found:
                per_round[method] = median(m.round_seconds for m in found)
                starts += [max(0.0, m.seconds - m.round_seconds * rounds) for m in found]
        methods = tuple(m for m in self.record.methods if m in per_round)
        self.record = replace(self.record, methods=methods, failures=dict(self.trials.failures))
        return Costs(per_round, median(starts))

    def _fit_final(self, plan: Plan, costs: Costs) -> Plan:
        """Return the plan with a final that fits into what is left of the budget, or with the smallest final.

        The first estimates may have been too low. FedAvg's candidates may also have made a rung larger than planned.
        """
        if self.record.final_plan is None:
            left = (
                self.budget.amount - self.trials.rounds
                if self.budget.unit == "rounds"
                else PLANNED_SHARE * (self.budget.amount - self._seconds) * self.workers
            )
            self._save(final_plan=shrink_final(plan, left, costs, self.base.rounds).to_json())
        assert self.record.final_plan is not None
        return Plan.from_json(self.record.final_plan)

    def _final(self, field: Sequence[Candidate], splits: int, rounds: int) -> RaceRecord:
        fresh = range(MAX_SPLITS, MAX_SPLITS + splits)
        names = ", ".join(candidate.method for candidate in field)
        words = self.record.repeats
        self._train(f"final {words.on} {splits} fresh {words.many}: {names}", field, fresh, rounds)
        earlier = range(Plan.from_json(self.record.plan or {}).splits)
        results = [
            FinalResult(
                self._standing(c, scores, True),
                list(dict(self._rank([c], earlier, rounds))[c].values()),
                [self.trials.get(c, seed, rounds) for seed in self._seeds(fresh)],
            )
            for c, scores in self._rank(self._without_failed(field), fresh, rounds)
        ]
        ended = {"failures": dict(self.trials.failures), "seconds": round(self._seconds, 1)}
        class_weights, rungs = self.record.config.get("class_weights"), self.record.rungs
        self._save(**decide(results, self.record.rank_by, class_weights, words, rungs), **ended)
        return self.record

    @property
    def _seconds(self) -> float:
        """The time of this session, and of the race's trials in earlier sessions."""
        return self.trials.earlier_seconds + time.monotonic() - self._began

    # -- trials and their scores ---------------------------------------------------------------------------

    def _seeds(self, splits: Sequence[int]) -> list[int]:
        return [self.base.seed + split for split in splits]

    def _without_failed(self, field: Sequence[Candidate]) -> list[Candidate]:
        """Return the candidates whose methods have not failed."""
        return [candidate for candidate in field if candidate.method not in self.trials.failures]

    def _train(self, heading: str, field: Sequence[Candidate], splits: Sequence[int], until: int) -> None:
        """Train all candidates on one split before the next, so that an interruption leaves few splits incomplete."""
        self.trials.run(heading, [Trial(c, seed, until) for seed in self._seeds(splits) for c in field])
        if {candidate.method for candidate in self._without_failed(field)} == {BASELINE}:
            reasons = "; ".join(f"{method}: {reason}" for method, reason in self.trials.failures.items())
            raise UserError(f"no method but FedAvg is left in the race; failed: {reasons}")

    def _rank(
        self, field: Sequence[Candidate], splits: Sequence[int], rounds: int
    ) -> list[tuple[Candidate, dict[int, float]]]:
        """Return the candidates with their validation scores by seed, the best mean first."""
        last = scored_rounds(self.base, rounds)
        scores = {
            c: {s: self.trials.get(c, s, rounds).score(self.record.rank_by, rounds, last) for s in self._seeds(splits)}
            for c in field
        }
        return sorted(scores.items(), key=lambda item: -fmean(item[1].values()))

    def _standing(self, candidate: Candidate, scores: dict[int, float], kept: bool) -> Standing:
        return Standing(candidate.method, candidate.label, candidate.lr, dict(candidate.params), scores, kept)

    def _record_rung(
        self, number: int, rounds: int, ranking: Sequence[tuple[Candidate, dict[int, float]]], kept: list[Candidate]
    ) -> None:
        standings = tuple(self._standing(candidate, scores, candidate in kept) for candidate, scores in ranking)
        rungs = (*self.record.rungs[:number], Rung(rounds, standings))
        self._save(rungs=rungs, failures=dict(self.trials.failures))
        self.watcher.on_standings(self.record)

    def _save(self, **values: object) -> None:
        self.record = replace(self.record, **values)  # type: ignore[arg-type]
        save_race(self.folder, self.record)


def scored_rounds(config: Config, rounds: int) -> int:
    """Return the number of last rounds that a score averages: a third of `rounds`, from 1 to `mean_last`."""
    return min(config.mean_last, max(1, rounds // 3))


def keep_best(ranking: Sequence[tuple[Candidate, object]], size: int) -> list[Candidate]:
    """Return the best `size` candidates, at most two per method. Two of FedAvg are always kept, even beyond `size`.

    If the best candidate of a method has the method's highest learning rate, the second one must have a lower rate.
    High rates often lead after few rounds and fall behind later.
    """
    highest: dict[str, float] = {}
    for candidate, _ in ranking:
        highest[candidate.method] = max(candidate.lr, highest.get(candidate.method, 0.0))
    kept: list[Candidate] = []
    for candidate, _ in ranking:
        same_method = [other for other in kept if other.method == candidate.method]
        has_room = len(same_method) < MAX_PER_METHOD and (len(kept) < size or candidate.is_baseline)
        if has_room and not (same_method and same_method[0].lr == candidate.lr == highest[candidate.method]):
            kept.append(candidate)
    return kept


def finalists(ranking: Sequence[tuple[Candidate, object]], plan: Plan) -> list[Candidate]:
    """Return the best candidate of FedAvg and of each of the best other methods."""
    best: dict[str, Candidate] = {}
    for candidate, _ in ranking:
        best.setdefault(candidate.method, candidate)
    baseline = best.pop(BASELINE)
    return [baseline, *list(best.values())[: plan.finalists]]
