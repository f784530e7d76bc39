"""Sums over the rows of a table, from which several sites together fit one encoding without showing their rows.

A site reports, for a column of numbers, how many values and gaps it has, their mean, and the sum of their squared
deviations. For a column of categories it reports the values that occur, and whether there are gaps. A group of fewer
than `smallest_group` rows is not reported:

- a category with fewer rows is left out, so it will be an unknown value
- fewer gaps count as values equal to the mean, and fewer values count as gaps
- if fewer rows differ from a column's most frequent value, they count as if they had that value
- if a column has both fewer gaps and fewer values, or only that few values of each kind, its values are not reported

This does not guarantee privacy, because the sums are exact. If a column has whole numbers, the mean can reveal how many
values it was computed from, and mean and squares together can reveal how often a rare value occurs. If a row is added
between two requests, the difference of the two answers is that row.

Moments are added as in Chan, Golub and LeVeque (The American Statistician, 1983), which loses no digits if the mean is
large compared with the deviation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from fedskew.data.table_encoding import ColumnEncoding, Numbers, RawTable, Strings, TableEncoding
from fedskew.errors import UserError

SMALLEST_GROUP = 5
"""By default, a site reports nothing about fewer rows than this."""
_FAR = 5.0
"""A site's column gives a warning if its mean is more than this many standard deviations from the other sites'."""


@dataclass(frozen=True)
class NumberSums:
    """Sums over a column of numbers."""

    name: str
    count: int = 0
    """Number of values."""
    missing: int = 0
    """Number of gaps."""
    mean: float = 0.0
    correction: float = 0.0
    """Mean of the deviations from `mean`. It has the digits that rounding `mean` loses."""
    squares: float = 0.0
    """Sum of the squared deviations from the mean."""

    def describe(self) -> str:
        if not self.count:
            return f"{self.name}: no value, {self.missing} gaps"
        deviation = math.sqrt(self.squares / self.count)
        return f"{self.name}: {self.count} values, mean {self.mean:.6g}, deviation {deviation:.6g}, {self.missing} gaps"


@dataclass(frozen=True)
class CategorySums:
    """The values of a column of categories. How often each occurs is not reported."""

    name: str
    categories: tuple[str, ...] = ()
    has_gaps: bool = False

    def describe(self) -> str:
        return f"{self.name}: values {', '.join(self.categories) or 'none'}; gaps: {'yes' if self.has_gaps else 'no'}"


ColumnSums = NumberSums | CategorySums


def sum_columns(table: RawTable, smallest_group: int = SMALLEST_GROUP) -> tuple[ColumnSums, ...]:
    """Return the sums of each column, without anything about fewer than `smallest_group` rows."""
    place = {name: position for position, name in enumerate(table.number_names)}
    return tuple(
        _list_categories(name, table.strings[name], smallest_group)
        if name in table.strings
        else _sum_numbers(name, table.numbers[:, place[name]], smallest_group)
        for name in table.names
    )


def _sum_numbers(name: str, column: Numbers, smallest: int) -> NumberSums:
    values = column[~np.isnan(column)]
    gaps = len(column) - len(values)
    if len(values) < smallest:
        return NumberSums(name, missing=len(column) if gaps >= smallest else 0)
    missing = gaps if gaps >= smallest else 0
    count = len(column) - missing
    distinct, frequencies = np.unique(values, return_counts=True)
    usual, frequency = float(distinct[frequencies.argmax()]), int(frequencies.max())
    if len(values) - frequency < smallest:
        if frequency < smallest:
            return NumberSums(name, missing=missing)
        return NumberSums(name, count, missing, usual)
    mean, correction, squares = _moments(values)
    if not math.isfinite(squares):
        raise UserError(f"the values in column {name!r} are too large to be standardised")
    return NumberSums(name, count, missing, mean, correction, squares)


def _moments(values: Numbers) -> tuple[float, float, float]:
    """Return the rounded mean, its correction, and the sum of squared deviations."""
    with np.errstate(over="ignore", invalid="ignore"):  # the caller refuses sums that are not finite
        mean = float(values.mean())
        deviations = values - mean
        correction = float(deviations.mean())
        squares = float(((deviations - correction) ** 2).sum())
    return mean, correction, squares


def _list_categories(name: str, column: Strings, smallest: int) -> CategorySums:
    counts = np.bincount(column.codes[column.codes >= 0], minlength=len(column.values))
    frequent = sorted(value for value, count in zip(column.values, counts, strict=True) if count >= smallest)
    return CategorySums(name, tuple(frequent), int((column.codes < 0).sum()) >= smallest)


def fit_encoding_to_sums(sites: Sequence[Sequence[ColumnSums]]) -> TableEncoding:
    """Fit an encoding to the sums of several sites, which list the same columns."""
    return TableEncoding(tuple(_fit_column(column) for column in zip(*sites, strict=True)))


def find_other_units(sites: Mapping[str, Sequence[ColumnSums]]) -> list[str]:
    """Return one line for each column of a site whose mean is so far from the others' that its units may differ."""
    found = []
    for name, sums in sites.items():
        for position, column in enumerate(sums):
            others = [one[position] for other, one in sites.items() if other != name]
            rest = [one for one in others if isinstance(one, NumberSums) and one.count]
            if not isinstance(column, NumberSums) or not column.count or not rest:
                continue
            mean, std = _add_moments(column.name, rest)
            if abs(column.mean - mean) > _FAR * std:
                found.append(
                    f"column {column.name!r} of {name} has mean {column.mean:.4g}, but the other sites have "
                    f"{mean:.4g} ± {std:.4g}: is it in other units?"
                )
    return found


def _fit_column(sums: Sequence[ColumnSums]) -> ColumnEncoding:
    numbers = [one for one in sums if isinstance(one, NumberSums)]
    categories = [one for one in sums if isinstance(one, CategorySums)]
    name = sums[0].name
    if categories:
        values = sorted({value for one in categories for value in one.categories})
        return ColumnEncoding(name, categories=tuple(values), marks_gaps=any(one.has_gaps for one in categories))
    mean, std = _add_moments(name, numbers)
    return ColumnEncoding(name, mean, std, marks_gaps=any(one.missing for one in numbers))


def _add_moments(name: str, sums: Sequence[NumberSums]) -> tuple[float, float]:
    """Return the mean and the standard deviation of all sites' values. The arithmetic is exact until the end."""
    count = sum(one.count for one in sums)
    if not count:
        return 0.0, 1.0
    means = [Fraction(one.mean) + Fraction(one.correction) for one in sums]
    mean = sum((one.count * own for one, own in zip(sums, means, strict=True)), Fraction()) / count
    within = sum((Fraction(one.squares) for one in sums), Fraction())
    between = sum((one.count * (own - mean) ** 2 for one, own in zip(sums, means, strict=True)), Fraction())
    try:
        return float(mean), math.sqrt((within + between) / count) or 1.0
    except OverflowError as error:
        raise UserError(f"the values in column {name!r} are too large to be standardised") from error
