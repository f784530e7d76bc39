"""Budgets, rungs and plans."""

from __future__ import annotations

import math

import pytest

from fedskew.choose.budget import PLANNED_SHARE, PLANS, Budget, Costs, Plan, choose_plan, rung_ends, shrink_final
from fedskew.errors import UserError

METHODS = ("fedavg", "fedprox", "fedvls")


@pytest.mark.parametrize(
    ("text", "amount", "unit"),
    [("5m", 300, "seconds"), ("200s", 200, "seconds"), ("1.5h", 5400, "seconds"), ("2000r", 2000, "rounds")],
)
def test_a_budget_is_a_time_or_a_number_of_rounds(text: str, amount: float, unit: str) -> None:
    assert Budget.parse(text) == Budget(amount, unit)  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["", "5", "m", "-3m", "0s", "5 minutes", "2000rounds"])
def test_another_budget_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="expected a time such as 5m"):
        Budget.parse(text)


@pytest.mark.parametrize(
    ("rounds", "expected"), [(1, (1,)), (2, (1, 2)), (3, (1, 3)), (9, (1, 3, 9)), (40, (5, 15, 40)), (60, (7, 21, 60))]
)
def test_rungs_are_a_ninth_a_third_and_all_rounds(rounds: int, expected: tuple[int, ...]) -> None:
    assert rung_ends(rounds) == expected


def test_plans_become_cheaper_from_first_to_last() -> None:
    costs = Costs.counted(METHODS)
    prices = [costs.race_cost(plan, METHODS, 0.1, 40) for plan in PLANS]
    assert prices == sorted(prices, reverse=True)
    assert len(set(prices)) == len(prices)


def test_the_cost_of_a_plan_is_the_sum_of_its_rounds() -> None:
    price = Costs.counted(METHODS).race_cost(Plan(0, 1, 2, 3), METHODS, 0.1, 9)
    assert price == 9 * 1 + 6 * 2 + 6 * 6 + 3 * 3 * 9


def test_the_most_thorough_plan_that_fits_is_taken() -> None:
    costs = Costs.counted(METHODS)
    for plan in PLANS:
        needed = costs.race_cost(plan, METHODS, 0.1, 40)
        assert choose_plan(Budget(needed, "rounds"), costs, METHODS, 0.1, 40, 1) == plan


def test_a_budget_that_is_too_small_names_what_is_needed() -> None:
    costs = Costs.counted(METHODS)
    needed = costs.race_cost(PLANS[-1], METHODS, 0.1, 40)
    with pytest.raises(UserError, match=f"3 methods over 40 rounds needs about {needed:.0f} rounds"):
        choose_plan(Budget(needed - 1, "rounds"), costs, METHODS, 0.1, 40, 1)


def test_a_plan_leaves_a_reserve_of_the_time() -> None:
    costs = Costs(dict.fromkeys(METHODS, 0.1), 0.5)
    needed = costs.race_cost(PLANS[-1], METHODS, 0.1, 40)
    with pytest.raises(UserError, match="increase --budget"):
        choose_plan(Budget(1.01 * needed, "seconds"), costs, METHODS, 0.1, 40, 1)


def test_more_workers_do_more_in_the_same_time() -> None:
    costs = Costs(dict.fromkeys(METHODS, 0.1), 0.5)
    budget = Budget(costs.race_cost(PLANS[-1], METHODS, 0.1, 40) / PLANNED_SHARE, "seconds")
    assert choose_plan(budget, costs, METHODS, 0.1, 40, 1) == PLANS[-1]
    assert PLANS.index(choose_plan(budget, costs, METHODS, 0.1, 40, 4)) < len(PLANS) - 1


def test_the_final_shrinks_to_what_is_left_but_never_below_three_splits() -> None:
    costs, plan = Costs.counted(METHODS), Plan(1, 2, 4, 5)
    assert shrink_final(plan, math.inf, costs, 10) == plan
    assert shrink_final(plan, 25 * 10, costs, 10) == plan
    assert shrink_final(plan, 15 * 10, costs, 10) == Plan(1, 2, 2, 5)
    assert shrink_final(plan, 9 * 10, costs, 10) == Plan(1, 2, 2, 3)
    assert shrink_final(plan, 0.0, costs, 10) == Plan(1, 2, 1, 3)
