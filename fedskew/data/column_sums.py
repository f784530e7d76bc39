"""Sums over the columns of a site's table. From several sites' sums, the server fits one encoding for all tables.

For a column of numbers, a site reports the number of values, the number of gaps (missing values), the mean of the
values and the sum of their squared deviations. For a column of categories, it reports the values that occur, and
whether there are gaps. It reports no rows.

Rows of a column form a group if they have the same category, if they have the same number, if they all have a gap, or
if they all have a value. A group is small if it has fewer than `smallest_group` rows. Small groups are hidden before
anything is summed. In a column of categories:

- a category of few rows is left out
- few gaps count as no gaps

In a column of numbers:

- few gaps are filled with the median, and count as values
- few values count as gaps
- if both gaps and values are few, nothing about the column is reported
- rare numbers are replaced by others: see `_hide_small_groups`

If all numbers are rare and most of them differ, as measurements do, none is replaced. A number far above all others
then shows in the sum of squares. Sums before and after a row was added would also reveal that row.
So a site answers only once (see `flower/site_answers.py`).

Moments are added as in Chan, Golub and LeVeque (The American Statistician, 1983). Their method loses no digits even
if the mean is much larger than the deviation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from fedskew.data.spelling import composed
from fedskew.data.table_encoding import ColumnEncoding, Numbers, RawTable, Strings, TableEncoding
from fedskew.errors import UserError, plural

SMALLEST_GROUP = 5
"""The default size below which a group of rows is hidden."""
_FAR = 5.0
"""A site's column gives a warning if its mean is more than this many standard deviations from the other sites' mean.

A deviation of 0 counts as 1."""


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
    """Mean of the deviations from `mean`: the digits that `mean` loses by rounding."""
    squares: float = 0.0
    """Sum of the squared deviations from the mean."""

    def describe(self) -> str:
        gaps = plural(self.missing, "gap")
        if not self.count:
            return f"{self.name}: no value, {gaps}"
        values, deviation = plural(self.count, "value"), math.sqrt(self.squares / self.count)
        return f"{self.name}: {values}, mean {self.mean:.6g}, deviation {deviation:.6g}, {gaps}"


@dataclass(frozen=True)
class CategorySums:
    """The values that occur in a column of categories. Their frequencies are not reported."""

    name: str
    categories: tuple[str, ...] = ()
    has_gaps: bool = False

    def describe(self) -> str:
        return f"{self.name}: values {', '.join(self.categories) or 'none'}; gaps: {'yes' if self.has_gaps else 'no'}"


ColumnSums = NumberSums | CategorySums


def sum_columns(table: RawTable, smallest_group: int = SMALLEST_GROUP) -> tuple[ColumnSums, ...]:
    """Return the sums of each column. Groups of fewer than `smallest_group` rows are hidden."""
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
    values = _hide_small_groups(values, smallest)
    missing = gaps if gaps >= smallest else 0
    if not missing:
        values = np.concatenate([values, np.full(gaps, _median(values))])
    if (values == values[0]).all():
        return NumberSums(name, len(values), missing, float(values[0]))
    mean, correction, squares = _moments(values)
    if not math.isfinite(squares):
        raise _too_large(name)
    return NumberSums(name, len(values), missing, mean, correction, squares)


def _hide_small_groups(values: Numbers, smallest: int) -> Numbers:
    """Replace rare values. A value is rare if fewer than `smallest` rows have it.

    The rows with rare values are sorted by value, and split into groups of at least `smallest` rows. All rows of a
    group get the group's median, which is one of the group's values, so whole numbers stay whole. If fewer than
    `smallest` rows have rare values, each of these rows gets the nearest frequent value. Nothing is replaced if all
    values are rare and most of them differ, as measurements do.
    """
    distinct, codes, frequencies = np.unique(values, return_inverse=True, return_counts=True)
    rare = np.flatnonzero(frequencies[codes] < smallest)
    most_differ = frequencies.max() < smallest and 2 * len(distinct) > len(values)
    if most_differ or not len(rare):
        return values
    changed = values.copy()
    if len(rare) < smallest:
        frequent = distinct[frequencies >= smallest]
        nearest = np.abs(values[rare, None] - frequent[None]).argmin(axis=1)
        changed[rare] = frequent[nearest]
        return changed
    ordered = rare[np.argsort(values[rare], kind="stable")]
    for group in np.array_split(ordered, len(ordered) // smallest):
        changed[group] = _median(values[group])
    return changed


def _median(values: Numbers) -> float:
    """Return the lower median, which is one of the values."""
    return float(np.sort(values)[(len(values) - 1) // 2])


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
    """Fit an encoding to the sums of several sites. All sites must list the same columns."""
    return TableEncoding(tuple(_fit_column(column) for column in zip(*sites, strict=True)))


def find_other_units(sites: Mapping[str, Sequence[ColumnSums]]) -> list[str]:
    """Return a warning for each column whose mean at one site is far from its mean at the other sites."""
    found = []
    for site, sums in sites.items():
        for position, column in enumerate(sums):
            others = [one[position] for other, one in sites.items() if other != site]
            rest = [one for one in others if isinstance(one, NumberSums) and one.count]
            if not isinstance(column, NumberSums) or not column.count or not rest:
                continue
            mean, std = _add_moments(column.name, rest)
            if abs(column.mean - mean) > _FAR * (std or 1.0):
                found.append(
                    f"column {column.name!r} of {site} has mean {column.mean:.4g}, but the other sites have "
                    f"{mean:.4g} ± {std:.4g}: is it in other units?"
                )
    return found


def _fit_column(sums: Sequence[ColumnSums]) -> ColumnEncoding:
    numbers = [one for one in sums if isinstance(one, NumberSums)]
    categories = [one for one in sums if isinstance(one, CategorySums)]
    name = sums[0].name
    if categories:
        values = sorted({composed(value) for one in categories for value in one.categories})
        return ColumnEncoding(name, categories=tuple(values), marks_gaps=any(one.has_gaps for one in categories))
    mean, std = _add_moments(name, numbers)
    return ColumnEncoding(name, mean, std or 1.0, marks_gaps=any(one.missing for one in numbers))


def _add_moments(name: str, sums: Sequence[NumberSums]) -> tuple[float, float]:
    """Return the mean and the standard deviation over the values of all sites. Without values, both are 0.

    Fractions make the arithmetic exact until the end.
    """
    count = sum(one.count for one in sums)
    if not count:
        return 0.0, 0.0
    means = [Fraction(one.mean) + Fraction(one.correction) for one in sums]
    mean = sum((one.count * own for one, own in zip(sums, means, strict=True)), Fraction()) / count
    within = sum((Fraction(one.squares) for one in sums), Fraction())
    between = sum((one.count * (own - mean) ** 2 for one, own in zip(sums, means, strict=True)), Fraction())
    try:
        return float(mean), math.sqrt((within + between) / count)
    except OverflowError as error:
        raise _too_large(name) from error


def _too_large(column: str) -> UserError:
    return UserError(
        f"the values in column {column!r} are too large to be standardised; correct them, or divide the column by the "
        "same constant at every site"
    )
