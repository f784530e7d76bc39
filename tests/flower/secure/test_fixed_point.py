"""Fixed-point sums equal weighted means within the stated bound, and numbers beyond the range are refused."""

from __future__ import annotations

import numpy as np
import pytest

from fedskew.flower.secure.fixed_point import Contribution, FixedPoint, OutOfRange, layout_length
from fedskew.flower.settings import FederationSettings
from fedskew.flower.wire import Garbled

ENCODING = FixedPoint(sites=5, largest_weight=1_000_000, largest_value=16.0)


def added(contributions: list[Contribution], encoding: FixedPoint = ENCODING) -> tuple[np.ndarray, list]:
    vectors = [encoding.encode(contribution) for contribution in contributions]
    return np.sum([vector for vector, _ in vectors], axis=0, dtype=np.uint64), vectors[0][1]


@pytest.mark.parametrize("weights", [[1, 1, 1], [3, 500, 77], [1_000_000] * 5])
def test_the_mean_differs_from_the_exact_one_by_no_more_than_the_bound(weights: list[int]) -> None:
    rng = np.random.default_rng(0)
    values = [rng.uniform(-16, 16, 2000) for _ in weights]
    values[0][:3] = (16, -16, 0)
    found = ENCODING.decode(*added([Contribution({}, w, {"x": v}) for w, v in zip(weights, values, strict=True)]))
    numerator = sum(w * v.astype(np.longdouble) for w, v in zip(weights, values, strict=True))
    exact = numerator / sum(weights)
    assert found.weight == sum(weights)
    assert np.abs(found.means["x"] - exact).max() <= ENCODING.error_bound + 16 * 2.0**-52
    assert ENCODING.error_bound < 1e-10


def test_with_three_sites_and_the_default_settings_the_error_is_below_1e_11() -> None:
    settings = FederationSettings(sites=("a", "b", "c"))
    assert FixedPoint(3, settings.most_samples, settings.largest_change).error_bound < 1e-11


def test_counts_and_whole_numbers_add_up_exactly() -> None:
    sites = [Contribution({"n": n, "right": r}, n, {}, {"steps": np.array([s])}) for n, r, s in [(3, 1, 7), (9, 8, -1)]]
    found = ENCODING.decode(*added(sites))
    assert found.counts == {"n": 12, "right": 9}
    assert found.means["steps"].tolist() == [(3 * 7 - 9) / 12]


def test_the_largest_sum_does_not_wrap_around() -> None:
    extreme = Contribution({}, 1_000_000, {"x": np.array([16.0, -16.0])})
    assert ENCODING.decode(*added([extreme] * 5)).means["x"].tolist() == [16.0, -16.0]


@pytest.mark.parametrize(
    ("contribution", "line"),
    [
        (Contribution({}, 1, {"w": np.array([16.001])}), "w has a number beyond ±16"),
        (Contribution({}, 1, {"w": np.array([np.nan])}), "not finite"),
        (Contribution({}, 1, {"w": np.array([-np.inf])}), "not finite"),
        (Contribution({}, 1_000_001, {}), "the weight is 1000001; expected 1 to 1000000"),
        (Contribution({}, 0, {}), "weight"),
        (Contribution({"n": -1}, 1, {}), "count"),
        (Contribution({}, 1, {}, {"n": np.array([2**60])}), "n has a number beyond"),
        (Contribution({}, 1, {}, {"n": np.array([-(2**63)])}), "n has a number beyond"),
    ],
)
def test_what_is_out_of_range_is_refused(contribution: Contribution, line: str) -> None:
    with pytest.raises(OutOfRange, match=line):
        ENCODING.encode(contribution)


def test_a_sum_with_an_impossible_weight_is_refused() -> None:
    total, layout = added([Contribution({}, 5, {"x": np.zeros(2)})])
    total[0] = np.uint64(2**63)
    with pytest.raises(Garbled, match="impossible counts"):
        ENCODING.decode(total, layout)


@pytest.mark.parametrize("layout", [None, 7, [], [[], [], [["x"]]], [["a"], [["x", [-1]]], []], [[3], [], []]])
def test_a_layout_that_is_none_is_refused(layout: object) -> None:
    with pytest.raises(Garbled):
        layout_length(layout)
