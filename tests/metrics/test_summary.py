"""What is reported of a learning curve."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedskew.metrics.summary import (
    Attained,
    CurveSummary,
    MeanOfLast,
    MeanStd,
    best,
    first_round_reaching,
    last,
    mean_of_last,
    mean_std,
    population_mean_std,
    speed_up,
)

CURVE = [(0, 0.1), (10, 0.5), (20, 0.7), (30, 0.7), (40, 0.6)]


def test_best_is_the_first_round_that_attained_it() -> None:
    assert best(CURVE) == Attained(20, 0.7)
    assert last(CURVE) == Attained(40, 0.6)


def test_mean_of_last_counts_rounds_not_evaluations() -> None:
    assert mean_of_last(CURVE, 20) == MeanOfLast(pytest.approx(0.65), 30, 40, 2)
    assert mean_of_last(CURVE, 1) == MeanOfLast(0.6, 40, 40, 1)
    assert mean_of_last(CURVE, 1000).evaluations == 4  # the initial model is none of the last rounds
    assert mean_of_last([(0, 0.1)], 5).evaluations == 1


def test_first_round_reaching_a_target() -> None:
    assert first_round_reaching(CURVE, 0.5) == 10
    assert first_round_reaching(CURVE, 0.71) is None


def test_speed_up_is_the_ratio_of_rounds_to_the_baselines_best() -> None:
    assert speed_up(CURVE, [(5, 0.69), (8, 0.7), (40, 0.9)]) == 20 / 8
    assert speed_up(CURVE, [(30, 0.75)]) == 20 / 30


def test_speed_up_is_one_where_the_method_never_gets_there() -> None:
    assert speed_up(CURVE, [(1, 0.69), (40, 0.699)]) == 1.0


def test_speed_up_of_a_baseline_that_never_improves_on_its_initial_model() -> None:
    assert speed_up([(0, 0.3), (5, 0.2)], [(0, 0.3), (5, 0.9)]) == 1.0


@given(st.lists(st.floats(0, 1), min_size=2, max_size=8))
def test_mean_and_deviations(values: list[float]) -> None:
    result, population = mean_std(values), population_mean_std(values)
    assert result.mean == population.mean == pytest.approx(np.mean(values), abs=1e-12)
    assert result.std == pytest.approx(np.std(values, ddof=1), abs=1e-12)
    assert population.std == pytest.approx(np.std(values), abs=1e-12)


def test_mean_and_deviation_print_in_percent() -> None:
    assert str(mean_std([0.5, 0.7])) == "60.00 ± 14.14"
    assert str(population_mean_std([0.5, 0.7])) == "60.00 ± 10.00"
    assert mean_std([0.5, 0.7]).in_percent(1) == "60.0 ± 14.1"


def test_one_value_has_no_deviation() -> None:
    assert str(mean_std([0.5])) == "50.00"
    assert population_mean_std([0.5]) == (0.5, 0.0)
    assert str(MeanStd(np.nan, np.nan)) == "–"


def test_a_summary_survives_strict_json() -> None:
    summary = CurveSummary.from_curve(CURVE, mean_last=20)
    assert CurveSummary.from_json(json.loads(json.dumps(summary.to_json(), allow_nan=False))) == summary


@pytest.mark.parametrize("of", [best, last, lambda curve: mean_of_last(curve, 1), mean_std])
def test_nothing_has_no_summary(of: object) -> None:
    with pytest.raises(ValueError, match=r"the curve is empty|no values"):
        of([])  # type: ignore[operator]
