"""The budget of a race, and the plan that fits into it.

`race.py` explains rungs and the final, and `field.py` explains candidates.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any, Literal

from fedskew.choose.field import Candidate, make_field
from fedskew.errors import UserError, plural

_SECONDS = {"s": 1, "m": 60, "h": 3600}
MAX_PER_METHOD = 2
"""The maximum number of candidates per method from the second rung on, so that one method cannot fill a rung."""
PLANNED_SHARE = 0.85
"""Plans use only this share of a time budget, because some rounds take longer than estimated."""


@dataclass(frozen=True)
class Budget:
    """An amount of wall-clock time, or a total number of rounds over all runs."""

    amount: float
    unit: Literal["seconds", "rounds"]

    @classmethod
    def parse(cls, text: str) -> Budget:
        """Read `5m`, `200s`, `1h` or `2000r`."""
        found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smhr])", str(text).strip().lower())
        if found is None or float(found[1]) <= 0:
            raise UserError(f"budget is {text!r}; expected a time such as 5m or 200s, or rounds such as 2000r")
        if found[2] == "r":
            return cls(float(found[1]), "rounds")
        return cls(float(found[1]) * _SECONDS[found[2]], "seconds")

    def show(self, amount: float | None = None) -> str:
        """Format an amount in the budget's unit, by default the whole budget."""
        number = self.amount if amount is None else amount
        if self.unit == "rounds":
            return plural(round(number), "round")
        return f"{number:.0f} s" if number < 120 else f"{number / 60:.1f} minutes"


@dataclass(frozen=True)
class Plan:
    """The numbers that decide how thorough a race is."""

    settings: int
    """Whether the settings in `DEFAULT_FIELD` are tried besides a method's defaults.

    0: no. 1: with the configured learning rate. 2: with every learning rate.
    """
    splits: int
    """The number of splits in each rung."""
    finalists: int
    """The number of methods in the final, besides FedAvg."""
    final_splits: int
    """The number of fresh splits in the final."""

    def sizes(self, methods: int) -> tuple[int, int]:
        """Return the number of candidates in the second and in the third rung.

        Of three rungs, the first drops settings and learning rates, but no method: after so few rounds, the order of
        the methods says little. The second drops methods. It leaves twice as many candidates as the final takes. A race
        with two rungs uses only the second number.
        """
        return MAX_PER_METHOD * methods, 2 * (self.finalists + 1)

    def to_json(self) -> dict[str, int]:
        return asdict(self)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Plan:
        return cls(**content)


PLANS = (
    Plan(2, 3, 4, 20),
    Plan(2, 3, 4, 12),
    Plan(2, 3, 4, 8),
    Plan(2, 3, 4, 5),
    Plan(2, 2, 4, 5),
    Plan(1, 2, 4, 5),
    Plan(1, 2, 3, 4),
    Plan(0, 2, 3, 3),
    Plan(0, 1, 3, 4),
    Plan(0, 1, 2, 3),
    Plan(0, 1, 1, 3),
)
"""Plans, from the most to the least thorough."""


def rung_ends(rounds: int) -> tuple[int, ...]:
    """Return the rounds at which rungs end: a ninth of the rounds (rounded up), three times that, and all rounds.

    Short runs have fewer rungs.
    """
    first = max(1, -(-rounds // 9))
    return tuple(dict.fromkeys(min(rounds, r) for r in (first, 3 * first, rounds)))


@dataclass(frozen=True)
class Costs:
    """The cost of a round of each method and the fixed cost of a trial, in the budget's unit."""

    per_round: Mapping[str, float]
    per_trial: float

    @classmethod
    def counted(cls, methods: Sequence[str]) -> Costs:
        """Make the costs for a budget in rounds: a round of any method costs 1, and starting a trial costs nothing."""
        return cls(dict.fromkeys(methods, 1.0), 0.0)

    def trial_cost(self, candidate: Candidate, rounds: int) -> float:
        return self.per_trial + self.per_round[candidate.method] * rounds

    @property
    def mean_round(self) -> float:
        """The expected cost of a round after the first rung: the mean over all methods, since any may get that far."""
        return fmean(self.per_round.values())

    def race_cost(self, plan: Plan, methods: Sequence[str], lr: float, rounds: int) -> float:
        """Estimate the cost of the whole race, including the final."""
        field = make_field(methods, lr, plan.settings)
        first, *later = rung_ends(rounds)
        total = plan.splits * sum(self.trial_cost(candidate, first) for candidate in field)
        before = first
        for size, end in zip(plan.sizes(len(methods))[-len(later) :] if later else (), later, strict=True):
            total += (
                min(size, MAX_PER_METHOD * len(methods))
                * plan.splits
                * (self.per_trial + self.mean_round * (end - before))
            )
            before = end
        return total + self.final_cost(plan, rounds)

    def final_cost(self, plan: Plan, rounds: int) -> float:
        return (plan.finalists + 1) * plan.final_splits * (self.per_trial + self.mean_round * rounds)


def choose_plan(budget: Budget, costs: Costs, methods: Sequence[str], lr: float, rounds: int, workers: int) -> Plan:
    """Return the most thorough plan that fits into the budget. Raise `UserError` if none fits."""
    # What one unit of the budget pays for. All workers spend time in parallel.
    cost_per_unit = 1.0 if budget.unit == "rounds" else PLANNED_SHARE * workers
    needed = 0.0
    for plan in PLANS:
        needed = costs.race_cost(plan, methods, lr, rounds) / cost_per_unit
        if needed <= budget.amount:
            return plan
    raise UserError(
        f"budget is {budget.show()}; racing {plural(len(methods), 'method')} over {plural(rounds, 'round')} needs "
        f"about {budget.show(needed)} here; increase --budget (finished trials are kept), or use fewer --methods or "
        "--rounds"
    )


def shrink_final(plan: Plan, left: float, costs: Costs, rounds: int) -> Plan:
    """Reduce the final to what is left of the budget, but keep at least one method besides FedAvg, and three splits.

    A second method besides FedAvg is preferred to more splits, and more splits are preferred to further methods.
    """
    smaller = [Plan(plan.settings, plan.splits, finalists, splits)
               for splits in range(plan.final_splits, 2, -1) for finalists in range(plan.finalists, 0, -1)]  # fmt: skip
    fitting = [small for small in smaller if costs.final_cost(small, rounds) <= left]
    return max(fitting, key=lambda p: (min(p.finalists, 2), p.final_splits, p.finalists), default=smaller[-1])
