"""Sums of several sites give the encoding of their pooled rows, and nothing about a few rows."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest

from fedskew.data.column_sums import (
    CategorySums,
    NumberSums,
    _hide_small_groups,
    find_other_units,
    fit_encoding_to_sums,
    sum_columns,
)
from fedskew.data.table_encoding import ColumnEncoding, RawTable, Strings, TableEncoding, fit_encoding
from fedskew.errors import UserError

NAN = float("nan")


def numbers(*values: float) -> RawTable:
    return RawTable(("x",), np.array(values)[:, None], {})


def texts(*values: str | None) -> RawTable:
    known = tuple(dict.fromkeys(value for value in values if value is not None))
    codes = np.array([-1 if value is None else known.index(value) for value in values])
    return RawTable(("x",), np.empty((len(values), 0)), {"x": Strings(known, codes)})


def fitted_apart(table: RawTable, sizes: list[int]) -> TableEncoding:
    """The encoding from the sums of sites that have the first rows, the next rows, and so on."""
    parts = np.split(np.arange(len(table)), np.cumsum(sizes)[:-1])
    return fit_encoding_to_sums([sum_columns(table.take(rows)) for rows in parts])


def assert_close(one: TableEncoding, other: TableEncoding) -> None:
    for a, b in zip(one.columns, other.columns, strict=True):
        assert (a.name, a.categories, a.marks_gaps) == (b.name, b.categories, b.marks_gaps)
        assert a.mean == pytest.approx(b.mean, rel=1e-9, abs=1e-9)
        assert a.std == pytest.approx(b.std, rel=1e-9)


@pytest.mark.parametrize("offset", [0.0, -3.7, 1e9, -1e10])
def test_sums_give_the_pooled_moments_for_large_offsets_too(offset: float) -> None:
    random = np.random.default_rng(0)
    x = offset + random.normal(0, 1, 300) + np.repeat([0.0, 1.0, -2.0], 100)  # the sites differ
    x[::7] = NAN
    table = numbers(*x)
    assert_close(fitted_apart(table, [100, 40, 160]), fit_encoding(table))


def test_plain_sums_of_squares_would_lose_these_digits() -> None:
    x = 1e9 + np.random.default_rng(0).normal(0, 1, 300)
    naive = (x**2).mean() - x.mean() ** 2
    exact = fit_encoding(numbers(*x)).columns[0].std
    assert naive < 0 or abs(math.sqrt(naive) / exact - 1) > 1e-3
    assert fitted_apart(numbers(*x), [150, 150]).columns[0].std == pytest.approx(exact, rel=1e-12)


def test_the_rounded_means_of_sites_would_lose_digits_too() -> None:
    x = np.concatenate([1e12 + np.random.default_rng(k).normal(k, 0.01, 50) for k in range(3)])
    sums = [sum_columns(numbers(*x[start : start + 50]))[0] for start in (0, 50, 100)]
    exact = fit_encoding(numbers(*(x - 1e12))).columns[0].std  # the subtraction is exact
    rounded = [NumberSums(s.name, s.count, s.missing, s.mean, 0.0, s.squares) for s in sums]  # type: ignore[union-attr]
    assert abs(fit_encoding_to_sums([[s] for s in rounded]).columns[0].std / exact - 1) > 1e-9
    assert fit_encoding_to_sums([[s] for s in sums]).columns[0].std == pytest.approx(exact, rel=1e-12)


def test_a_constant_column_has_deviation_1_as_in_a_pooled_fit() -> None:
    table = numbers(*[0.1] * 30)
    assert_close(fitted_apart(table, [11, 19]), fit_encoding(table))
    assert fitted_apart(table, [11, 19]).columns[0] == ColumnEncoding("x", 0.1, 1.0)


def test_mixed_columns_give_the_pooled_encoding() -> None:
    random = np.random.default_rng(3)
    values = random.normal(50, 9, (400, 2))
    values[random.random(400) < 0.2, 1] = NAN
    town = Strings(("Rome", "Bonn", "Oslo"), random.integers(-1, 3, 400))
    table = RawTable(("age", "town", "pulse"), values, {"town": town})
    assert_close(fitted_apart(table, [120, 200, 80]), fit_encoding(table))


def test_a_site_names_only_categories_of_enough_rows() -> None:
    table = texts(*["a"] * 5, *["b"] * 4, *[None] * 5)
    assert sum_columns(table) == (CategorySums("x", ("a",), has_gaps=True),)
    assert sum_columns(table, 4) == (CategorySums("x", ("a", "b"), has_gaps=True),)
    assert sum_columns(table, 6) == (CategorySums("x"),)
    frequent_elsewhere = [sum_columns(table), sum_columns(texts(*["b"] * 5))]
    assert fit_encoding_to_sums(frequent_elsewhere).columns[0] == ColumnEncoding("x", 0, 1, ("a", "b"), True)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1.0, 2, 3, 4], NumberSums("x")),  # fewer rows than 5
        ([1.0, 2, 3, 4, *[NAN] * 5], NumberSums("x", missing=9)),  # few values count as gaps
        ([*range(9), NAN, NAN], NumberSums("x", 11, 0, 4.0, 0.0, 60.0)),  # few gaps count as medians
        ([*range(10), *[NAN] * 5], NumberSums("x", 10, 5, 4.5, 0.0, 82.5)),
        ([*[0.0] * 90, *[1.0] * 4], NumberSums("x", 94, 0, 0.0)),  # four rows with a rare value
        ([*[1.0] * 90, *[0.0] * 4], NumberSums("x", 94, 0, 1.0)),
        ([0.0, 0, 0, 0, 1, 1], NumberSums("x", 6, 0, 0.0)),  # neither value has five rows, so they are one group
        ([*[0.0] * 50, *[1.0] * 47, *[2.0] * 3], NumberSums("x", 100, 0, 0.5, 0.0, 25.0)),  # the nearest frequent value
        ([*[0.0] * 5, *[1.0] * 5], NumberSums("x", 10, 0, 0.5, 0.0, 2.5)),
        ([7.0] * 5, NumberSums("x", 5, 0, 7.0)),
    ],
)
def test_sums_of_numbers_hide_what_concerns_fewer_than_five_rows(values: list[float], expected: NumberSums) -> None:
    assert sum_columns(numbers(*values)) == (expected,)


@pytest.mark.parametrize("rare", [1, 2, 3, 4])
def test_a_small_group_cannot_be_computed_from_mean_and_squares(rare: int) -> None:
    """The attack: with three known values, the number of rows, the sum and the squares have one solution."""
    (sums,) = sum_columns(numbers(*[0.0] * 50, *[1.0] * (50 - rare), *[2.0] * rare))
    assert isinstance(sums, NumberSums)
    mean = sums.mean + sums.correction
    total, squares = sums.count * mean, sums.squares + sums.count * mean**2
    solved = np.linalg.solve([[1, 1, 1], [0, 1, 2], [0, 1, 4]], [sums.count, total, squares])
    assert solved.round(6).tolist() == [50, 50, 0]


@pytest.mark.parametrize("gaps", [0, 1, 4])
def test_the_mean_of_whole_numbers_does_not_show_how_many_gaps_there_are(gaps: int) -> None:
    """The attack: only if the sum is divided by the number of values is the mean times that number a whole number."""
    (sums,) = sum_columns(numbers(*[float(value) for value in range(7) for _ in range(9)], *[NAN] * gaps))
    assert isinstance(sums, NumberSums)
    assert (sums.count, sums.missing) == (63 + gaps, 0)
    assert sums.count * (sums.mean + sums.correction) == pytest.approx(9 * 21 + 3 * gaps, abs=1e-9)


def test_every_value_in_the_sums_of_repeated_values_has_enough_rows() -> None:
    random = np.random.default_rng(0)
    for column in (random.poisson(3, 200), random.integers(0, 90, 400), np.r_[np.zeros(60), random.normal(9, 1, 40)]):
        changed = _hide_small_groups(column.astype(float), 5)
        assert np.unique(changed, return_counts=True)[1].min() >= 5
        assert changed.mean() == pytest.approx(column.mean(), rel=0.02)
        assert changed.std() == pytest.approx(column.std(), rel=0.05)


def test_a_column_that_no_site_reports_stays_as_it_is() -> None:
    assert fit_encoding_to_sums([[NumberSums("x")], [NumberSums("x")]]).columns[0] == ColumnEncoding("x")


def test_a_site_in_other_units_is_named() -> None:
    random = np.random.default_rng(0)
    months, years = sum_columns(numbers(*random.normal(720, 100, 50))), sum_columns(numbers(*random.normal(60, 8, 50)))
    similar, none = sum_columns(numbers(*random.normal(65, 8, 50))), (NumberSums("x"),)
    (line,) = find_other_units({"east": years, "north": months, "west": similar, "tiny": none})
    assert re.fullmatch(
        r"column 'x' of north has mean 7\d\d.*, but the other sites have 6\d.* ± \d.*other units\?", line
    )
    assert find_other_units({"east": years, "west": similar, "tiny": none}) == []
    constant = sum_columns(numbers(*[60.0] * 50))
    assert find_other_units({"east": constant, "north": sum_columns(numbers(*[64.0] * 50))}) == []
    (line, _) = find_other_units({"east": months, "west": constant})
    assert "the other sites have 60 ± 0:" in line
    assert find_other_units({"east": (CategorySums("x"),), "west": (CategorySums("x", ("a",)),)}) == []


def test_values_too_large_to_square_are_refused_by_name() -> None:
    with pytest.raises(UserError, match="'x' are too large to be standardised"):
        sum_columns(numbers(*(1e200 * np.arange(20))))
    with pytest.raises(UserError, match="'x' are too large to be standardised"):
        fit_encoding_to_sums([[NumberSums("x", 9, 0, 1e200)], [NumberSums("x", 9, 0, -1e200)]])


def test_sums_are_described_in_words() -> None:
    assert NumberSums("age", 4, 6, 50.0, 0.0, 16.0).describe() == "age: 4 values, mean 50, deviation 2, 6 gaps"
    assert NumberSums("age", missing=9).describe() == "age: no value, 9 gaps"
    assert CategorySums("ward", ("a", "b"), True).describe() == "ward: values a, b; gaps: yes"
